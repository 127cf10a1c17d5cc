//! The traits of futures-io for a stream.

use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_io::{AsyncBufRead, AsyncRead, AsyncSeek, AsyncWrite};

use crate::api::file_stream::{FileStream, StreamFile};

impl<F: StreamFile> AsyncRead for FileStream<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        memory: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        if memory.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let bytes = ready!(self.poll_fill(context))?;
        let count = bytes.len().min(memory.len());
        memory[..count].copy_from_slice(&bytes[..count]);
        self.take(count);
        Poll::Ready(Ok(count))
    }
}

impl<F: StreamFile> AsyncBufRead for FileStream<F> {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        self.get_mut().poll_fill(context)
    }

    fn consume(mut self: Pin<&mut Self>, count: usize) {
        self.take(count);
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

impl<F: StreamFile> AsyncWrite for FileStream<F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_idle(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_idle(context)
    }
}
