//! A fallible map over several threads.
//!
//! Invariant: the results are in the order of the items. No thread outlives the call.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Calls `act` for each item of `all` on at most `most` threads, of which the calling thread is one. Returns the results.
///
/// # Errors
/// The error of the first item that failed; later items may not have been processed.
pub(crate) fn try_map<T: Send, R: Send, E: Send>(
    all: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator + Send>,
    most: usize,
    act: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let all = all.into_iter();
    let count = all.len();
    let next = Mutex::new(all.enumerate().fuse());
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let part = || {
        let mut done = Vec::new();
        while let Some((index, it)) = take() {
            let result = act(it);
            let has_failed = result.is_err();
            done.push((index, result));
            if has_failed {
                // The other threads end, too.
                while take().is_some() {}
            }
        }
        done
    };
    let mut done = thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, part).ok();
        let others: Vec<_> = (1..most.min(count)).map_while(start).collect();
        let mut done = part();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn the_results_of_several_threads_have_the_order_of_what_they_are_of() {
        for (count, most) in [(0, 4), (1, 4), (3, 1), (100, 4), (3, 16)] {
            let doubled = try_map(0..count, most, |n| Ok::<_, ()>(2 * n));
            assert_eq!(doubled, Ok((0..count).map(|n| 2 * n).collect()), "{count} by {most}");
        }
        // Each waits for another one.
        let barrier = Barrier::new(2);
        assert!(try_map(0..8, 2, |_| Ok::<_, ()>(barrier.wait().is_leader())).is_ok());
    }

    #[test]
    fn the_first_error_is_told_and_ends_the_work() {
        let fails = |n: u32| if n < 5 { Ok(n) } else { Err(n) };
        assert_eq!(try_map(0..1_000_000_u32, 1, fails), Err(5));
        assert!(try_map(0..1_000_000_u32, 4, fails).is_err_and(|n| n >= 5));
    }
}
