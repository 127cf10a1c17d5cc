//! The cost of writes by several threads on one device, on queues that do no I/O: what is left is
//! what the engines of a device share, above all its range locks.
//!
//! `null_threads THREADS WRITES random|quarters|neighbours` prints the nanoseconds of a 4 KiB write
//! on each thread. The threads write at random; each in a part of the device of its own, one after
//! the other; or by turns in neighbouring 64 KiB.
#![allow(unsafe_code)]

use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use nowait::{
    BlockDevice, ByteRange, Config, Engine, Error, Flags, IoSegment, LinearMap, Null, Op,
    OpenOptions, Request, WorkerPool,
};

const SIZE: u64 = 4 << 30;
const BLOCK: u64 = 4096;
const NEIGHBOUR: u64 = 64 << 10;
/// Requests that are submitted before each poll, as a server does under load.
const BATCH: usize = 8;

/// The memory of one request.
#[repr(align(4096))]
struct Page([u8; BLOCK as usize]);

#[derive(Clone, Copy)]
enum Pattern {
    Random,
    Quarters,
    Neighbours,
}

impl Pattern {
    /// The position of write `n` of a thread.
    fn pos(self, thread: u64, threads: u64, n: u64) -> u64 {
        match self {
            Self::Random => {
                let mixed = (n * threads + thread).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                mixed % (SIZE / BLOCK) * BLOCK
            }
            Self::Quarters => thread * (SIZE / threads) + n * BLOCK % (SIZE / threads),
            Self::Neighbours => {
                let blocks = NEIGHBOUR / BLOCK;
                let turn = n / blocks * threads + thread;
                (turn * NEIGHBOUR + n % blocks * BLOCK) % SIZE
            }
        }
    }
}

/// Writes as thread number `thread`. Returns the time it took.
fn write(
    disk: Arc<BlockDevice<LinearMap>>,
    thread: u64,
    threads: u64,
    writes: u64,
    pattern: Pattern,
    barrier: &Barrier,
) -> Result<Duration, Error> {
    let workers = WorkerPool::new(1);
    // Declared before the engine, so that they are dropped after it.
    let mut pages: Vec<Page> = (0..BATCH).map(|_| Page([0; BLOCK as usize])).collect();
    let mut engine = Engine::new(Null::new()?, workers, Config::default())?;
    let disk = engine.attach(disk)?;
    barrier.wait();
    let began = Instant::now();
    let mut n = 0;
    while n < writes {
        for page in &mut pages {
            let range = ByteRange::new(pattern.pos(thread, threads, n), BLOCK);
            let io = Request { op: Op::Write, flags: Flags::NONE, range };
            let segment = IoSegment { base: page.0.as_mut_ptr(), len: page.0.len() };
            // SAFETY: the page is borrowed for longer than the engine lives, which is dropped
            // first. Each page is used by one request at a time: all requests of a batch have ended
            // before the next batch begins.
            unsafe { engine.submit_user_memory(&disk, io, &[segment], n) }
                .map_err(|it| it.error)?;
            n += 1;
        }
        engine.poll()?;
        while let Some(completion) = engine.next() {
            completion.result()?;
        }
    }
    Ok(began.elapsed())
}

fn run(threads: u64, writes: u64, pattern: Pattern) -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    std::fs::File::create(&path)?.set_len(SIZE)?;
    let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default())?);
    if !disk.is_direct() {
        return Err("no direct I/O in the temporary directory: writes take no range locks".into());
    }
    let barrier = Barrier::new(threads as usize);
    let times = std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|thread| {
                let (disk, barrier) = (disk.clone(), &barrier);
                scope.spawn(move || write(disk, thread, threads, writes, pattern, barrier))
            })
            .collect();
        started.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    for time in times {
        let time = time.map_err(|_| "a thread has panicked")??;
        print!("{:.1} ", time.as_secs_f64() * 1e9 / writes as f64);
    }
    println!();
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match args.as_slice() {
        [threads, writes, pattern] => {
            let pattern = match pattern.as_str() {
                "random" => Some(Pattern::Random),
                "quarters" => Some(Pattern::Quarters),
                "neighbours" => Some(Pattern::Neighbours),
                _ => None,
            };
            threads.parse().ok().zip(writes.parse().ok()).zip(pattern)
        }
        _ => None,
    };
    let Some(((threads @ 1.., writes), pattern)) = parsed else {
        eprintln!("usage: null_threads THREADS WRITES random|quarters|neighbours");
        return ExitCode::from(2);
    };
    match run(threads, writes, pattern) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("null_threads: {error}");
            ExitCode::FAILURE
        }
    }
}
