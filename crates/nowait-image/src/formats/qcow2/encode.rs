//! Encodes the header of a qcow2 image, the inverse of [`Header::parse`].
//!
//! Invariant: the bytes hold only fields of the header, and no extension but the name of a data file, the state of the
//! disk in it and the format of the backing file. Source: QEMU docs/interop/qcow2.txt, "Header".

use std::os::unix::ffi::OsStrExt;

use crate::formats::decompress::Compression;
use crate::formats::qcow2::header::{
    EXTENSION_BACKING_FORMAT, EXTENSION_DATA_FILE, EXTENSION_DISK_STATE, Header, MAGIC, V3_BYTES,
};

/// The fields of version 3, and padding to a multiple of 8.
const FIELDS_BYTES: usize = 112;
const EXTENSION_HEAD_BYTES: usize = 8;

/// `header` as bytes, from the beginning of the file on.
pub(crate) fn encode(header: &Header) -> Vec<u8> {
    let mut bytes = vec![0; FIELDS_BYTES];
    // The field for the compression is there where it is needed.
    let (len, compression) = match header.compression {
        Compression::Deflate => (V3_BYTES, 0),
        Compression::Zstd => (FIELDS_BYTES, 1),
        Compression::Unknown(number) => (FIELDS_BYTES, number),
    };
    let mut put = |at: usize, value: &[u8]| {
        if let Some(field) = bytes.get_mut(at..at + value.len()) {
            field.copy_from_slice(value);
        }
    };
    put(0, &MAGIC);
    put(4, &header.version.to_be_bytes());
    put(20, &header.cluster_bits.to_be_bytes());
    put(24, &header.size.to_be_bytes());
    put(36, &header.l1_entries.to_be_bytes());
    put(40, &header.l1_pos.to_be_bytes());
    put(48, &header.refcount_table_pos.to_be_bytes());
    put(56, &header.refcount_table_clusters.to_be_bytes());
    put(60, &header.snapshots.to_be_bytes());
    put(64, &header.snapshots_pos.to_be_bytes());
    if header.version >= 3 {
        put(72, &header.incompatible.to_be_bytes());
        put(88, &header.autoclear.to_be_bytes());
        put(96, &header.refcount_order.to_be_bytes());
        put(100, &(len as u32).to_be_bytes());
        put(V3_BYTES, &[compression]);
    }
    let format = header.backing.as_ref().and_then(|backing| backing.format.as_deref());
    let extensions = [
        (EXTENSION_BACKING_FORMAT, format.map(str::as_bytes)),
        (EXTENSION_DISK_STATE, header.disk_state.as_ref().map(|state| &state[..])),
        (EXTENSION_DATA_FILE, header.data_file.as_ref().map(|name| name.as_bytes())),
    ];
    if header.backing.is_some() || extensions.iter().any(|(_, data)| data.is_some()) {
        // The extensions begin behind the fields, without the padding.
        bytes.truncate(len);
        for (kind, data) in extensions {
            let Some(data) = data else { continue };
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        bytes.extend([0; EXTENSION_HEAD_BYTES]);
    }
    if let Some(backing) = &header.backing {
        let (pos, name) = (bytes.len() as u64, backing.name.as_bytes());
        bytes.extend(name);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(8, &pos.to_be_bytes());
        put(16, &(name.len() as u32).to_be_bytes());
    }
    bytes
}
