//! The files of which there are streams.

use std::future::Future;

use crate::api::async_file::{self, AsyncFile};
use crate::api::local_file::{LocalAsyncFile, request_future};
use crate::api::timed_request::TimedRequest;
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::Error;
use crate::types::request::Op;

/// A file of which a [`FileStream`](crate::FileStream) can be made: [`AsyncFile`] and [`LocalAsyncFile`].
pub trait StreamFile: StreamRequests {}

/// The requests of a stream, which only this crate makes.
pub trait StreamRequests: Unpin {
    /// A read or a write.
    type Request: Future<Output = (Result<usize, Error>, IoBuffer)> + Unpin;

    /// A read or write of the first `len` bytes of `buffer`.
    fn request(&self, op: Op, pos: u64, len: usize, buffer: IoBuffer) -> Self::Request;

    /// Bytes of the file at present.
    fn size(&self) -> u64;
}

impl StreamFile for AsyncFile {}

impl StreamRequests for AsyncFile {
    type Request = TimedRequest<async_file::RequestFuture>;

    fn request(&self, op: Op, pos: u64, len: usize, buffer: IoBuffer) -> Self::Request {
        self.request_of(op, pos, len, buffer)
    }

    fn size(&self) -> u64 {
        Self::size(self)
    }
}

impl StreamFile for LocalAsyncFile {}

impl StreamRequests for LocalAsyncFile {
    type Request = TimedRequest<request_future::RequestFuture>;

    fn request(&self, op: Op, pos: u64, len: usize, buffer: IoBuffer) -> Self::Request {
        self.request_of(op, pos, len, buffer)
    }

    fn size(&self) -> u64 {
        Self::size(self)
    }
}
