//! The connections and the listeners that other threads give to a thread.
//!
//! Invariant: a connection is in one channel or on one thread. A closed channel takes none.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::locking::lock;
use crate::nbd::connection::HandoffConnection;
use crate::net::listener::Listener;
use crate::thread_handle::ThreadHandle;

/// Connections that a thread takes from its channel in one iteration of its event loop.
pub(crate) const ARRIVAL_BATCH: usize = 32;

/// The source of a thread's connections.
pub(crate) struct ConnectionChannel {
    thread: Arc<ThreadHandle>,
    arrivals: Mutex<Arrivals>,
    listeners: Mutex<Listeners>,
    /// Notified when the thread has given its listeners back.
    given_back: Condvar,
}

#[derive(Default)]
struct Arrivals {
    connections: VecDeque<HandoffConnection>,
    is_closed: bool,
}

#[derive(Default)]
struct Listeners {
    /// For the thread.
    arriving: Vec<Listener>,
    /// The thread is to give back what it has.
    is_wanted: bool,
    given_back: Option<Vec<Listener>>,
}

impl ConnectionChannel {
    /// The empty channel of `thread`.
    pub(crate) fn new(thread: Arc<ThreadHandle>) -> Self {
        let (arrivals, listeners) = (Mutex::default(), Mutex::default());
        Self { thread, arrivals, listeners, given_back: Condvar::new() }
    }

    /// The thread that takes the connections.
    pub(crate) fn thread(&self) -> &Arc<ThreadHandle> {
        &self.thread
    }

    /// Sends a connection to the thread. It is closed if the thread takes no more.
    pub(crate) fn assign(&self, arrival: HandoffConnection) {
        let mut arrivals = lock(&self.arrivals);
        if !arrivals.is_closed {
            self.thread.add_connection();
            arrivals.connections.push_back(arrival);
            self.thread.wake();
        }
    }

    /// Takes the oldest connections, [`ARRIVAL_BATCH`] at most. If more remain, the thread is woken
    /// up again. [`ThreadHandle::remove_connection`] is called for each once it has been counted
    /// otherwise.
    pub(crate) fn take(&self) -> Vec<HandoffConnection> {
        let Arrivals { connections, .. } = &mut *lock(&self.arrivals);
        let first = connections.len().min(ARRIVAL_BATCH);
        let taken = connections.drain(..first).collect();
        if !connections.is_empty() {
            self.thread.wake();
        }
        taken
    }

    /// Closes all waiting connections, and those that come later.
    pub(crate) fn close(&self) {
        let mut arrivals = lock(&self.arrivals);
        arrivals.is_closed = true;
        let connections = std::mem::take(&mut arrivals.connections);
        drop(arrivals);
        connections.iter().for_each(|_| self.thread.remove_connection());
    }

    /// Has the thread accept the connections of `listeners`.
    pub(crate) fn give_listeners(&self, listeners: Vec<Listener>) {
        lock(&self.listeners).arriving.extend(listeners);
        self.thread.wake();
    }

    /// Has the thread accept no more connections and give its listeners back.
    pub(crate) fn want_listeners(&self) {
        let mut listeners = lock(&self.listeners);
        (listeners.is_wanted, listeners.given_back) = (true, None);
        self.thread.wake();
    }

    /// The listeners that the thread has given back, within `timeout`.
    pub(crate) fn wait_listeners(&self, timeout: Duration) -> Option<Vec<Listener>> {
        let is_missing = |listeners: &mut Listeners| listeners.given_back.is_none();
        let waited = self.given_back.wait_timeout_while(lock(&self.listeners), timeout, is_missing);
        let (mut listeners, _) = waited.unwrap_or_else(PoisonError::into_inner);
        listeners.is_wanted = false;
        listeners.given_back.take()
    }

    /// Whether the thread is to give its listeners back.
    pub(crate) fn wants_listeners(&self) -> bool {
        let listeners = lock(&self.listeners);
        listeners.is_wanted && listeners.given_back.is_none()
    }

    /// Gives the listeners of the thread back.
    pub(crate) fn give_back(&self, given: Vec<Listener>) {
        let mut listeners = lock(&self.listeners);
        match listeners.is_wanted {
            true => listeners.given_back = Some(given),
            // The wait for them has timed out.
            false => listeners.arriving.extend(given),
        }
        drop(listeners);
        self.given_back.notify_all();
        self.thread.wake();
    }

    /// Takes what [`ConnectionChannel::give_listeners`] has given.
    pub(crate) fn take_listeners(&self) -> Vec<Listener> {
        std::mem::take(&mut lock(&self.listeners).arriving)
    }
}
