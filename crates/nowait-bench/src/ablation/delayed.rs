//! A queue of a given latency: transfers nothing, and holds each completion back until its time.
//!
//! Invariant: transfers complete in the order of submission, with their full length, and not before
//! the latency has passed.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use nowait::{Error, EventSource, IoQueue, Null, Outcome, QueueFile, QueueFull, Token, Transfer};

/// The last part of a wait is a busy loop, because the kernel may wake a thread later than that.
const BUSY_WAIT: Duration = Duration::from_micros(120);

/// The queue. Its descriptor reports watched descriptors only: it is for callers that wait with
/// [`IoQueue::wait`].
pub(crate) struct Delayed {
    latency: Duration,
    due: VecDeque<(Instant, Token, Outcome)>,
    watched: Null,
}

impl Delayed {
    /// # Errors
    /// Like [`Null::new`].
    pub(crate) fn new(latency: Duration) -> Result<Self, Error> {
        Ok(Self { latency, due: VecDeque::with_capacity(64), watched: Null::new()? })
    }
}

// SAFETY: each token is reported once, from the list that `place` appended it to; `Null` reports
// the watched ones.
unsafe impl IoQueue for Delayed {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        self.watched.attach(files)
    }

    fn detach(&mut self, first: u32, count: u32) {
        self.watched.detach(first, count);
    }

    // SAFETY: the memory is never accessed.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.due.push_back((Instant::now() + self.latency, token, transfer.len as Outcome));
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let now = Instant::now();
        let mut count = 0;
        while let Some(&(time, token, outcome)) = self.due.front()
            && time <= now
        {
            self.due.pop_front();
            sink(token, outcome);
            count += 1;
        }
        count + self.watched.drain_completions(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let Some(&(time, ..)) = self.due.front() else { return self.watched.wait(timeout) };
        let left = time.saturating_duration_since(Instant::now());
        let sleep = left.saturating_sub(BUSY_WAIT);
        self.watched.wait(Some(timeout.map_or(sleep, |timeout| timeout.min(sleep))))?;
        if timeout.is_none_or(|timeout| timeout >= left) && !self.watched.has_completions() {
            while Instant::now() < time {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    fn has_completions(&mut self) -> bool {
        let now = Instant::now();
        self.due.front().is_some_and(|(time, ..)| *time <= now) || self.watched.has_completions()
    }

    fn events(&self) -> &dyn EventSource {
        self.watched.events()
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        self.watched.events_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nowait::{
        BlockDevice, ByteRange, Config, Engine, Flags, Op, OpenOptions, Request, WorkerPool,
    };

    use super::*;

    #[test]
    fn a_transfer_completes_in_full_and_not_before_its_latency() {
        let latency = Duration::from_millis(20);
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.as_file().set_len(1 << 20).expect("a sparse file");
        let disk = BlockDevice::open_mapped(file.path(), OpenOptions::default()).expect("a disk");
        let disk = Arc::new(disk);
        let queue = Delayed::new(latency).expect("a queue");
        let engine = Engine::new(queue, WorkerPool::new(1), Config::default());
        let mut engine = engine.expect("an engine");
        let disk = engine.attach(disk).expect("a device");
        let begin = Instant::now();
        for tag in [7, 8] {
            let range = ByteRange::new(0, 4096);
            let buf = engine.buffer(&disk, range).expect("a buffer");
            let io = Request { op: Op::Read, flags: Flags::NONE, range };
            assert!(engine.submit(&disk, io, buf, tag).is_ok());
        }
        let mut ended = Vec::new();
        while ended.len() < 2 {
            engine.wait(None, &mut |_, _| {}).expect("a wait");
            while let Some(completion) = engine.next() {
                let in_time = begin.elapsed() >= latency;
                ended.push((completion.tag, completion.result().ok(), in_time));
            }
        }
        assert_eq!(ended, [(7, Some(4096), true), (8, Some(4096), true)]);
    }
}
