//! A queue that a test sees through: what was placed is kept, what is made of it and what is reaped
//! can be changed.
//!
//! Invariant: without a script it is the queue inside it, token for token and errno for errno.
//! Knows: the public queues. Known by: rig.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::Duration;

use nowait::{
    Error, Interest, Null, Outcome, Queue, QueueFull, Segment, Threads, Token, Transfer, Uring,
    WATCHED,
};

/// Any of the engine's queues.
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
pub(crate) enum Any {
    Uring(Uring),
    Threads(Threads),
    Null(Null),
}

macro_rules! each {
    ($self:ident, $queue:ident => $call:expr) => {
        match $self {
            Any::Uring($queue) => $call,
            Any::Threads($queue) => $call,
            Any::Null($queue) => $call,
        }
    };
}

/// What becomes of an outcome on its way to the engine.
pub(crate) type Change = Box<dyn FnMut(&Transfer, Outcome) -> Outcome>;

/// What becomes of a transfer that is not made, if it is not.
pub(crate) type Prevent = Box<dyn FnMut(&Transfer) -> Option<Outcome>>;

/// A transfer as it was placed.
pub(crate) struct Placed {
    pub(crate) transfer: Transfer,
    /// Its memory.
    pub(crate) memory: Vec<Segment>,
}

impl Placed {
    /// # Safety
    /// The transfer's list of segments, if it has one, is still there.
    unsafe fn new(transfer: &Transfer) -> Self {
        let memory = match usize::from(transfer.segments) {
            0 => vec![Segment { base: transfer.base, len: transfer.len as usize }],
            // SAFETY: as promised by the caller; a list is laid out as an array of segments.
            many => unsafe {
                std::slice::from_raw_parts(transfer.base.cast_const().cast(), many).to_vec()
            },
        };
        Self { transfer: *transfer, memory }
    }
}

/// What a test asks of the queue, and what it was asked by the engine.
#[derive(Default)]
pub(crate) struct Script {
    /// Every transfer that was placed, in order.
    pub(crate) placed: RefCell<Vec<Placed>>,
    /// Applied to each outcome.
    pub(crate) change: RefCell<Option<Change>>,
    /// Asked of each transfer before it is made.
    pub(crate) prevent: RefCell<Option<Prevent>>,
    /// So many times `place` finds no room.
    pub(crate) full: Cell<u32>,
    /// Transfers that were placed and not reaped.
    pub(crate) out: Cell<usize>,
}

impl Script {
    /// Applies `change` to each outcome from now on.
    pub(crate) fn on_reap(&self, change: impl FnMut(&Transfer, Outcome) -> Outcome + 'static) {
        *self.change.borrow_mut() = Some(Box::new(change));
    }

    /// Asks `prevent` from now on whether a transfer is made: where it names an outcome, that is all
    /// that comes of it.
    pub(crate) fn on_place(&self, prevent: impl FnMut(&Transfer) -> Option<Outcome> + 'static) {
        *self.prevent.borrow_mut() = Some(Box::new(prevent));
    }

    /// Transfers and outcomes are left as they are from now on.
    pub(crate) fn behave(&self) {
        *self.change.borrow_mut() = None;
        *self.prevent.borrow_mut() = None;
    }

    /// What was placed since this was asked last.
    pub(crate) fn take_placed(&self) -> Vec<Placed> {
        self.placed.take()
    }
}

/// The queue of every engine here.
pub(crate) struct Scripted {
    inner: Any,
    script: Rc<Script>,
    flying: HashMap<Token, Transfer>,
    /// What was not made, until it is reaped.
    prevented: Vec<(Token, Outcome)>,
}

impl Scripted {
    pub(crate) fn new(inner: Any, script: Rc<Script>) -> Self {
        Self { inner, script, flying: HashMap::new(), prevented: Vec::new() }
    }
}

impl Queue for Scripted {
    // SAFETY: the caller's promise is passed on; what is kept for the test is never followed.
    unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        if self.script.full.get() > 0 {
            self.script.full.set(self.script.full.get() - 1);
            return Err(QueueFull);
        }
        let prevented = match &mut *self.script.prevent.borrow_mut() {
            Some(prevent) => prevent(transfer),
            None => None,
        };
        let inner = &mut self.inner;
        match prevented {
            Some(outcome) => self.prevented.push((token, outcome)),
            // SAFETY: as promised by the caller.
            None => unsafe { each!(inner, queue => queue.place(transfer, token)) }?,
        }
        let before = self.flying.insert(token, *transfer);
        assert!(before.is_none(), "a token was placed twice");
        // SAFETY: the list is memory of the transfer, which stays until the token is reaped.
        let placed = unsafe { Placed::new(transfer) };
        self.script.placed.borrow_mut().push(placed);
        self.script.out.set(self.flying.len());
        Ok(())
    }

    fn kick(&mut self) -> Result<(), Error> {
        let inner = &mut self.inner;
        each!(inner, queue => queue.kick())
    }

    fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let Self { inner, script, flying, prevented } = self;
        let mut through = |token: Token, mut outcome: Outcome| {
            if token & WATCHED == 0 {
                let transfer = flying.remove(&token).expect("reaped once");
                if let Some(change) = &mut *script.change.borrow_mut() {
                    outcome = change(&transfer, outcome);
                }
                script.out.set(flying.len());
            }
            sink(token, outcome);
        };
        let count = prevented.len();
        prevented.drain(..).for_each(|(token, outcome)| through(token, outcome));
        count + each!(inner, queue => queue.reap(&mut through))
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let timeout = if self.prevented.is_empty() { timeout } else { Some(Duration::ZERO) };
        let inner = &mut self.inner;
        each!(inner, queue => queue.wait(timeout))
    }

    fn pending(&mut self) -> bool {
        let inner = &mut self.inner;
        !self.prevented.is_empty() || each!(inner, queue => queue.pending())
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        let inner = &mut self.inner;
        each!(inner, queue => queue.watch(fd, token, interest))
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        let inner = &mut self.inner;
        each!(inner, queue => queue.unwatch(fd, token));
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        let inner = &mut self.inner;
        // SAFETY: as promised by the caller.
        unsafe { each!(inner, queue => queue.register(base, bytes)) }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        let inner = &self.inner;
        each!(inner, queue => queue.fd())
    }
}
