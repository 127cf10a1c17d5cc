//! Fair scheduling of connections: how many bytes one service of a connection moves.
//!
//! Invariant: an interactive connection waits for at most one quantum of bulk traffic.

use nowait::{Op, Request};

use crate::rate_limit::Tokens;

/// Quantum in bytes with several connections: what one service may send, and as much may be read
/// from the device. A processor copies it in some 50 µs. A request is not split, so the last one
/// may exceed it.
/// Beyond it: the next connection has its turn.
const QUANTUM_SHARED_BYTES: u64 = 256 << 10;
/// Quantum in bytes of a connection that is alone: all that it may hold.
/// Beyond it: other work of the thread has its turn.
const QUANTUM_ALONE_BYTES: u64 = 32 << 20;
/// A connection is bulk if it moved this many bytes lately.
const BULK_THRESHOLD_BYTES: u64 = 256 << 10;

/// The quantum in bytes with `connections` connections.
pub(crate) fn quantum_among(connections: usize) -> u64 {
    if connections > 1 { QUANTUM_SHARED_BYTES } else { QUANTUM_ALONE_BYTES }
}

/// Bytes that a connection may still move in this service.
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
    /// Tokens that the limits allow in this service, and what was taken.
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
    pub(crate) fn is_bulk(&self) -> bool {
        self.recent_bytes + self.moved >= BULK_THRESHOLD_BYTES
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
