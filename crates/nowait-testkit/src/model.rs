//! Random requests through an engine, compared with an array of bytes.
//!
//! Invariant: requests in flight never overlap, so each has one right result.

use nowait::{
    BlockMap, ByteRange, ExtentStatus, Flags, IoQueue, Op, Rejected, Request, SingleDisk,
};

use crate::engines::WaitForRequests;
use crate::random::Random;

const DEPTH: usize = 24;
/// Ranges that are discarded at the end.
const DISCARDS: u32 = 20;
/// The clusters of most images; an area in which ranges are close.
const CLUSTER: u64 = 64 << 10;
const CROWDED: u64 = 200_000;

/// A request in flight and its expected bytes.
struct Flight {
    range: ByteRange,
    expected: Option<Vec<u8>>,
}

/// The bytes that a device must have.
pub struct Model {
    random: Random,
    label: String,
    /// The bytes, from the device's start to its end.
    pub bytes: Vec<u8>,
}

impl Model {
    /// A model of a device that has `bytes` now; requests are chosen by `random`, and failures are
    /// reported under `label`.
    pub fn new(random: Random, bytes: Vec<u8>, label: String) -> Self {
        Self { random, label, bytes }
    }

    /// Runs `steps` random requests, and some discards after them.
    pub fn play<Q: IoQueue, M: BlockMap>(&mut self, engine: &mut SingleDisk<Q, M>, steps: u32) {
        let mut flights: Vec<Option<Flight>> = (0..DEPTH).map(|_| None).collect();
        for _ in 0..steps {
            let full = flights.iter().all(Option::is_some);
            if full || engine.in_flight() > 0 && self.random.chance(25) {
                engine.wait_once();
                self.drain(engine, &mut flights);
            }
            let Some(tag) = flights.iter().position(Option::is_none) else { continue };
            let range = self.range();
            let overlaps =
                |flight: &Flight| flight.range.pos < range.end() && range.pos < flight.range.end();
            if !flights.iter().flatten().any(overlaps) {
                flights[tag] = Some(loop {
                    let random = self.random.clone();
                    let error = match self.submit(engine, range, tag as u64) {
                        Ok(flight) => break flight,
                        Err(rejected) => rejected.error,
                    };
                    // Each part of a request to small clusters has a slot, so there may be none.
                    assert!(error.errno() == libc::EAGAIN && engine.in_flight() > 0, "{error}");
                    engine.wait_once();
                    self.drain(engine, &mut flights);
                    self.random = random;
                });
            }
        }
        while engine.in_flight() > 0 {
            engine.wait_once();
            self.drain(engine, &mut flights);
        }
        self.discard_some(engine);
    }

    fn range(&mut self) -> ByteRange {
        let size = self.bytes.len() as u64;
        let random = &mut self.random;
        let len = match random.below(8) {
            0 => CLUSTER * (1 + random.below(8)),
            1..4 => 4096 * (1 + random.below(16)),
            4..6 => 512 * (1 + random.below(64)),
            _ => 1 + random.below(70_000),
        };
        let pos = match random.below(6) {
            0 => random.below(size),
            1 => size.saturating_sub(random.below(9000) + 1),
            2 => random.below(size) / CLUSTER * CLUSTER,
            // A small area, where clusters are written more than once.
            3 => random.below(size.min(CROWDED)) / 512 * 512,
            _ => random.below(size) / 4096 * 4096,
        };
        ByteRange::new(pos, len.min(size - pos))
    }

    fn submit<Q: IoQueue, M: BlockMap>(
        &mut self,
        engine: &mut SingleDisk<Q, M>,
        range: ByteRange,
        tag: u64,
    ) -> Result<Flight, Rejected> {
        let bytes = &mut self.bytes[range.pos as usize..range.end() as usize];
        let flags = if self.random.chance(10) { Flags::DSYNC } else { Flags::NONE };
        let mut expected = None;
        let io = |op, flags| Request { op, flags, range };
        match self.random.below(20) {
            0..8 => {
                let mut buf = engine.buffer(range).expect("a buffer");
                bytes.copy_from_slice(&self.random.bytes(bytes.len()));
                buf.copy_from_slice(bytes);
                engine.submit(io(Op::Write, flags), buf, tag)?;
            }
            8..16 => {
                let mut buf = engine.buffer(range).expect("a buffer");
                buf.fill(0xee);
                expected = Some(bytes.to_vec());
                engine.submit(io(Op::Read, Flags::NONE), buf, tag)?;
            }
            16..18 => {
                bytes.fill(0);
                let keep = self.random.chance(50);
                let flags = if keep { flags | Flags::NO_UNMAP } else { flags };
                engine.submit_no_data(io(Op::Zero, flags), tag)?;
            }
            18 => engine.submit_no_data(io(Op::Flush, Flags::NONE), tag)?,
            _ => engine.submit_no_data(io(Op::Status, Flags::NONE), tag)?,
        }
        Ok(Flight { range, expected })
    }

    fn drain<Q: IoQueue, M: BlockMap>(
        &self,
        engine: &mut SingleDisk<Q, M>,
        flights: &mut [Option<Flight>],
    ) {
        let label = &self.label;
        while let Some(completion) = engine.next() {
            let flight = flights[completion.tag as usize].take().expect("completed once");
            let (op, range) = (completion.io.op, flight.range);
            let done = completion.result().unwrap_or_else(|e| panic!("{label}: {e}"));
            if op != Op::Flush {
                assert_eq!(done, range.len, "{label}: {:?}", completion.io);
            }
            if op == Op::Status {
                self.check_status(range, &engine.take_extents(completion.tag));
            }
            let Some(expected) = flight.expected else { continue };
            let buf = completion.buf.expect("a read gives its buffer back");
            let got = &buf[..];
            let differs = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{label}: first wrong byte of {range:?}");
        }
    }

    /// A reported hole has to be zeros in the model: overlapping writes are not in flight.
    fn check_status(&self, range: ByteRange, extents: &[ExtentStatus]) {
        let mut pos = range.pos as usize;
        for extent in extents {
            let end = pos + extent.len as usize;
            let zeros = self.bytes[pos..end].iter().all(|&byte| byte == 0);
            assert!(!extent.hole || zeros, "{}: hole at {pos}, {} bytes", self.label, extent.len);
            pos = end;
        }
        assert_eq!(pos as u64, range.end(), "{}: all of the range is told", self.label);
    }

    /// C52: discarded bytes are the old ones or zeros, and do not change afterwards.
    fn discard_some<Q: IoQueue, M: BlockMap>(&mut self, engine: &mut SingleDisk<Q, M>) {
        for _ in 0..DISCARDS {
            let range = self.range();
            let io = |op| Request { op, flags: Flags::NONE, range };
            engine.submit_no_data(io(Op::Discard), 0).map_err(|r| r.error).expect("a slot");
            match engine.only().result() {
                Err(error) if error.errno() == libc::EOPNOTSUPP => return,
                done => assert_eq!(done, Ok(range.len), "{}", self.label),
            }
            let buf = engine.buffer(range).expect("a buffer");
            engine.submit(io(Op::Read), buf, 0).map_err(|r| r.error).expect("a slot");
            let read = engine.only();
            assert_eq!(read.result(), Ok(range.len), "{}", self.label);
            let buf = read.buf.expect("a read gives its buffer back");
            let model = &mut self.bytes[range.pos as usize..range.end() as usize];
            let got = &buf[..];
            let stray = got.iter().zip(&*model).position(|(now, old)| now != old && *now != 0);
            assert_eq!(stray, None, "{}: neither old nor zero, {range:?}", self.label);
            model.copy_from_slice(got);
        }
    }
}
