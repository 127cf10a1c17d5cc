//! Doors for fuzz targets: what servers answer, records of boots, and files of a cache.
//!
//! Invariant: what a door calls is the code that is shipped; only connections and directories are its own.

use std::collections::VecDeque;
use std::future::{Ready, ready};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::{Builder, Runtime};

use crate::object::block_cache::{BlockCache, Cached};
use crate::object::boot_record;
use crate::object::cache_directory::{CacheOptions, MIN_CACHE_BYTES};
use crate::object::http_client::Connector;
use crate::object::object_url::ObjectUrl;
use crate::object::store::{Object, Timeouts};

/// The object that is asked for.
pub const URL: &str = "http://host/disk.img";
/// The position and the length of what is read of it.
pub const READ: (u64, u64) = (10, 20);
/// Bytes of the object of [`CacheFile`]: one block.
pub const CACHED_BYTES: u64 = 300;
const CONNECT: Duration = Duration::from_secs(5);

/// A connection to a server that sends these bytes after the first request, and then closes. It takes all that is written.
struct Canned {
    bytes: Vec<u8>,
    sent: usize,
    /// Whether something was written: the request.
    is_asked: bool,
    /// The task that reads, woken by the request.
    asked: Option<Waker>,
}

impl AsyncRead for Canned {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.is_asked {
            self.asked = Some(context.waker().clone());
            return Poll::Pending;
        }
        let rest = self.bytes.get(self.sent..).unwrap_or_default();
        let now = rest.get(..buf.remaining()).unwrap_or(rest);
        buf.put_slice(now);
        let len = now.len();
        self.sent += len;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Canned {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.is_asked = true;
        self.asked.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Connection for Canned {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// Connects to one canned answer after the other.
#[derive(Clone, Debug)]
struct Connections(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl tower::Service<Uri> for Connections {
    type Response = TokioIo<Canned>;
    type Error = io::Error;
    type Future = Ready<io::Result<TokioIo<Canned>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let bytes = bytes.ok_or_else(|| io::ErrorKind::ConnectionRefused.into());
        ready(
            bytes
                .map(|bytes| TokioIo::new(Canned { bytes, sent: 0, asked: None, is_asked: false })),
        )
    }
}

/// The verdict on a server's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The object cannot be opened, or cannot be read, for this reason.
    Fault(String),
    /// It has been opened, and these bytes of [`READ`] were read.
    Read(Vec<u8>),
}

/// A client of servers that answer what they like.
pub struct Judge {
    runtime: Runtime,
    url: ObjectUrl,
}

impl Judge {
    /// # Errors
    /// A message: there is no runtime.
    pub fn new() -> Result<Self, String> {
        let runtime = Builder::new_current_thread().enable_all().build();
        Ok(Self { runtime: runtime.map_err(|error| error.to_string())?, url: URL.parse()? })
    }

    /// Opens [`URL`] and reads [`READ`] of it, from servers that send one of `answers` after the other,
    /// each on a connection that ends then.
    pub fn judge(&self, answers: Vec<Vec<u8>>) -> Verdict {
        let connections = Connections(Arc::new(Mutex::new(answers.into())));
        let timeouts = Timeouts { silence: CONNECT, all: CONNECT, minimum_rate: 0 };
        let connector = Connector::over(connections, true, timeouts.silence);
        let judged = self.runtime.block_on(async {
            let object = Object::over(&self.url, timeouts, connector)?;
            let fault = |fault: crate::object::fault::Fault| fault.text().to_owned();
            let version = object.probe(CONNECT).await.map_err(fault)?;
            object.read(&version, READ, &mut object.progress(CONNECT)).await.map_err(fault)
        });
        judged.map_or_else(Verdict::Fault, Verdict::Read)
    }
}

/// The blocks of the object at `place`, of `end` blocks, in the `text` of a record.
#[must_use]
pub fn record(text: &str, place: &str, end: u64) -> Vec<u64> {
    boot_record::order_in(text, place, end).blocks().to_vec()
}

/// A cache with one file, of an object with [`CACHED_BYTES`] bytes.
pub struct CacheFile {
    cache: BlockCache,
}

impl CacheFile {
    /// A cache in `directory`, which is made.
    ///
    /// # Errors
    /// A message: it cannot be made.
    pub fn new(directory: &Path) -> Result<Self, String> {
        let options = CacheOptions { directory: directory.to_owned(), bytes: MIN_CACHE_BYTES };
        Ok(Self { cache: BlockCache::open(&options, URL, "one", CACHED_BYTES)? })
    }

    /// The file that a cache has of the object with the bytes `data`.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn written(&self, data: &[u8]) -> io::Result<Vec<u8>> {
        self.cache.write(0, data);
        std::fs::read(self.cache.path(0))
    }

    /// The block of the object that a cache with the file `bytes` has; `None`: it has to be fetched.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn read(&self, bytes: &[u8]) -> io::Result<Option<Vec<u8>>> {
        std::fs::write(self.cache.path(0), bytes)?;
        Ok(match self.cache.read(0) {
            Cached::Block(data) => Some(data),
            Cached::Absent | Cached::Corrupt => None,
        })
    }
}
