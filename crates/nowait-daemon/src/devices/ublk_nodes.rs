//! The local block devices that exports of a server are.
//!
//! Invariant: an export has at most one; those that were handed over are the running program's, with its numbers. A node
//! that appeared is removed again if another one cannot appear.

use nowait_image::file_in;
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use nowait_server::{AnyExport, UblkDevice, UblkNode, UblkOptions, ublk_stop};
use serde_json::Value;
use tracing::warn;

use crate::config::ServeConfig;
use crate::config::export_spec::NamedExport;
use crate::config::ublk_spec;
use crate::devices::device_kind::DeviceKind;
use crate::disks::open_disk::OpenedDisk;
use crate::error::CliError;
use crate::sandbox::FileAccess;

/// The nodes by the indices of their exports, each with the path of its image. Dropped, it deletes the devices without a
/// node.
#[derive(Default)]
pub(crate) struct UblkNodes {
    by_export: BTreeMap<usize, (PathBuf, UblkNode)>,
}

impl UblkNodes {
    /// Makes the devices of `config` for exports of `all`, or takes over those that wait for a server of their images. If
    /// another program hands over, only those that it has `handed_over` are taken over: indices of exports, and numbers.
    ///
    /// # Errors
    /// There is no driver, no right to it, or a number is taken.
    pub(crate) fn open(
        config: &ServeConfig,
        all: &[OpenedDisk],
        handed_over: Option<&[(usize, u32)]>,
    ) -> Result<Self, CliError> {
        let mut wanted: Vec<(usize, Option<u32>)> = match handed_over {
            Some(nodes) => nodes.iter().map(|(at, id)| (*at, Some(*id))).collect(),
            None => {
                let named: Vec<NamedExport> = all.iter().map(|it| it.named.clone()).collect();
                ublk_spec::assign(&config.ublk, &named)
                    .map_err(CliError::new)?
                    .into_iter()
                    .collect()
            }
        };
        // A device that gets any number must not get one that was given.
        wanted.sort_by_key(|(at, id)| (id.is_none(), *at));
        let mut by_export = BTreeMap::new();
        for (at, id) in wanted {
            let opened =
                all.get(at).ok_or_else(|| CliError::new("the export of a node is missing"))?;
            let node = open(config, opened, id, handed_over.is_some())?;
            by_export.insert(at, (opened.named.image.clone(), node));
        }
        Ok(Self { by_export })
    }

    /// The device of the export of index `at`, if it has one.
    pub(crate) fn device(&self, at: usize) -> Option<Arc<UblkDevice>> {
        self.by_export.get(&at).map(|(_, node)| node.device())
    }

    /// The devices, in the order of their exports.
    fn devices(&self) -> impl Iterator<Item = Arc<UblkDevice>> {
        self.by_export.values().map(|(_, node)| node.device())
    }
}

impl DeviceKind for UblkNodes {
    fn is_empty(&self) -> bool {
        self.by_export.is_empty()
    }

    fn is_local(&self) -> bool {
        true
    }

    fn add_to(&mut self, at: usize, export: AnyExport) -> Result<AnyExport, CliError> {
        Ok(match self.device(at) {
            Some(device) => export.with_device(device),
            None => export,
        })
    }

    fn places(&self, at: usize) -> Vec<String> {
        self.device(at).iter().map(|device| device.node()).collect()
    }

    fn describe(&self, at: usize, export: &mut Value) {
        if let Some(device) = self.device(at) {
            export["node"] = device.node().into();
        }
    }

    fn add_files(&self, files: &mut FileAccess) {
        for device in self.devices() {
            device.paths().into_iter().for_each(|path| files.write(path));
            files.administer();
        }
    }

    /// Nodes that have appeared are removed if one cannot.
    fn start(&self) -> Result<(), CliError> {
        let mut appeared = Vec::new();
        for (image, node) in self.by_export.values() {
            if let Err(error) = node.start() {
                appeared.into_iter().for_each(remove);
                return Err(CliError::at(image, error));
            }
            appeared.extend(Some(node.device()).filter(|device| !device.is_recovered()));
        }
        Ok(())
    }
}

/// Removes a node that no user knows yet.
fn remove(device: Arc<UblkDevice>) {
    if let Err(error) = ublk_stop(device.id(), false) {
        warn!("{error}");
    }
}

/// Makes the block device of number `id` from `opened`, or takes that over.
fn open(
    config: &ServeConfig,
    opened: &OpenedDisk,
    id: Option<u32>,
    is_handed_over: bool,
) -> Result<UblkNode, CliError> {
    let image = &opened.named.image;
    let image_ids = if is_handed_over { Vec::new() } else { image_ids(opened)? };
    let (queues, block_size, zero_copy) = (config.threads(), config.block_size, config.zero_copy());
    let options = UblkOptions { id, queues, image_ids, block_size, zero_copy };
    let node =
        UblkNode::open(&opened.image, options).map_err(|error| CliError::at(image, error))?;
    let (node_bytes, image_bytes) = (node.device().size(), opened.image.size());
    if node_bytes < image_bytes {
        let bytes = image_bytes - node_bytes;
        warn!(
            "{}: its last {bytes} bytes are not a whole block and are not served",
            image.display()
        );
    }
    Ok(node)
}

/// Tell the image and those below it from other local files and devices; never 0.
fn image_ids(opened: &OpenedDisk) -> Result<Vec<u64>, CliError> {
    let image = &opened.named.image;
    let failed = |error: io::Error| CliError::at(image, error);
    let mut ids = vec![image_id(&fs::metadata(file_in(image)).map_err(failed)?)];
    for file in opened.image.held_files() {
        let file = file.try_clone_to_owned().map(File::from).map_err(failed)?;
        ids.push(image_id(&file.metadata().map_err(failed)?));
    }
    Ok(ids)
}

fn image_id(meta: &Metadata) -> u64 {
    let (device, file) = match meta.file_type().is_block_device() {
        true => (meta.rdev(), 0),
        false => (meta.dev(), meta.ino()),
    };
    (device.rotate_left(40) ^ file) | 1 << 63
}
