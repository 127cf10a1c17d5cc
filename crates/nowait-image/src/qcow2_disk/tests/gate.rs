//! A gate in front of the reads of a file: a read through the image's code waits while the gate is
//! shut.
//!
//! Invariant: reads that the engine submits through its own queue pass no gate.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};

#[derive(Default)]
struct State {
    shut: bool,
    waiting: u32,
    bytes: u64,
}

/// The gate of one file.
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

/// Puts an open gate in front of the file behind `fd`, if that is opened for requests from now on.
pub(crate) fn before(fd: impl AsFd) -> Arc<Gate> {
    let stat = rustix::fs::fstat(fd).unwrap();
    let gate = Arc::<Gate>::default();
    gates().lock().unwrap().insert((stat.st_dev, stat.st_ino), gate.clone());
    gate
}

/// The gate in front of the file behind `fd`, if it has one.
pub(crate) fn of(fd: impl AsFd) -> Option<Arc<Gate>> {
    let stat = rustix::fs::fstat(fd).unwrap();
    gates().lock().unwrap().get(&(stat.st_dev, stat.st_ino)).cloned()
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits while the gate is shut.
    pub(crate) fn enter(&self) {
        let mut state = self.lock();
        state.waiting += 1;
        self.moved.notify_all();
        state = self.moved.wait_while(state, |state| state.shut).unwrap();
        state.waiting -= 1;
    }

    /// Counts the bytes of a read.
    pub(crate) fn passed(&self, bytes: u64) {
        self.lock().bytes += bytes;
    }

    /// Makes later reads wait. Returns the bytes that passed before.
    pub(crate) fn shut(&self) -> u64 {
        let mut state = self.lock();
        state.shut = true;
        state.bytes
    }

    pub(crate) fn open(&self) {
        self.lock().shut = false;
        self.moved.notify_all();
    }

    /// Waits until a read waits at the gate.
    pub(crate) fn wait_for_reader(&self) {
        let state = self.moved.wait_while(self.lock(), |state| state.waiting == 0);
        drop(state.unwrap());
    }

    /// Number of reads that wait at the gate.
    pub(crate) fn waiting(&self) -> u32 {
        self.lock().waiting
    }

    /// The bytes of all reads that passed.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }
}
