//! The commands to drivers in the queue of a simulated device: a simulation takes them as the driver
//! would, and answers them.
//!
//! Invariant: a command reaches the driver with the submission after it, in order. After the death of
//! its process none does, and no answer does harm.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::types::token::Token;
use crate::types::transfer::Outcome;

/// A command, as it was pushed to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimCommand {
    /// The driver's number of it.
    pub op: u32,
    /// Its arguments.
    pub arguments: [u8; 16],
    /// The token under which it is answered.
    pub token: Token,
}

#[derive(Default)]
struct Lists {
    pushed: Vec<SimCommand>,
    submitted: Vec<SimCommand>,
    ended: Vec<(Token, Outcome)>,
    is_dead: bool,
}

/// The commands of one queue, for the queue and the driver.
#[derive(Clone, Default)]
pub struct SimCommands(Arc<Mutex<Lists>>);

impl SimCommands {
    fn lists(&self) -> MutexGuard<'_, Lists> {
        // No critical section here can panic half-way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, command: SimCommand) {
        self.lists().pushed.push(command);
    }

    pub(crate) fn submit(&self) {
        let lists = &mut *self.lists();
        let pushed = lists.pushed.drain(..);
        if lists.is_dead { drop(pushed) } else { lists.submitted.extend(pushed) }
    }

    pub(crate) fn take_ended(&self) -> Vec<(Token, Outcome)> {
        std::mem::take(&mut self.lists().ended)
    }

    pub(crate) fn has_work(&self) -> bool {
        let lists = self.lists();
        !lists.pushed.is_empty() || !lists.ended.is_empty()
    }

    /// Takes the commands that have reached the driver, in order.
    #[must_use]
    pub fn take_submitted(&self) -> Vec<SimCommand> {
        std::mem::take(&mut self.lists().submitted)
    }

    /// Answers a command.
    pub fn end(&self, token: Token, outcome: Outcome) {
        self.lists().ended.push((token, outcome));
    }

    /// The process has died: of the commands that it has pushed and not submitted, only the first
    /// `reach` reach the driver.
    pub fn die(&self, reach: usize) {
        let lists = &mut *self.lists();
        let reach = reach.min(lists.pushed.len());
        lists.submitted.extend(lists.pushed.drain(..reach));
        lists.pushed.clear();
        lists.is_dead = true;
    }
}
