//! What is asked of a server: direction, order, block size and depth; what it may answer from, and how
//! the bytes go between it and the client.
//!
//! Invariant: a workload says everything that the servers have in common, nothing about any one of them.
//! Knows: nothing. Known by: client, server, report, peers.

use std::fmt;

const KIB: usize = 1024;

/// Where requests may be answered from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// From storage: the server is told to go past the page cache.
    Direct,
    /// From the page cache, which holds the whole file before the measurement begins, if it fits.
    PageCache,
}

impl Caching {
    /// The word for it in reports: `direct` or `page cache`.
    pub fn name(self) -> &'static str {
        match self {
            Caching::Direct => "direct",
            Caching::PageCache => "page cache",
        }
    }
}

/// How bytes go between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// As they are.
    Plain,
    /// As they are, by TCP on the loopback interface; the others use Unix sockets.
    Tcp,
    /// By TLS 1.3, all servers with the same certificate and the same cipher.
    Tls,
}

/// Who makes the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientKind {
    /// Our own light client, which the server does not wait for.
    Own,
    /// fio with its nbd engine, to check the other's figures with.
    Fio,
}

/// What all servers of one table have in common, beside the file; tables are never mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Where requests may be answered from.
    pub caching: Caching,
    /// How bytes go between client and server.
    pub transport: Transport,
}

impl Transport {
    /// The word for it in reports: `plain`, `TCP` or `TLS`.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Plain => "plain",
            Transport::Tcp => "TCP",
            Transport::Tls => "TLS",
        }
    }
}

impl Terms {
    /// All there are, in the order of the report.
    pub const ALL: [Terms; 6] = [
        Terms { caching: Caching::Direct, transport: Transport::Plain },
        Terms { caching: Caching::PageCache, transport: Transport::Plain },
        Terms { caching: Caching::Direct, transport: Transport::Tcp },
        Terms { caching: Caching::PageCache, transport: Transport::Tcp },
        Terms { caching: Caching::Direct, transport: Transport::Tls },
        Terms { caching: Caching::PageCache, transport: Transport::Tls },
    ];
}

/// For people: `direct`, or `page cache, TLS`.
impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Terms { caching, transport } = self;
        match transport {
            Transport::Plain => f.write_str(caching.name()),
            Transport::Tcp | Transport::Tls => {
                write!(f, "{}, {}", caching.name(), transport.name())
            }
        }
    }
}

/// Which way the data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the server.
    Read,
    /// To the server.
    Write,
}

/// Which block comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Any, each as likely as the other.
    Random,
    /// The following one; from the first again after the last. Each connection has a part of the file.
    Sequential,
}

/// One kind of load, kept up for as long as the measurement lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Read or write.
    pub direction: Direction,
    /// Random or sequential.
    pub order: Order,
    /// Bytes per request; positions are multiples of it. A multiple of 4096, at most 1 MiB.
    pub block_bytes: usize,
    /// Requests kept in flight on each connection: 1 to 1024.
    pub depth: usize,
    /// What another client does meanwhile, on a connection of its own.
    pub beside: Option<Neighbour>,
}

/// What another client does beside a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// As much as it can: 1 MiB sequential, depth 256.
    Flood(Direction),
    /// One write of 64 KiB after the other, to where the image has nothing yet.
    Allocations,
}

impl Neighbour {
    /// Its load.
    pub fn load(self) -> Workload {
        let (direction, block_bytes, depth) = match self {
            Neighbour::Flood(direction) => (direction, 1024 * KIB, 256),
            Neighbour::Allocations => (Direction::Write, 64 * KIB, 1),
        };
        Workload { direction, order: Order::Sequential, block_bytes, depth, beside: None }
    }
}

impl Workload {
    /// Whether it, or what is beside it, writes.
    pub fn writes(&self) -> bool {
        let is_write = |direction| direction == Direction::Write;
        is_write(self.direction)
            || self.beside.is_some_and(|neighbour| is_write(neighbour.load().direction))
    }

    /// What `nowait bench peers` measures: 4K random at depth 1, 16 and 64, 128K sequential at depth 8, and
    /// 4K random reads at depth 1 beside a flood.
    pub fn standard() -> Vec<Workload> {
        let small = Workload {
            direction: Direction::Read,
            order: Order::Random,
            block_bytes: 4 * KIB,
            depth: 1,
            beside: None,
        };
        let mut all = Vec::new();
        for direction in [Direction::Read, Direction::Write] {
            for depth in [1, 16, 64] {
                all.push(Workload { direction, depth, ..small });
            }
        }
        for direction in [Direction::Read, Direction::Write] {
            all.push(Workload {
                direction,
                order: Order::Sequential,
                block_bytes: 128 * KIB,
                depth: 8,
                beside: None,
            });
        }
        for direction in [Direction::Read, Direction::Write] {
            all.push(Workload { beside: Some(Neighbour::Flood(direction)), ..small });
        }
        all
    }
}

/// For people: `4K random read, depth 16`, `4K random read, depth 1, beside 1024K sequential read, depth 256`.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            Order::Random => "random",
            Order::Sequential => "sequential",
        };
        let direction = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        write!(f, "{}K {order} {direction}, depth {}", self.block_bytes / KIB, self.depth)?;
        match self.beside {
            Some(neighbour) => write!(f, ", beside {neighbour}"),
            None => Ok(()),
        }
    }
}

/// For people: `1024K sequential read, depth 256`, or `64K allocating write, depth 1`.
impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let load = self.load();
        match self {
            Neighbour::Flood(_) => load.fmt(f),
            Neighbour::Allocations => {
                write!(f, "{}K allocating write, depth {}", load.block_bytes / KIB, load.depth)
            }
        }
    }
}
