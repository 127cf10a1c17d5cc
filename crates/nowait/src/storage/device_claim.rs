//! The claim of a block device (open(2), `O_EXCL`), which outlives its process for a moment.
//!
//! Invariant: a claim that others keep is reported as such, after a time that is bounded.

use std::thread;
use std::time::Duration;

use rustix::io::Errno;

/// How often a claimed device is opened again, and how long the thread sleeps before it does.
const RETRIES: u32 = 10;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Calls `open`, and again while the device is claimed, for at most 200 ms: the kernel closes the files of a
/// ring some time after the process has exited, so that the next server would be refused.
///
/// # Errors
/// Those of `open`; `EBUSY` if the device is still claimed.
pub fn retry_while_claimed<T>(mut open: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..RETRIES {
        match open() {
            Err(Errno::BUSY) => thread::sleep(RETRY_INTERVAL),
            opened => return opened,
        }
    }
    open()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_is_given_up_is_waited_for_and_one_that_stays_is_refused() {
        for (claimed, opened) in [(0, Ok(1)), (10, Ok(11)), (11, Err(Errno::BUSY))] {
            let mut calls = 0;
            let result = retry_while_claimed(|| {
                calls += 1;
                if calls <= claimed { Err(Errno::BUSY) } else { Ok(calls) }
            });
            assert_eq!(result, opened);
        }
        let mut calls = 0;
        let refused = retry_while_claimed(|| {
            calls += 1;
            Err::<(), _>(Errno::ACCESS)
        });
        assert_eq!((refused, calls), (Err(Errno::ACCESS), 1));
    }
}
