//! Accepts connections.
//!
//! Invariant: an accepted connection has a permit or is closed immediately; it never waits for a
//! permit. One iteration of the event loop accepts a bounded number, however many clients connect.
//! When the process has no descriptor left, the acceptor backs off.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::injected_panic;

use crate::net::connection_limit::{ConnectionLimit, ConnectionPermit};
use crate::net::listener::Listener;
use crate::net::socket::Socket;
use crate::refusal_log::{self, Refusal};

/// The most connections that one iteration of the event loop accepts or rejects.
/// Beyond it: the others wait for the next iteration of the event loop.
pub(crate) const ACCEPT_BATCH: usize = 32;

/// Back-off after accept(2) has failed, as it does when the process has no descriptor left.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// The listeners of a thread.
pub(crate) struct Acceptor {
    listeners: Vec<Listener>,
    limit: Arc<ConnectionLimit>,
    /// Listeners with a possible connection, by index; the one that has waited longest comes first.
    ready: VecDeque<usize>,
    /// Back-off: nothing is accepted before this time.
    retry_at: Option<Instant>,
    /// The last accept(2) has failed, and the failure was logged.
    has_failed: bool,
}

impl Acceptor {
    pub(crate) fn new(listeners: Vec<Listener>, limit: Arc<ConnectionLimit>) -> Self {
        let ready = VecDeque::with_capacity(listeners.len());
        Self { listeners, limit, ready, retry_at: None, has_failed: false }
    }

    /// The listeners.
    pub(crate) fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// Takes another listener. Returns its number.
    pub(crate) fn add(&mut self, listener: Listener) -> usize {
        self.listeners.push(listener);
        self.listeners.len() - 1
    }

    /// Notes that a connection may be waiting at listener `n`.
    pub(crate) fn mark_ready(&mut self, n: usize) {
        if n < self.listeners.len() && !self.ready.contains(&n) {
            self.ready.push_back(n);
        }
    }

    /// Accepts waiting connections, [`ACCEPT_BATCH`] at most; the rest wait for the next call.
    pub(crate) fn accept(&mut self, mut hand_over: impl FnMut(Socket, ConnectionPermit)) {
        if self.ready.is_empty() || self.retry_at.is_some_and(|until| until > Instant::now()) {
            return;
        }
        self.retry_at = None;
        injected_panic::panic_at("acceptor");
        for _ in 0..ACCEPT_BATCH {
            let Some(n) = self.ready.pop_front() else { return };
            let Some(listener) = self.listeners.get(n) else { continue };
            match listener.accept() {
                Ok(socket) => {
                    self.has_failed = false;
                    match self.limit.take() {
                        Some(permit) => hand_over(socket.into(), permit),
                        None => self.log_rejection(),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.has_failed, true) {
                        tracing::warn!("cannot accept a connection: {error}");
                    }
                    self.retry_at = Some(Instant::now() + ACCEPT_BACK_OFF);
                    return self.ready.push_back(n);
                }
            }
            // Listeners are served round robin.
            self.ready.push_back(n);
        }
    }

    /// Logs that a connection was rejected at the limit.
    #[cold]
    fn log_rejection(&self) {
        let limit = self.limit.limit();
        refusal_log::note(
            Refusal::Connections,
            format_args!("a connection was closed: {limit} are open, the most that are allowed"),
        );
    }

    /// Whether [`Acceptor::accept`] must be called again now.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.ready.is_empty() && self.retry_at.is_none()
    }

    /// When [`Acceptor::accept`] must be called again after a failure.
    #[inline]
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        self.retry_at.filter(|_| !self.ready.is_empty())
    }

    /// Accepts no more connections. Dropping the returned listeners closes them.
    pub(crate) fn close(&mut self) -> Vec<Listener> {
        self.ready.clear();
        std::mem::take(&mut self.listeners)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// An acceptor with `counts[n]` clients waiting at listener `n`; the clients, and the sockets'
    /// directory.
    fn with_clients(counts: &[usize]) -> (Acceptor, Vec<UnixStream>, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let (mut listeners, mut clients) = (Vec::new(), Vec::new());
        for (n, count) in counts.iter().enumerate() {
            let path = dir.path().join(n.to_string());
            listeners.push(Listener::unix(&path).unwrap());
            clients.extend((0..*count).map(|_| UnixStream::connect(&path).unwrap()));
        }
        let acceptor = Acceptor::new(listeners, Arc::new(ConnectionLimit::new(1000)));
        (acceptor, clients, dir)
    }

    #[test]
    fn one_call_accepts_a_bounded_number_and_the_next_calls_the_others() {
        let (mut acceptor, _clients, _dir) = with_clients(&[2 * ACCEPT_BATCH + 5]);
        assert!(!acceptor.has_work(), "no listener was reported ready");
        acceptor.mark_ready(0);
        let mut calls = Vec::new();
        while acceptor.has_work() {
            let mut count = 0;
            acceptor.accept(|_, _| count += 1);
            calls.push(count);
        }
        assert_eq!(calls, [ACCEPT_BATCH, ACCEPT_BATCH, 5]);
    }

    #[test]
    fn many_clients_at_one_listener_do_not_delay_a_client_of_another() {
        let (mut acceptor, _clients, _dir) = with_clients(&[2 * ACCEPT_BATCH, 1]);
        (0..2).for_each(|n| acceptor.mark_ready(n));
        acceptor.accept(|_, _| {});
        assert_eq!(acceptor.ready, [0]);
    }

    #[test]
    fn rejected_connections_count_like_accepted_ones() {
        let (mut acceptor, _clients, _dir) = with_clients(&[2 * ACCEPT_BATCH]);
        acceptor.limit = Arc::new(ConnectionLimit::new(1));
        acceptor.mark_ready(0);
        let mut kept = Vec::new();
        acceptor.accept(|_, permit| kept.push(permit));
        assert_eq!((kept.len(), acceptor.has_work()), (1, true));
    }
}
