//! Splits long writes beside other connections into fragments, each submitted as soon as it has
//! been received.
//!
//! A write occupies a processor while the kernel copies, compresses or checks it: a millisecond for
//! a mebibyte on some devices. Between two fragments the other connections are serviced.
//!
//! Invariant: a write that must be durable before it is answered (C28) is not split, so that it
//! costs one flush.

use nowait::{BlockMap, Flags, IoQueue, Op, Request};

use crate::event_loop::EventLoop;
use crate::event_loop::request_reader::ParseProgress;
use crate::nbd::connection::{Connection, IncomingWrite, Phase, ReadState};
use crate::nbd::reply::builder::RequestContext;
use crate::nbd::write_split::{IncomingSplitWrite, SplitWrite};

impl<Q: IoQueue, M: BlockMap> EventLoop<Q, M> {
    /// Whether to split `io`. A write beyond the end, or in strict mode (alignment is enforced), is
    /// not split: it is refused whole.
    #[inline]
    pub(crate) fn should_split(&self, io: Request) -> bool {
        io.op == Op::Write
            && io.range.len > self.shared.options.split_bytes
            && !io.flags.has(Flags::DSYNC)
            && self.connections.len() > 1
            && !self.shared.options.config.strict
            && io.range.pos.saturating_add(io.range.len) <= self.export.disk().size()
    }

    /// Begins a split write of connection `index`.
    pub(crate) fn begin_split(&mut self, index: usize, request: RequestContext, io: Request) {
        if let Some(connection) = self.connections.get_mut(index) {
            let split = self.splits.insert(SplitWrite::new(request, io));
            let fragment_bytes = self.shared.options.split_bytes;
            connection.incoming_split =
                Some(IncomingSplitWrite { split, rest: io, fragment_bytes });
        }
    }

    /// Makes room for the next fragment of the write that connection `index` is sending.
    pub(crate) fn begin_fragment(&mut self, index: usize) -> ParseProgress {
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        let Some(incoming) = &mut connection.incoming_split else { return ParseProgress::NeedMore };
        let Some(split) = self.splits.get(incoming.split) else { return ParseProgress::NeedMore };
        let (mut request, io) = (split.request, incoming.next());
        if !connection.has_budget(&self.budget, io.range.len) || !self.engine.has_free_slot() {
            return ParseProgress::Blocked;
        }
        let Some(buf) = self.engine.buffer(io.range) else { return ParseProgress::Blocked };
        request.budget_used = buf.len() as u32;
        self.budget.charge(&mut connection.budget_used, u64::from(request.budget_used));
        let start = self.engine.buffer_offset(io.range.pos);
        connection.payload = Some(IncomingWrite { request, io, buf, start, filled: 0 });
        if let Some(incoming) = &mut connection.incoming_split {
            incoming.begin_next();
        }
        ParseProgress::Bytes(0)
    }

    /// A fragment of `bytes` of split write `split_id` has completed with `errno` (0: success).
    pub(crate) fn on_fragment_done(
        &mut self,
        index: usize,
        split_id: usize,
        fragment: &RequestContext,
        bytes: u64,
        errno: i32,
    ) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        self.budget.release(&mut connection.budget_used, u64::from(fragment.budget_used));
        let Some(split) = self.splits.get_mut(split_id) else { return };
        if split.on_fragment_done(bytes, errno)
            && let Some(incoming) =
                connection.incoming_split.as_mut().filter(|incoming| incoming.split == split_id)
        {
            connection.discard_bytes = incoming.cancel();
            split.drop_bytes(connection.discard_bytes);
            if connection.payload.is_none() {
                connection.incoming_split = None;
            }
        }
        if let Some(errno) = split.result() {
            let SplitWrite { request, .. } = self.splits.remove(split_id);
            if let (&Phase::Transmission(transmission), false) =
                (&connection.phase, connection.input == ReadState::Aborted)
            {
                connection.refuse(transmission.mode, &request.header, errno);
            }
        }
    }

    /// Drops the unfinished split write of `connection`, which is leaving.
    pub(crate) fn drop_split(&mut self, connection: &Connection) {
        if let Some(incoming) = &connection.incoming_split {
            self.splits.try_remove(incoming.split);
        }
    }
}
