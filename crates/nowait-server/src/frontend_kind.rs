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
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nbd, Self::VhostUser, Self::Ublk];

    /// Its name for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
            Self::Ublk => "ublk",
        }
    }
}
