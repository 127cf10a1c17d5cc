//! A bare io_uring(7) loop, with all that makes it fast and nothing else: registered file, registered
//! buffers, one enter for a batch.
//!
//! Invariant: the memory is freed only when nothing is in flight, else leaked, because the kernel may
//! still write to it. Knows: drive, places. Known by: tables.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};

use super::drive::{Pace, Stretch};
use super::places::Places;
use super::psync::Block;
use crate::workload::{Direction, Workload};

/// The number of the only registered file and of the only registered buffer.
const ONLY: u32 = 0;

/// A ring with its file, and one block of memory for each request in flight.
pub(crate) struct BareRing {
    ring: IoUring,
    memory: ManuallyDrop<Vec<Block>>,
    free: Vec<u64>,
    started: Vec<Instant>,
    load: Workload,
}

impl BareRing {
    /// # Errors
    /// What io_uring_setup(2) or io_uring_register(2) said.
    pub(crate) fn new(file: &File, load: &Workload) -> io::Result<BareRing> {
        if load.block_bytes > Block::BYTES {
            return Err(io::Error::other("blocks of this size are not measured"));
        }
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(load.depth as u32)?;
        let memory: Vec<Block> = (0..load.depth).map(|_| *Block::random()).collect();
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
        // SAFETY: the memory is freed after the ring was emptied, else never.
        unsafe { bare.ring.submitter().register_buffers(&[all]) }?;
        Ok(bare)
    }

    /// Keeps the load's depth in flight for as long as `pace` says.
    ///
    /// # Errors
    /// What io_uring_enter(2) or a transfer said.
    pub(crate) fn run(&mut self, places: &mut Places, pace: Pace<'_>) -> io::Result<Stretch> {
        let mut stretch = pace.begin();
        let mut now = stretch.begin;
        while !pace.is_over(&stretch, now) {
            self.fill(places, now)?;
            self.ring.submit_and_wait(1)?;
            now = Instant::now();
            self.take(&mut stretch, now)?;
        }
        stretch.end();
        let mut rest = Pace { timed: false, ..pace }.begin();
        while self.in_flight() > 0 {
            self.ring.submit_and_wait(1)?;
            self.take(&mut rest, now)?;
        }
        Ok(stretch)
    }

    fn in_flight(&self) -> usize {
        self.load.depth - self.free.len()
    }

    fn fill(&mut self, places: &mut Places, now: Instant) -> io::Result<()> {
        while let Some(lane) = self.free.pop() {
            let Some(pos) = places.next() else {
                self.free.push(lane);
                break;
            };
            let (file, len) = (types::Fixed(ONLY), self.load.block_bytes as u32);
            let base = self.memory.as_mut_ptr().wrapping_add(lane as usize).cast::<u8>();
            let buffer = ONLY as u16;
            let entry: squeue::Entry = match self.load.direction {
                Direction::Read => {
                    opcode::ReadFixed::new(file, base, len, buffer).offset(pos).build()
                }
                Direction::Write => {
                    opcode::WriteFixed::new(file, base, len, buffer).offset(pos).build()
                }
            };
            self.started[lane as usize] = now;
            // SAFETY: the lane's block is used by this transfer alone until the lane is free again,
            // and lives until nothing is in flight.
            if unsafe { self.ring.submission().push(&entry.user_data(lane)) }.is_err() {
                self.free.push(lane);
                return Err(io::Error::other("the ring has no room"));
            }
        }
        Ok(())
    }

    fn take(&mut self, stretch: &mut Stretch, now: Instant) -> io::Result<()> {
        let mut failed = None;
        for completion in self.ring.completion() {
            let lane = completion.user_data();
            self.free.push(lane);
            match completion.result() {
                moved if moved >= 0 && moved as usize == self.load.block_bytes => {
                    let begin = self.started[lane as usize];
                    stretch.count(moved as u64, now.saturating_duration_since(begin));
                }
                moved if moved >= 0 => failed = Some(io::Error::other("a transfer was cut short")),
                errno => failed = Some(io::Error::from_raw_os_error(-errno)),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for BareRing {
    fn drop(&mut self) {
        while self.in_flight() > 0 && self.ring.submit_and_wait(1).is_ok() {
            for completion in self.ring.completion() {
                self.free.push(completion.user_data());
            }
        }
        if self.in_flight() == 0 {
            // SAFETY: the field is not used again; the kernel has nothing left to do with it.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}
