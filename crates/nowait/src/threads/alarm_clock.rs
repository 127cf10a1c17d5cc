//! Wakes tasks at given times, by one thread of the process, which starts with the first of them.
//!
//! Invariant: a waker is in the list until its time has come or its `Alarm` is dropped; it is neither woken
//! nor dropped while the list is locked.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// How long the thread sleeps without an alarm.
const IDLE: Duration = Duration::from_secs(3600);

struct Alarms {
    wakers: BTreeMap<(Instant, u64), Waker>,
    next: u64,
}

static ALARMS: Mutex<Alarms> = Mutex::new(Alarms { wakers: BTreeMap::new(), next: 0 });
static EARLIER: Condvar = Condvar::new();

fn alarms() -> MutexGuard<'static, Alarms> {
    ALARMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes those whose time has come.
fn run() {
    let mut locked = alarms();
    loop {
        let now = Instant::now();
        let first = locked.wakers.first_key_value().map(|(key, _)| key.0);
        if first.is_some_and(|first| first <= now) {
            let due = locked.wakers.pop_first();
            drop(locked);
            if let Some((_, waker)) = due {
                waker.wake();
            }
            locked = alarms();
            continue;
        }
        let sleep = first.map_or(IDLE, |first| first - now);
        locked = EARLIER.wait_timeout(locked, sleep).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// A task that is to be woken at a time.
pub(crate) struct Alarm {
    time: Instant,
    /// Its number in the list, once it was there.
    number: Option<u64>,
}

impl Alarm {
    /// An alarm at `time`, not set yet.
    pub(crate) const fn at(time: Instant) -> Self {
        Self { time, number: None }
    }

    /// Whether its time has come.
    pub(crate) fn is_due(&self) -> bool {
        Instant::now() >= self.time
    }

    /// Wakes `waker` when the time has come, in place of an earlier one. False if the system starts no
    /// thread for that.
    pub(crate) fn set(&mut self, waker: &Waker) -> bool {
        static STARTED: Once = Once::new();
        let mut can = true;
        STARTED.call_once(|| {
            can = std::thread::Builder::new().name("nowait-alarm".into()).spawn(run).is_ok();
        });
        let mut alarms = alarms();
        let number = *self.number.get_or_insert_with(|| {
            alarms.next += 1;
            alarms.next
        });
        let key = (self.time, number);
        let is_first = alarms.wakers.first_key_value().is_none_or(|(first, _)| key < *first);
        let old = alarms.wakers.insert(key, waker.clone());
        drop(alarms);
        drop(old);
        if is_first {
            EARLIER.notify_one();
        }
        can
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let _waker = alarms().wakers.remove(&(self.time, number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_task_is_woken_once_when_its_time_has_come_and_not_after_its_alarm_is_dropped() {
        let [early, late, dropped] = [(); 3].map(|()| Arc::new(Count::default()));
        let after = |milliseconds| Instant::now() + Duration::from_millis(milliseconds);
        let mut alarms = [Alarm::at(after(2)), Alarm::at(after(4)), Alarm::at(after(3))];
        for (alarm, count) in alarms.iter_mut().zip([&early, &late, &dropped]) {
            assert!(alarm.set(&count.clone().into()));
            assert!(alarm.set(&count.clone().into()), "in place of the first one");
        }
        let [first, second, third] = alarms;
        drop(third);
        let woken = |count: &Count| count.0.load(Ordering::SeqCst);
        nowait_testkit::wait_until("both are woken", || woken(&early) + woken(&late) == 2);
        assert!(first.is_due() && second.is_due());
        assert_eq!((woken(&early), woken(&late), woken(&dropped)), (1, 1, 0));
        drop((first, second));
        assert_eq!(Arc::strong_count(&early), 1);
    }
}
