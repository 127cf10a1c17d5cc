//! A request, or a call, as a future that waits for a bounded time.
//!
//! Invariant: the future of a request that is late is dropped, and nothing else is done about it: the memory
//! is the engine's until the kernel has left it (C45).

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::memory::io_buffer::IoBuffer;
use crate::threads::alarm_clock::Alarm;
use crate::types::error::{Error, Operation};

/// An answer that there may be without a result.
#[allow(unreachable_pub, reason = "with the features of `FileStream` its trait names it")]
pub trait Answer {
    /// The answer to a request that has failed with `error`, and has kept its memory.
    fn failed(error: Error) -> Self;
}

impl<T> Answer for Result<T, Error> {
    fn failed(error: Error) -> Self {
        Err(error)
    }
}

impl<T> Answer for (Result<T, Error>, IoBuffer) {
    fn failed(error: Error) -> Self {
        (Err(error), IoBuffer::default())
    }
}

/// A request and the time that it has from its first poll on.
#[allow(unreachable_pub, reason = "with the features of `FileStream` its trait names it")]
pub struct TimedRequest<F> {
    /// `None` when it was late.
    request: Option<F>,
    timeout: Option<Duration>,
    alarm: Option<Alarm>,
}

impl<F> TimedRequest<F> {
    /// The request; without a `timeout` it has any time.
    pub(crate) const fn new(request: F, timeout: Option<Duration>) -> Self {
        Self { request: Some(request), timeout, alarm: None }
    }
}

impl<F> Future for TimedRequest<F>
where
    F: Future<Output: Answer> + Unpin,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let late = |errno| F::Output::failed(Error::new(errno, Operation::Wait));
        // A future that has ended is not to be polled.
        let Some(request) = &mut this.request else { return Poll::Ready(late(libc::EINVAL)) };
        let answer = Pin::new(request).poll(context);
        // A timeout for which the clock has no number is none.
        let timeout = this.timeout.filter(|_| answer.is_pending());
        let Some(deadline) = timeout.and_then(|timeout| Instant::now().checked_add(timeout)) else {
            this.alarm = None;
            return answer;
        };
        let alarm = this.alarm.get_or_insert(Alarm::at(deadline));
        if !alarm.is_due() {
            if !alarm.set(context.waker()) {
                context.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        this.alarm = None;
        this.request = None;
        Poll::Ready(late(libc::ETIMEDOUT))
    }
}
