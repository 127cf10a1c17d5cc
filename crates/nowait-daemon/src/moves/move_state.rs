//! The state of a move, and whether it is to end.
//!
//! Invariant: a move that has ended does not run again.

use std::time::Duration;

use nowait_control::MoveInfo;

use crate::moves::{Task, TaskState};

/// The stage of a move that runs, as the control interface reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// All of the disk is copied.
    Copying,
    /// Changes made meanwhile are copied again.
    Following,
    /// Clients change the disk faster than it is copied.
    Behind,
    /// The export is paused.
    Pivoting,
}

impl Stage {
    const fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Following => "following",
            Self::Behind => "behind",
            Self::Pivoting => "pivoting",
        }
    }
}

/// How a move has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// The export is served from its new place, after this pause.
    Completed(Duration),
    Failed(String),
    Cancelled,
}

impl Task for Job {
    const IS: &'static str = "being moved";
    const END: &'static str = "nowait export move NAME --cancel";

    fn is_running(&self) -> bool {
        self.state.lock().running
    }

    /// The disk is to stay where it is.
    fn cancel(&self) {
        self.state.cancel();
    }

    fn target(&self) -> String {
        self.state.lock().target.clone()
    }
}

/// A move.
pub(crate) struct Job {
    pub(crate) state: TaskState<MoveInfo>,
}

impl Job {
    /// A move of a disk of `size` bytes to `target`.
    pub(crate) fn new(target: String, size: u64) -> Self {
        let state = Stage::Copying.name().to_owned();
        let (total_bytes, left_bytes) = (size, size);
        let info = MoveInfo {
            target,
            state,
            running: true,
            total_bytes,
            left_bytes,
            ..MoveInfo::default()
        };
        Self { state: TaskState::new(info) }
    }

    /// Its state.
    pub(crate) fn info(&self) -> MoveInfo {
        self.state.lock().clone()
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        stage.name().clone_into(&mut self.state.lock().state);
    }

    /// Bytes that were copied so far, and those that are left.
    pub(crate) fn set_progress(&self, copied: u64, left: u64) {
        let mut info = self.state.lock();
        (info.copied_bytes, info.left_bytes) = (copied, left);
    }

    /// Changes were copied once more.
    pub(crate) fn count_round(&self) {
        self.state.lock().rounds += 1;
    }

    /// Adds a line for the user.
    pub(crate) fn note(&self, line: String) {
        self.state.lock().notes.push(line);
    }

    /// Whether there is a line for the user.
    pub(crate) fn has_notes(&self) -> bool {
        !self.state.lock().notes.is_empty()
    }

    /// It has ended so.
    pub(crate) fn end(&self, end: &End) {
        let mut info = self.state.lock();
        info.running = false;
        info.state = match end {
            End::Completed(pause) => {
                info.pause_ms = Some(pause.as_secs_f64() * 1e3);
                info.left_bytes = 0;
                "completed"
            }
            End::Failed(why) => {
                info.failure = Some(why.clone());
                "failed"
            }
            End::Cancelled => "cancelled",
        }
        .to_owned();
    }
}
