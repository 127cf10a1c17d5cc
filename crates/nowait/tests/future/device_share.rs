//! One task's view of a device, and its requests, for every async API.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use nowait::{AsyncFile, ByteRange, Error, Flags, IoBuffer, LocalAsyncFile};
use nowait_testkit::Random;

use crate::{LONGEST, SCRATCH, SHARE, STEPS};

pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// The requests of an async API.
pub(crate) trait TestFile: Clone {
    /// A request as a future: `Send` if those of the API are.
    type Request<T>: Future<Output = T> + Unpin;
    fn read_at(&self, buffer: IoBuffer, pos: u64) -> Self::Request<Answer>;
    fn write_at(&self, buffer: IoBuffer, pos: u64, flags: Flags) -> Self::Request<Answer>;
    fn flush(&self) -> Self::Request<Result<(), Error>>;
    fn zero(&self, range: ByteRange, flags: Flags) -> Self::Request<Result<(), Error>>;
}

macro_rules! test_file {
    ($file:ty, $future:ty) => {
        impl TestFile for $file {
            type Request<T> = Pin<Box<$future>>;
            fn read_at(&self, buffer: IoBuffer, pos: u64) -> Self::Request<Answer> {
                Box::pin(self.read_at(buffer, pos))
            }
            fn write_at(&self, buffer: IoBuffer, pos: u64, flags: Flags) -> Self::Request<Answer> {
                Box::pin(self.write_at(buffer, pos, flags))
            }
            fn flush(&self) -> Self::Request<Result<(), Error>> {
                Box::pin(self.flush())
            }
            fn zero(&self, range: ByteRange, flags: Flags) -> Self::Request<Result<(), Error>> {
                Box::pin(self.zero(range, flags))
            }
        }
    };
}

test_file!(AsyncFile, dyn Future<Output = T> + Send);
test_file!(LocalAsyncFile, dyn Future<Output = T>);

/// One task's view of its share of the device.
pub(crate) struct Share<F> {
    file: F,
    start: u64,
    model: Vec<u8>,
    random: Random,
}

impl<F: TestFile> Share<F> {
    pub(crate) fn new(file: F, task: u64) -> Self {
        let model = vec![0; (SHARE - SCRATCH) as usize];
        let random = Random::from_seed(task);
        Self { file, start: task * SHARE, model, random }
    }

    /// A range below `limit`; half of the ranges are whole blocks.
    fn range(&mut self, limit: u64) -> (u64, u64) {
        let (mut from, mut len) = (self.random.below(limit), 1 + self.random.below(LONGEST));
        if self.random.below(2) == 0 {
            (from, len) = (from & !4095, (len + 4095) & !4095);
        }
        (from, len.min(limit - from))
    }

    pub(crate) async fn run(mut self) {
        for step in 0..STEPS {
            for _ in 0..self.random.below(4) {
                self.begin_and_drop().await.unwrap();
            }
            self.step(step).await.unwrap_or_else(|error| panic!("step {step}: {error}"));
        }
    }

    async fn step(&mut self, step: u32) -> Result<(), Error> {
        let (from, len) = self.range(SHARE - SCRATCH);
        let range = ByteRange::new(self.start + from, len);
        let mut buffer = IoBuffer::zeroed(len as usize)?;
        let model = &mut self.model[from as usize..(from + len) as usize];
        match self.random.below(10) {
            0..4 => {
                self.random.fill(&mut buffer);
                model.copy_from_slice(&buffer);
                let flags = if step.is_multiple_of(16) { Flags::DSYNC } else { Flags::NONE };
                let (written, buffer) = self.file.write_at(buffer, range.pos, flags).await;
                assert_eq!(written? as u64, len);
                assert!(*buffer == *model, "step {step}: the memory of {range:?} has changed");
            }
            4..8 => {
                buffer.fill(0xa5);
                let (read, buffer) = self.file.read_at(buffer, range.pos).await;
                assert_eq!(read? as u64, len);
                assert!(*buffer == *model, "step {step}: {range:?}");
            }
            8 => {
                model.fill(0);
                self.file.zero(range, Flags::NONE).await?;
            }
            _ => self.file.flush().await?,
        }
        Ok(())
    }

    /// Begins a request and drops it: a read, or a write to the part that is never compared.
    async fn begin_and_drop(&mut self) -> Result<(), Error> {
        if self.random.below(2) == 0 {
            let (from, len) = self.range(SHARE);
            poll_once(self.file.read_at(IoBuffer::zeroed(len as usize)?, self.start + from)).await;
        } else {
            let (from, len) = self.range(SCRATCH - 300);
            let mut buffer = IoBuffer::zeroed(len as usize)?;
            self.random.fill(&mut buffer);
            let pos = self.start + SHARE - SCRATCH + from;
            poll_once(self.file.write_at(buffer, pos, Flags::NONE)).await;
        }
        Ok(())
    }
}

/// Polls a future once and drops it.
pub(crate) async fn poll_once<F: Future + Unpin>(mut future: F) {
    let poll = |context: &mut Context<'_>| Poll::Ready(pin!(&mut future).poll(context).is_ready());
    std::future::poll_fn(poll).await;
}
