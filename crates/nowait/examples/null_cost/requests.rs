//! Requests that the programs that count instructions have in common: of 4 KiB on a queue that does
//! no I/O, whose completions are checked.
#![allow(unsafe_code)]

use std::sync::Arc;

use nowait::{
    BlockDevice, BlockMap, ByteRange, Config, DeviceHandle, Engine, Flags, IoSegment, Null, Op,
    Request, WorkerPool,
};

pub(crate) const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;
/// Requests that a server under load submits before each poll.
#[allow(dead_code, reason = "not of the program that submits one at a time")]
pub(crate) const LOADED: usize = 32;

/// The memory of one request.
#[repr(align(4096))]
struct Page([u8; BLOCK as usize]);

/// The sums of the completions' bytes and tags.
#[derive(Default, PartialEq, Eq)]
struct Done {
    bytes: u64,
    tags: u64,
}

#[inline(always)]
fn transfer<M: BlockMap>(
    engine: &mut Engine<Null, M>,
    disk: &DeviceHandle<M>,
    pages: &mut [Page],
    op: Op,
    requests: u64,
) -> Result<Done, nowait::Error> {
    let mut done = Done::default();
    let mut n = 0;
    while n < requests {
        let count = pages.len().min((requests - n) as usize);
        for page in &mut pages[..count] {
            // A block apart: neighbours would share transfers.
            let range = ByteRange::new(2 * n * BLOCK % SIZE, BLOCK);
            let io = Request { op, flags: Flags::NONE, range };
            let segment = IoSegment { base: page.0.as_mut_ptr(), len: page.0.len() };
            // SAFETY: the page is borrowed for longer than this function runs, which returns early
            // only when the program ends. Each page is used by one request at a time: all requests
            // of a batch have ended before the next batch begins.
            unsafe { engine.submit_user_memory(disk, io, &[segment], n) }.map_err(|it| it.error)?;
            n += 1;
        }
        engine.poll()?;
        while let Some(completion) = engine.next() {
            done.bytes += completion.result()?;
            done.tags += completion.tag;
        }
    }
    Ok(done)
}

pub(crate) type Failure = Box<dyn std::error::Error>;

/// Makes `requests`, `DEPTH` at a time, on the simple path or on the general one. Returns the bytes.
#[inline(always)]
pub(crate) fn run<M: BlockMap, const DEPTH: usize>(
    disk: BlockDevice<M>,
    op: Op,
    simple: bool,
    requests: u64,
) -> Result<u64, Failure> {
    let disk = Arc::new(disk);
    let config = Config { simple, ..Config::default() };
    let workers = WorkerPool::new(1);
    // Declared before the engine, so that they are dropped after it.
    let mut pages: Vec<Page> = (0..DEPTH).map(|_| Page([0; BLOCK as usize])).collect();
    let mut engine = Engine::new(Null::new()?, workers, config)?;
    let disk = engine.attach(disk)?;
    let done = transfer(&mut engine, &disk, &mut pages, op, requests)?;
    let tags = requests * requests.saturating_sub(1) / 2;
    if done != (Done { bytes: requests * BLOCK, tags }) {
        return Err("the completions do not match the requests".into());
    }
    let stats = engine.stats();
    let path = if simple { stats.simple } else { stats.general };
    if path != requests {
        return Err(format!("took another path: {stats:?}").into());
    }
    if stats.pool.hit + stats.pool.allocated != requests {
        return Err(format!("a request took more than one slot: {stats:?}").into());
    }
    Ok(done.bytes)
}
