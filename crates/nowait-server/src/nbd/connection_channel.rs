//! The queue of connections that other threads hand over to a thread.
//!
//! Invariant: a connection is in one channel or on one thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::locking::lock;
use crate::nbd::connection::HandoffConnection;
use crate::net::listener::Listener;
use crate::thread_handle::ThreadHandle;

/// Connections that a thread takes from its channel in one iteration of its event loop.
pub(crate) const ARRIVAL_BATCH: usize = 32;

/// The source of a thread's connections.
pub(crate) struct ConnectionChannel {
    thread: Arc<ThreadHandle>,
    arrivals: Mutex<VecDeque<HandoffConnection>>,
    listeners: Mutex<Vec<Listener>>,
}

impl ConnectionChannel {
    /// The empty channel of `thread`.
    pub(crate) fn new(thread: Arc<ThreadHandle>) -> Self {
        Self { thread, arrivals: Mutex::default(), listeners: Mutex::default() }
    }

    /// The thread that takes the connections.
    pub(crate) fn thread(&self) -> &Arc<ThreadHandle> {
        &self.thread
    }

    /// Sends a connection to the thread.
    pub(crate) fn assign(&self, arrival: HandoffConnection) {
        self.thread.add_connection();
        self.lock().push_back(arrival);
        self.thread.wake();
    }

    /// Takes the oldest connections, [`ARRIVAL_BATCH`] at most. If more remain, the thread is woken
    /// up again. [`ThreadHandle::remove_connection`] is called for each once it has been counted
    /// otherwise.
    pub(crate) fn take(&self) -> Vec<HandoffConnection> {
        let mut arrivals = self.lock();
        let first = arrivals.len().min(ARRIVAL_BATCH);
        let taken = arrivals.drain(..first).collect();
        if !arrivals.is_empty() {
            self.thread.wake();
        }
        taken
    }

    /// Takes all waiting connections; otherwise as [`ConnectionChannel::take`].
    pub(crate) fn take_all(&self) -> VecDeque<HandoffConnection> {
        std::mem::take(&mut *self.lock())
    }

    /// Has the thread accept the connections of `listeners`.
    pub(crate) fn give_listeners(&self, listeners: Vec<Listener>) {
        lock(&self.listeners).extend(listeners);
        self.thread.wake();
    }

    /// Takes what [`ConnectionChannel::give_listeners`] has given.
    pub(crate) fn take_listeners(&self) -> Vec<Listener> {
        std::mem::take(&mut *lock(&self.listeners))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<HandoffConnection>> {
        lock(&self.arrivals)
    }
}
