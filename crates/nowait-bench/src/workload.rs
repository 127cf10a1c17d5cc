//! Workloads: direction, order, block size and depth; and the conditions of a table: caching and transport.
//!
//! Invariant: a workload contains only what all servers have in common.

use std::fmt;

use clap::ValueEnum;

const KIB: usize = 1024;

/// The caching mode of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Caching {
    /// From storage: the server is told to use direct I/O.
    Direct,
    /// From the page cache, which holds the whole file before the measurement begins, if it fits.
    #[value(name = "cached")]
    PageCache,
}

impl Caching {
    /// Its name in reports: `direct` or `page cache`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Caching::Direct => "direct",
            Caching::PageCache => "page cache",
        }
    }
}

/// The transport between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Unencrypted, over a Unix socket.
    Plain,
    /// Unencrypted, over TCP on the loopback interface.
    Tcp,
    /// TLS 1.3 over a Unix socket, all servers with the same certificate and cipher.
    Tls,
    /// Not NBD: a vhost-user-blk device, whose requests are in shared memory.
    VhostUser,
}

/// The conditions that all servers of one table have in common, besides the file; tables are never
/// mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conditions {
    /// The caching mode of a table.
    pub(crate) caching: Caching,
    /// The transport between client and server.
    pub(crate) transport: Transport,
}

impl Transport {
    /// Its name in reports: `plain`, `TCP`, `TLS` or `vhost-user`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Plain => "plain",
            Transport::Tcp => "TCP",
            Transport::Tls => "TLS",
            Transport::VhostUser => "vhost-user",
        }
    }
}

impl Conditions {
    /// All conditions, in the order of the report.
    pub(crate) const ALL: [Conditions; 8] = [
        Conditions { caching: Caching::Direct, transport: Transport::Plain },
        Conditions { caching: Caching::PageCache, transport: Transport::Plain },
        Conditions { caching: Caching::Direct, transport: Transport::Tcp },
        Conditions { caching: Caching::PageCache, transport: Transport::Tcp },
        Conditions { caching: Caching::Direct, transport: Transport::Tls },
        Conditions { caching: Caching::PageCache, transport: Transport::Tls },
        Conditions { caching: Caching::Direct, transport: Transport::VhostUser },
        Conditions { caching: Caching::PageCache, transport: Transport::VhostUser },
    ];
}

/// Text: `direct`, or `page cache, TLS`.
impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conditions { caching, transport } = self;
        match transport {
            Transport::Plain => f.write_str(caching.name()),
            Transport::Tcp | Transport::Tls | Transport::VhostUser => {
                write!(f, "{}, {}", caching.name(), transport.name())
            }
        }
    }
}

/// The direction of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the server.
    Read,
    /// To the server.
    Write,
}

/// The order of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Uniformly random.
    Random,
    /// Consecutive, starting over after the last. Each connection has its own part of the file.
    Sequential,
}

/// One kind of load, constant during the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workload {
    /// Read or write.
    pub(crate) direction: Direction,
    /// Random or sequential.
    pub(crate) order: Order,
    /// Bytes per request; positions are multiples of it. A multiple of 4096, at most 1 MiB.
    pub(crate) block_bytes: usize,
    /// Requests kept in flight on each connection: 1 to 1024.
    pub(crate) depth: usize,
    /// Whether a write is durable when it ends (FUA). Servers are measured without.
    pub(crate) durable: bool,
    /// Another client at the same time, on a separate connection, which moves as much as it can in this direction.
    pub(crate) beside: Option<Direction>,
}

/// The load of a client that moves as much as it can: requests of 1 MiB, sequential, at depth 256.
pub(crate) fn flood(direction: Direction) -> Workload {
    let (order, block_bytes) = (Order::Sequential, 1024 * KIB);
    Workload { direction, order, block_bytes, depth: 256, durable: false, beside: None }
}

impl Workload {
    /// Whether it, or the background load, writes.
    pub(crate) fn writes(&self) -> bool {
        self.direction == Direction::Write || self.beside == Some(Direction::Write)
    }

    /// The workloads of `nowait bench peers`: 4K random at depth 1, 16 and 64, 128K sequential at depth 8, and
    /// 4K random reads at depth 1 beside a flood.
    pub(crate) fn standard() -> Vec<Workload> {
        let small = Workload {
            direction: Direction::Read,
            order: Order::Random,
            block_bytes: 4 * KIB,
            depth: 1,
            durable: false,
            beside: None,
        };
        let (order, block_bytes) = (Order::Sequential, 128 * KIB);
        let large = Workload { order, block_bytes, depth: 8, ..small };
        let both = [Direction::Read, Direction::Write];
        let depths = |direction| [1, 16, 64].map(|depth| Workload { direction, depth, ..small });
        let mut all: Vec<Workload> = both.into_iter().flat_map(depths).collect();
        all.extend(both.map(|direction| Workload { direction, ..large }));
        all.extend(both.map(|direction| Workload { beside: Some(direction), ..small }));
        all
    }

    /// The workloads of image formats: 4K random at depth 1, 16 and 64.
    pub(crate) fn of_images() -> Vec<Workload> {
        let small = |load: &Workload| load.beside.is_none() && load.order == Order::Random;
        Workload::standard().into_iter().filter(small).collect()
    }

    /// The workloads of vhost-user: 4K and 64K random at depth 1, 16 and 64.
    pub(crate) fn of_virtual_machines() -> Vec<Workload> {
        let mut all = Workload::of_images();
        let large: Vec<_> =
            all.iter().map(|load| Workload { block_bytes: 64 * KIB, ..*load }).collect();
        all.extend(large);
        all
    }
}

impl Direction {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

impl Order {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Order::Random => "random",
            Order::Sequential => "sequential",
        }
    }
}

/// Text: `4K random read, depth 16`, `4K random read, depth 1, beside 1024K sequential read,
/// depth 256`.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (order, direction) = (self.order.name(), self.direction.name());
        write!(f, "{}K {order} {direction}, depth {}", self.block_bytes / KIB, self.depth)?;
        match self.beside {
            Some(direction) => write!(f, ", beside {}", flood(direction)),
            None => Ok(()),
        }
    }
}
