//! The traits of tokio for a stream.

use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncBufRead, AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};

use crate::api::file_stream::{FileStream, StreamFile};

impl<F: StreamFile> AsyncRead for FileStream<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        memory: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if memory.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let bytes = ready!(self.poll_fill(context))?;
        let count = bytes.len().min(memory.remaining());
        memory.put_slice(&bytes[..count]);
        self.take(count);
        Poll::Ready(Ok(()))
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
    fn start_seek(mut self: Pin<&mut Self>, target: SeekFrom) -> io::Result<()> {
        if self.seek_to.replace(target).is_some() {
            return Err(io::Error::other("a seek of this stream has not been waited for"));
        }
        Ok(())
    }

    fn poll_complete(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<u64>> {
        let Some(target) = self.seek_to else { return Poll::Ready(Ok(self.pos)) };
        let sought = ready!(self.poll_seek_to(context, target));
        self.seek_to = None;
        Poll::Ready(sought)
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

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_idle(context)
    }
}
