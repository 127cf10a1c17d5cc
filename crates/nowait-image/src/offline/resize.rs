//! Grows or shrinks a disk.
//!
//! Invariant: the bytes that a disk grows by read as zeros, whatever its image or a backing file
//! has there. A kill or a power cut leaves the old size or the new one, and all bytes that both
//! sizes have.

use std::io;

use crate::chain::{Chain, Layer};
use crate::chain_reader::ChainReader;
use crate::error::ImageError;
use crate::formats::format::Format;
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::layout::SECTOR_BYTES;
use crate::offline::editor::Editor;

/// Makes the disk of `chain`, which is open for writing, `size` bytes large; for a qcow2 image
/// rounded up to a multiple of 512. Returns the new size.
///
/// # Errors
/// A refusal where the disk would become smaller and `shrink` is false, where it is a block device,
/// or where the image has features that cannot be maintained here; the errno of a failed system
/// call.
pub fn resize(chain: &Chain, size: u64, shrink: bool) -> Result<u64, ImageError> {
    let top = chain.top();
    let path = top.file.path();
    let size = match top.format() {
        Format::Raw => size,
        Format::Qcow2 => size.next_multiple_of(SECTOR_BYTES),
    };
    if size == 0 {
        return Err(ImageError::refused(path, "a disk needs at least one byte"));
    }
    if size < top.size && !shrink {
        let why = format!(
            "it would become smaller, {size} of {} bytes, and lose what is behind that \
             (if that is meant: --shrink)",
            top.size
        );
        return Err(ImageError::refused(path, why));
    }
    let failed = |error: io::Error| ImageError::os(path, "resize it", &error);
    if top.format() == Format::Raw {
        resize_raw(top, size)?;
    } else if size != top.size {
        let mut editor = Editor::open(top)?;
        if size > top.size {
            grow(&mut editor, chain, 0, size)?;
            editor.finish(false).map_err(failed)?;
        } else {
            shrink_to(&mut editor, top, size).map_err(failed)?;
            editor.finish(true).map_err(failed)?;
        }
    }
    Ok(size)
}

/// Makes a raw image `size` bytes large.
pub(crate) fn resize_raw(layer: &Layer, size: u64) -> Result<(), ImageError> {
    let file = &layer.file;
    let failed = |error: io::Error| ImageError::os(file.path(), "resize it", &error);
    if size == layer.size {
        return Ok(());
    }
    if file.is_block_device() {
        let why = format!("a block device of {} bytes cannot get another size", layer.size);
        return Err(ImageError::refused(file.path(), why));
    }
    file.set_len(size).and_then(|()| file.sync()).map_err(failed)
}

/// Grows the disk of `editor`, which has `above` images above it in `chain`.
pub(crate) fn grow(
    editor: &mut Editor<'_>,
    chain: &Chain,
    above: usize,
    size: u64,
) -> Result<(), ImageError> {
    let Some(layer) = chain.layers().get(above) else { return Ok(()) };
    let failed = |error: io::Error| ImageError::os(layer.file.path(), "resize it", &error);
    let old = editor.size();
    let below = chain.layers().get(above + 1).map_or(0, |below| below.size);
    // No cluster may be allocated there; but other programs do leave clusters behind the end.
    editor.truncate(old).map_err(failed)?;
    editor.make_room(size).map_err(failed)?;
    let cluster = editor.cluster_bytes();
    if let Some(bytes) = last_cluster(editor, chain, above, below)? {
        editor.write_cluster(old / cluster, &bytes).map_err(failed)?;
    }
    zero_tail(editor, layer, old).map_err(failed)?;
    // A backing file longer than the disk was would become visible.
    for index in old.div_ceil(cluster)..size.min(below).div_ceil(cluster) {
        editor.zero_cluster(index, true).map_err(failed)?;
    }
    editor.set_size(size).map_err(failed)
}

/// The contents of the disk's last cluster when the disk continues behind it, if the disk now ends
/// inside the cluster and the cluster cannot be written in place.
fn last_cluster(
    editor: &mut Editor<'_>,
    chain: &Chain,
    above: usize,
    below: u64,
) -> Result<Option<Vec<u8>>, ImageError> {
    let (old, cluster) = (editor.size(), editor.cluster_bytes());
    if old % cluster == 0 {
        return Ok(None);
    }
    let path = chain.top().file.path();
    let found = editor.cluster(old / cluster);
    match found.map_err(|error| ImageError::os(path, "resize it", &error))? {
        Cluster::Data { copied: true, .. } | Cluster::Zero { .. } => return Ok(None),
        Cluster::Unallocated if below <= old => return Ok(None),
        _ => {}
    }
    let mut bytes = vec![0; cluster as usize];
    let (inside, _) = bytes.split_at_mut((old % cluster) as usize);
    ChainReader::below(chain, above)?.read_at(old - old % cluster, inside)?;
    Ok(Some(bytes))
}

/// Zeroes the part behind `size` of the cluster that contains it, if that has data.
fn zero_tail(editor: &mut Editor<'_>, layer: &Layer, size: u64) -> io::Result<()> {
    let cluster = editor.cluster_bytes();
    let inside = size % cluster;
    if inside > 0
        && let Some(host) = editor.in_place(size / cluster)?
    {
        layer.file.zero(host + inside, cluster - inside)?;
    }
    Ok(())
}

fn shrink_to(editor: &mut Editor<'_>, layer: &Layer, size: u64) -> io::Result<()> {
    // The clusters are freed first: if the size shrank before that, a later growth would show them
    // again.
    editor.truncate(size)?;
    zero_tail(editor, layer, size)?;
    editor.set_size(size)
}
