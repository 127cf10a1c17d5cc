//! `nowait info`: describes an image and how it would be served.
//!
//! Invariant: the image is opened for reading only and not locked, so that it can be inspected
//! while it is served; the keys of the JSON object are stable.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nowait::internal::RegisteredMemory;
use nowait_image::{Format, ImageError, ImageFile, ImageInfo, Signature, snapshot_in};
use nowait_remote::Location;
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::args::info_args::InfoArgs;
use crate::commands::info_remote;
use crate::header_lines::header_lines;
use crate::output;
use nowait_daemon::error::{CliError, open_message, os_message, plain};
use nowait_daemon::size::human;
use nowait_daemon::summary;

/// The unit of `st_blocks`, whatever the file system's own block size (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    RegularFile,
    BlockDevice,
}

/// The layout of a file by SEEK_DATA and SEEK_HOLE, from one pass over it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Layout {
    data_extents: u64,
    data_bytes: u64,
    hole_bytes: u64,
}

enum Direct {
    Possible(nowait::Alignment),
    /// With the reason.
    Impossible(String),
}

enum Queue {
    /// With the buffer memory that it may register; `None` without a limit.
    Uring(Option<usize>),
    /// With the reason why not `Uring`.
    Threads(String),
}

struct Facts {
    kind: Kind,
    size_bytes: u64,
    /// `None` for a block device, which does not report it.
    allocated_bytes: Option<u64>,
    /// `None` where the file system or the device does not report it.
    layout: Option<Layout>,
    direct: Direct,
    queue: Queue,
    /// The signature at its start.
    signature: Option<Signature>,
    /// Contents of its header, if the format has one.
    header: Option<ImageInfo>,
}

pub(crate) fn run(args: &InfoArgs) -> Result<(), CliError> {
    let location = Location::parse(&args.image.clone().into());
    let location = location.map_err(|error| CliError::at(&args.image, error))?;
    if location.path().is_none() {
        return info_remote::run(args, &location);
    }
    let facts = gather(&args.image, args.format)?;
    let text = if args.json {
        format!("{}\n", in_json(&args.image, &facts))
    } else {
        in_words(&args.image, &facts)
    };
    output::print(text)
}

fn gather(image: &Path, format: Option<Format>) -> Result<Facts, CliError> {
    let (file, snapshot) = snapshot_in(image).unzip();
    let image = file.as_deref().unwrap_or(image);
    let cannot =
        |doing: &str, error: io::Error| CliError::at(image, open_message(image, doing, &error));
    // stat(2) comes before the open: opening a pipe would block, opening a tape would rewind it.
    let stat = fs::metadata(image).map_err(|error| cannot("open", error))?;
    let kind = match stat.file_type() {
        t if t.is_file() => Kind::RegularFile,
        t if t.is_block_device() => Kind::BlockDevice,
        _ => {
            return Err(CliError::at(image, "neither a regular file nor a block device"));
        }
    };
    let file = File::open(image).map_err(|error| cannot("open", error))?;
    let failed = |error: ImageError| CliError::of_image(&error);
    let host = ImageFile::open(image, false).map_err(failed)?;
    let signature = Signature::probe(&host).ok().flatten();
    let format = format.map_or_else(|| Format::probe(&host), Ok).map_err(failed)?;
    let header = format.info(&host, image, snapshot.as_deref()).map_err(failed)?;
    let stat = file.metadata().map_err(|error| cannot("look at it", error))?;
    // Unlike st_size, lseek(2) with SEEK_END is right for block devices, too.
    let size_bytes = rustix::fs::seek(&file, SeekFrom::End(0))
        .map_err(|errno| cannot("find its size", errno.into()))?;
    Ok(Facts {
        kind,
        size_bytes,
        allocated_bytes: (kind == Kind::RegularFile).then(|| stat.blocks() * STAT_BLOCK_BYTES),
        layout: layout(file.as_fd(), size_bytes),
        signature,
        header,
        queue: queue(),
        // Last, because it leaves O_DIRECT set.
        direct: direct(file.as_fd()),
    })
}

fn layout(file: BorrowedFd<'_>, size_bytes: u64) -> Option<Layout> {
    let mut found = Layout::default();
    let mut end = 0;
    while end < size_bytes {
        let start = match rustix::fs::seek(file, SeekFrom::Data(end)) {
            Ok(start) => start.clamp(end, size_bytes),
            Err(Errno::NXIO) => size_bytes,
            Err(_) => return None,
        };
        found.hole_bytes += start - end;
        if start == size_bytes {
            break;
        }
        end = rustix::fs::seek(file, SeekFrom::Hole(start)).ok()?.min(size_bytes);
        // The file may lose the data between the two calls; then there is a hole at `start`.
        if end > start {
            found.data_extents += 1;
            found.data_bytes += end - start;
        } else {
            end = start + 1;
            found.hole_bytes += 1;
        }
    }
    Some(found)
}

fn direct(file: BorrowedFd<'_>) -> Direct {
    let set = rustix::fs::fcntl_getfl(file)
        .and_then(|flags| rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT));
    match set {
        Err(Errno::INVAL) => Direct::Impossible("the file system refuses O_DIRECT".into()),
        Err(errno) => Direct::Impossible(format!("O_DIRECT: {}", os_message(&errno.into()))),
        Ok(()) => match nowait::Alignment::of(file) {
            Ok(alignment) => Direct::Possible(alignment),
            Err(error) if error.errno() == Errno::OPNOTSUPP.raw_os_error() => {
                Direct::Impossible("the file system does no direct I/O on this file".into())
            }
            Err(error) => Direct::Impossible(error.to_string()),
        },
    }
}

/// The queue that `serve` would use, found in the same way: by creating a ring.
fn queue() -> Queue {
    let Err(error) = nowait::Uring::new() else {
        return Queue::Uring(RegisteredMemory::of_this_process().limit_bytes);
    };
    Queue::Threads(nowait::Uring::refusal(error))
}

impl Kind {
    fn key(self) -> &'static str {
        match self {
            Self::RegularFile => "regular_file",
            Self::BlockDevice => "block_device",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::RegularFile => "regular file",
            Self::BlockDevice => "block device",
        }
    }
}

impl Direct {
    fn alignment(&self) -> Option<&nowait::Alignment> {
        match self {
            Self::Possible(alignment) => Some(alignment),
            Self::Impossible(_) => None,
        }
    }

    fn why(&self) -> &str {
        match self {
            Self::Possible(_) => "O_DIRECT works here",
            Self::Impossible(why) => why,
        }
    }
}

impl Queue {
    fn name(&self) -> &'static str {
        match self {
            Self::Uring(_) => "uring",
            Self::Threads(_) => "threads",
        }
    }

    fn why(&self) -> &str {
        match self {
            Self::Uring(_) => "io_uring works here",
            Self::Threads(why) => why,
        }
    }
}

impl Queue {
    /// Bytes of buffers that it may register; `None` without a limit, and without a ring.
    fn registered_limit(&self) -> Option<usize> {
        match self {
            Self::Uring(limit) => *limit,
            Self::Threads(_) => None,
        }
    }

    fn registered(&self) -> Option<String> {
        match self {
            Self::Uring(_) => Some(summary::registrable()),
            Self::Threads(_) => None,
        }
    }
}

/// The object of `--json`. Unknown values are null; no key is ever left out.
fn in_json(image: &Path, facts: &Facts) -> Value {
    let alignment = facts.direct.alignment();
    let mut object = json!({
        "filename": image.to_string_lossy(),
        "format": facts.header.as_ref().map_or("raw", |header| header.format.name()),
        "virtual-size": facts.size_bytes,
        "actual-size": facts.allocated_bytes.unwrap_or(0),
        "dirty-flag": false,
        "image": image.to_string_lossy(),
        "kind": facts.kind.key(),
        "size_bytes": facts.size_bytes,
        "allocated_bytes": facts.allocated_bytes,
        "data_extents": facts.layout.map(|l| l.data_extents),
        "data_bytes": facts.layout.map(|l| l.data_bytes),
        "hole_bytes": facts.layout.map(|l| l.hole_bytes),
        "direct_io": alignment.is_some(),
        "direct_io_reason": facts.direct.why(),
        "memory_alignment_bytes": alignment.map(|a| a.memory),
        "offset_alignment_bytes": alignment.map(|a| a.offset),
        "read_offset_alignment_bytes": alignment.map(|a| a.read_offset),
        "queue": facts.queue.name(),
        "queue_reason": facts.queue.why(),
        "registered_bytes_limit": facts.queue.registered_limit(),
        "qcow2_header": facts.signature.is_some_and(Signature::is_qcow2),
    });
    if let (Some(header), Value::Object(object)) = (&facts.header, &mut object) {
        object.extend(header.json.clone());
    }
    object
}

fn in_words(image: &Path, facts: &Facts) -> String {
    let allocated = facts.allocated_bytes.map_or("not reported by the device".into(), human);
    let (data, holes) = match facts.layout {
        Some(l) => {
            let extents = if l.data_extents == 1 { "extent" } else { "extents" };
            (
                format!("{} in {} {extents}", human(l.data_bytes), l.data_extents),
                human(l.hole_bytes),
            )
        }
        None => ("not told".into(), "not told".into()),
    };
    let alignment = facts.direct.alignment().map_or("none needed".into(), |a| {
        let nowait::Alignment { memory, offset, read_offset, .. } = a;
        format!("memory {memory}, offset {offset}, offset of reads {read_offset} bytes")
    });
    let possible = if facts.direct.alignment().is_some() { "yes" } else { "no" };
    let mut lines = vec![
        ("image", plain(&image.display().to_string())),
        ("kind", facts.kind.words().to_owned()),
    ];
    match &facts.header {
        Some(header) => {
            lines.extend(header_lines(header, facts.size_bytes, allocated));
        }
        None => lines.extend([
            ("format", "raw".to_owned()),
            ("virtual size", human(facts.size_bytes)),
            ("disk size", allocated),
        ]),
    }
    lines.extend([
        ("data", data),
        ("holes", holes),
        ("direct I/O", format!("{possible}, {}", facts.direct.why())),
        ("alignment", alignment),
        ("queue", format!("{}, {}", facts.queue.name(), facts.queue.why())),
    ]);
    lines.extend(facts.queue.registered().map(|words| ("registered", words)));
    let note = facts.header.as_ref().and_then(|header| header.note.clone());
    lines.extend(note.map(|why| ("note", why)));
    if let (Some(signature), None) = (facts.signature, &facts.header) {
        lines.push(("note", format!("begins like {}, but is opened as raw", signature.words())));
    }
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:<14}{value}", format!("{name}:"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn image(bytes: u64) -> (tempfile::TempDir, PathBuf, File) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let file = File::create_new(&path).unwrap();
        file.set_len(bytes).unwrap();
        (directory, path, file)
    }

    fn facts_of(path: &Path) -> Facts {
        gather(path, None).map_err(|error| error.to_string()).unwrap()
    }

    #[test]
    fn the_json_object_has_these_keys_and_no_others() {
        let (_directory, path, _file) = image(MIB);
        let object = in_json(&path, &facts_of(&path));
        let mut keys: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        let expected = [
            "actual-size",
            "allocated_bytes",
            "data_bytes",
            "data_extents",
            "direct_io",
            "direct_io_reason",
            "dirty-flag",
            "filename",
            "format",
            "hole_bytes",
            "image",
            "kind",
            "memory_alignment_bytes",
            "offset_alignment_bytes",
            "qcow2_header",
            "queue",
            "queue_reason",
            "read_offset_alignment_bytes",
            "registered_bytes_limit",
            "size_bytes",
            "virtual-size",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn an_unknown_value_is_null_and_not_left_out() {
        let facts = Facts {
            kind: Kind::BlockDevice,
            size_bytes: 512,
            allocated_bytes: None,
            layout: None,
            direct: Direct::Impossible("because".into()),
            queue: Queue::Threads("therefore".into()),
            signature: None,
            header: None,
        };
        let object = in_json(Path::new("/dev/vdb"), &facts);
        for key in ["allocated_bytes", "data_extents", "hole_bytes", "memory_alignment_bytes"] {
            assert_eq!(object.get(key), Some(&Value::Null), "{key}");
        }
        assert_eq!(object["kind"], "block_device");
        assert_eq!(
            (&object["direct_io"], &object["direct_io_reason"]),
            (&json!(false), &json!("because"))
        );
        assert_eq!(
            (&object["queue"], &object["queue_reason"]),
            (&json!("threads"), &json!("therefore"))
        );
    }

    #[test]
    fn an_empty_sparse_image_is_one_hole() {
        let (_directory, path, _file) = image(MIB + 1);
        let facts = facts_of(&path);
        assert_eq!((facts.kind, facts.size_bytes), (Kind::RegularFile, MIB + 1));
        assert_eq!(facts.allocated_bytes, Some(0));
        let hole = Layout { data_extents: 0, data_bytes: 0, hole_bytes: MIB + 1 };
        assert_eq!(facts.layout, Some(hole));
    }

    #[test]
    fn data_and_holes_add_up_to_the_size() {
        let (_directory, path, file) = image(8 * MIB + 1);
        for start in [0, 2 * MIB, 8 * MIB] {
            file.write_all_at(b"x", start).unwrap();
        }
        let facts = facts_of(&path);
        let layout = facts.layout.unwrap();
        assert_eq!(layout.data_bytes + layout.hole_bytes, facts.size_bytes);
        assert_eq!(layout.data_extents, 3);
        assert!(in_words(&path, &facts).contains(" in 3 extents"));
    }

    #[test]
    fn a_qcow2_header_is_noted_and_a_shorter_file_has_none() {
        let (_directory, path, file) = image(3);
        assert_eq!(facts_of(&path).signature, None);
        file.write_all_at(&nowait_image::MAGIC, 0).unwrap();
        let facts = gather(&path, Some(Format::Raw)).map_err(|error| error.to_string()).unwrap();
        assert_eq!(facts.signature, Some(Signature::Supported(Format::Qcow2)));
        assert!(in_words(&path, &facts).contains("begins like a qcow2 image"));
        let error = gather(&path, None).err().map(|error| error.to_string()).unwrap();
        assert!(error.contains("qcow2 version 0 is not known"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_image_is_refused_with_a_message() {
        let directory = tempfile::tempdir().unwrap();
        let refusal =
            |path: &Path| gather(path, None).err().map(|error| error.to_string()).unwrap();
        assert!(refusal(directory.path()).contains("neither a regular file nor a block device"));
        assert!(refusal(Path::new("/dev/null")).contains("neither a regular file"));
        let missing = refusal(&directory.path().join("missing.img"));
        assert!(missing.ends_with("missing.img: there is no such file"));
    }
}
