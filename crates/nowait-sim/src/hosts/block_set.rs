//! A set of blocks of an image: a bit for each.

/// Blocks below a limit.
#[derive(Clone, Debug)]
pub(super) struct BlockSet {
    words: Vec<u64>,
    len: u64,
}

impl BlockSet {
    /// The empty set of blocks below `limit`.
    pub(super) fn new(limit: u64) -> Self {
        Self { words: vec![0; limit.div_ceil(64) as usize], len: 0 }
    }

    /// The number of blocks in the set.
    #[cfg(test)]
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Whether `block` is in the set.
    pub(super) fn has(&self, block: u64) -> bool {
        let word = self.words.get((block / 64) as usize);
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// Adds `block`, which is below the limit.
    pub(super) fn add(&mut self, block: u64) {
        if !self.has(block)
            && let Some(word) = self.words.get_mut((block / 64) as usize)
        {
            *word |= 1 << (block % 64);
            self.len += 1;
        }
    }

    /// Removes `block`.
    pub(super) fn remove(&mut self, block: u64) {
        if self.has(block)
            && let Some(word) = self.words.get_mut((block / 64) as usize)
        {
            *word &= !(1 << (block % 64));
            self.len -= 1;
        }
    }
}
