//! The stream of events (`GET /v1/events`): statistics each second, and what has changed since the
//! second before.
//!
//! Invariant: a subscriber that does not read is dropped, and costs the others nothing: a message is
//! kept once for all of them, and at most [`MESSAGES`] are kept. Without subscribers nothing is asked.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::stream::{Stream, unfold};
use serde::Serialize;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast};

use crate::api::{ConnectionInfo, RemovedExport};
use crate::controlled_server::ControlledServer;
use crate::counted_api::{ExportInfo, Statistics};
use crate::http::blocking_calls::blocking;

/// The most clients that follow the events simultaneously.
/// Beyond it: 503.
pub(crate) const MAX_SUBSCRIBERS: usize = 16;
/// The time between two messages.
const PERIOD: Duration = Duration::from_secs(1);
/// The messages that a subscriber may be behind.
const MESSAGES: usize = 4;

/// The events of a server; clones share the subscribers.
#[derive(Clone)]
pub(crate) struct Events {
    sender: broadcast::Sender<Bytes>,
    places: Arc<Semaphore>,
    /// Told of each subscriber.
    subscribed: Arc<Notify>,
}

impl Events {
    pub(crate) fn new() -> Self {
        Self {
            sender: broadcast::Sender::new(MESSAGES),
            places: Arc::new(Semaphore::new(MAX_SUBSCRIBERS)),
            subscribed: Arc::default(),
        }
    }

    /// The subscribers that there are.
    pub(crate) fn subscribers(&self) -> u64 {
        MAX_SUBSCRIBERS.saturating_sub(self.places.available_permits()) as u64
    }

    /// The stream for a new subscriber; `None` if there are too many.
    pub(crate) fn subscribe(
        &self,
    ) -> Option<impl Stream<Item = Result<Bytes, Infallible>> + use<>> {
        let place = self.places.clone().try_acquire_owned().ok()?;
        let receiver = self.sender.subscribe();
        self.subscribed.notify_one();
        Some(unfold((receiver, place), next))
    }

    /// Sends the events of `server` as long as this runs.
    pub(crate) async fn run(self, server: Arc<dyn ControlledServer>) {
        let mut before = None;
        loop {
            while self.sender.receiver_count() == 0 {
                before = None;
                self.subscribed.notified().await;
            }
            let (server, subscribers) = (server.clone(), self.subscribers());
            // A task that has panicked has been reported.
            if let Some(now) = blocking(move || Seen::now(&*server)).await {
                // All may have left meanwhile.
                let _ = self.sender.send(now.message(before.as_ref(), subscribers).into());
                before = Some(now);
            }
            tokio::time::sleep(PERIOD).await;
        }
    }
}

type Subscriber = (broadcast::Receiver<Bytes>, OwnedSemaphorePermit);

/// The next message; none after one was missed.
async fn next(
    (mut receiver, place): Subscriber,
) -> Option<(Result<Bytes, Infallible>, Subscriber)> {
    let message = receiver.recv().await.ok()?;
    Some((Ok(message), (receiver, place)))
}

/// A server at one moment.
struct Seen {
    statistics: Statistics,
    connections: BTreeMap<u64, ConnectionInfo>,
}

impl Seen {
    fn now(server: &dyn ControlledServer) -> Self {
        let connections = server.connections().into_iter();
        Self {
            statistics: Statistics { server: server.info(), exports: server.exports() },
            connections: connections.map(|connection| (connection.id, connection)).collect(),
        }
    }

    /// The changes since `before`, and the statistics.
    fn message(&self, before: Option<&Self>, subscribers: u64) -> String {
        let mut text = String::new();
        if let Some(before) = before {
            self.exports_since(before, &mut text);
            self.connections_since(before, &mut text);
        }
        let mut statistics = self.statistics.clone();
        statistics.server.event_subscribers = subscribers;
        event(&mut text, "statistics", &statistics);
        text
    }

    fn exports_since(&self, before: &Self, text: &mut String) {
        let by_id = |seen: &Self| -> BTreeMap<u64, ExportInfo> {
            seen.statistics.exports.iter().map(|export| (export.id, settings(export))).collect()
        };
        let (before, now) = (by_id(before), by_id(self));
        for (id, export) in &now {
            match before.get(id) {
                None => event(text, "export_added", export),
                Some(old) if old != export => event(text, "export_changed", export),
                Some(_) => {}
            }
        }
        for (id, export) in before.iter().filter(|(id, _)| !now.contains_key(id)) {
            event(text, "export_removed", &RemovedExport { id: *id, name: export.name.clone() });
        }
    }

    fn connections_since(&self, before: &Self, text: &mut String) {
        let chosen =
            |connection: Option<&ConnectionInfo>| connection.and_then(|c| c.export.clone());
        for (id, connection) in &self.connections {
            match before.connections.get(id) {
                None => event(text, "connection_opened", connection),
                Some(old) if chosen(Some(old)) != connection.export => {
                    event(text, "connection_changed", connection);
                }
                Some(_) => {}
            }
        }
        let closed = before.connections.iter().filter(|(id, _)| !self.connections.contains_key(id));
        closed.for_each(|(_, connection)| event(text, "connection_closed", connection));
    }
}

/// An export without what changes by itself.
fn settings(export: &ExportInfo) -> ExportInfo {
    ExportInfo {
        members: 0,
        in_flight: 0,
        frontends: BTreeMap::new(),
        mechanisms: BTreeMap::new(),
        ..export.clone()
    }
}

/// Appends an event in the form of server-sent events; JSON has no line ends.
fn event(text: &mut String, name: &str, data: &impl Serialize) {
    // The types here have no value that JSON has not.
    let data = serde_json::to_string(data).unwrap_or_default();
    *text += &format!("event: {name}\ndata: {data}\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(exports: &[(u64, u64, u64)], connections: &[u64]) -> Seen {
        let export = |&(id, size_bytes, in_flight): &(u64, u64, u64)| ExportInfo {
            id,
            size_bytes,
            in_flight,
            ..ExportInfo::default()
        };
        let connection = |&id: &u64| (id, ConnectionInfo { id, ..ConnectionInfo::default() });
        Seen {
            statistics: Statistics {
                exports: exports.iter().map(export).collect(),
                ..Statistics::default()
            },
            connections: connections.iter().map(connection).collect(),
        }
    }

    fn names(text: &str) -> Vec<&str> {
        text.lines().filter_map(|line| line.strip_prefix("event: ")).collect()
    }

    #[test]
    fn what_came_went_and_changed_is_told_once_and_load_alone_is_no_change() {
        let before = seen(&[(0, 512, 0), (1, 512, 0), (2, 512, 3)], &[1, 2]);
        let now = seen(&[(0, 1024, 0), (2, 512, 9), (3, 512, 0)], &[2, 3]);
        assert_eq!(names(&now.message(None, 1)), ["statistics"]);
        let expected = [
            "export_changed",
            "export_added",
            "export_removed",
            "connection_opened",
            "connection_closed",
            "statistics",
        ];
        assert_eq!(names(&now.message(Some(&before), 1)), expected);
        assert_eq!(names(&now.message(Some(&now), 1)), ["statistics"]);
    }

    #[test]
    fn a_subscriber_that_is_too_far_behind_gets_no_further_message_and_leaves_its_place() {
        use futures_util::StreamExt;
        let events = Events::new();
        let mut all: Vec<_> = (0..MAX_SUBSCRIBERS).filter_map(|_| events.subscribe()).collect();
        assert!(events.subscribe().is_none());
        assert_eq!(events.subscribers(), MAX_SUBSCRIBERS as u64);
        for number in 0..=MESSAGES {
            events.sender.send(number.to_string().into()).unwrap();
        }
        let slow = all.pop().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(slow.count()), 0);
        assert_eq!(events.subscribers(), MAX_SUBSCRIBERS as u64 - 1);
    }
}
