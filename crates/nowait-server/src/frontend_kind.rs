//! The kinds of frontends, by which requests, connections and numbers are told apart.
//!
//! Invariant: the numbers of the kinds are successive, from 0 on.

/// How requests come to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendKind {
    /// Connections of NBD clients.
    Nbd,
    /// Queues of virtual machines.
    VhostUser,
    /// A local block device.
    Ublk,
}

impl FrontendKind {
    /// All of them, by their numbers.
    pub const ALL: [Self; 3] = [Self::Nbd, Self::VhostUser, Self::Ublk];

    /// Bits of a number that are its kind.
    pub(crate) const BITS: u32 = 2;

    /// Its name for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
            Self::Ublk => "ublk",
        }
    }

    /// The kind in the last bits of `number`.
    #[inline(always)]
    pub(crate) fn of_number(number: u64) -> Self {
        const NBD: u64 = FrontendKind::Nbd as u64;
        const VHOST_USER: u64 = FrontendKind::VhostUser as u64;
        match number & ((1 << Self::BITS) - 1) {
            NBD => Self::Nbd,
            VHOST_USER => Self::VhostUser,
            // No other number is given out: the last kind needs no comparison.
            _ => Self::Ublk,
        }
    }
}

const _: () = assert!(FrontendKind::ALL.len() <= 1 << FrontendKind::BITS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_told_by_the_last_bits_of_a_number() {
        for (at, kind) in FrontendKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
            for above in [0, 1, 1 << 40] {
                assert_eq!(FrontendKind::of_number(above << FrontendKind::BITS | at as u64), kind);
            }
        }
    }
}
