//! Fair scheduling of connections: how many bytes one service of a connection moves, and which
//! connection is serviced first.
//!
//! Invariant: an interactive connection waits for at most one quantum of bulk traffic. Bulk
//! connections take turns, those of each export by its weight.

use std::sync::Arc;

use nowait::{Op, Request};

use crate::bulk_queues::BulkQueues;
use crate::rate_limit::{ClientBuckets, Tokens};
use crate::shared_export::ExportUse;

/// Quantum in bytes with several connections: what one service may send, and as much may be read
/// from the device. A processor copies it in some 50 µs. A request is not split, so the last one
/// may exceed it.
const QUANTUM_SHARED_BYTES: u64 = 256 << 10;
/// Quantum in bytes of a connection that is alone: all that it may hold.
const QUANTUM_ALONE_BYTES: u64 = 32 << 20;
/// A connection is bulk if it moved this many bytes lately.
const BULK_THRESHOLD_BYTES: u64 = 256 << 10;

/// The quantum in bytes with `connections` connections.
pub(crate) fn quantum_among(connections: usize) -> u64 {
    if connections > 1 { QUANTUM_SHARED_BYTES } else { QUANTUM_ALONE_BYTES }
}

/// In place of an index: a member that uses no export yet.
pub(crate) const NO_EXPORT: u32 = u32::MAX;

/// What a connection may still move in this service.
pub(crate) struct Quantum {
    /// Bytes that may still be sent.
    pub(crate) send: u64,
    /// Bytes that may still be read from the device.
    read: u64,
    /// Only half of the received input is parsed in this service.
    halved: bool,
    /// Bytes moved in this service.
    moved: u64,
    /// Bytes moved in earlier services: half of the last one's, a quarter of the one before, and so
    /// on.
    recent_bytes: u64,
    /// What the limits allow in this service, and what was taken.
    allowed: Tokens,
    taken: Tokens,
}

impl Default for Quantum {
    fn default() -> Self {
        Self {
            send: 0,
            read: 0,
            halved: false,
            moved: 0,
            recent_bytes: 0,
            allowed: Tokens::ALL,
            taken: Tokens::NONE,
        }
    }
}

impl Quantum {
    /// Begins a service that may move `bytes` each way.
    #[inline]
    pub(crate) fn begin(&mut self, bytes: u64) {
        let recent_bytes = (self.recent_bytes + self.moved) / 2;
        *self = Self { send: bytes, read: bytes, recent_bytes, ..Self::default() };
    }

    /// Allows no more than `tokens` in this service, beside one request that may exceed it.
    pub(crate) fn limit(&mut self, tokens: Tokens) {
        self.allowed = tokens;
    }

    /// Counts a request that is submitted, or answered without the device, for the limits.
    #[inline]
    pub(crate) fn count(&mut self, io: Request) {
        self.taken.requests += 1;
        if matches!(io.op, Op::Read | Op::Write) {
            self.taken.bytes += io.range.len;
        }
    }

    /// Whether the limits allow no further request in this service.
    #[inline]
    pub(crate) fn is_spent(&self) -> bool {
        self.taken.requests >= self.allowed.requests || self.taken.bytes >= self.allowed.bytes
    }

    /// Whether a request of `op` is left to another service. Only reads have a quantum.
    #[inline]
    pub(crate) fn holds_back(&self, op: Op) -> bool {
        self.is_spent() || op == Op::Read && self.reads_exhausted()
    }

    /// Takes what the requests since the last call have to pay.
    pub(crate) fn take_debt(&mut self) -> Tokens {
        std::mem::replace(&mut self.taken, Tokens::NONE)
    }

    /// Counts `bytes` moved in either direction.
    #[inline]
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.moved += bytes;
    }

    /// Counts a read of `bytes` submitted to the device.
    #[inline]
    pub(crate) fn read(&mut self, bytes: u64) {
        self.read = self.read.saturating_sub(bytes);
        self.moved += bytes;
    }

    /// Whether no more reads may be submitted in this service.
    #[inline]
    pub(crate) fn reads_exhausted(&self) -> bool {
        self.read == 0
    }

    /// Leaves the second half of the received input to the next service.
    pub(crate) fn halve(&mut self) {
        self.halved = true;
    }

    /// Whether a blocked connection goes on in the next service without waiting for an event.
    #[inline]
    pub(crate) fn needs_requeue(&self) -> bool {
        self.reads_exhausted() || self.halved || self.is_spent()
    }

    /// Bytes moved in this service, in both directions.
    #[inline]
    pub(crate) fn bytes_moved(&self) -> u64 {
        self.moved
    }

    #[inline]
    fn is_bulk(&self) -> bool {
        self.recent_bytes + self.moved >= BULK_THRESHOLD_BYTES
    }
}

/// What the event loop keeps for a connection or a queue of a frontend: a member of its run queues.
pub(crate) struct Member {
    /// It is in the run queues.
    pub(crate) scheduled: bool,
    /// What it may move in this service.
    pub(crate) quantum: Quantum,
    /// Bytes of the buffer budget that it holds.
    pub(crate) budget_used: u64,
    /// The limits of the client that it belongs to.
    pub(crate) client: Arc<ClientBuckets>,
    /// It waits until it may go on under the limits.
    pub(crate) is_held: bool,
    /// The export that it uses, among those of its thread; [`NO_EXPORT`] before it has chosen one.
    pub(crate) export: u32,
    /// Its use of the export.
    pub(crate) used: Option<ExportUse>,
}

impl Default for Member {
    fn default() -> Self {
        Self {
            scheduled: false,
            quantum: Quantum::default(),
            budget_used: 0,
            client: Arc::default(),
            is_held: false,
            export: NO_EXPORT,
            used: None,
        }
    }
}

impl Member {
    /// One of several members of a client.
    pub(crate) fn of(client: Arc<ClientBuckets>) -> Self {
        Self { client, ..Self::default() }
    }
}

/// The scheduled members, by number.
#[derive(Default)]
pub(crate) struct RunQueues {
    /// Interactive members: all are serviced in each iteration.
    pub(crate) interactive: Vec<usize>,
    /// Bulk members, which take turns by the weights of their exports.
    pub(crate) bulk: BulkQueues,
    /// An empty list that keeps its memory.
    spare: Vec<usize>,
}

impl RunQueues {
    #[inline]
    pub(crate) fn schedule(&mut self, number: usize, member: &mut Member) {
        if std::mem::replace(&mut member.scheduled, true) {
            return;
        }
        match member.quantum.is_bulk() {
            true => self.bulk.push(member.export, number),
            false => self.interactive.push(number),
        }
    }

    /// Takes the list of interactive members.
    #[inline]
    pub(crate) fn take_interactive(&mut self) -> Vec<usize> {
        std::mem::replace(&mut self.interactive, std::mem::take(&mut self.spare))
    }

    /// Keeps the memory of a list that was taken, which is empty now.
    #[inline]
    pub(crate) fn keep(&mut self, list: Vec<usize>) {
        debug_assert!(list.is_empty());
        self.spare = list;
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.interactive.is_empty() && self.bulk.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The quantum of a connection that moved `bytes` in each of its last ten services.
    fn moving(bytes: u64) -> Quantum {
        let mut quantum = Quantum::default();
        for _ in 0..10 {
            quantum.begin(QUANTUM_SHARED_BYTES);
            quantum.moved(bytes);
        }
        quantum
    }

    #[test]
    fn a_connection_that_moves_a_quantum_in_each_service_is_bulk_and_one_that_moves_little_is_not()
    {
        let mut queues = RunQueues::default();
        for (number, bytes) in [(1, QUANTUM_SHARED_BYTES), (2, 16 * 4096), (3, 1 << 20)] {
            let mut member = Member { quantum: moving(bytes), ..Member::default() };
            queues.schedule(number, &mut member);
            // It is in one queue once.
            queues.schedule(number, &mut member);
        }
        let RunQueues { interactive, mut bulk, .. } = queues;
        let mut order = Vec::new();
        while let Some(number) = bulk.pop() {
            order.push(number);
            bulk.serviced(1, 100);
        }
        assert_eq!((interactive, order), (vec![2], vec![1, 3]));
    }

    #[test]
    fn a_bulk_connection_becomes_interactive_after_some_services_that_move_nothing() {
        let mut quantum = moving(1 << 20);
        let mut services = 0;
        while quantum.is_bulk() {
            quantum.begin(QUANTUM_SHARED_BYTES);
            services += 1;
        }
        assert!((1..10).contains(&services), "{services}");
    }

    #[test]
    fn a_service_reads_its_quantum_and_a_last_request_of_any_length() {
        let mut quantum = Quantum::default();
        quantum.begin(QUANTUM_SHARED_BYTES);
        quantum.read(QUANTUM_SHARED_BYTES - 1);
        assert!(!quantum.reads_exhausted());
        quantum.read(32 << 20);
        assert!(quantum.reads_exhausted());
    }
}
