//! A queue under a test's control: it records the pushed transfers, and can prevent transfers and
//! change outcomes.
//!
//! Invariant: without a script it behaves as the inner queue, token for token and errno for errno.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use nowait::{Error, FD_TOKEN, IoQueue, IoSegment, Outcome, QueueFull, Token, Transfer};
use nowait_testkit::engines::TestQueue;

/// Changes an outcome before the engine sees it.
pub(crate) type Change = Box<dyn FnMut(&Transfer, Outcome) -> Outcome>;

/// The outcome of a transfer that is prevented; `None` for a transfer that is made.
pub(crate) type Prevent = Box<dyn FnMut(&Transfer) -> Option<Outcome>>;

/// A transfer as it was pushed.
pub(crate) struct Pushed {
    pub(crate) transfer: Transfer,
    /// Its memory.
    pub(crate) memory: Vec<IoSegment>,
}

impl Pushed {
    /// # Safety
    /// The transfer's list of segments, if it has one, is still valid.
    unsafe fn new(transfer: &Transfer) -> Self {
        let memory = match usize::from(transfer.segments) {
            0 => vec![IoSegment { base: transfer.base, len: transfer.len as usize }],
            // SAFETY: as promised by the caller; a list is laid out as an array of segments.
            many => unsafe {
                std::slice::from_raw_parts(transfer.base.cast_const().cast(), many).to_vec()
            },
        };
        Self { transfer: *transfer, memory }
    }
}

/// A test's settings for the queue, and the queue's records.
#[derive(Default)]
pub(crate) struct Script {
    /// Every transfer that was pushed, in order.
    pub(crate) pushed: RefCell<Vec<Pushed>>,
    /// Applied to each outcome.
    pub(crate) change: RefCell<Option<Change>>,
    /// Called for each transfer before it is made.
    pub(crate) prevent: RefCell<Option<Prevent>>,
    /// The number of pushes to refuse as if the queue were full.
    pub(crate) full: Cell<u32>,
    /// Transfers that were pushed and not reaped.
    pub(crate) out: Cell<usize>,
}

impl Script {
    /// Applies `change` to each outcome from now on.
    pub(crate) fn on_reap(&self, change: impl FnMut(&Transfer, Outcome) -> Outcome + 'static) {
        *self.change.borrow_mut() = Some(Box::new(change));
    }

    /// Calls `prevent` for each transfer from now on: if it returns an outcome, the transfer is not
    /// made and has that outcome.
    pub(crate) fn on_push(&self, prevent: impl FnMut(&Transfer) -> Option<Outcome> + 'static) {
        *self.prevent.borrow_mut() = Some(Box::new(prevent));
    }

    /// Leaves transfers and outcomes unchanged from now on.
    pub(crate) fn behave(&self) {
        *self.change.borrow_mut() = None;
        *self.prevent.borrow_mut() = None;
    }

    /// The transfers pushed since the last call.
    pub(crate) fn take_pushed(&self) -> Vec<Pushed> {
        self.pushed.take()
    }
}

/// The queue of every engine here.
pub(crate) struct Scripted {
    inner: TestQueue,
    script: Rc<Script>,
    in_flight: HashMap<Token, Transfer>,
    /// Outcomes of prevented transfers, until they are reaped.
    prevented: Vec<(Token, Outcome)>,
}

impl Scripted {
    pub(crate) fn new(inner: TestQueue, script: Rc<Script>) -> Self {
        Self { inner, script, in_flight: HashMap::new(), prevented: Vec::new() }
    }
}

// SAFETY: tokens are reported as the inner queue reports them, or once from `prevented`, whose
// tokens the inner queue never saw.
unsafe impl IoQueue for Scripted {
    nowait_testkit::pass_on!(self.inner: attach detach submit events);

    // SAFETY: the caller's promise is passed on; the pointers kept for the test are never
    // dereferenced.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        if self.script.full.get() > 0 {
            self.script.full.set(self.script.full.get() - 1);
            return Err(QueueFull);
        }
        let prevented = match &mut *self.script.prevent.borrow_mut() {
            Some(prevent) => prevent(transfer),
            None => None,
        };
        match prevented {
            Some(outcome) => self.prevented.push((token, outcome)),
            // SAFETY: as promised by the caller.
            None => unsafe { self.inner.push(transfer, token) }?,
        }
        let before = self.in_flight.insert(token, *transfer);
        assert!(before.is_none(), "a token was pushed twice");
        // SAFETY: the list is memory of the transfer, which stays until the token is reaped.
        let pushed = unsafe { Pushed::new(transfer) };
        self.script.pushed.borrow_mut().push(pushed);
        self.script.out.set(self.in_flight.len());
        Ok(())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let Self { inner, script, in_flight, prevented } = self;
        let mut report = |token: Token, mut outcome: Outcome| {
            if token & FD_TOKEN == 0 {
                let transfer = in_flight.remove(&token).expect("reaped once");
                if let Some(change) = &mut *script.change.borrow_mut() {
                    outcome = change(&transfer, outcome);
                }
                script.out.set(in_flight.len());
            }
            sink(token, outcome);
        };
        let count = prevented.len();
        prevented.drain(..).for_each(|(token, outcome)| report(token, outcome));
        count + inner.drain_completions(&mut report)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let timeout = if self.prevented.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.inner.wait(timeout)
    }

    fn has_completions(&mut self) -> bool {
        !self.prevented.is_empty() || self.inner.has_completions()
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        // SAFETY: as promised by the caller.
        unsafe { self.inner.register(base, bytes) }
    }
}
