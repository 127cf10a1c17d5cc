//! The state of the replication of a disk, and whether it is to end.
//!
//! Invariant: the instant is that of the last round that is complete and durable on the target.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nowait_control::{ReplicationInfo, StartReplication};

use crate::moves::{Task, TaskState};

/// A replication.
pub(crate) struct Replica {
    pub(crate) state: TaskState<ReplicationInfo>,
    /// Options with which it was started.
    pub(crate) start: StartReplication,
    since: SystemTime,
}

impl Task for Replica {
    const IS: &'static str = "being replicated";
    const END: &'static str = "nowait export replicate NAME --stop";

    fn is_running(&self) -> bool {
        self.state.lock().running
    }

    fn cancel(&self) {
        self.state.cancel();
    }

    fn target(&self) -> String {
        self.state.lock().target.clone()
    }
}

impl Replica {
    /// The replication of `start`, a round `every` so often.
    pub(crate) fn new(start: &StartReplication, every: Duration) -> Self {
        let info = ReplicationInfo {
            target: start.target.clone(),
            state: "copying".into(),
            running: true,
            every_seconds: every.as_secs(),
            ..ReplicationInfo::default()
        };
        Self { state: TaskState::new(info), start: start.clone(), since: SystemTime::now() }
    }

    /// Its state.
    pub(crate) fn info(&self) -> ReplicationInfo {
        let info = self.state.lock().clone();
        let instant = info.instant_unix_seconds.map(|it| UNIX_EPOCH + Duration::from_secs_f64(it));
        let lag = SystemTime::now().duration_since(instant.unwrap_or(self.since));
        ReplicationInfo { lag_seconds: lag.unwrap_or_default().as_secs_f64(), ..info }
    }

    /// A round begins to copy: the target is a mixture from now on.
    pub(crate) fn begin_copying(&self) {
        let mut info = self.state.lock();
        "copying".clone_into(&mut info.state);
        info.consistent = false;
    }

    /// Counts `bytes` that were copied.
    pub(crate) fn count(&self, bytes: u64) {
        self.state.lock().copied_bytes += bytes;
    }

    /// Bytes that are to be copied.
    pub(crate) fn set_left(&self, bytes: u64) {
        self.state.lock().left_bytes = bytes;
    }

    /// The target has the disk as of `instant`.
    pub(crate) fn on_round(&self, instant: SystemTime) {
        let mut info = self.state.lock();
        "waiting".clone_into(&mut info.state);
        info.rounds += 1;
        info.consistent = true;
        info.last_error = None;
        let since = instant.duration_since(UNIX_EPOCH).unwrap_or_default();
        info.instant_unix_seconds = Some(since.as_secs_f64());
    }

    /// A round has failed; it is tried again.
    pub(crate) fn on_failure(&self, why: String) {
        let mut info = self.state.lock();
        "retrying".clone_into(&mut info.state);
        info.failures += 1;
        info.last_error = Some(why);
    }

    /// It has ended.
    pub(crate) fn end(&self) {
        let mut info = self.state.lock();
        "stopped".clone_into(&mut info.state);
        info.running = false;
    }
}
