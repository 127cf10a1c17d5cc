//! A whole copy: both sides opened, copied, flushed, compared, and the file given its name.
//!
//! Invariant: a file has its name only after everything before it went well.
//! Knows: every other module. Known by: the crate's users.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nowait_image::Format;

use crate::ends::{self, Shape, Target};
use crate::error::Error;
use crate::nbd::Connecting;
use crate::pair::Pair;
pub use crate::pair::{Phase, Progress};
use crate::place::Place;
use crate::transfer::{self, Zeros};
use crate::verify;

/// The longest read or write in bytes: what it costs to hand over does not count.
pub const REQUEST_BYTES: u64 = 1 << 20;

/// What to copy, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The source; only read.
    pub from: Place,
    /// The target.
    pub to: Place,
    /// What is inside a source that is a file; `None`: raw, unless it begins like a qcow2 image.
    pub from_format: Option<Format>,
    /// Directories that what a source stands on may be below, beside its own.
    pub backing_dirs: Vec<PathBuf>,
    /// What the target is to be; only a new file can be qcow2.
    pub to_format: Format,
    /// Bytes of a cluster of a qcow2 target, a power of two in
    /// [`nowait_image::create::CLUSTER_BYTES`]; `None` is 64 KiB.
    pub cluster_bytes: Option<u64>,
    /// Overwrite a file that is not empty, or a block device.
    pub force: bool,
    /// Read both sides again at the end and compare them.
    pub verify: bool,
    /// Connections to each NBD server that allows several, at least 1.
    pub connections: usize,
    /// The directory with the certificates for servers whose URI asks for TLS and names none:
    /// `ca-cert.pem`, and, for servers that want to know their clients, `client-cert.pem` and
    /// `client-key.pem`.
    pub tls_certs: Option<PathBuf>,
    /// Requests in flight, at least 1, each of [`REQUEST_BYTES`] at most; of smaller ones more are.
    pub requests: usize,
    /// Data is searched for zeros in blocks of so many bytes, which are left or made holes; 0 for
    /// not at all.
    pub sparse_bytes: usize,
}

/// What a copy came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Bytes of the source.
    pub size: u64,
    /// Bytes of the target: what is behind the end of the source was left as it was, or is zeros in
    /// a new qcow2 image, whose disk is a multiple of 512 bytes.
    pub target_size: u64,
    /// Bytes that were written.
    pub data: u64,
    /// Bytes that were left or made zero.
    pub zero: u64,
    /// From the first request until everything was durable, and compared.
    pub elapsed: Duration,
}

/// Copies `options.from` to `options.to`. `tell` hears of the progress some times a second; when
/// `stop` is set, the copy ends soon.
///
/// # Errors
/// [`Error::At`] for what is wrong with either side, before anything was changed where it could be
/// seen; [`Error::Interrupted`]. No file has the target's name then, unless it had it before; what
/// was written to a block device or an export stays.
pub fn copy(
    options: &Options,
    stop: &AtomicBool,
    tell: &mut dyn FnMut(Progress),
) -> Result<Report, Error> {
    let Options { from_format, backing_dirs, force, .. } = options;
    let connecting =
        Connecting { connections: options.connections, certificates: options.tls_certs.as_deref() };
    let source = ends::source(&options.from, *from_format, backing_dirs, connecting)?;
    let from = source.facts();
    let shape = Shape { format: options.to_format, cluster_bytes: options.cluster_bytes };
    let target = ends::target(&options.to, &options.from, shape, from.size, *force, connecting)?;
    let Target { port, named, is_zero } = target;
    let to = port.facts();
    let granule = from.granule.max(to.granule);
    let largest = REQUEST_BYTES.min(from.max_bytes).min(to.max_bytes);
    let chunk = (largest & !(granule - 1)).max(granule);
    let block = match options.sparse_bytes {
        0 => 0,
        bytes => bytes.next_multiple_of(granule as usize),
    };
    let begin = Instant::now();
    let mut pair = Pair {
        source,
        target: port,
        size: from.size,
        chunk,
        granule,
        memory: options.requests.max(1) * chunk as usize,
        stop,
        tell,
        told: None,
    };
    let zeros = Zeros { block, target_is_zero: is_zero };
    let counts = transfer::run(&mut pair, zeros)?;
    if options.verify {
        if let Some(port) = named.reopened(&options.to)? {
            pair.target = port;
        }
        verify::run(&mut pair, &options.to)?;
    }
    drop(pair);
    named.finish().map_err(|what| Error::at(&options.to, what))?;
    Ok(Report {
        size: from.size,
        target_size: to.size,
        data: counts.data,
        zero: counts.zero,
        elapsed: begin.elapsed(),
    })
}
