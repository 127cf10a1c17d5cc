//! A request to an NBD storage, and where its result goes.
//!
//! Invariant: a job is ended once; one that is dropped ends with `EIO`.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nowait::{ByteRange, ExtentStatus, PendingTransfer};

/// The operation of a job on its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read,
    Write,
    /// Makes all writes durable that have completed; the range says only what the result counts.
    Flush,
    /// Makes the range read as zeros; its storage may go unless it is to stay allocated.
    Zero {
        keep: bool,
    },
    Status,
}

impl Command {
    pub(super) const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Zero { .. })
    }
}

/// A request.
pub(super) struct Job {
    pub(super) command: Command,
    pub(super) range: ByteRange,
    /// Whether a write is to be durable when it completes.
    pub(super) durable: bool,
    /// The data of a write, once [`Job::load`] was called; the memory of a read, once it is asked.
    pub(super) data: Vec<u8>,
    /// It was with the server on an earlier connection.
    pub(super) was_asked: bool,
    pub(super) origin: Origin,
}

/// The origin of a job, which learns of its end.
pub(super) enum Origin {
    Transfer(PendingTransfer),
    Call(Caller),
    /// The replay log: a write that has completed once before.
    Replay,
    /// The replay log, which is to become shorter.
    Trim,
}

impl Job {
    pub(super) fn of_transfer(transfer: PendingTransfer) -> Self {
        Self {
            command: if transfer.is_write() { Command::Write } else { Command::Read },
            range: transfer.range(),
            durable: transfer.is_durable(),
            data: Vec::new(),
            was_asked: false,
            origin: Origin::Transfer(transfer),
        }
    }

    /// A job of a call, and what that waits for.
    pub(super) fn of_call(
        command: Command,
        range: ByteRange,
        durable: bool,
        data: Vec<u8>,
    ) -> (Self, Arc<Call>) {
        let call = Arc::new(Call::default());
        let origin = Origin::Call(Caller(call.clone()));
        (Self { command, range, durable, data, was_asked: false, origin }, call)
    }

    /// A flush by the replay log itself.
    pub(super) const fn trim() -> Self {
        Self {
            command: Command::Flush,
            range: ByteRange::new(0, 0),
            durable: false,
            data: Vec::new(),
            was_asked: false,
            origin: Origin::Trim,
        }
    }

    /// Whether it is a change that is asked again.
    pub(super) const fn is_repeat(&self) -> bool {
        self.was_asked && self.command.changes()
    }

    /// Copies the data of a write, so that it can be sent more than once.
    pub(super) fn load(&mut self) {
        if let Origin::Transfer(transfer) = &self.origin
            && self.command == Command::Write
            && self.data.is_empty()
        {
            self.data.reserve_exact(self.range.len as usize);
            transfer.copy_data(&mut self.data);
        }
    }

    /// Ends the job with success, or with a positive errno; `extents` are the answer of a status
    /// request.
    pub(super) fn end(self, result: Result<(), i32>, extents: Vec<ExtentStatus>) {
        let data = self.data;
        match (self.origin, result) {
            (Origin::Transfer(transfer), Err(errno)) => transfer.fail(errno),
            (Origin::Transfer(transfer), Ok(())) if transfer.is_write() => {
                transfer.complete_write();
            }
            (Origin::Transfer(transfer), Ok(())) => transfer.complete(&data),
            (Origin::Call(caller), result) => {
                caller.0.set(Answer { result, data, extents });
            }
            (Origin::Replay | Origin::Trim, _) => {}
        }
    }
}

/// The result of a call.
pub(super) struct Answer {
    pub(super) result: Result<(), i32>,
    pub(super) data: Vec<u8>,
    pub(super) extents: Vec<ExtentStatus>,
}

/// A call that waits for its answer.
#[derive(Default)]
pub(super) struct Call {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

impl Call {
    fn lock(&self) -> MutexGuard<'_, Option<Answer>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first answer counts.
    fn set(&self, answer: Answer) {
        self.lock().get_or_insert(answer);
        self.answered.notify_all();
    }

    /// The answer, if it is there.
    #[cfg(feature = "sim")]
    pub(super) fn take(&self) -> Option<Answer> {
        self.lock().take()
    }

    /// Waits for the answer.
    pub(super) fn wait(&self) -> Answer {
        let mut answer = self.lock();
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            answer = self.answered.wait(answer).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The end of a call that answers it.
pub(super) struct Caller(Arc<Call>);

impl Drop for Caller {
    fn drop(&mut self) {
        let (data, extents) = (Vec::new(), Vec::new());
        self.0.set(Answer { result: Err(libc::EIO), data, extents });
    }
}
