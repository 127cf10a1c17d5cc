//! A qcow2 image in use: served and written to, with all that it stands on.
//!
//! Invariant: a power cut at any moment leaves the image as `qemu-img check` accepts it, leaked
//! clusters apart, and with all that was flushed; nothing below the image is ever written to.
//! Knows: chain, error, header, host, tables, and the modules here, which are listed in the order
//! in which they know each other. Known by: the command.

mod wait;
mod parts;
mod medium;
mod known;
mod overlay;
mod counts;
mod meta;
mod store;
mod layers;
mod busy;
mod image;
mod write;
#[cfg(feature = "sim")]
mod simulated;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread::JoinHandle;

use nowait::{Alignment, Direct, Disk, Error, OpenOptions, Storage};

use crate::chain::{Chain, Content, Layer};
use crate::error::ImageError;
use crate::header::Header;
use crate::host::HostFile;
use crate::tables::read_table;

pub use image::Qcow2;
#[cfg(feature = "sim")]
pub use simulated::{new_simulated, open_simulated};

use counts::Counts;
use known::Known;
use layers::{Below, Kind, Layers};
use medium::Medium;
use meta::Meta;
use overlay::Overlay;
use store::Store;

/// Metadata is read and written in blocks of so many bytes, of a cluster if that is smaller, and
/// of what direct I/O asks for if that is larger.
const BLOCK_BYTES: u64 = 4096;

/// How an image is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeOptions {
    /// Whether the image may be written to; then its chain was opened for that.
    pub writable: bool,
    /// Whether the page cache is bypassed, for all files of the chain alike.
    pub direct: Direct,
    /// Whether it is remembered where the bytes are ([`nowait::Config::hint`]).
    pub hint: bool,
}

/// What keeps an image in order while it is served: the locks on its files, and a thread that
/// writes metadata which nobody asks to flush. To be dropped when nothing is asked of it any more.
pub struct Keeper {
    /// The locks end with it.
    chain: Chain,
    store: Arc<Store>,
    writable: bool,
    cluster_bytes: u64,
    /// None in a simulation.
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Flushes, and gives back the space that the image does not need any more. Nothing may be in
    /// flight. What is not closed so is in order too, but may have leaked clusters.
    ///
    /// # Errors
    /// What writing said.
    pub fn close(mut self) -> Result<(), Error> {
        self.end_thread();
        if self.writable {
            self.store.flush()?;
            self.store.tidy(self.cluster_bytes)?;
        }
        Ok(())
    }

    fn end_thread(&mut self) {
        self.store.let_go();
        if let Some(thread) = self.thread.take() {
            // It does nothing that panics; if it did, it has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.end_thread();
    }
}

/// Opens the image on top of `chain`, which is qcow2, to be served.
///
/// # Errors
/// What the system said when a file was opened or read; that direct I/O was asked for and is not
/// possible; that it is not qcow2.
pub fn open(chain: Chain, options: ServeOptions) -> Result<(Disk<Qcow2>, Keeper), ImageError> {
    let Opened { top, below, size, map, mut keeper } = open_all(chain, options)?;
    let disk = Disk::mapped(top, below, size, !options.writable, map);
    if options.writable {
        let failed = |e| ImageError::os(keeper.chain.top().file.path(), "serve", &e);
        keeper.thread = Some(keeper.store.keep().map_err(failed)?);
    }
    Ok((disk, keeper))
}

/// What a disk is made of, all open.
pub struct Opened {
    /// The file with the image's own data.
    pub top: Storage,
    /// The other files that extents may lie in, by [`nowait::Extent::file`] from 1 on.
    pub below: Vec<Storage>,
    /// Bytes of the disk.
    pub size: u64,
    /// Where its bytes are.
    pub map: Qcow2,
    /// What keeps it in order, without a thread.
    pub keeper: Keeper,
}

fn open_all(chain: Chain, options: ServeOptions) -> Result<Opened, ImageError> {
    let image = chain.top();
    let direct = agree_on_direct(&chain, options)?;
    let options = ServeOptions { direct, ..options };
    let ServeOptions { writable, .. } = options;
    let (map, store) = open_map(&chain, options)?;
    let (size, cluster_bytes) = (image.size, image.header().map_or(1, Header::cluster_bytes));
    let top = storage_of(image.data_file(), !writable, direct)?;
    let below = files_below(&chain).map(|layer| storage_of(layer.data_file(), true, direct));
    let below = below.collect::<Result<_, _>>()?;
    let keeper = Keeper { chain, store, writable, cluster_bytes, thread: None };
    Ok(Opened { top, below, size, map, keeper })
}

/// The map of the image on top of `chain`, and what is behind it.
fn open_map(chain: &Chain, options: ServeOptions) -> Result<(Qcow2, Arc<Store>), ImageError> {
    let top = chain.top();
    let Content::Qcow2 { header, .. } = &top.content else {
        return Err(ImageError::refused(top.file.path(), "it is no qcow2 image"));
    };
    let store = Arc::new(open_store(top, header, options)?);
    let mut below = Vec::new();
    let mut shift = header.cluster_bits;
    for layer in files_below(chain) {
        below.push(open_below(layer, options)?);
        shift = shift.min(layer.header().map_or(shift, |header| header.cluster_bits));
    }
    let known = Known::new(header.size, shift, options.hint);
    let layers = Layers::new(store.clone(), Header::clone(header), below);
    Ok((Qcow2::new(layers, known), store))
}

/// The images below the top one, up to one that is empty: below that nothing can be seen.
fn files_below(chain: &Chain) -> impl Iterator<Item = &Layer> {
    chain.layers().iter().skip(1).take_while(|layer| layer.size > 0)
}

/// Whether all files of the chain are opened for direct I/O: all of them, or none. It is possible
/// where no cluster is smaller than the blocks that it asks for.
fn agree_on_direct(chain: &Chain, options: ServeOptions) -> Result<Direct, ImageError> {
    if options.direct == Direct::Off {
        return Ok(Direct::Off);
    }
    let mut smallest = u64::MAX;
    let mut block = 1;
    for layer in std::iter::once(chain.top()).chain(files_below(chain)) {
        smallest = smallest.min(layer.header().map_or(u64::MAX, Header::cluster_bytes));
        for file in [&layer.file, layer.data_file()] {
            let align = storage_of(file, true, options.direct)?.alignment();
            if align == Alignment::NONE {
                return Ok(Direct::Off);
            }
            block = block.max(u64::from(align.offset));
        }
    }
    match (block <= smallest, options.direct) {
        (true, direct) => Ok(direct),
        (false, Direct::On) => {
            let what = format!(
                "direct I/O needs clusters of at least {block} bytes, and it has such of {smallest} \
                 (try --direct auto)"
            );
            Err(ImageError::refused(chain.top().file.path(), what))
        }
        (false, _) => Ok(Direct::Off),
    }
}

/// Opens `file` once more, to be served from.
fn storage_of(file: &HostFile, read_only: bool, direct: Direct) -> Result<Storage, ImageError> {
    let path = file.path();
    let os = |error: &std::io::Error| ImageError::os(path, "open", error);
    #[cfg(feature = "sim")]
    if let Some(file) = file.as_simulated() {
        return file.open(read_only, direct).map_err(|error| os(&error.into()));
    }
    let options = OpenOptions { read_only, direct, no_hint: false };
    let storage = Storage::open(path, options).map_err(|error| match error.errno() {
        libc::EOPNOTSUPP => {
            ImageError::refused(path, "its file system does no direct I/O (try --direct auto)")
        }
        libc::ENODATA => ImageError::refused(path, "it is empty"),
        _ => os(&error.into()),
    })?;
    let opened = rustix::fs::fstat(storage.lock_fd()).map_err(|error| os(&error.into()))?;
    let locked = rustix::fs::fstat(file.fd()).map_err(|error| os(&error.into()))?;
    if (opened.st_dev, opened.st_ino) != (locked.st_dev, locked.st_ino) {
        return Err(ImageError::refused(path, "another file has taken its place"));
    }
    Ok(storage)
}

fn open_store(layer: &Layer, header: &Header, options: ServeOptions) -> Result<Store, ImageError> {
    let file = &layer.file;
    let ServeOptions { writable, direct, .. } = options;
    let data = Medium::new(storage_of(layer.data_file(), !writable, direct)?);
    let separate = match header.has_data_file() {
        true => Some(Medium::new(storage_of(file, !writable, direct)?)),
        false => None,
    };
    store_on(file, header, data, separate, writable)
}

/// The metadata that `file` has, which goes to `separate`, or `data` if that is it.
fn store_on(
    file: &HostFile,
    header: &Header,
    data: Medium,
    separate: Option<Medium>,
    writable: bool,
) -> Result<Store, ImageError> {
    let failed = |error: std::io::Error| ImageError::os(file.path(), "read its tables", &error);
    if writable && let Some(autoclear) = header.autoclear_to_write() {
        file.write_at(Header::AUTOCLEAR_AT, &autoclear.to_be_bytes()).map_err(failed)?;
        file.sync().map_err(failed)?;
    }
    let bytes = file.size().map_err(failed)?;
    let l1 = read_table(file, header.l1_pos, u64::from(header.l1_entries)).map_err(failed)?;
    let counts = match writable {
        true => {
            let (pos, entries) = (header.refcount_table_pos, header.refcount_table_entries());
            let table = read_table(file, pos, entries).map_err(failed)?;
            Some(Counts::new(header, table, bytes))
        }
        false => None,
    };
    let direct_block = separate.as_ref().unwrap_or(&data).block();
    let block = BLOCK_BYTES.min(header.cluster_bytes()).max(direct_block);
    let meta = Meta::new(header.clone(), Overlay::new(block), l1, counts, bytes);
    Ok(Store::new(meta, data, separate, bytes))
}

fn open_below(layer: &Layer, options: ServeOptions) -> Result<Below, ImageError> {
    let file = layer.data_file();
    let medium = Medium::new(storage_of(file, true, options.direct)?);
    let file_bytes = medium.storage().size();
    let kind = match &layer.content {
        Content::Raw => Kind::Raw,
        Content::Qcow2 { header, .. } => {
            Kind::Qcow2 { header: header.clone(), host: layer.file.clone() }
        }
    };
    Ok(Below { kind, medium, size: layer.size, file_bytes })
}
