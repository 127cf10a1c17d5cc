//! Prints a checksum of an image from an event loop: `nowait::Engine` beside another descriptor in
//! poll(2).
//!
//! `polling IMAGE`: many reads are in flight while the loop also listens to standard input; for
//! each line typed there it prints the progress.

use std::error::Error;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use nowait::{
    AllocationCache, AnyQueue, BlockDevice, ByteRange, Config, DeviceHandle, Engine, Flags, Op,
    OpenOptions, QueueKind, Request, WorkerPool,
};
use rustix::event::{PollFd, PollFlags, poll};

/// Bytes of each read, and the number of reads in flight.
const STEP_BYTES: u64 = 256 << 10;
const DEPTH: usize = 16;

/// A sum over `bytes` at `pos` (FNV-1a); the sums of all parts of an image are added up, so that
/// they may come in any order.
fn sum_of(pos: u64, bytes: &[u8]) -> u64 {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    pos.to_le_bytes().iter().chain(bytes).fold(0xcbf2_9ce4_8422_2325, mix)
}

struct Reader {
    engine: Engine<AnyQueue, AllocationCache>,
    disk: DeviceHandle<AllocationCache>,
    size: u64,
    /// First byte of the next read.
    next: u64,
    /// Bytes in the sum.
    done: u64,
    sum: u64,
}

impl Reader {
    /// Submits reads until enough are in flight.
    fn submit(&mut self) -> Result<(), nowait::Error> {
        while self.next < self.size && self.engine.in_flight() < DEPTH {
            let range = ByteRange::new(self.next, STEP_BYTES.min(self.size - self.next));
            let Some(buffer) = self.engine.buffer(&self.disk, range) else { return Ok(()) };
            let io = Request { op: Op::Read, flags: Flags::NONE, range };
            if let Err(rejected) = self.engine.submit(&self.disk, io, buffer, 0) {
                return Err(rejected.error);
            }
            self.next += range.len;
        }
        Ok(())
    }

    /// Adds the completed reads to the sum.
    fn complete(&mut self) -> Result<(), nowait::Error> {
        while let Some(completion) = self.engine.next() {
            let (len, range) = (completion.result()?, completion.io.range);
            let Some(buffer) = completion.buf else { continue };
            if let Some(bytes) = buffer.get(..len as usize) {
                self.sum = self.sum.wrapping_add(sum_of(range.pos, bytes));
            }
            self.done += range.len;
        }
        Ok(())
    }

    fn run(mut self) -> Result<u64, Box<dyn Error>> {
        let stdin = std::io::stdin();
        let mut listens = true;
        while self.done < self.size {
            self.submit()?;
            self.engine.poll()?;
            self.complete()?;
            // Before it sleeps on the descriptors, the loop checks that there is nothing to do.
            if self.engine.has_completions() || self.engine.in_flight() == 0 {
                continue;
            }
            let engine_fd = self.engine.fd();
            let stdin_fd = stdin.as_fd();
            let engine = PollFd::from_borrowed_fd(engine_fd, PollFlags::IN);
            let mut fds = vec![engine];
            if listens {
                fds.push(PollFd::from_borrowed_fd(stdin_fd, PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let typed = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
            if typed {
                listens = stdin.lock().read(&mut [0; 4096])? > 0;
                eprintln!("{} of {} bytes", self.done, self.size);
            }
        }
        Ok(self.sum)
    }
}

fn sum(path: &Path) -> Result<u64, Box<dyn Error>> {
    let disk = BlockDevice::open(path, OpenOptions::new().read_only(true))?;
    let (size, config) = (disk.size(), Config::default());
    let queue = QueueKind::Auto.open(config.slots)?;
    let mut engine = Engine::new(queue, WorkerPool::default(), config)?;
    let disk = engine.attach(Arc::new(disk))?;
    Reader { engine, disk, size, next: 0, done: 0, sum: 0 }.run()
}

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [image] = args.as_slice() else {
        eprintln!("usage: polling IMAGE");
        return ExitCode::from(2);
    };
    match sum(Path::new(image)) {
        Ok(sum) => {
            println!("{sum:016x}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("polling: {error}");
            ExitCode::FAILURE
        }
    }
}
