//! The kinds of runs.

use nowait::sim::Random;

/// The kind of a run: what is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Engines.
    Engine,
    /// A server, through sockets.
    Server,
    /// A server, through a virtual machine's memory.
    VhostUser,
    /// A server, through a local block device.
    Ublk,
    /// A storage behind a network; see [`crate::remote`].
    Remote,
    /// A log; see [`crate::log`]. No seed is one by default.
    Log,
    /// A backup of a disk that is written; see [`crate::backup`]. No seed is one by default.
    Backup,
    /// The bitmaps of a raw disk or an image; see [`crate::raw_bitmaps`]. No seed is one by default.
    Bitmaps,
    /// A disk that moves; see [`crate::moves`]. No seed is one by default.
    Move,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 9] = [
        Self::Engine,
        Self::Server,
        Self::VhostUser,
        Self::Ublk,
        Self::Remote,
        Self::Log,
        Self::Backup,
        Self::Bitmaps,
        Self::Move,
    ];
    /// The modes with a simulated device, whose scenario is a [`crate::scenario::Scenario`].
    pub const ON_DEVICES: [Self; 4] = [Self::Engine, Self::Server, Self::VhostUser, Self::Ublk];

    /// The command-line name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Server => "server",
            Self::VhostUser => "vhost-user",
            Self::Ublk => "ublk",
            Self::Remote => "remote",
            Self::Log => "log",
            Self::Backup => "backup",
            Self::Bitmaps => "bitmaps",
            Self::Move => "move",
        }
    }

    /// The default mode of `seed`: one seed in four runs the server, one in eight a virtual
    /// machine's, one in eight a block device's, and one in eight a storage behind a network.
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX - 2);
        match (random.below(4), random.below(6), random.below(4)) {
            (0, ..) => Self::Server,
            (_, 0, _) => Self::VhostUser,
            (_, 1, _) => Self::Ublk,
            (.., 0) => Self::Remote,
            _ => Self::Engine,
        }
    }
}
