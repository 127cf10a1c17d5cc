//! The traits of tokio for a stream.

use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncSeek, ReadBuf};

use crate::api::file_stream::{FileStream, StreamFile};

common_traits!(tokio::io, poll_shutdown);

impl<F: StreamFile> AsyncRead for FileStream<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        memory: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = memory.remaining();
        self.poll_copy(context, room, |bytes| memory.put_slice(bytes)).map_ok(|_| ())
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
