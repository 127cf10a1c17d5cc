//! A machine that boots: how far each of its processes has come.

use super::boot_trace::MAX_LANES;
use super::timeline::Time;

/// A process of the running phase.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    /// The number of its next read, or of the one that it waits for.
    pub(super) read: u32,
    /// Requests that it waits for, and since when.
    pub(super) waits: u32,
    pub(super) since: Time,
}

/// How a boot ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It has not ended.
    Boots,
    /// After its last read.
    Up,
    /// With a read that failed.
    Failed,
}

/// A machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) host: u32,
    pub(super) state: State,
    pub(super) phase: u32,
    /// Processes that have not ended the phase.
    pub(super) running: u32,
    /// When the last process of the phase ends, as far as is known.
    pub(super) phase_end: Time,
    pub(super) lanes: [Lane; MAX_LANES],
}

impl Machine {
    /// A machine of `host` that has not started.
    pub(super) fn new(host: u32) -> Self {
        Self {
            host,
            state: State::Boots,
            phase: 0,
            running: 0,
            phase_end: 0,
            lanes: [Lane::default(); MAX_LANES],
        }
    }
}
