//! The blocks that clients read and write as a whole.
//!
//! Invariant: a power of two between a sector and a page.

/// The blocks of all frontends: clients read and write them as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSize {
    /// 512 bytes.
    Sector,
    /// 4096 bytes.
    Page,
}

impl BlockSize {
    /// The one of `bytes`.
    #[must_use]
    pub fn of(bytes: u64) -> Option<Self> {
        [Self::Sector, Self::Page].into_iter().find(|size| u64::from(size.bytes()) == bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Sector => 512,
            Self::Page => 4096,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_a_sector_or_a_page() {
        let of = [0, 1, 511, 512, 1024, 4096, 8192].map(BlockSize::of);
        let (sector, page) = (Some(BlockSize::Sector), Some(BlockSize::Page));
        assert_eq!(of, [None, None, None, sector, None, page, None]);
    }
}
