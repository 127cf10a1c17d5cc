//! The processors of this process, and whether a thread computes or waits.
//!
//! Invariant: where the kernel does not say how often a thread has waited, nothing is concluded.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::num::NonZero;

/// The processors that this process may use, at least 1.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// How often the calling thread has left its processor to wait, since its start: the voluntary context switches of
/// getrusage(2). `None` if the call is forbidden.
pub(crate) fn waits_of_thread() -> Option<i64> {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes at most one `rusage` to memory for one.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: it consists of numbers, of which every one may be zero.
    let usage = unsafe { usage.assume_init() };
    (result == 0).then_some(usage.ru_nvcsw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_sleep_is_a_wait_of_the_thread_that_sleeps() {
        let before = waits_of_thread().expect("a count");
        std::thread::sleep(Duration::from_millis(1));
        assert!(waits_of_thread().expect("a count") > before);
    }
}
