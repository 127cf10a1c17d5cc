//! Parameters of a simulation: the store, the hosts, the boot, and what of nowait is switched on.

use std::time::Duration;

use nowait_remote::{BLOCK_BYTES, BackOff};

/// The most blocks of one request.
pub const RUN_BLOCKS: u64 = (4 << 20) / BLOCK_BYTES;
/// Blocks that a server without a cache has in memory.
pub const MEMORY_BLOCKS: usize = 512;
/// Requests for what no read waits for that are in flight simultaneously, for each server.
pub const PREFETCH_REQUESTS: u32 = 4;
/// The attempts after which a block that no read waits for is not fetched ahead any more.
pub const PREFETCH_ATTEMPTS: u32 = 5;
/// The requests of a full download that are in flight simultaneously.
pub const DOWNLOAD_REQUESTS: u32 = 8;
/// An attempt without a byte for this time is given up.
pub const IDLE_LIMIT: Duration = Duration::from_secs(20);

/// How a host comes to the blocks of its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The whole image is fetched, then the machines start.
    Download,
    /// Blocks are in memory for a short time only.
    NoCache,
    /// Blocks that were read stay in a cache that is empty at first.
    Cache,
    /// A cache that is empty at first, filled ahead in the order of an earlier boot.
    Prefetch,
    /// A cache that has all blocks already.
    WarmCache,
    /// Hosts without a cache behind a server for each rack, which has one.
    RackCache,
    /// A cache, and the rack's server fills its cache ahead.
    RackPrefetch,
}

impl Plan {
    /// All plans, in the order in which they are compared.
    pub const ALL: [Self; 7] = [
        Self::Download,
        Self::NoCache,
        Self::Cache,
        Self::Prefetch,
        Self::WarmCache,
        Self::RackCache,
        Self::RackPrefetch,
    ];

    /// The name of this plan.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Download => "download",
            Self::NoCache => "no-cache",
            Self::Cache => "cache",
            Self::Prefetch => "prefetch",
            Self::WarmCache => "warm-cache",
            Self::RackCache => "rack-cache",
            Self::RackPrefetch => "rack-prefetch",
        }
    }

    /// Whether there is a server for each rack.
    pub const fn has_racks(self) -> bool {
        matches!(self, Self::RackCache | Self::RackPrefetch)
    }
}

/// When a read fails whose requests fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// When its own request has failed again and again for [`Parameters::reconnect`], whatever the
    /// reason.
    Request,
    /// When it has failed for other reasons than too many requests for that time, or the store has
    /// answered none of the host's requests for that time.
    Store,
}

/// Reads of a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootReads {
    /// Reads of a machine with Debian.
    Recorded,
    /// Files of random sizes at random places.
    Synthetic {
        /// Bytes of the image.
        image_bytes: u64,
        /// Bytes that a boot reads.
        read_bytes: u64,
    },
}

/// The image and its boot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BootParameters {
    /// Its reads.
    pub reads: BootReads,
    /// The time of a boot whose reads take no time, in seconds.
    pub think_seconds: f64,
    /// Of 65,536 reads, those that are elsewhere in each boot.
    pub variation: u16,
}

/// The store. Rates are bits a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreParameters {
    /// From a request to the first byte, in the median, in seconds: half of the requests take up to
    /// twice as long, one in 100 up to ten times.
    pub latency: f64,
    /// Of all connections together.
    pub bandwidth: f64,
    /// Of one request.
    pub request_bandwidth: f64,
    /// Requests a second, above which it answers 503.
    pub request_rate: f64,
    /// Of 65,536 attempts, those that go wrong: an error 500, a connection cut in the middle, a
    /// slow body, or no answer.
    pub faults: u16,
}

/// A simulation. Rates are bits a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// Decides everything that is random.
    pub seed: u64,
    /// Hosts, at least 1.
    pub hosts: u32,
    /// Machines of each host.
    pub machines: u32,
    /// The time over which the starts of hosts are spread, in seconds.
    pub window: f64,
    /// How a host comes to its blocks.
    pub plan: Plan,
    /// The image and its boot.
    pub boot: BootParameters,
    /// The store.
    pub store: StoreParameters,
    /// The bandwidth of a host's network.
    pub host_bandwidth: f64,
    /// Hosts of a rack, at least 1.
    pub rack_hosts: u32,
    /// The bandwidth of a rack's server.
    pub rack_bandwidth: f64,
    /// After this time without an answer a read fails, in seconds.
    pub reconnect: f64,
    /// The party that has to be silent for `reconnect`.
    pub give_up: GiveUp,
    /// Whether reads one after the other make a server read ahead.
    pub read_ahead: bool,
    /// Whether a host that is refused asks less often.
    pub paced: bool,
    /// The pauses between attempts.
    pub back_off: BackOff,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            seed: 1,
            hosts: 1000,
            machines: 1,
            window: 0.0,
            plan: Plan::Cache,
            boot: BootParameters {
                reads: BootReads::Recorded,
                think_seconds: 10.0,
                variation: 655,
            },
            store: StoreParameters {
                latency: 0.02,
                bandwidth: 100e9,
                request_bandwidth: 0.8e9,
                request_rate: 5500.0,
                faults: 7,
            },
            host_bandwidth: 10e9,
            rack_hosts: 40,
            rack_bandwidth: 25e9,
            reconnect: 30.0,
            give_up: GiveUp::Store,
            read_ahead: true,
            paced: true,
            back_off: BackOff::STORE,
        }
    }
}
