//! A gate before the reads of a file: whoever copies from it waits while it is shut.
//!
//! Invariant: what goes past the image's own code, by the engine's queue, passes no gate.
//! Knows: nothing. Known by: medium, in tests.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};

use nowait::Storage;

#[derive(Default)]
struct State {
    shut: bool,
    waiting: u32,
    bytes: u64,
}

/// The gate before one file.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    moved: Condvar,
}

type Gates = Mutex<HashMap<(u64, u64), Arc<Gate>>>;

fn gates() -> &'static Gates {
    static GATES: OnceLock<Gates> = OnceLock::new();
    GATES.get_or_init(Gates::default)
}

/// Puts an open gate before the file behind `fd`.
pub(crate) fn before(fd: impl AsFd) -> Arc<Gate> {
    let stat = rustix::fs::fstat(fd).unwrap();
    let gate = Arc::<Gate>::default();
    gates().lock().unwrap().insert((stat.st_dev, stat.st_ino), gate.clone());
    gate
}

/// `bytes` are about to be read from `storage`.
pub(crate) fn pass(storage: &Storage, bytes: usize) {
    let stat = rustix::fs::fstat(storage.fd()).unwrap();
    let gate = gates().lock().unwrap().get(&(stat.st_dev, stat.st_ino)).cloned();
    if let Some(gate) = gate {
        gate.enter(bytes as u64);
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn enter(&self, bytes: u64) {
        let mut state = self.lock();
        state.waiting += 1;
        self.moved.notify_all();
        state = self.moved.wait_while(state, |state| state.shut).unwrap();
        state.waiting -= 1;
        state.bytes += bytes;
    }

    /// From now on whoever comes waits. Returns the bytes that passed before.
    pub(crate) fn shut(&self) -> u64 {
        let mut state = self.lock();
        state.shut = true;
        state.bytes
    }

    pub(crate) fn open(&self) {
        self.lock().shut = false;
        self.moved.notify_all();
    }

    /// Waits until somebody waits at it.
    pub(crate) fn until_somebody_waits(&self) {
        let somebody = self.moved.wait_while(self.lock(), |state| state.waiting == 0);
        drop(somebody.unwrap());
    }

    /// How many wait at it.
    pub(crate) fn waiting(&self) -> u32 {
        self.lock().waiting
    }

    /// The bytes that passed.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }
}
