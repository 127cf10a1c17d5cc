//! The memory of a queue's requests, and how many commands of the queue are in the ring: the driver may write to the
//! memory until they have ended, also after the queue has left its thread.
//!
//! Invariant: memory is freed, and numbers of registered buffers are given back, when no command is left in the ring;
//! what a ring takes along at its end is leaked (C45).

use nowait::{BlockMap, Engine, IoQueue, Token};

use crate::ublk::request_data::RequestData;

/// The memory, and the commands.
pub(super) struct QueueMemory {
    pub(super) data: RequestData,
    /// Commands in the ring.
    pub(super) in_ring: u16,
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        if self.in_ring > 0 {
            self.data.leak();
        }
    }
}

/// A queue that has left its thread, of which commands may be in the ring.
pub(super) struct LeftQueue {
    /// The token of its first tag.
    pub(super) first_token: Token,
    pub(super) memory: QueueMemory,
    /// A request was not answered: the driver may have its memory registered.
    pub(super) has_requests: bool,
}

impl LeftQueue {
    /// A command has ended, with a request for the next server or without one. Returns whether it was the last one.
    pub(super) fn on_command(&mut self, outcome: i32) -> bool {
        self.memory.in_ring -= 1;
        self.has_requests |= outcome >= 0;
        self.memory.in_ring == 0
    }

    /// No command is left in the ring.
    pub(super) fn end<Q: IoQueue>(mut self, engine: &mut Engine<Q, dyn BlockMap>) {
        if !self.has_requests {
            self.memory.data.release(engine);
        }
    }
}
