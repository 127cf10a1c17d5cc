//! The map of a qcow2 image: which clusters are data, zeros or unallocated, and at which position.
//!
//! Invariant: the answers are those of `qemu-img map`.

use std::io;

use crate::error::ImageError;
use crate::formats::driver::{LayerMap, Status};
use crate::formats::layer::Layer;
use crate::formats::qcow2::content::header_of;
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::Tables;
use crate::formats::qcow2::refcounts::Refcounts;
use crate::formats::raw::file_status;
use crate::image_file::ImageFile;

/// One image, prepared for lookups.
struct ClusterMap<'a> {
    layer: &'a Layer,
    header: &'a Header,
    tables: Tables<'a>,
    /// Whether data clusters may be holes of the file: the image was preallocated.
    preallocated: bool,
}

/// Prepares the image of `layer`, which is qcow2, for lookups.
///
/// # Errors
/// Damage in the metadata; the errno of a failed read.
pub(crate) fn open(layer: &Layer) -> Result<Box<dyn LayerMap + '_>, ImageError> {
    let header = header_of(layer)?;
    let tables = Tables::read(&layer.file, header)?;
    let preallocated = is_preallocated(&layer.file, header);
    let preallocated = preallocated.map_err(|e| ImageError::os(layer.file.path(), "read", &e))?;
    Ok(Box::new(ClusterMap { layer, header, tables, preallocated }))
}

impl LayerMap for ClusterMap<'_> {
    fn size(&self) -> u64 {
        self.layer.size
    }

    fn status(&mut self, pos: u64, len: u64) -> Result<Status, ImageError> {
        let (cluster, len) = self.tables.lookup(pos, len)?;
        let inside = pos % self.header.unit_bytes();
        let status = Status { len, data: false, zero: false, offset: None, file: 0 };
        match cluster {
            Cluster::Unallocated | Cluster::Mixed { .. } => Ok(status),
            Cluster::Reserved { host, .. } => Ok(Status { offset: Some(host + inside), ..status }),
            Cluster::Compressed { .. } => Ok(Status { data: true, ..status }),
            Cluster::Zero { host, .. } => {
                Ok(Status { zero: true, offset: host.map(|host| host + inside), ..status })
            }
            Cluster::Data { host, .. } if self.preallocated => {
                let run = file_status(self.layer.data_file(), host + inside, len)?;
                Ok(Status { data: true, zero: run.zero, offset: Some(host + inside), ..run })
            }
            Cluster::Data { host, .. } => {
                Ok(Status { data: true, offset: Some(host + inside), ..status })
            }
        }
    }
}

/// Whether the image has clearly more clusters in use than its file has space: then its data
/// clusters may be holes. The threshold is QEMU's (block/qcow2-refcount.c,
/// `qcow2_detect_metadata_preallocation`), so that the maps agree.
fn is_preallocated(file: &ImageFile, header: &Header) -> io::Result<bool> {
    let allocated = file.allocated()? >> header.cluster_bits;
    let bound = (allocated * 10 / 9).max(allocated + 2);
    let clusters = file.size()?.div_ceil(header.cluster_bytes());
    let mut refcounts = Refcounts::read(file, header)?;
    let mut in_use = 0;
    for cluster in 0..clusters {
        in_use += u64::from(refcounts.of(cluster)? != 0);
        if in_use >= bound {
            return Ok(true);
        }
    }
    Ok(false)
}
