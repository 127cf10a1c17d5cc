//! The traits of futures-io for a stream.

use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_io::{AsyncRead, AsyncSeek};

use crate::api::file_stream::{FileStream, StreamFile};

common_traits!(futures_io, poll_close);

impl<F: StreamFile> AsyncRead for FileStream<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        memory: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_copy(context, memory.len(), |bytes| memory[..bytes.len()].copy_from_slice(bytes))
    }
}

impl<F: StreamFile> AsyncSeek for FileStream<F> {
    fn poll_seek(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: SeekFrom,
    ) -> Poll<io::Result<u64>> {
        self.poll_seek_to(context, target)
    }
}
