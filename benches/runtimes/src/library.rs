//! nowait's own files.

use std::io;

use nowait::{AsyncFile, BlockingFile, Flags, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};

use crate::load::{Figures, Load, Moved, RuntimeFile, Work};
use crate::runtimes::{in_threads, on_tokio};

macro_rules! runtime_file {
    ($($file:ty),*) => {$(
        impl RuntimeFile for $file {
            type Buffer = IoBuffer;

            fn buffer(block: usize) -> io::Result<IoBuffer> {
                Ok(IoBuffer::zeroed(block)?)
            }

            async fn read(&self, buffer: IoBuffer, _: usize, pos: u64) -> Moved<IoBuffer> {
                let (done, buffer) = self.read_at(buffer, pos).await;
                (done.map_err(io::Error::from), buffer)
            }

            async fn write(&self, buffer: IoBuffer, _: usize, pos: u64) -> Moved<IoBuffer> {
                let (done, buffer) = self.write_at(buffer, pos, Flags::NONE).await;
                (done.map_err(io::Error::from), buffer)
            }
        }
    )*};
}

runtime_file!(LocalAsyncFile, AsyncFile);

impl RuntimeFile for BlockingFile {
    type Buffer = IoBuffer;

    fn buffer(block: usize) -> io::Result<IoBuffer> {
        Ok(IoBuffer::zeroed(block)?)
    }

    async fn read(&self, mut buffer: IoBuffer, _: usize, pos: u64) -> Moved<IoBuffer> {
        (self.read_at(&mut buffer, pos).map_err(io::Error::from), buffer)
    }

    async fn write(&self, buffer: IoBuffer, _: usize, pos: u64) -> Moved<IoBuffer> {
        (self.write_at(&buffer, pos, Flags::NONE).map_err(io::Error::from), buffer)
    }
}

fn options(load: &Load) -> OpenOptions {
    OpenOptions::new().read_only(load.work != Work::Write).read_ahead(load.work == Work::Scan)
}

/// `LocalAsyncFile`, driven by `LocalDriver`.
pub fn local(load: &Load) -> io::Result<Figures> {
    LocalDriver::new()?.block_on(async {
        let files = load.open(|path| Ok(LocalAsyncFile::open(path, options(load))?))?;
        load.run(files, |task| task).await
    })
}

/// `LocalAsyncFile`, driven by tokio's reactor.
pub fn local_on_tokio(load: &Load) -> io::Result<Figures> {
    on_tokio(load, |load| {
        let files = load.open(|path| Ok(LocalAsyncFile::open(path, options(load))?))?;
        if let Some(file) = files.first() {
            tokio::task::spawn_local(file.tokio_driver());
        }
        Ok(files)
    })
}

/// `AsyncFile`.
pub fn any_thread(load: &Load) -> io::Result<Figures> {
    on_tokio(load, |load| load.open(|path| Ok(AsyncFile::open(path, options(load))?)))
}

/// `BlockingFile`, with a thread for each request in flight.
pub fn blocking(load: &Load) -> io::Result<Figures> {
    in_threads(load, load.open(|path| Ok(BlockingFile::open(path, options(load))?))?)
}
