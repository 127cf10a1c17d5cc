//! The mechanisms that `nowait serve --off` turns off.
//!
//! Invariant: each is a switch of the engine, of a disk, or of a frontend.

use clap::ValueEnum;

/// A mechanism of the engine, of a disk, or of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// The short way of a request that is one transfer
    Simple,
    /// Finishing a request on the thread that learns of its end
    InlineCompletion,
    /// Having all transfers of one request under way together
    Vectored,
    /// Reusing the memory of finished requests
    Pool,
    /// Serving requests that touch by one transfer
    Merge,
    /// Trying without waiting before handing a request to a worker thread
    NowaitFirst,
    /// Handing requests to workers without a try for a while after many refusals
    BackOff,
    /// Remembering which ranges of the image hold data
    Hint,
    /// Making writes with FUA durable together where the kernel would sync for each
    GroupSyncs,
    /// Allocating storage behind sequential writes into holes of a raw image
    AllocateAhead,
    /// Moving data between storage and the users of a --ublk node without a copy
    ZeroCopy,
}

impl Switch {
    /// Turns it off in `config`, if it is the engine's.
    pub(crate) fn turn_off(self, config: &mut nowait::Config) {
        *match self {
            Self::Simple => &mut config.simple,
            Self::InlineCompletion => &mut config.inline_completion,
            Self::Vectored => &mut config.vectored,
            Self::Pool => &mut config.pool,
            Self::Merge => &mut config.merge,
            Self::NowaitFirst => &mut config.nowait_first,
            Self::BackOff => &mut config.back_off,
            Self::GroupSyncs => &mut config.group_syncs,
            Self::Hint | Self::AllocateAhead | Self::ZeroCopy => return,
        } = false;
    }
}
