//! A request between its future and the driver.

use crate::api::oneshot::Sender;
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::Error;
use crate::types::request::Request;

/// The result of a request: bytes done or an error, and its memory.
pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// A request on its way to the driver.
pub(crate) struct AsyncRequest {
    pub(crate) io: Request,
    pub(crate) buffer: IoBuffer,
    pub(crate) sender: Sender<Answer>,
}

impl AsyncRequest {
    /// Ends a request that was not submitted.
    pub(crate) fn refuse(self, error: Error) {
        self.sender.complete((Err(error), self.buffer));
    }
}
