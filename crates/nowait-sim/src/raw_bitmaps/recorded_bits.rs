//! The bits of a bitmap in memory.
//!
//! Invariant: all that was marked is there until the process ends.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use nowait::ByteRange;
use nowait_image::BitmapBits;

/// The bits of the only bitmap of a simulated disk.
pub struct RecordedBits {
    bits: Mutex<Vec<u8>>,
    granularity: u64,
    is_enabled: AtomicBool,
}

/// Whether bit `number` of `bits` is set.
#[must_use]
pub fn is_set(bits: &[u8], number: u64) -> bool {
    bits.get((number / 8) as usize).is_some_and(|byte| byte & 1 << (number % 8) != 0)
}

impl RecordedBits {
    /// The bits of a disk of `size` bytes that are stored in `stored`.
    ///
    /// # Errors
    /// That of a read.
    pub fn from_stored<R: Read>(
        mut stored: R,
        size: u64,
        granularity: u64,
        enabled: bool,
    ) -> io::Result<Self> {
        let mut bits = Vec::new();
        stored.read_to_end(&mut bits)?;
        bits.resize(size.div_ceil(granularity).div_ceil(8) as usize, 0);
        Ok(Self { bits: Mutex::new(bits), granularity, is_enabled: AtomicBool::new(enabled) })
    }

    /// Changes are recorded from now on, or no more.
    pub fn enable(&self, enabled: bool) {
        self.is_enabled.store(enabled, Ordering::SeqCst);
    }

    /// Marks `range`, which is not empty, if changes are recorded.
    pub fn mark(&self, range: ByteRange) {
        if !self.is_enabled() {
            return;
        }
        let mut bits = self.bits.lock().unwrap_or_else(PoisonError::into_inner);
        for number in range.pos / self.granularity..range.end().div_ceil(self.granularity) {
            if let Some(byte) = bits.get_mut((number / 8) as usize) {
                *byte |= 1 << (number % 8);
            }
        }
    }

    /// A copy of the bits.
    #[must_use]
    pub fn all(&self) -> Vec<u8> {
        self.bits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl BitmapBits for RecordedBits {
    fn is_enabled(&self) -> bool {
        self.is_enabled.load(Ordering::SeqCst)
    }

    fn copy(&self, at: u64, memory: &mut [u8]) {
        let bits = self.all();
        let from = bits.get(at as usize..).unwrap_or_default();
        let (there, behind) = memory.split_at_mut(from.len().min(memory.len()));
        there.copy_from_slice(from.get(..there.len()).unwrap_or_default());
        behind.fill(0);
    }
}
