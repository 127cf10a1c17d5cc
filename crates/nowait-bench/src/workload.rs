//! Workloads: direction, order, block size and depth; and the conditions of a table: caching,
//! transport, client.
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

/// The client that makes the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClientKind {
    /// The built-in client, which is light enough not to limit the server.
    Own,
    /// fio with its nbd engine, to check the figures of the built-in client.
    Fio,
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
    /// The load of another client at the same time, on a separate connection.
    pub(crate) beside: Option<BackgroundLoad>,
}

/// The load of another client at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackgroundLoad {
    /// Requests of 1 MiB, sequential, at depth 256: as much as possible.
    Flood(Direction),
    /// Writes of 64 KiB, one after the other, to unallocated clusters of the image.
    Allocations,
}

impl BackgroundLoad {
    /// The workload of this client.
    pub(crate) fn load(self) -> Workload {
        let (direction, block_bytes, depth) = match self {
            BackgroundLoad::Flood(direction) => (direction, 1024 * KIB, 256),
            BackgroundLoad::Allocations => (Direction::Write, 64 * KIB, 1),
        };
        let order = Order::Sequential;
        Workload { direction, order, block_bytes, depth, durable: false, beside: None }
    }
}

impl Workload {
    /// Whether it, or the background load, writes.
    pub(crate) fn writes(&self) -> bool {
        let is_write = |direction| direction == Direction::Write;
        is_write(self.direction)
            || self.beside.is_some_and(|neighbour| is_write(neighbour.load().direction))
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
        let flood = |direction| Some(BackgroundLoad::Flood(direction));
        all.extend(both.map(|direction| Workload { beside: flood(direction), ..small }));
        all
    }

    /// The workloads of vhost-user: 4K and 64K random at depth 1, 16 and 64.
    pub(crate) fn of_virtual_machines() -> Vec<Workload> {
        let small = |load: &Workload| load.beside.is_none() && load.order == Order::Random;
        let small: Vec<Workload> = Workload::standard().into_iter().filter(small).collect();
        let large = small.iter().map(|load| Workload { block_bytes: 64 * KIB, ..*load });
        small.iter().copied().chain(large).collect()
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
            Some(neighbour) => write!(f, ", beside {neighbour}"),
            None => Ok(()),
        }
    }
}

/// Text: `1024K sequential read, depth 256`, or `64K allocating write, depth 1`.
impl fmt::Display for BackgroundLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let load = self.load();
        match self {
            BackgroundLoad::Flood(_) => load.fmt(f),
            BackgroundLoad::Allocations => {
                write!(f, "{}K allocating write, depth {}", load.block_bytes / KIB, load.depth)
            }
        }
    }
}
