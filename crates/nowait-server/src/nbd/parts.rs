//! Long writes beside other connections: cut into parts, each of which the engine gets as soon as it
//! has come.
//!
//! A write holds a processor for as long as the kernel copies, compresses or checks it, a
//! millisecond for a mebibyte on some devices, and whoever comes meanwhile waits. Between two parts
//! others have their turn.
//!
//! Invariant: a write that must be durable before it is answered (C28) is not cut, so that it costs
//! one flush.
//! Knows: cut, conn, respond, turn, parse. Known by: nobody (parse and turn call it).

use nowait::{Flags, Io, Map, Op, Queue};

use super::conn::{Conn, Input, Payload, Phase};
use super::cut::{self, Coming, Cut};
use super::parse::Taken;
use super::respond::Request;
use super::turn::Thread;

impl<Q: Queue, M: Map> Thread<Q, M> {
    /// Whether `io` is better cut. One that goes beyond the end, or is held to alignment, is not: it
    /// is refused whole.
    #[inline]
    pub(crate) fn is_to_be_cut(&self, io: Io) -> bool {
        io.op == Op::Write
            && cut::is_long(io.range.len)
            && !io.flags.has(Flags::DSYNC)
            && self.conns.len() > 1
            && !self.shared.options.config.strict
            && io.range.pos.saturating_add(io.range.len) <= self.device.disk().size()
    }

    /// Begins a write that comes to connection `index` and is to be cut.
    pub(crate) fn cut(&mut self, index: usize, request: Request, io: Io) {
        if let Some(conn) = self.conns.get_mut(index) {
            let cut = self.cuts.insert(Cut::new(request, io));
            conn.coming = Some(Coming { cut, rest: io });
        }
    }

    /// Makes room for the next part of the write that comes to connection `index`.
    pub(crate) fn begin_part(&mut self, index: usize) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        let Some(coming) = &mut conn.coming else { return Taken::TooFew };
        let Some(cut) = self.cuts.get(coming.cut) else { return Taken::TooFew };
        let (mut request, io) = (cut.request, coming.next());
        if !conn.admits(&self.store, io.range.len) || !self.engine.has_room() {
            return Taken::Stall;
        }
        let Some(buf) = self.engine.buffer(io.range) else { return Taken::Stall };
        request.held = buf.len() as u32;
        self.store.take(&mut conn.held, u64::from(request.held));
        let start = self.engine.start(io.range.pos);
        conn.payload = Some(Payload { request, io, buf, start, filled: 0 });
        if let Some(coming) = &mut conn.coming {
            coming.begun();
        }
        Taken::Bytes(0)
    }

    /// `part`, of `bytes`, of write number `number` has come to `errno` (0: success).
    pub(crate) fn part_ended(
        &mut self,
        index: usize,
        number: usize,
        part: &Request,
        bytes: u64,
        errno: i32,
    ) {
        let Some(conn) = self.conns.get_mut(index) else { return };
        self.store.give_back(&mut conn.held, u64::from(part.held));
        let Some(cut) = self.cuts.get_mut(number) else { return };
        if cut.part_ended(bytes, errno)
            && let Some(coming) = conn.coming.as_mut().filter(|coming| coming.cut == number)
        {
            conn.skip = coming.end();
            cut.dropped(conn.skip);
            if conn.payload.is_none() {
                conn.coming = None;
            }
        }
        if let Some(errno) = cut.verdict() {
            let Cut { request, .. } = self.cuts.remove(number);
            if let (&Phase::Transmission(dialect), false) =
                (&conn.phase, conn.input == Input::Broken)
            {
                conn.refuse(dialect.mode, &request.header, errno);
            }
        }
    }

    /// Forgets the write that `conn`, which is leaving, has not sent to its end.
    pub(crate) fn forget_cut(&mut self, conn: &Conn) {
        if let Some(coming) = &conn.coming {
            self.cuts.try_remove(coming.cut);
        }
    }
}
