//! Grows or shrinks the disk of a qcow2 image.
//!
//! Invariant: the bytes that a disk grows by read as zeros, whatever its image or a backing file
//! has there. A kill or a power cut leaves the old size or the new one, and all bytes that both
//! sizes have.

use std::io;

use crate::error::ImageError;
use crate::formats::chain_reader::ChainReader;
use crate::formats::layer::Layer;
use crate::formats::qcow2::bitmap_editor::change_bitmaps;
use crate::formats::qcow2::editor::{Editor, check_editable};
use crate::formats::qcow2::entries::Cluster;

/// Makes the disk of the first of `layers`, which is open for writing, `size` bytes large.
///
/// # Errors
/// A refusal of an image with features that cannot be maintained here; the errno of a failed system
/// call.
pub(crate) fn resize(layers: &[Layer], size: u64) -> Result<(), ImageError> {
    let Some(top) = layers.first() else { return Ok(()) };
    let failed = |error: io::Error| ImageError::os(top.file.path(), "resize it", &error);
    check_editable(top)?;
    // A bitmap with more bits than the disk needs is valid, one with fewer is not.
    change_bitmaps(&top.file, |bitmaps| bitmaps.fit(size.max(top.size)))?;
    let mut editor = Editor::open(top)?;
    if size > top.size {
        grow(&mut editor, layers, size)?;
        editor.finish(false).map_err(failed)
    } else {
        shrink_to(&mut editor, top, size).map_err(failed)?;
        editor.finish(true).map_err(failed)?;
        change_bitmaps(&top.file, |bitmaps| bitmaps.trim(size))
    }
}

/// Grows the disk of `editor`, the image of the first of `layers`.
pub(crate) fn grow(editor: &mut Editor<'_>, layers: &[Layer], size: u64) -> Result<(), ImageError> {
    let Some(layer) = layers.first() else { return Ok(()) };
    let failed = |error: io::Error| ImageError::os(layer.file.path(), "resize it", &error);
    let old = editor.size();
    let below = layers.get(1).map_or(0, |below| below.size);
    // No cluster may be allocated there; but other programs do leave clusters behind the end.
    editor.truncate(old).map_err(failed)?;
    editor.make_room(size).map_err(failed)?;
    let cluster = editor.cluster_bytes();
    if let Some(bytes) = last_cluster(editor, layers, layer, below)? {
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
    layers: &[Layer],
    layer: &Layer,
    below: u64,
) -> Result<Option<Vec<u8>>, ImageError> {
    let (old, cluster) = (editor.size(), editor.cluster_bytes());
    if old % cluster == 0 {
        return Ok(None);
    }
    let path = layer.file.path();
    let found = editor.cluster(old / cluster);
    match found.map_err(|error| ImageError::os(path, "resize it", &error))? {
        Cluster::Data { copied: true, .. } | Cluster::Zero { .. } => return Ok(None),
        Cluster::Unallocated if below <= old => return Ok(None),
        _ => {}
    }
    let mut bytes = vec![0; cluster as usize];
    let (inside, _) = bytes.split_at_mut((old % cluster) as usize);
    ChainReader::new(layers)?.read_at(old - old % cluster, inside)?;
    Ok(Some(bytes))
}

/// Zeroes the part behind `size` of the cluster that contains it, if that has data.
fn zero_tail(editor: &mut Editor<'_>, layer: &Layer, size: u64) -> io::Result<()> {
    let cluster = editor.cluster_bytes();
    let inside = size % cluster;
    if inside > 0
        && let Some(host) = editor.exclusive_host(size / cluster)?
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
