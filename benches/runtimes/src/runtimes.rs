//! The files of other runtimes, and pread(2) on threads.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use compio::BufResult;
use compio::io::{AsyncReadAt, AsyncWriteAt};
use futures_util::FutureExt;
use monoio::buf::{IoBufMut as _, SliceMut};
use tokio::task::{LocalSet, spawn_local};
use tokio_uring::buf::{BoundedBuf as _, Slice};

use crate::load::{ALIGNMENT, DIRECT, Figures, Load, Moved, RuntimeFile, Started, Work, at};

/// Memory with a block in it that is aligned, and where that is.
fn memory(block: usize) -> (Vec<u8>, Range<usize>) {
    let memory = vec![1; block + ALIGNMENT];
    let begin = memory.as_ptr().align_offset(ALIGNMENT);
    (memory, begin..begin + block)
}

impl RuntimeFile for compio::fs::File {
    type Buffer = compio::buf::Slice<Vec<u8>>;

    fn buffer(block: usize) -> io::Result<Self::Buffer> {
        let (memory, place) = memory(block);
        Ok(compio::buf::IoBuf::slice(memory, place))
    }

    async fn read(&self, buffer: Self::Buffer, _: usize, pos: u64) -> Moved<Self::Buffer> {
        let BufResult(done, buffer) = self.read_at(buffer, pos).await;
        (done, buffer)
    }

    async fn write(&self, buffer: Self::Buffer, _: usize, pos: u64) -> Moved<Self::Buffer> {
        let mut file = self;
        let BufResult(done, buffer) = file.write_at(buffer, pos).await;
        (done, buffer)
    }
}

pub fn compio(load: &Load) -> io::Result<Figures> {
    compio::runtime::Runtime::new()?.block_on(async {
        let mut options = compio::fs::OpenOptions::new();
        options.read(true).write(load.work == Work::Write).custom_flags(DIRECT);
        let mut files = Vec::new();
        for path in load.paths() {
            files.push(options.open(&path).await.map_err(|error| at(&path, error))?);
        }
        let spawn = |task| compio::runtime::spawn(task).map(|ended| ended.unwrap_or_else(panicked));
        load.run(files, spawn).await
    })
}

/// The end of a task that is none, because it has panicked or was stopped.
fn panicked<E>(_: E) -> io::Result<u64> {
    Err(io::Error::other("a task has panicked"))
}

/// A file of glommio, whose buffers are its own.
struct DmaFile(Rc<glommio::io::DmaFile>);

impl RuntimeFile for DmaFile {
    type Buffer = ();

    fn buffer(_: usize) -> io::Result<()> {
        Ok(())
    }

    async fn read(&self, (): (), block: usize, pos: u64) -> Moved<()> {
        let done = self.0.read_at_aligned(pos, block).await;
        (done.map(|data| data.len()).map_err(io::Error::from), ())
    }

    async fn write(&self, (): (), block: usize, pos: u64) -> Moved<()> {
        let buffer = self.0.alloc_dma_buffer(block);
        (self.0.write_at(buffer, pos).await.map_err(io::Error::from), ())
    }
}

pub fn glommio(load: &Load) -> io::Result<Figures> {
    let load = load.clone();
    let executor = glommio::LocalExecutorBuilder::default().spawn(|| async move {
        let mut files = Vec::new();
        for path in load.paths() {
            let mut options = glommio::io::OpenOptions::new();
            options.read(true).write(load.work == Work::Write);
            let file = options.dma_open(&path).await.map_err(|error| at(&path, error))?;
            files.push(DmaFile(Rc::new(file)));
        }
        load.run(files, glommio::spawn_local).await
    });
    executor.and_then(|executor| executor.join()).map_err(io::Error::from)?
}

impl RuntimeFile for monoio::fs::File {
    type Buffer = SliceMut<Vec<u8>>;

    fn buffer(block: usize) -> io::Result<Self::Buffer> {
        let (memory, place) = memory(block);
        Ok(memory.slice_mut(place))
    }

    async fn read(&self, buffer: Self::Buffer, _: usize, pos: u64) -> Moved<Self::Buffer> {
        self.read_at(buffer, pos).await
    }

    async fn write(&self, buffer: Self::Buffer, _: usize, pos: u64) -> Moved<Self::Buffer> {
        self.write_at(buffer, pos).await
    }
}

pub fn monoio(load: &Load) -> io::Result<Figures> {
    monoio::RuntimeBuilder::<monoio::IoUringDriver>::new().build()?.block_on(async {
        let files = load.open_plain()?.into_iter().map(monoio::fs::File::from_std);
        load.run(files.collect::<io::Result<_>>()?, monoio::spawn).await
    })
}

impl RuntimeFile for tokio_uring::fs::File {
    type Buffer = Slice<Vec<u8>>;

    fn buffer(block: usize) -> io::Result<Self::Buffer> {
        let (memory, place) = memory(block);
        Ok(memory.slice(place))
    }

    async fn read(&self, buffer: Self::Buffer, _: usize, pos: u64) -> Moved<Self::Buffer> {
        self.read_at(buffer, pos).await
    }

    async fn write(&self, buffer: Self::Buffer, _: usize, pos: u64) -> Moved<Self::Buffer> {
        self.write_at(buffer, pos).submit().await
    }
}

pub fn tokio_uring(load: &Load) -> io::Result<Figures> {
    tokio_uring::start(async {
        let files: Vec<_> =
            load.open_plain()?.into_iter().map(tokio_uring::fs::File::from_std).collect();
        let spawn = |task| tokio_uring::spawn(task).map(|ended| ended.unwrap_or_else(panicked));
        load.run(files, spawn).await
    })
}

/// A block of memory, and where it is.
type Block = (Vec<u8>, Range<usize>);

/// A file whose calls are made by tokio's threads for blocking.
struct SpawnBlocking(Arc<File>);

impl SpawnBlocking {
    async fn call(
        &self,
        (mut memory, place): Block,
        call: impl FnOnce(&File, &mut [u8]) -> io::Result<usize> + Send + 'static,
    ) -> Moved<Block> {
        let file = self.0.clone();
        let called = tokio::task::spawn_blocking(move || {
            let done = memory.get_mut(place.clone()).map_or(Ok(0), |block| call(&file, block));
            (done, (memory, place))
        });
        called.await.unwrap_or_else(|error| (Err(error.into()), Block::default()))
    }
}

impl RuntimeFile for SpawnBlocking {
    type Buffer = Block;

    fn buffer(block: usize) -> io::Result<Block> {
        Ok(memory(block))
    }

    async fn read(&self, buffer: Block, _: usize, pos: u64) -> Moved<Block> {
        self.call(buffer, move |file, block| file.read_at(block, pos)).await
    }

    async fn write(&self, buffer: Block, _: usize, pos: u64) -> Moved<Block> {
        self.call(buffer, move |file, block| file.write_at(block, pos)).await
    }
}

pub fn spawn_blocking(load: &Load) -> io::Result<Figures> {
    on_tokio(load, |load| {
        Ok(load.open_plain()?.into_iter().map(|file| SpawnBlocking(Arc::new(file))).collect())
    })
}

/// Runs the tasks on a runtime of tokio of one thread, which opens the files, too.
pub fn on_tokio<F: RuntimeFile>(
    load: &Load,
    open: impl FnOnce(&Load) -> io::Result<Vec<F>>,
) -> io::Result<Figures> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    LocalSet::new().block_on(&runtime, async {
        let spawn = |task| spawn_local(task).map(|ended| ended.unwrap_or_else(panicked));
        load.run(open(load)?, spawn).await
    })
}

impl RuntimeFile for File {
    type Buffer = Block;

    fn buffer(block: usize) -> io::Result<Block> {
        Ok(memory(block))
    }

    async fn read(&self, (mut memory, place): Block, _: usize, pos: u64) -> Moved<Block> {
        let done = memory.get_mut(place.clone()).map_or(Ok(0), |block| self.read_at(block, pos));
        (done, (memory, place))
    }

    async fn write(&self, (memory, place): Block, _: usize, pos: u64) -> Moved<Block> {
        let done = memory.get(place.clone()).map_or(Ok(0), |block| self.write_at(block, pos));
        (done, (memory, place))
    }
}

pub fn threads(load: &Load) -> io::Result<Figures> {
    in_threads(load, load.open_plain()?)
}

/// Runs each task on a thread of its own; its transfers end when they are polled.
pub fn in_threads<F: RuntimeFile + Send + Sync>(load: &Load, files: Vec<F>) -> io::Result<Figures> {
    let (started, files) = (Started::now(), Arc::from(files));
    let task = |number| load.clone().task(Arc::clone(&files), number, started).now_or_never();
    let requests: io::Result<u64> = thread::scope(|scope| {
        let spawn = |number| scope.spawn(move || task(number).unwrap_or_else(|| panicked(())));
        let threads: Vec<_> = (0..load.depth).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).sum()
    });
    Ok(started.figures(requests?))
}
