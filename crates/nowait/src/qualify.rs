//! Whether trying without waiting is worth it (C39).
//!
//! Invariant: after a window in which nearly every try was refused, trying rests for a bounded
//! number of requests, then begins again.
//! Knows: nothing. Known by: engine.

/// Tries that are judged together.
const WINDOW: u32 = 64;
/// Refusals in a window that make it rest.
const TOO_MANY: u32 = 56;
/// Requests that go to the workers at once before the next window.
const REST: u32 = 2048;

/// The judge of one engine.
#[derive(Default)]
pub(crate) struct Qualify {
    tried: u32,
    refused: u32,
    resting: u32,
}

impl Qualify {
    /// Whether the next request is to be tried.
    #[inline]
    pub(crate) fn allows(&mut self) -> bool {
        if self.resting == 0 {
            return true;
        }
        self.resting -= 1;
        false
    }

    /// A try was served.
    #[inline]
    pub(crate) fn served(&mut self) {
        self.tried += 1;
        if self.tried == WINDOW {
            (self.tried, self.refused) = (0, 0);
        }
    }

    /// A try came back with `EAGAIN`. True when that makes it rest.
    #[cold]
    pub(crate) fn refused(&mut self) -> bool {
        self.tried += 1;
        self.refused += 1;
        if self.refused == TOO_MANY {
            *self = Self { resting: REST, ..Self::default() };
            return true;
        }
        if self.tried >= WINDOW {
            (self.tried, self.refused) = (0, 0);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later() {
        let mut qualify = Qualify::default();
        assert!((0..TOO_MANY).all(|n| qualify.allows() && qualify.refused() == (n + 1 == TOO_MANY)));
        assert!((0..REST).all(|_| !qualify.allows()));
        assert!(qualify.allows());
    }

    #[test]
    fn c39_a_file_that_refuses_now_and_then_is_always_tried() {
        let mut qualify = Qualify::default();
        for n in 0..10_000 {
            assert!(qualify.allows());
            if n % 2 == 0 {
                assert!(!qualify.refused());
            } else {
                qualify.served();
            }
        }
    }
}
