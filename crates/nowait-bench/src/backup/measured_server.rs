//! Servers that note what is changed in a dirty bitmap, or keep what a backup needs, started and told so from outside.
//!
//! Invariant: a bitmap that a measurement has stored in an image, or next to it, is removed after it.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nowait_nbd::Address;
use serde_json::{Value, json};

use crate::cancel::CancelFlag;
use crate::image_kind::ImageKind;
use crate::other_programs::printed;
use crate::server::{Program, Server, ServerFiles, ServerKind, remove_if_there};
use crate::test_file::{Access, Target};
use crate::test_images::TestImages;
use crate::workload::{Caching, Conditions, Transport};

/// The name of the bitmap.
const BITMAP: &str = "b";
/// The longest time for an answer of qemu-storage-daemon.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Work of a server at each write, for backups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackupFeature {
    Off,
    /// A dirty bitmap that is lost with the server.
    InMemory,
    /// A dirty bitmap that is stored: in a qcow2 image, or next to a raw one.
    Stored,
    /// The old bytes of each 64 KiB, for a backup.
    CopyBeforeWrite,
}

impl BackupFeature {
    /// Its name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Off => "nothing",
            Self::InMemory => "bitmap in memory",
            Self::Stored => "stored bitmap",
            Self::CopyBeforeWrite => "backup",
        }
    }
}

/// A server on an image, with a feature that is measured.
#[derive(Clone, Debug)]
pub(super) struct MeasuredServer {
    pub(super) program: Program,
    pub(super) image: ImageKind,
    pub(super) feature: BackupFeature,
}

/// The files of a running server.
#[derive(Clone, Copy)]
pub(super) struct ServerPlaces<'a> {
    pub(super) images: &'a TestImages,
    /// The image that is served.
    pub(super) target: &'a Target,
    /// For sockets and messages.
    pub(super) directory: &'a Path,
}

impl ServerPlaces<'_> {
    fn control(&self) -> PathBuf {
        self.directory.join("control")
    }

    /// The file for old bytes; nowait makes one without a name.
    fn old_bytes(&self) -> PathBuf {
        self.target.path.with_file_name("old-bytes")
    }

    /// The bitmaps that nowait has stored next to a raw image.
    fn sidecar(&self) -> PathBuf {
        self.target.path.with_extension("bitmaps.qcow2")
    }
}

impl MeasuredServer {
    fn is_nowait(&self) -> bool {
        self.program.kind == ServerKind::Nowait
    }

    /// Stores what has to be in the image before it is served.
    pub(super) fn prepare(&self, places: ServerPlaces<'_>) -> io::Result<()> {
        places.target.prepare(Caching::Direct)?;
        remove_if_there(&places.control())?;
        match (self.feature, self.image) {
            (BackupFeature::Stored, ImageKind::Qcow2) => places.images.bitmap("--add", BITMAP),
            (BackupFeature::CopyBeforeWrite, _) if !self.is_nowait() => {
                std::fs::File::create(places.old_bytes())?.set_len(places.target.bytes)
            }
            _ => Ok(()),
        }
    }

    /// Removes what a measurement has left.
    pub(super) fn clean_up(&self, places: ServerPlaces<'_>) -> io::Result<()> {
        match (self.feature, self.image) {
            (BackupFeature::Stored, ImageKind::Qcow2) => places.images.bitmap("--remove", BITMAP),
            (BackupFeature::Stored, _) => remove_if_there(&places.sidecar()),
            (BackupFeature::CopyBeforeWrite, _) => remove_if_there(&places.old_bytes()),
            (BackupFeature::Off | BackupFeature::InMemory, _) => Ok(()),
        }
    }

    /// Starts it. It notes nothing yet, but for a bitmap that is stored in the image.
    pub(super) fn start(&self, places: ServerPlaces<'_>) -> io::Result<Server> {
        let ServerPlaces { target, directory, .. } = places;
        let address = Address::Unix(directory.join("socket"));
        let terms = Conditions { caching: Caching::Direct, transport: Transport::Plain };
        let certificates = directory;
        let server_files = ServerFiles {
            file: &target.path,
            image: self.image,
            address: &address,
            queues: 1,
            certificates,
        };
        let mut command = self.program.command();
        command.args(self.program.kind.arguments(terms, Access::ReadWrite, server_files));
        let control = places.control();
        if self.is_nowait() {
            command.arg("--control").arg(format!("unix:{}", control.display()));
            command.args(
                target.path.parent().iter().flat_map(|it| ["--allow-dir".as_ref(), it.as_os_str()]),
            );
        } else {
            command.arg("--chardev");
            command.arg(format!("socket,id=m,path={},server=on,wait=off", control.display()));
            command.args(["--monitor", "chardev=m"]);
            if self.feature == BackupFeature::CopyBeforeWrite {
                let file = places.old_bytes();
                let node = "driver=file,node-name=old,aio=io_uring,cache.direct=on,filename=";
                command.arg("--blockdev").arg(format!("{node}{}", file.display()));
            }
        }
        Server::spawn(&mut command, address, directory)
    }

    /// Has it note from now on what it does not note yet.
    pub(super) fn begin(&self, places: ServerPlaces<'_>, stop: &CancelFlag) -> io::Result<()> {
        let control = places.control();
        let nowait = |words: &[&str]| {
            let mut command = self.program.command();
            command.arg("export").args(words).arg("--control").arg(&control);
            printed(&mut command, SILENCE_MAX, stop).map(|_| ())
        };
        match (self.feature, self.is_nowait()) {
            (BackupFeature::Off, _) => Ok(()),
            (BackupFeature::Stored, _) if self.image == ImageKind::Qcow2 => Ok(()),
            (BackupFeature::InMemory, true) => {
                nowait(&["bitmap", "add", "@0", BITMAP, "--temporary"])
            }
            (BackupFeature::Stored, true) => nowait(&["bitmap", "add", "@0", BITMAP]),
            (BackupFeature::CopyBeforeWrite, true) => nowait(&["backup", "start", "@0"]),
            (BackupFeature::InMemory | BackupFeature::Stored, false) => {
                let arguments = json!({ "node": "f", "name": BITMAP });
                execute(&control, "block-dirty-bitmap-add", arguments)
            }
            (BackupFeature::CopyBeforeWrite, false) => {
                let job = json!({ "job-id": "b", "device": "f", "target": "old", "sync": "none" });
                execute(&control, "blockdev-backup", job)
            }
        }
    }
}

/// Has qemu-storage-daemon execute a command of QMP.
fn execute(socket: &Path, command: &str, arguments: Value) -> io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let begin = json!({ "execute": "qmp_capabilities" });
    for request in [begin, json!({ "execute": command, "arguments": arguments })] {
        writeln!(stream, "{request}")?;
        // The greeting and events come between the answers.
        loop {
            let line = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
            let answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("{command}: {}", error["desc"])));
            }
            if answer.get("return").is_some() {
                break;
            }
        }
    }
    Ok(())
}
