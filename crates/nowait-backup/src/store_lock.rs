//! The lock of a chain in an object store: an object, which its holder puts again from time to time.
//!
//! Invariant: it is taken from a holder only when its process has ended, as far as that can be seen, or when it has not
//! been put for long. A holder that has lost it notices before it changes anything that others see.

use std::fs;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nowait_remote::{Condition, FoundVersion, ObjectFolder};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// The name of the object.
pub(crate) const LOCK: &str = "nowait-backup.lock";
/// The most bytes of the lock of a chain in a store.
/// Beyond it: the backup or prune is refused, as the lock is not one of nowait.
const MAX_LOCK_BYTES: u64 = 64 << 10;
/// How often its holder puts it again.
const RENEWAL: Duration = Duration::from_secs(60);
/// The most seconds since the holder of such a lock has put it, by the clocks of the store and of the host.
/// Beyond it: another process takes the lock.
const MAX_AGE_SECONDS: u64 = 15 * 60;

const HELD: &str = "another backup or prune is at work in it";
const LOST: &str = "another backup or prune has taken the lock of the chain meanwhile";

/// A process that has a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    /// The start of the host, and the numbers of processes that the process knows.
    host: String,
    pid: i32,
    /// When it was started, in the units of the kernel.
    started: u64,
}

/// The content of a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// A random number of each holder.
    id: u64,
    holder: Holder,
    /// How often it was put, so that it is another object each time.
    renewals: u64,
    /// Uploads that are not complete: the names of the objects and of the uploads.
    uploads: Vec<(String, String)>,
}

/// A lock that is held.
pub(crate) struct StoreLock {
    shared: Arc<Shared>,
    /// Ends the thread that renews it when it is dropped.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    folder: ObjectFolder,
    state: Mutex<State>,
}

struct State {
    record: Record,
    version: FoundVersion,
}

impl StoreLock {
    /// Takes the lock in `folder`, and aborts the uploads of a holder that has ended.
    ///
    /// # Errors
    /// Another process holds it; the store refuses or does not answer.
    pub(crate) fn acquire(folder: ObjectFolder) -> Result<Self, String> {
        let failed = |why: String| format!("cannot lock it: {why}");
        let (mut condition, mut uploads) = (Condition::Absent, Vec::new());
        if let Some(found) = folder.get(LOCK, MAX_LOCK_BYTES).map_err(failed)? {
            let record: Option<Record> = serde_json::from_slice(&found.bytes).ok();
            let age = age_of(found.seconds);
            let has_ended = record.as_ref().is_some_and(|record| record.holder.has_ended());
            if !has_ended && age.is_none_or(|age| age <= MAX_AGE_SECONDS) {
                let age = age.map_or_else(|| "an unknown time".into(), |age| format!("{age} s"));
                return Err(format!(
                    "{HELD} (its {LOCK} was renewed {age} ago; it is taken over after {} minutes, or on \
                     the same host when its process has ended)",
                    MAX_AGE_SECONDS / 60
                ));
            }
            condition = Condition::Same(found.version);
            uploads = record.map_or_else(Vec::new, |record| record.uploads);
        }
        let (id, holder) = (fastrand::u64(..), Holder::own());
        let record = Record { id, holder, renewals: 0, uploads };
        let put = folder.put(LOCK, &encoded(&record), &condition).map_err(failed)?;
        let version = put.ok_or(HELD)?;
        let shared = Arc::new(Shared { folder, state: Mutex::new(State { record, version }) });
        let (end, ended) = channel::<()>();
        let renewed = shared.clone();
        let renew = move || {
            while ended.recv_timeout(RENEWAL) == Err(RecvTimeoutError::Timeout) {
                // A lock that is lost is noticed by `check`, and a store that does not answer by all requests.
                let _ = renewed.put(|_| {});
            }
        };
        let thread = std::thread::Builder::new().name("nowait-lock".into()).spawn(renew);
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        let lock = Self { shared, end: Some(end), thread: Some(thread) };
        lock.abort_uploads().map_err(failed)?;
        Ok(lock)
    }

    /// Aborts the uploads that a holder before has left.
    fn abort_uploads(&self) -> Result<(), String> {
        let uploads = self.shared.state().record.uploads.clone();
        for (name, id) in uploads {
            self.shared.folder.abort_upload(&name, &id)?;
            self.forget(&id);
        }
        Ok(())
    }

    /// Looks whether it is held.
    ///
    /// # Errors
    /// It is not; the store refuses or does not answer.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.shared.is_own(&self.shared.state())? {
            true => Ok(()),
            false => Err(LOST.into()),
        }
    }

    /// Notes the upload `id` of the object `name`, so that others abort it if this process is killed.
    ///
    /// # Errors
    /// The lock is lost; the store refuses or does not answer.
    pub(crate) fn note(&self, name: &str, id: &str) -> Result<(), String> {
        self.shared.put(|record| record.uploads.push((name.to_owned(), id.to_owned())))
    }

    /// Forgets the upload `id`, which is complete or aborted.
    pub(crate) fn forget(&self, id: &str) {
        self.shared.state().record.uploads.retain(|(_, other)| other != id);
    }
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        self.end = None;
        let _ = self.thread.take().map(JoinHandle::join);
        let state = self.shared.state();
        // One with uploads that could not be aborted stays for who aborts them.
        if state.record.uploads.is_empty() && self.shared.is_own(&state) == Ok(true) {
            let _ = self.shared.folder.remove(LOCK);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the lock in the store is the one of `state`.
    fn is_own(&self, state: &State) -> Result<bool, String> {
        let found = self.folder.get(LOCK, MAX_LOCK_BYTES)?;
        let record = found.and_then(|found| serde_json::from_slice::<Record>(&found.bytes).ok());
        Ok(record.is_some_and(|record| record.id == state.record.id))
    }

    /// Puts the lock again after a `change` of its record.
    fn put(&self, change: impl FnOnce(&mut Record)) -> Result<(), String> {
        let mut state = self.state();
        change(&mut state.record);
        state.record.renewals += 1;
        let condition = Condition::Same(state.version.clone());
        let put = self.folder.put(LOCK, &encoded(&state.record), &condition)?;
        state.version = put.ok_or(LOST)?;
        Ok(())
    }
}

fn encoded(record: &Record) -> Vec<u8> {
    serde_json::to_vec(record).unwrap_or_default()
}

/// How many seconds ago `seconds` since 1970 was; `None`: it is not known.
fn age_of(seconds: i64) -> Option<u64> {
    let then = u64::try_from(seconds).ok().filter(|then| *then > 0)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(now.as_secs().saturating_sub(then))
}

impl Holder {
    /// This process.
    fn own() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Self {
            host: format!("{} {}", boot.trim(), namespace.display()),
            pid,
            started: start_of(pid).unwrap_or_default(),
        }
    }

    /// Whether it has ended; never where that cannot be seen from here.
    fn has_ended(&self) -> bool {
        let pid = Pid::from_raw(self.pid.max(0));
        let Some(pid) = pid.filter(|_| self.host == Self::own().host) else {
            return false;
        };
        test_kill_process(pid) == Err(Errno::SRCH)
            || start_of(self.pid).is_some_and(|started| started != self.started)
    }
}

/// When the process `pid` was started, if that can be seen.
fn start_of(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name may have any characters; the field is the 22nd, counted from 1.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_this_host_that_has_ended_is_taken_for_one() {
        let own = Holder::own();
        assert!(!own.has_ended() && own.started > 0);
        assert!(Holder { started: own.started + 1, ..own.clone() }.has_ended());
        assert!(!Holder { host: "other".into(), started: 0, ..own.clone() }.has_ended());
        for pid in [0, -1, i32::MIN] {
            assert!(!Holder { pid, ..own.clone() }.has_ended());
        }
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        child.wait().unwrap();
        assert!(Holder { pid, started: 0, ..own }.has_ended());
    }

    #[test]
    fn an_age_is_known_if_the_store_tells_a_time() {
        assert_eq!([age_of(0), age_of(-1)], [None, None]);
        assert!(age_of(1).is_some_and(|age| age > MAX_AGE_SECONDS));
        assert_eq!(age_of(i64::MAX), Some(0));
    }
}
