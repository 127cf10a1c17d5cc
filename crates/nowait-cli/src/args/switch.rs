//! The mechanisms that `nowait serve --off` turns off.

use clap::ValueEnum;

use nowait_daemon::config::choices::Mechanism;

/// A mechanism of the engine, or of a frontend.
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

impl From<Switch> for Mechanism {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::Simple => Self::Simple,
            Switch::InlineCompletion => Self::InlineCompletion,
            Switch::Vectored => Self::Vectored,
            Switch::Pool => Self::Pool,
            Switch::Merge => Self::Merge,
            Switch::NowaitFirst => Self::NowaitFirst,
            Switch::BackOff => Self::BackOff,
            Switch::Hint => Self::Hint,
            Switch::GroupSyncs => Self::GroupSyncs,
            Switch::AllocateAhead => Self::AllocateAhead,
            Switch::ZeroCopy => Self::ZeroCopy,
        }
    }
}
