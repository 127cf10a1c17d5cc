//! The images that formats are measured on: the same disk in a raw file, in a qcow2 image, in a chain of
//! three, and below a new overlay.
//!
//! Invariant: they are gone when the measurement is; all but the overlay have all of their data from the start,
//! on storage. Knows: error, target. Known by: images, images_report. QEMU's tools make them, so that none of the
//! servers is measured on what it has laid out itself.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::error::Error;
use crate::target::{Format, Target, forget_cached, put_random};

const MIB: u64 = 1 << 20;
/// Bytes of the disk with data.
const DATA_BYTES: u64 = 128 * MIB;
/// Bytes of the overlay's disk behind these: more than can be written in one turn.
const SPARE_BYTES: u64 = 1 << 40;
const CLUSTER_BYTES: u64 = 64 << 10;
/// What all but the overlay are called.
const NAMES: [&str; 4] = ["raw", "qcow2", "middle", "chain"];
/// Images of the chain.
const CHAIN: u64 = 3;

/// What a server is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A raw file without holes.
    Raw,
    /// A qcow2 image with all of its clusters, of 64 KiB.
    Qcow2,
    /// A qcow2 image over another one over a raw file: each has every third cluster.
    Chain,
    /// A qcow2 image that is made for each turn, over one with all of its clusters.
    Overlay,
}

impl ImageKind {
    /// What it is called in reports.
    pub fn name(self) -> &'static str {
        match self {
            ImageKind::Raw => "raw",
            ImageKind::Qcow2 => "qcow2",
            ImageKind::Chain => "chain of 3",
            ImageKind::Overlay => "new overlay",
        }
    }
}

/// The images, in a directory of their own.
pub(crate) struct Gallery {
    directory: TempDir,
}

impl Gallery {
    /// Makes them all below `$TMPDIR`, or /var/tmp: about 400 MiB.
    pub(crate) fn make() -> Result<Gallery, Error> {
        // /tmp is often in memory and says nothing about storage; /var/tmp is on a disk by convention.
        let parent =
            std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let made = || {
            let directory = tempfile::Builder::new().prefix("nowait-bench-").tempdir_in(parent)?;
            let gallery = Gallery { directory };
            gallery.fill()?;
            Ok(gallery)
        };
        made().map_err(Error::system("making images with qemu-img and qemu-io"))
    }

    fn fill(&self) -> io::Result<()> {
        put_random(&mut File::create_new(self.path("raw"))?, DATA_BYTES)?;
        self.run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "raw", "qcow2"])?;
        self.add_to_chain("middle", "raw", "raw", 1)?;
        self.add_to_chain("chain", "middle", "qcow2", 0)?;
        for name in NAMES {
            File::open(self.path(name))?.sync_all()?;
        }
        Ok(())
    }

    /// Makes a layer of the chain: over `below`, with the clusters that leave the rest `part`.
    fn add_to_chain(&self, name: &str, below: &str, format: &str, part: u64) -> io::Result<()> {
        let create = ["create", "-q", "-f", "qcow2", "-b", below, "-F", format, name];
        self.run("qemu-img", &create)?;
        let clusters = (part..DATA_BYTES / CLUSTER_BYTES).step_by(CHAIN as usize);
        let commands: Vec<String> = clusters
            // What a raw file begins with: random, so that no storage takes it for less than it is.
            .map(|cluster| format!("write -q -s raw {} {CLUSTER_BYTES}", cluster * CLUSTER_BYTES))
            .collect();
        let mut arguments = vec!["-t", "writeback", "-f", "qcow2"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        arguments.push(name);
        self.run("qemu-io", &arguments)
    }

    /// Where an image of this name is.
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The directory that all of them are in.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// One of the images, nothing of it or of what it stands on in the page cache; the overlay is made anew.
    pub(crate) fn image(&self, kind: ImageKind) -> io::Result<Target> {
        let (name, format, spare) = match kind {
            ImageKind::Raw => ("raw", Format::Raw, 0),
            ImageKind::Qcow2 => ("qcow2", Format::Qcow2, 0),
            ImageKind::Chain => ("chain", Format::Qcow2, 0),
            ImageKind::Overlay => ("overlay", Format::Qcow2, SPARE_BYTES),
        };
        if kind == ImageKind::Overlay {
            match fs::remove_file(self.path(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let size = (DATA_BYTES + SPARE_BYTES).to_string();
            let create = ["create", "-q", "-f", "qcow2", "-b", "qcow2", "-F", "qcow2"];
            self.run("qemu-img", &[&create[..], &[name, &size]].concat())?;
        }
        for name in NAMES {
            forget_cached(&File::open(self.path(name))?)?;
        }
        Target::of_image(self.path(name), format, DATA_BYTES, spare)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<()> {
        let mut command = Command::new(program);
        command.current_dir(self.directory.path()).args(arguments).stdin(Stdio::null());
        let output = command.output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or_default();
        Err(io::Error::other(format!("{program} ended with {}: {said}", output.status)))
    }
}
