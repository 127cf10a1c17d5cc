//! The sleep of a thread in its ring, and what the kernel takes it for.
//!
//! Invariant: the kernel counts a sleep as a wait for I/O (`/proc/pressure/io`) while transfers are in flight, and an idle
//! thread's not: watched descriptors and commands of drivers are not I/O that is waited for.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, types};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// After so long a thread without transfers is idle.
const IDLE: Duration = Duration::from_millis(100);

/// How the thread of one ring sleeps.
pub(super) struct Sleep {
    /// The kernel can be told what a sleep is for (`IORING_ENTER_NO_IOWAIT`, Linux 6.15).
    can_tell: bool,
    /// Where it cannot: the eventfd of a sleep beside the ring, made on first use; `None` inside where there can be none.
    bell: Option<Option<OwnedFd>>,
    /// Where it cannot: how long a thread sleeps in the ring before it sleeps beside it.
    idle: Duration,
}

impl Sleep {
    pub(super) fn new(ring: &IoUring) -> Self {
        Self { can_tell: ring.params().is_feature_no_iowait(), bell: None, idle: IDLE }
    }

    /// Submits all entries, and sleeps until there is a completion or `timeout` has passed.
    #[inline]
    pub(super) fn sleep(
        &mut self,
        ring: &mut IoUring,
        timeout: Option<Duration>,
        has_transfers: bool,
    ) -> io::Result<usize> {
        if self.can_tell || has_transfers {
            return enter(ring, 1, timeout, !has_transfers && self.can_tell);
        }
        self.sleep_untold(ring, timeout)
    }

    /// Sleeps without transfers where the kernel cannot be told: Linux 6.5 to 6.14 count each sleep in a ring as a wait for
    /// I/O. A thread that has been idle for a while sleeps elsewhere: the calls that this takes are no loss then.
    #[cold]
    fn sleep_untold(&mut self, ring: &mut IoUring, timeout: Option<Duration>) -> io::Result<usize> {
        let is_short = timeout.is_some_and(|timeout| timeout <= self.idle);
        if is_short || matches!(self.bell, Some(None)) {
            return enter(ring, 1, timeout, false);
        }
        let slept = enter(ring, 1, Some(self.idle), false);
        let is_over = ring.submission().is_empty() && ring.completion().is_empty();
        match slept {
            Err(error) if error.raw_os_error() != Some(libc::ETIME) => Err(error),
            slept if !is_over => slept,
            _ => self.sleep_beside(ring, timeout.map(|timeout| timeout - self.idle)),
        }
    }

    /// Sleeps on an eventfd that the kernel makes readable with the next completion. Where that cannot be had, sleeps in the ring.
    fn sleep_beside(&mut self, ring: &mut IoUring, timeout: Option<Duration>) -> io::Result<usize> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = self.bell.get_or_insert_with(|| eventfd(0, flags).ok());
        let registered = |bell: &&mut OwnedFd| ring.submitter().register_eventfd(bell.as_raw_fd());
        let Some(bell) = bell.as_mut().filter(|bell| registered(bell).is_ok()) else {
            // There is one of the caller's own already (`Uring::fd`), or no descriptor left.
            self.bell = Some(None);
            return enter(ring, 1, timeout, false);
        };
        // A completion from before the registration has not rung. The fence has the kernel look for it after that.
        fence(Ordering::SeqCst);
        let mut result = enter(ring, 0, None, false);
        if result.is_ok() && ring.completion().is_empty() {
            let time = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            let rung = poll(&mut [PollFd::new(bell, PollFlags::IN)], time.as_ref());
            result = rung.map(|_| 0).map_err(io::Error::from);
        }
        // EAGAIN: it has not rung.
        let _ = rustix::io::read(bell, &mut [0u8; 8]);
        ring.submitter().unregister_eventfd()?;
        result.and_then(|_| enter(ring, 0, None, false))
    }
}

/// Submits all entries, runs the kernel's deferred work, and waits for `completions` for at most `timeout`; an `idle` wait
/// is none for I/O.
#[inline]
fn enter(
    ring: &mut IoUring,
    completions: u32,
    timeout: Option<Duration>,
    is_idle: bool,
) -> io::Result<usize> {
    let mut flags = EnterFlags::GETEVENTS;
    flags.set(EnterFlags::NO_IOWAIT, is_idle);
    let entries = ring.submission().len() as u32;
    let submitter = ring.submitter();
    let Some(timeout) = timeout else {
        // SAFETY: there is no argument, and the memory of the entries is as their push promised.
        return unsafe {
            submitter.enter::<libc::sigset_t>(entries, completions, flags.bits(), None)
        };
    };
    let time = types::Timespec::from(timeout);
    let arguments = types::SubmitArgs::new().timespec(&time);
    let flags = flags | EnterFlags::EXT_ARG;
    // SAFETY: with EXT_ARG the argument is a `SubmitArgs`, which lives as long as the call, and so does its time.
    unsafe { submitter.enter(entries, completions, flags.bits(), Some(&arguments)) }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::io::{Read, Write, pipe};
    use std::os::fd::AsFd;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::queue::event_source::{EventSource, Interest};
    use crate::queue::{IoQueue, QueueFile, Uring};
    use crate::types::token::FD_TOKEN;
    use crate::types::transfer::Transfer;

    /// A ring of a kernel that cannot be told, whose thread is idle after `idle`; `None` if there is no ring.
    fn ring_of_an_older_kernel(idle: Duration) -> Option<Uring> {
        let Ok(mut ring) = Uring::new() else {
            nowait_testkit::skip("no io_uring");
            return None;
        };
        ring.sleep = Sleep { can_tell: false, bell: None, idle };
        Some(ring)
    }

    /// The next event of `ring`, which is awaited however often the sleep ends without one.
    fn next_event(ring: &mut Uring, timeout: Option<Duration>) -> u64 {
        let mut event = None;
        while event.is_none() {
            ring.wait(timeout).unwrap();
            ring.drain_completions(|token, _| event = Some(token));
        }
        event.unwrap()
    }

    #[test]
    fn no_event_is_missed_by_a_sleep_beside_the_ring_whenever_it_comes() {
        let Some(mut ring) = ring_of_an_older_kernel(Duration::from_micros(200)) else { return };
        let ((mut reader, writer), (send, wanted)) = (pipe().unwrap(), channel::<u64>());
        ring.watch(reader.as_fd(), FD_TOKEN | 7, Interest::Readable).unwrap();
        let mut writer = writer;
        let other = thread::spawn(move || {
            for delay in wanted {
                thread::sleep(Duration::from_micros(delay));
                writer.write_all(b"x").unwrap();
            }
        });
        for round in 0..2000 {
            send.send(round % 500).unwrap();
            let timeout = (round % 2 == 0).then_some(Duration::from_secs(60));
            assert_eq!(next_event(&mut ring, timeout), FD_TOKEN | 7);
            reader.read_exact(&mut [0]).unwrap();
        }
        drop(send);
        other.join().unwrap();
        assert!(matches!(ring.sleep.bell, Some(Some(_))), "it never slept beside the ring");
    }

    #[test]
    fn a_sleep_beside_the_ring_ends_with_its_timeout_and_not_before() {
        let Some(mut ring) = ring_of_an_older_kernel(Duration::from_millis(5)) else { return };
        for timeout in [0, 5, 6, 50].map(Duration::from_millis) {
            let begun = Instant::now();
            ring.wait(Some(timeout)).unwrap();
            assert!(begun.elapsed() >= timeout, "{timeout:?}");
            assert_eq!(ring.drain_completions(|_, _| ()), 0);
        }
    }

    #[test]
    fn only_transfers_in_the_ring_are_io_that_is_waited_for() {
        let (reader, mut writer) = pipe().unwrap();
        let Ok(mut ring) = Uring::new() else { return };
        ring.attach(&[QueueFile::Descriptor { file: reader.as_fd(), cached: true }]).unwrap();
        let drained = |ring: &mut Uring| {
            ring.wait(None).unwrap();
            ring.drain_completions(|_, _| ())
        };
        ring.watch(reader.as_fd(), FD_TOKEN | 7, Interest::Readable).unwrap();
        assert_eq!(ring.in_flight, 0);
        writer.write_all(b"xy").unwrap();
        drained(&mut ring);
        let mut byte = [0];
        let read = Transfer { base: byte.as_mut_ptr(), len: 1, ..Transfer::NONE };
        // SAFETY: the memory stays until both have ended.
        (0..2).for_each(|token| unsafe { ring.push(&read, token) }.unwrap());
        assert_eq!(ring.in_flight, 2);
        while ring.in_flight > 0 {
            let before = ring.in_flight;
            assert!(drained(&mut ring) >= before - ring.in_flight);
        }
        ring.unwatch(reader.as_fd(), FD_TOKEN | 7);
        drained(&mut ring);
        assert_eq!(ring.in_flight, 0);
    }

    #[test]
    fn a_ring_whose_descriptor_the_caller_waits_on_sleeps_in_itself() {
        let Some(mut ring) = ring_of_an_older_kernel(Duration::from_micros(1)) else { return };
        let _ = ring.fd();
        let (reader, mut writer) = pipe().unwrap();
        ring.watch(reader.as_fd(), FD_TOKEN | 7, Interest::Readable).unwrap();
        ring.wait(Some(Duration::from_millis(5))).unwrap();
        assert!(matches!(ring.sleep.bell, Some(None)));
        writer.write_all(b"x").unwrap();
        assert_eq!(next_event(&mut ring, None), FD_TOKEN | 7);
        // The caller's descriptor is as before.
        writer.write_all(b"x").unwrap();
        let mut descriptor = [PollFd::from_borrowed_fd(ring.fd(), PollFlags::IN)];
        assert_eq!(poll(&mut descriptor, None), Ok(1));
    }
}
