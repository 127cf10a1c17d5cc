//! The internal snapshots of a qcow2 image: their table, and the header of the disk as of one.
//!
//! Invariant: at most 64 MiB of the table are read, and one entry of it is in memory unless all are asked for.
//! Source: QEMU docs/interop/qcow2.txt, "Snapshots".

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;

use crate::error::{ImageError, plain};
use crate::formats::qcow2::header::{Header, be32, be64};
use crate::image_file::ImageFile;

/// The most bytes of a table of snapshots, as in QEMU (block/qcow2.h, `QCOW_MAX_SNAPSHOTS_SIZE`).
/// Beyond it: its snapshots are not listed, read or changed: "cut off, or too long".
const MAX_TABLE_BYTES: u64 = 64 << 20;
const HEAD_BYTES: usize = 40;
/// Bytes of the known part of the extra data: sizes of the VM state and the disk, and a count.
const EXTRA_BYTES: u32 = 24;

/// An entry of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    l1_pos: u64,
    l1_entries: u32,
    pub(crate) id: Vec<u8>,
    pub(crate) name: Vec<u8>,
    /// When it was made: seconds since 1970, and nanoseconds.
    pub(crate) date: (u32, u32),
    /// How long the VM had run, in nanoseconds.
    pub(crate) vm_clock: u64,
    /// Bytes of the VM's state.
    pub(crate) vm_state_bytes: u64,
    /// Bytes of the disk.
    pub(crate) disk_bytes: u64,
    /// Instructions that the VM had run, if it counts them.
    pub(crate) icount: Option<u64>,
}

impl Snapshot {
    /// The entry at byte `at` of `file`, and the position behind it.
    fn read(file: &ImageFile, header: &Header, at: u64) -> io::Result<(Self, u64)> {
        let mut head = [0; HEAD_BYTES];
        file.read_at(at, &mut head)?;
        let extra_bytes = be32(&head, 36);
        let mut extra = vec![0; extra_bytes.min(EXTRA_BYTES) as usize];
        file.read_at(at.saturating_add(HEAD_BYTES as u64), &mut extra)?;
        let names_pos = at.saturating_add(HEAD_BYTES as u64 + u64::from(extra_bytes));
        let (id, name) = (be32(&head, 12) >> 16, be32(&head, 12) & 0xffff);
        let mut names = vec![0; (id + name) as usize];
        file.read_at(names_pos, &mut names)?;
        let end = names_pos.saturating_add(names.len() as u64);
        let name = names.split_off(id as usize);
        let told = |at: usize| (extra.len() >= at + 8).then(|| be64(&extra, at));
        let snapshot = Self {
            l1_pos: be64(&head, 0),
            l1_entries: be32(&head, 8),
            id: names,
            name,
            date: (be32(&head, 16), be32(&head, 20)),
            vm_clock: be64(&head, 24),
            vm_state_bytes: told(0).unwrap_or(u64::from(be32(&head, 32))),
            disk_bytes: told(8).unwrap_or(header.size),
            icount: told(16).filter(|&count| count != u64::MAX),
        };
        Ok((snapshot, end.saturating_add(7) & !7))
    }

    /// Passes each entry of the table in `file` to `sink`.
    fn each(file: &ImageFile, header: &Header, mut sink: impl FnMut(Self)) -> io::Result<()> {
        let mut at = header.snapshots_pos;
        let bytes = file.size()?.min(at.saturating_add(MAX_TABLE_BYTES));
        for _ in 0..header.snapshots {
            let (snapshot, end) = Self::read(file, header, at)?;
            if end > bytes.next_multiple_of(8) {
                let why = "its table of snapshots is cut off, or too long";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            sink(snapshot);
            at = end;
        }
        Ok(())
    }

    /// All snapshots of the image in `file`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for a table that is cut off or too long; the errno of a failed read.
    pub(crate) fn all(file: &ImageFile, header: &Header) -> io::Result<Vec<Self>> {
        let mut all = Vec::new();
        Self::each(file, header, |snapshot| all.push(snapshot))?;
        Ok(all)
    }

    /// The snapshot with this name, or else with this ID.
    fn find(file: &ImageFile, header: &Header, wanted: &OsStr) -> io::Result<Option<Self>> {
        let (mut named, mut numbered) = (None, None);
        Self::each(file, header, |snapshot| {
            if named.is_none() && snapshot.name == wanted.as_bytes() {
                named = Some(snapshot);
            } else if numbered.is_none() && snapshot.id == wanted.as_bytes() {
                numbered = Some(snapshot);
            }
        })?;
        Ok(named.or(numbered))
    }
}

impl Header {
    /// The header of the disk as of the snapshot `wanted`, a name or an ID, of the image in `file`, which has this
    /// header.
    ///
    /// # Errors
    /// There is no such snapshot, or its entry is damaged; the errno of a failed read.
    pub(crate) fn of_snapshot(&self, file: &ImageFile, wanted: &OsStr) -> Result<Self, ImageError> {
        let refused = |why: String| ImageError::refused(file.path(), why);
        let shown = plain(&wanted.to_string_lossy());
        let found = Snapshot::find(file, self, wanted).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => refused(error.to_string()),
            _ => ImageError::os(file.path(), "read its snapshots", &error),
        })?;
        let Some(snapshot) = found else {
            return Err(refused(format!(
                "it has no internal snapshot '{shown}' (nowait info lists those that it has)"
            )));
        };
        let header = Self {
            size: snapshot.disk_bytes,
            l1_pos: snapshot.l1_pos,
            l1_entries: snapshot.l1_entries,
            bitmaps: None,
            has_stale_bitmaps: false,
            is_snapshot: true,
            ..self.clone()
        };
        let checked = header.check_numbers();
        checked.map_err(|why| refused(format!("its snapshot '{shown}' is damaged: {why}")))?;
        Ok(header)
    }
}
