//! A bare io_uring(7) loop with only the fast features: registered file, registered buffers, one
//! io_uring_enter(2) for a batch.
//!
//! Invariant: the memory is freed only when no request is in flight; otherwise it is leaked,
//! because the kernel may still write to it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};

use crate::ablation::blocking_calls::Block;
use crate::ablation::closed_loop::{Interval, StopCondition};
use crate::offsets::Offsets;
use crate::workload::{Direction, Workload};

/// The index of the only registered file and of the only registered buffer.
const ONLY: u32 = 0;

/// A ring with its registered file and memory for each request in flight.
pub(crate) struct BareRing {
    ring: IoUring,
    memory: ManuallyDrop<Vec<Block>>,
    free: Vec<u64>,
    started: Vec<Instant>,
    load: Workload,
}

impl BareRing {
    /// # Errors
    /// The error of io_uring_setup(2) or io_uring_register(2); for `ENOMEM` with the note that the
    /// limit on locked memory may be the cause.
    pub(crate) fn new(file: &File, load: &Workload) -> io::Result<BareRing> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(load.depth as u32)
            .map_err(named)?;
        let blocks = (load.depth * load.block_bytes).div_ceil(Block::BYTES);
        let memory: Vec<Block> = (0..blocks).map(|_| *Block::random()).collect();
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let all = libc::iovec {
            iov_base: memory.as_ptr().cast_mut().cast(),
            iov_len: memory.len() * Block::BYTES,
        };
        let bare = BareRing {
            ring,
            memory: ManuallyDrop::new(memory),
            free: (0..load.depth as u64).collect(),
            started: vec![Instant::now(); load.depth],
            load: *load,
        };
        // SAFETY: the memory is freed only after the ring was drained, otherwise never.
        unsafe { bare.ring.submitter().register_buffers(&[all]) }.map_err(named)?;
        Ok(bare)
    }

    /// Keeps `load.depth` requests in flight until `stop_condition` ends the loop or the offsets run
    /// out.
    ///
    /// # Errors
    /// The error of io_uring_enter(2) or of a transfer.
    pub(crate) fn run(
        &mut self,
        offsets: &mut Offsets,
        stop_condition: StopCondition<'_>,
    ) -> io::Result<Interval> {
        let mut interval = stop_condition.begin();
        let mut now = interval.begin;
        while !stop_condition.is_over(&interval, now) {
            self.fill(offsets, now)?;
            if self.in_flight() == 0 {
                break;
            }
            self.ring.submit_and_wait(1)?;
            now = Instant::now();
            self.take(&mut interval, now)?;
        }
        interval.end();
        let mut rest = StopCondition { timed: false, ..stop_condition }.begin();
        while self.in_flight() > 0 {
            self.ring.submit_and_wait(1)?;
            self.take(&mut rest, now)?;
        }
        Ok(interval)
    }

    fn in_flight(&self) -> usize {
        self.load.depth - self.free.len()
    }

    fn fill(&mut self, offsets: &mut Offsets, now: Instant) -> io::Result<()> {
        while let Some(slot) = self.free.pop() {
            let Some(pos) = offsets.next() else {
                self.free.push(slot);
                break;
            };
            let (file, len) = (types::Fixed(ONLY), self.load.block_bytes as u32);
            let at = slot as usize * self.load.block_bytes;
            let base = self.memory.as_mut_ptr().cast::<u8>().wrapping_add(at);
            let buffer = ONLY as u16;
            let entry: squeue::Entry = match self.load.direction {
                Direction::Read => {
                    opcode::ReadFixed::new(file, base, len, buffer).offset(pos).build()
                }
                Direction::Write => {
                    opcode::WriteFixed::new(file, base, len, buffer).offset(pos).build()
                }
            };
            self.started[slot as usize] = now;
            // SAFETY: only this transfer uses the memory of the slot until the slot is free again,
            // and it lives until no request is in flight.
            if unsafe { self.ring.submission().push(&entry.user_data(slot)) }.is_err() {
                self.free.push(slot);
                return Err(io::Error::other("the ring has no room"));
            }
        }
        Ok(())
    }

    fn take(&mut self, interval: &mut Interval, now: Instant) -> io::Result<()> {
        let mut failed = None;
        for completion in self.ring.completion() {
            let slot = completion.user_data();
            self.free.push(slot);
            match completion.result() {
                moved if moved >= 0 && moved as usize == self.load.block_bytes => {
                    let begin = self.started[slot as usize];
                    interval.count(moved as u64, now.saturating_duration_since(begin));
                }
                moved if moved >= 0 => failed = Some(io::Error::other("a transfer was cut short")),
                errno => failed = Some(io::Error::from_raw_os_error(-errno)),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Adds the limit that `ENOMEM` may refer to.
fn named(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => io::Error::other(format!("{error}: see ulimit -l")),
        _ => error,
    }
}

impl Drop for BareRing {
    fn drop(&mut self) {
        while self.in_flight() > 0 && self.ring.submit_and_wait(1).is_ok() {
            for completion in self.ring.completion() {
                self.free.push(completion.user_data());
            }
        }
        // The kernel releases a closed ring some time later; until then its buffers would count
        // against the limit on locked memory.
        let _ = self.ring.submitter().unregister_buffers();
        if self.in_flight() == 0 {
            // SAFETY: the field is not used again; the kernel does not access the memory any more.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}
