//! Transfers by Linux AIO: one call hands them over, and does not wait for the device.
//!
//! It is for transfers with `RWF_NOWAIT` past the page cache: of others the call may wait for what it
//! likes, locks and metadata included. What has ended is read from the kernel's ring, without a call.
//! Invariant: a transfer that the kernel has taken is reported once; the kernel is through with all
//! of them when this is dropped.
//! Knows: io, queue. Known by: threads. Source: io_submit(2); fs/aio.c (`struct aio_ring`).
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::Token;
use crate::io::{Outcome, Transfer};

const READ: u16 = 0;
const WRITE: u16 = 1;
const READ_LIST: u16 = 7;
const WRITE_LIST: u16 = 8;
/// What has ended is told to an eventfd(2) too.
const TELLS: u32 = 1;
/// The ring is laid out as `Ring` says.
const MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb`.
#[repr(C)]
struct Entry {
    token: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    operation: u16,
    priority: i16,
    fd: u32,
    memory: u64,
    len: u64,
    pos: i64,
    reserved: u64,
    flags: u32,
    told: i32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Event {
    token: u64,
    entry: u64,
    outcome: i64,
    more: i64,
}

/// `struct aio_ring`, which the kernel maps where the context is; its events follow.
#[repr(C)]
struct Ring {
    id: u32,
    events: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    header: u32,
}

/// A context of the kernel's, and what is about to be handed over.
pub(super) struct Aio {
    context: usize,
    told: OwnedFd,
    entries: Vec<Entry>,
    places: Vec<usize>,
}

impl Aio {
    /// Room for `transfers` in flight; `None` where the kernel has none, or nobody may use it.
    pub(super) fn new(transfers: u32) -> Option<Self> {
        let told = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let mut context = 0usize;
        // SAFETY: the kernel writes one word.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, transfers, &raw mut context) };
        if made != 0 {
            return None;
        }
        let own = Self { context, told, entries: Vec::new(), places: Vec::new() };
        (own.ring().magic == MAGIC && own.ring().header as usize == size_of::<Ring>())
            .then_some(own)
    }

    /// It is ready when something has ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    fn ring(&self) -> &Ring {
        let ring = std::ptr::with_exposed_provenance::<Ring>(self.context);
        // SAFETY: the kernel has mapped it, until the context is destroyed; what it changes is atomic.
        unsafe { &*ring }
    }

    /// Adds a transfer to or from `fd` to those of the next [`Aio::hand_over`].
    pub(super) fn add(&mut self, fd: BorrowedFd<'_>, transfer: &Transfer, token: u32) {
        let (list, len) = (transfer.segments > 0, u64::from(transfer.len));
        self.entries.push(Entry {
            token: token.into(),
            key: 0,
            rw_flags: transfer.rw_flags,
            operation: match (transfer.write, list) {
                (false, false) => READ,
                (true, false) => WRITE,
                (false, true) => READ_LIST,
                (true, true) => WRITE_LIST,
            },
            priority: 0,
            fd: fd.as_raw_fd() as u32,
            memory: transfer.base as u64,
            len: if list { transfer.segments.into() } else { len },
            pos: transfer.pos as i64,
            reserved: 0,
            flags: TELLS,
            told: self.told.as_raw_fd(),
        });
    }

    /// Hands over what was added; returns how many of them the kernel has taken, in order.
    ///
    /// # Safety
    /// As for `Queue::place`: the memory of each transfer stays valid until its token was reaped.
    pub(super) unsafe fn hand_over(&mut self) -> usize {
        self.places
            .extend(self.entries.iter().map(|entry| (&raw const *entry).expose_provenance()));
        let (context, places) = (self.context, self.places.as_ptr());
        let mut taken = 0;
        while taken < self.entries.len() {
            let rest = self.entries.len() - taken;
            // SAFETY: `rest` pointers to entries, which the kernel copies; the memory that they name
            // is what the caller vouches for.
            let more = unsafe {
                libc::syscall(libc::SYS_io_submit, context, rest, places.wrapping_add(taken))
            };
            match usize::try_from(more) {
                Ok(more) if more > 0 => taken += more,
                _ => break,
            }
        }
        self.places.clear();
        self.entries.clear();
        taken
    }

    /// Whether something has ended.
    pub(super) fn has_ended(&self) -> bool {
        let ring = self.ring();
        ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
    }

    /// Reports what has ended; how many that were.
    pub(super) fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut count = 0;
        let ring = self.ring();
        // Only this side moves the head.
        let mut head = ring.head.load(Ordering::Relaxed);
        while head != ring.tail.load(Ordering::Acquire) {
            let events = std::ptr::with_exposed_provenance::<Ring>(self.context).wrapping_add(1);
            // SAFETY: an event between head and tail, which the kernel leaves alone until the head
            // has moved on; the ring's mapping goes on behind its header.
            let event = unsafe { events.cast::<Event>().wrapping_add(head as usize).read() };
            head = (head + 1) % ring.events;
            ring.head.store(head, Ordering::Release);
            sink(event.token, event.outcome as Outcome);
            count += 1;
        }
        count
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: nothing uses the ring any more. It waits until everything in flight has ended.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::io::Write;

    const BLOCK: usize = 4096;

    /// A file of blocks of the bytes 0, 1, 2, and so on.
    fn blocks(count: u8) -> std::fs::File {
        let mut file = tempfile::tempfile().unwrap();
        (0..count).for_each(|n| file.write_all(&[n; BLOCK]).unwrap());
        file
    }

    fn read(memory: &mut [u8], block: u64) -> Transfer {
        let (base, len) = (memory.as_mut_ptr(), memory.len() as u32);
        Transfer { base, len, pos: block * BLOCK as u64, ..Transfer::NONE }
    }

    /// Takes reports until there are `count`.
    fn reports(aio: &mut Aio, count: usize) -> Vec<(Token, Outcome)> {
        let mut all = Vec::new();
        for _ in 0..100_000 {
            aio.reap(|token, outcome| all.push((token, outcome)));
            if all.len() >= count {
                break;
            }
            std::thread::yield_now();
        }
        assert_eq!((aio.reap(|_, _| {}), aio.has_ended()), (0, false));
        all.sort_unstable();
        all
    }

    #[test]
    fn what_is_handed_over_is_reported_once_with_what_came_of_it() {
        let Some(mut aio) = Aio::new(8) else { return println!("skipped: no AIO") };
        let file = blocks(4);
        let mut memory = [vec![9; BLOCK], vec![9; BLOCK], vec![9; BLOCK]];
        for (n, memory) in memory.iter_mut().enumerate() {
            aio.add(file.as_fd(), &read(memory, 3 - n as u64), 10 + n as u32);
        }
        let written = vec![7; BLOCK];
        let write = Transfer {
            base: written.as_ptr().cast_mut(),
            pos: 0,
            write: true,
            ..read(&mut memory[0], 0)
        };
        aio.add(file.as_fd(), &write, 13);
        let mut behind = vec![9; BLOCK];
        aio.add(file.as_fd(), &read(&mut behind, 4), 14);
        // SAFETY: the memory is there until all was reported.
        assert_eq!(unsafe { aio.hand_over() }, 5);
        let full = BLOCK as Outcome;
        let all = [(10, full), (11, full), (12, full), (13, full), (14, 0)];
        assert_eq!(reports(&mut aio, 5), all);
        assert_eq!(memory, [vec![3; BLOCK], vec![2; BLOCK], vec![1; BLOCK]]);
        let mut first = [0; BLOCK];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut first, 0).unwrap();
        assert_eq!(first, [7; BLOCK]);
    }

    #[test]
    fn what_there_is_no_room_for_is_left_until_reports_were_taken() {
        let Some(mut aio) = Aio::new(1) else { return println!("skipped: no AIO") };
        let file = blocks(1);
        let mut memory = vec![9; BLOCK];
        for _ in 0..3 {
            let mut taken = 0;
            loop {
                aio.add(file.as_fd(), &read(&mut memory, 0), taken);
                // SAFETY: the memory is there until all was reported.
                match unsafe { aio.hand_over() } {
                    1 => taken += 1,
                    _ => break,
                }
                assert!(taken < 1 << 20, "there is room without end");
            }
            assert!(taken > 0);
            let all = reports(&mut aio, taken as usize);
            let wanted = (0..taken).map(|n| (Token::from(n), BLOCK as Outcome));
            assert!(all.into_iter().eq(wanted));
        }
    }
}
