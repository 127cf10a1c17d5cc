//! A whole copy: opens both endpoints, copies, flushes, compares, and renames a new file to its
//! name.
//!
//! Invariant: a new file gets its name only after every step before has succeeded.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nowait_image::{ChainOptions, Compression, Format, ImageError};

use crate::copy_loop::{Endpoints, Timing};
pub use crate::copy_loop::{Phase, Progress};
use crate::endpoint::{Capabilities, Endpoint};
use crate::error::Error;
use crate::first_bytes::first_bytes;
use crate::increment_target::{self, Increment, IncrementTerms};
use crate::lost_ranges::Lost;
use crate::nbd::Connecting;
use crate::open::{OverwriteOptions, Target, TargetFormat, TargetKind};
use crate::program_disk::{self, CopySource, CopyTarget};
use crate::rescue::Rescue;
use crate::transfer::Zeros;
use crate::{open, transfer, verify};
use nowait_remote::{Location, RemoteOptions};

/// The longest read or write in bytes: long enough that the fixed cost of a request is negligible.
pub const REQUEST_BYTES: u64 = 1 << 20;

/// Source, target and manner of a copy.
#[derive(Clone, Debug)]
pub struct Options {
    /// The source; only read.
    pub from: CopySource,
    /// The target.
    pub to: CopyTarget,
    /// The format of a source file; `None`: raw, unless it begins like a qcow2 image.
    pub from_format: Option<Format>,
    /// Directories that may contain backing files of the source, in addition to the directory of
    /// the image; subdirectories are not included.
    pub backing_dirs: Vec<PathBuf>,
    /// The URLs that may be below the source, exactly as it names them.
    pub backings: Vec<Location>,
    /// The data files of a source that may be opened.
    pub data_files: Vec<PathBuf>,
    /// How sources behind a network are opened, other than NBD exports.
    pub remote: RemoteOptions,
    /// The target's format; only a new file can be qcow2.
    pub to_format: Format,
    /// Whether the user gave the format. If not, a raw file that would begin like another format is
    /// refused: the next program that opens it would mistake it for that format.
    pub to_format_given: bool,
    /// Bytes of a cluster of a qcow2 target, a power of two in
    /// [`nowait_image::create::CLUSTER_BYTES`]; `None` is 64 KiB.
    pub cluster_bytes: Option<u64>,
    /// How the clusters of a qcow2 target are compressed; `None`: not at all.
    pub compression: Option<Compression>,
    /// Copy only what has changed since an earlier copy.
    pub increment: Option<Increment>,
    /// Overwrite a file that is not empty, a block device, or an object.
    pub force: bool,
    /// Overwrite a block device although it is mounted or otherwise in use.
    pub allow_mounted: bool,
    /// Read both sides again at the end and compare them.
    pub verify: bool,
    /// Continue where the source cannot be read: unreadable ranges are zeros in the target and are
    /// listed in [`Report::lost`]. Not with `verify`: a failing source should not be read twice,
    /// and the second read may return other data.
    pub rescue: bool,
    /// Connections to each NBD server that allows several, at least 1.
    pub connections: usize,
    /// The directory with the certificates for servers whose URI asks for TLS and names none:
    /// `ca-cert.pem`, and, for servers that ask for a client certificate, `client-cert.pem` and
    /// `client-key.pem`.
    pub tls_certs: Option<PathBuf>,
    /// Requests of [`REQUEST_BYTES`] in flight, at least 1; smaller requests may be more.
    pub requests: usize,
    /// Data is searched for zeros in blocks of this many bytes, which become holes; 0 disables the
    /// search.
    pub sparse_bytes: usize,
}

impl Options {
    /// A copy of all of `from` into `to`, a raw disk that is not in use, by one connection and one request in flight; zeros
    /// are copied as data.
    #[must_use]
    pub fn new(from: CopySource, to: CopyTarget) -> Self {
        Self {
            from,
            to,
            from_format: None,
            backing_dirs: Vec::new(),
            backings: Vec::new(),
            data_files: Vec::new(),
            remote: RemoteOptions::default(),
            to_format: Format::Raw,
            to_format_given: false,
            cluster_bytes: None,
            compression: None,
            increment: None,
            force: false,
            allow_mounted: false,
            verify: false,
            rescue: false,
            connections: 1,
            tls_certs: None,
            requests: 1,
            sparse_bytes: 0,
        }
    }

    /// How a source file is opened.
    fn chain_options(&self) -> Result<ChainOptions, Error> {
        let backings = nowait_remote::open_backings(&self.backings, &self.remote);
        let failed = |error: ImageError| Error::at(&error.path().display(), error.what());
        Ok(ChainOptions {
            backing_storages: backings.map_err(failed)?,
            format: self.from_format,
            backing_dirs: self.backing_dirs.clone(),
            data_files: self.data_files.clone(),
            ..ChainOptions::default()
        })
    }

    /// The dirty bitmap that tells what is copied.
    fn bitmap(&self) -> Option<&str> {
        self.increment.as_ref()?.changes.bitmap()
    }

    /// How both sides are connected to, if they are exports.
    fn connecting(&self) -> Connecting<'_> {
        let (connections, certificates) = (self.connections, self.tls_certs.as_deref());
        Connecting { connections, certificates, bitmap: None }
    }

    /// The target's format as requested.
    const fn format(&self) -> TargetFormat {
        TargetFormat {
            format: self.to_format,
            given: self.to_format_given,
            cluster_bytes: self.cluster_bytes,
            compression: self.compression,
        }
    }
}

/// The result of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Bytes of the source.
    pub size: u64,
    /// Bytes of the target. Bytes beyond the end of the source are unchanged; in a new qcow2 image,
    /// whose disk size is a multiple of 512 bytes, they are zeros.
    pub target_size: u64,
    /// Bytes that were written.
    pub data: u64,
    /// Bytes that were left or made zero.
    pub zero: u64,
    /// Bytes that have not changed since the earlier copy, of an increment.
    pub unchanged: u64,
    /// Bytes of the earlier copy that were read to find what has changed.
    pub compared: u64,
    /// Ranges that could not be read; empty without [`Options::rescue`].
    pub lost: Lost,
    /// From the first request until everything was durable and, with `verify`, compared.
    pub elapsed: Duration,
}

/// Opens the source.
fn source(options: &Options, connecting: Connecting<'_>) -> Result<Box<dyn Endpoint>, Error> {
    if options.rescue && options.verify {
        return Err(Error::at(&options.from, "what is rescued is not read again to be compared"));
    }
    let has_bitmap = options.bitmap().is_some();
    if has_bitmap && !matches!(options.from, CopySource::At(Location::Nbd(_))) {
        return Err(Error::at(&options.from, "only an NBD export has a dirty bitmap to copy by"));
    }
    let source = match &options.from {
        CopySource::At(location) => {
            open::source(location, options.chain_options()?, &options.remote, connecting)?
        }
        CopySource::Disk(name, disk) => program_disk::source(name, disk.clone())?,
    };
    Ok(if options.rescue { Box::new(Rescue::new(source)) } else { source })
}

/// Opens the target for a disk of `size` bytes.
fn target(options: &Options, size: u64, connecting: Connecting<'_>) -> Result<Target, Error> {
    let format = options.format();
    let location = match &options.to {
        CopyTarget::At(location) => location,
        CopyTarget::Disk(name, disk) => {
            let endpoint = program_disk::target(name, disk, size)?;
            return Ok(Target { endpoint, kind: TargetKind::Disk, is_zero: true });
        }
    };
    match &options.increment {
        Some(increment) => increment_target::target(
            location,
            &IncrementTerms {
                target: &increment.target,
                from: options.from.path(),
                format,
                size,
                backing_dirs: &options.backing_dirs,
                data_files: &options.data_files,
                allow_mounted: options.allow_mounted,
                connecting,
            },
        ),
        None => {
            let overwrite =
                OverwriteOptions { force: options.force, mounted: options.allow_mounted };
            open::target(location, options.from.path(), format, size, overwrite, connecting)
        }
    }
}

/// The failure `error`, after which what was written to `target` is dropped.
fn abandoned(error: Error, target: &mut dyn Endpoint) -> Error {
    match target.abandon() {
        Ok(()) => error,
        Err(left) => error.with_remains(&left),
    }
}

/// The alignment of pieces, and the longest request, in bytes.
fn units(from: Capabilities, to: Capabilities) -> (u64, u64) {
    let alignment = from.alignment.max(to.alignment);
    let largest = REQUEST_BYTES.min(from.max_bytes).min(to.max_bytes);
    (alignment, (largest & !(alignment - 1)).max(alignment))
}

/// Copies `options.from` to `options.to`. `report_progress` is called about ten times a second;
/// when `cancel` is set, the copy ends within about 0.2 s.
///
/// # Errors
/// [`Error::At`] for a failure on either side; [`Error::Interrupted`] when `cancel` was set. A file
/// or an object with the target's name is then as it was before the copy, or absent; an object that
/// was found to differ with `verify` is there. [`Error::WrittenInPart`]
/// instead of either, when a block device or an export had been written to.
pub fn copy(
    options: &Options,
    cancel: &AtomicBool,
    report_progress: &mut dyn FnMut(Progress),
) -> Result<Report, Error> {
    let connecting = options.connecting();
    let bitmap = options.bitmap();
    let mut source = source(options, Connecting { bitmap, ..connecting })?;
    let from = source.capabilities();
    let format = options.format();
    // Clean bytes are maybe not served, and the target of an increment is an image already.
    if options.increment.is_none() {
        let first = first_bytes(&mut *source, cancel)?;
        format.check_signature(options.to.path(), &first)?;
    }
    let Target { endpoint, kind, is_zero } = target(options, from.size, connecting)?;
    let to = endpoint.capabilities();
    let (alignment, request_bytes) = units(from, to);
    let zero_block = options.sparse_bytes.next_multiple_of(alignment as usize);
    let begin = Instant::now();
    let mut endpoints = Endpoints {
        source,
        target: endpoint,
        size: from.size,
        request_bytes,
        alignment,
        memory: options.requests.max(1) * request_bytes as usize,
        cancel,
        report_progress,
        timing: Timing::default(),
        has_written: false,
        is_incremental: bitmap.is_some(),
        compares: options.increment.is_some() && bitmap.is_none(),
    };
    let zeros = Zeros { block: zero_block, target_is_zero: is_zero };
    let is_in_place = matches!(kind, TargetKind::InPlace);
    let counts = match transfer::run(&mut endpoints, zeros) {
        Err(error) if is_in_place && endpoints.has_written => return Err(error.amid(&options.to)),
        Err(error) => return Err(abandoned(error, &mut *endpoints.target)),
        Ok(counts) => counts,
    };
    if options.verify {
        if let CopyTarget::At(location) = &options.to
            && let Some(endpoint) = kind.reopened(location)?
        {
            endpoints.target = endpoint;
        }
        match verify::run(&mut endpoints, &options.to) {
            Err(Error::Interrupted) if matches!(kind, TargetKind::InPlace | TargetKind::Object) => {
                let what = "interrupted: the copy is complete, but not compared to its end";
                return Err(Error::at(&options.to, what));
            }
            ended => ended?,
        }
    }
    let lost = endpoints.source.lost();
    drop(endpoints);
    kind.finish().map_err(|what| Error::at(&options.to, what))?;
    Ok(Report {
        size: from.size,
        target_size: to.size,
        data: counts.data,
        zero: counts.zero,
        unchanged: counts.unchanged,
        compared: counts.compared,
        lost,
        elapsed: begin.elapsed(),
    })
}
