//! The files of which there are streams.

use std::future::Future;

use crate::api::async_file::{self, AsyncFile};
use crate::api::local_file::{LocalAsyncFile, request_future};
use crate::api::timed_request::TimedRequest;
use crate::memory::io_buffer::IoBuffer;
use crate::types::byte_range::ByteRange;
use crate::types::error::Error;
use crate::types::request::Op;

/// A file of which a [`FileStream`](crate::FileStream) can be made: [`AsyncFile`] and [`LocalAsyncFile`].
pub trait StreamFile: StreamRequests {}

/// The requests of a stream, which only this crate makes.
pub trait StreamRequests: Unpin {
    /// A read or a write.
    type Request: Future<Output = (Result<usize, Error>, IoBuffer)> + Unpin;

    /// A read or write of `range`, which is no longer than `buffer`.
    fn request(&self, op: Op, range: ByteRange, buffer: IoBuffer) -> Self::Request;

    /// Bytes of the file at present.
    fn size(&self) -> u64;
}

/// A file of which there are streams, and its requests.
macro_rules! stream_file {
    ($file:ty, $request:ty) => {
        impl StreamFile for $file {}

        impl StreamRequests for $file {
            type Request = TimedRequest<$request>;

            fn request(&self, op: Op, range: ByteRange, buffer: IoBuffer) -> Self::Request {
                Self::request(self, op, self.flags, range, buffer)
            }

            fn size(&self) -> u64 {
                Self::size(self)
            }
        }
    };
}

stream_file!(AsyncFile, async_file::RequestFuture);
stream_file!(LocalAsyncFile, request_future::RequestFuture);
