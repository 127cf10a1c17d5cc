//! Transfers by Linux AIO: one call submits them and does not wait for the device.
//!
//! It is for direct I/O with `RWF_NOWAIT`: for other transfers io_submit(2) may block, on locks and
//! metadata for example. Completions are read from the kernel's ring without a system call.
//! Invariant: a transfer that the kernel has accepted completes once; when this is dropped, the
//! kernel accesses the memory of none any more.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::types::token::{self, Token};
use crate::types::transfer::{Outcome, Transfer};

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
/// Each completion also signals an eventfd(2).
const IOCB_FLAG_RESFD: u32 = 1;
/// The transfer has a priority.
const IOCB_FLAG_IOPRIO: u32 = 2;
/// The magic number of a ring with the layout of `AioRing`.
const AIO_RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb`.
#[repr(C)]
struct Iocb {
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
    eventfd: i32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy)]
struct IoEvent {
    token: u64,
    entry: u64,
    outcome: i64,
    more: i64,
}

/// `struct aio_ring`, which the kernel maps at the address of the context; its events follow.
#[repr(C)]
struct AioRing {
    id: u32,
    events: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    header: u32,
}

/// An AIO context, and the transfers of the next submission.
pub(crate) struct Aio {
    context: usize,
    eventfd: OwnedFd,
    iocbs: Vec<Iocb>,
    iocb_pointers: Vec<usize>,
}

impl Aio {
    /// Room for `transfers` in flight; `None` if the kernel has no AIO, forbids it or has no room.
    pub(crate) fn new(transfers: u32) -> Option<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let mut context = 0usize;
        // SAFETY: the kernel writes one word.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, transfers, &raw mut context) };
        if made != 0 {
            return None;
        }
        let aio = Self { context, eventfd, iocbs: Vec::new(), iocb_pointers: Vec::new() };
        (aio.ring().magic == AIO_RING_MAGIC && aio.ring().header as usize == size_of::<AioRing>())
            .then_some(aio)
    }

    /// A descriptor that is readable after a completion.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    fn ring(&self) -> &AioRing {
        let ring = std::ptr::with_exposed_provenance::<AioRing>(self.context);
        // SAFETY: the kernel keeps it mapped until the context is destroyed, and changes only the
        // fields that are atomics.
        unsafe { &*ring }
    }

    /// Adds a transfer to or from `fd` to those of the next [`Aio::submit`].
    pub(crate) fn push(&mut self, fd: BorrowedFd<'_>, transfer: &Transfer, token: u32) {
        self.iocbs.push(self.iocb(fd, transfer, token::of_slot(token)));
    }

    fn iocb(&self, fd: BorrowedFd<'_>, transfer: &Transfer, token: Token) -> Iocb {
        let (list, len) = (transfer.segments > 0, u64::from(transfer.len));
        Iocb {
            token,
            key: 0,
            rw_flags: transfer.rw_flags,
            operation: match (transfer.write, list) {
                (false, false) => IOCB_CMD_PREAD,
                (true, false) => IOCB_CMD_PWRITE,
                (false, true) => IOCB_CMD_PREADV,
                (true, true) => IOCB_CMD_PWRITEV,
            },
            priority: transfer.priority.cast_signed(),
            fd: fd.as_raw_fd() as u32,
            memory: transfer.base as u64,
            len: if list { transfer.segments.into() } else { len },
            pos: transfer.pos as i64,
            reserved: 0,
            flags: if transfer.priority == 0 {
                IOCB_FLAG_RESFD
            } else {
                IOCB_FLAG_RESFD | IOCB_FLAG_IOPRIO
            },
            eventfd: self.eventfd.as_raw_fd(),
        }
    }

    /// Submits one transfer, from any thread. False if the kernel has not accepted it.
    ///
    /// # Safety
    /// As for [`Aio::submit`].
    pub(crate) unsafe fn submit_one(
        &self,
        fd: BorrowedFd<'_>,
        transfer: &Transfer,
        token: Token,
    ) -> bool {
        let entry = self.iocb(fd, transfer, token);
        let pointer = &raw const entry;
        // SAFETY: one pointer to an entry, which the kernel copies; the memory that it names is valid as the caller
        // promised.
        unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, &raw const pointer) == 1 }
    }

    /// Submits the added transfers; returns how many of them, in order, the kernel has accepted.
    ///
    /// # Safety
    /// As for `IoQueue::push`: the memory of each transfer stays valid until `drain` has returned
    /// its token.
    pub(crate) unsafe fn submit(&mut self) -> usize {
        self.iocb_pointers
            .extend(self.iocbs.iter().map(|entry| (&raw const *entry).expose_provenance()));
        let (context, pointers) = (self.context, self.iocb_pointers.as_ptr());
        let mut taken = 0;
        while taken < self.iocbs.len() {
            let rest = self.iocbs.len() - taken;
            // SAFETY: `rest` pointers to entries, which the kernel copies; the memory that they
            // name is valid as the caller promised.
            let more = unsafe {
                libc::syscall(libc::SYS_io_submit, context, rest, pointers.wrapping_add(taken))
            };
            match usize::try_from(more) {
                Ok(more) if more > 0 => taken += more,
                _ => break,
            }
        }
        self.iocb_pointers.clear();
        self.iocbs.clear();
        taken
    }

    /// Whether `drain` would find a completion.
    pub(crate) fn has_ended(&self) -> bool {
        let ring = self.ring();
        ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
    }

    /// Passes all completions to `sink`; returns their number.
    pub(crate) fn drain(&mut self, sink: impl FnMut(Token, Outcome)) -> usize {
        // SAFETY: no other thread has it meanwhile.
        unsafe { self.drain_shared(usize::MAX, sink) }
    }

    /// Like [`Aio::drain`], at most `most` completions, while other threads submit.
    ///
    /// # Safety
    /// One thread drains at a time.
    pub(crate) unsafe fn drain_shared(
        &self,
        most: usize,
        mut sink: impl FnMut(Token, Outcome),
    ) -> usize {
        let mut count = 0;
        let ring = self.ring();
        // Only this side moves the head.
        let mut head = ring.head.load(Ordering::Relaxed);
        while count < most && head != ring.tail.load(Ordering::Acquire) {
            let events = std::ptr::with_exposed_provenance::<AioRing>(self.context).wrapping_add(1);
            // SAFETY: an event between head and tail, which the kernel does not change until the
            // head has moved on; the ring's mapping includes the events behind the header.
            let event = unsafe { events.cast::<IoEvent>().wrapping_add(head as usize).read() };
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
        // SAFETY: nothing uses the ring any more. The call waits until every transfer has ended.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use nowait_testkit::required;

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

    /// Drains completions until there are `count`.
    fn completions(aio: &mut Aio, count: usize) -> Vec<(Token, Outcome)> {
        let mut all = Vec::new();
        for _ in 0..100_000 {
            aio.drain(|token, outcome| all.push((token, outcome)));
            if all.len() >= count {
                break;
            }
            std::thread::yield_now();
        }
        assert_eq!((aio.drain(|_, _| {}), aio.has_ended()), (0, false));
        all.sort_unstable();
        all
    }

    #[test]
    fn each_submitted_transfer_completes_once_with_its_outcome() {
        let Some(mut aio) = required("AIO", Aio::new(8).ok_or("refused")) else { return };
        let file = blocks(4);
        let mut memory = [vec![9; BLOCK], vec![9; BLOCK], vec![9; BLOCK]];
        for (n, memory) in memory.iter_mut().enumerate() {
            aio.push(file.as_fd(), &read(memory, 3 - n as u64), 10 + n as u32);
        }
        let written = vec![7; BLOCK];
        let write = Transfer {
            base: written.as_ptr().cast_mut(),
            pos: 0,
            write: true,
            ..read(&mut memory[0], 0)
        };
        aio.push(file.as_fd(), &write, 13);
        let mut behind = vec![9; BLOCK];
        aio.push(file.as_fd(), &read(&mut behind, 4), 14);
        // SAFETY: the memory outlives the completions.
        assert_eq!(unsafe { aio.submit() }, 5);
        let full = BLOCK as Outcome;
        let all = [(10, full), (11, full), (12, full), (13, full), (14, 0)];
        assert_eq!(completions(&mut aio, 5), all);
        assert_eq!(memory, [vec![3; BLOCK], vec![2; BLOCK], vec![1; BLOCK]]);
        let mut first = [0; BLOCK];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut first, 0).unwrap();
        assert_eq!(first, [7; BLOCK]);
    }

    #[test]
    fn a_full_context_accepts_transfers_again_after_a_drain() {
        let Some(mut aio) = required("AIO", Aio::new(1).ok_or("refused")) else { return };
        let file = blocks(1);
        let mut memory = vec![9; BLOCK];
        for _ in 0..3 {
            let mut taken = 0;
            loop {
                aio.push(file.as_fd(), &read(&mut memory, 0), taken);
                // SAFETY: the memory outlives the completions.
                match unsafe { aio.submit() } {
                    1 => taken += 1,
                    _ => break,
                }
                assert!(taken < 1 << 20, "the context is never full");
            }
            assert!(taken > 0);
            let all = completions(&mut aio, taken as usize);
            let wanted = (0..taken).map(|n| (token::of_slot(n), BLOCK as Outcome));
            assert!(all.into_iter().eq(wanted));
        }
    }
}
