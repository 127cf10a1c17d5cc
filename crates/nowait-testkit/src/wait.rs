//! Waits with one bound, and a message that says what did not happen.
//!
//! Invariant: no test waits longer than [`BOUND`] for one event, and none asserts a shorter time.

use std::fmt::{Debug, Display};
use std::process::{Child, ExitStatus, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for one event. It stops tests that hang, and is not a measure of speed: two processors with a load of
/// 50 stay far below it.
pub const BOUND: Duration = Duration::from_secs(240);
/// The interval at which a condition is tested.
const STEP: Duration = Duration::from_millis(2);

/// Waits until `is_so`.
pub fn wait_until(what: impl Display, mut is_so: impl FnMut() -> bool) {
    wait_for(what, || is_so().then_some(()).ok_or("not yet"));
}

/// Waits until `ready` returns a value; its last error is part of the message of a failed wait.
pub fn wait_for<T, E: Debug>(what: impl Display, mut ready: impl FnMut() -> Result<T, E>) -> T {
    let begin = Instant::now();
    loop {
        match ready() {
            Ok(value) => return value,
            Err(last) => {
                assert!(begin.elapsed() < BOUND, "not within {BOUND:?}: {what}; {last:?}");
            }
        }
        thread::sleep(STEP);
    }
}

/// Runs `work` on a thread of its own, for calls that take no bound themselves.
pub fn within<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, done) = mpsc::channel();
    let worker = thread::spawn(move || {
        let value = work();
        // The receiver is gone if the test has failed.
        let _ = sender.send(());
        value
    });
    let in_time = done.recv_timeout(BOUND);
    assert_ne!(in_time, Err(RecvTimeoutError::Timeout), "not within {BOUND:?}: {what}");
    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits for the end of `child`. A child that does not end is killed, and fails the test.
pub fn wait_for_exit(child: &mut Child) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child to wait for") {
            return status;
        }
        if begin.elapsed() >= BOUND {
            let _ = child.kill();
            panic!("not within {BOUND:?}: the end of process {}", child.id());
        }
        thread::sleep(STEP);
    }
}

/// Like [`wait_for_exit`]; returns what the child has written to its pipes, which must fit them.
pub fn output_of(mut child: Child) -> Output {
    wait_for_exit(&mut child);
    child.wait_with_output().expect("the output of a child that has exited")
}

/// Sets a flag when it is dropped, also by a panic, so that threads which run until then end.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
