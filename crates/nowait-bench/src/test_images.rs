//! The images of the benchmark of formats: the same disk in a raw file, in a qcow2 image, in a
//! chain of three, and below a new overlay.
//!
//! Invariant: they are removed after the measurement; all but the overlay have all of their data on
//! storage from the start. The tools of QEMU create them, so that no server is measured on its own
//! layout.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::error::Error;
use crate::other_programs::is_installed;
use crate::server::remove_if_there;
use crate::test_file::{Format, Target, drop_cached, put_random, temporary_directory};

const MIB: u64 = 1 << 20;
/// Bytes of the disk with data.
const DATA_BYTES: u64 = 128 * MIB;
/// Bytes of the disk of the overlay after these: more than can be written in one measurement.
const SPARE_BYTES: u64 = 1 << 40;
const CLUSTER_BYTES: u64 = 64 << 10;
/// The names of all images except the overlay.
const NAMES: [&str; 4] = ["raw", "qcow2", "middle", "chain"];
/// The number of images in the chain.
const CHAIN: u64 = 3;

/// The kind of image that a server is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageKind {
    /// A raw file without holes.
    Raw,
    /// A qcow2 image with all of its clusters, of 64 KiB.
    Qcow2,
    /// A qcow2 image over another one over a raw file: each has every third cluster.
    Chain,
    /// A qcow2 image that is created for each measurement, over one with all of its clusters.
    Overlay,
}

impl ImageKind {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ImageKind::Raw => "raw",
            ImageKind::Qcow2 => "qcow2",
            ImageKind::Chain => "chain of 3",
            ImageKind::Overlay => "new overlay",
        }
    }
}

/// The images, in a temporary directory.
pub(crate) struct TestImages {
    directory: TempDir,
}

impl TestImages {
    /// Whether the programs that create them are installed.
    pub(crate) fn has_tools() -> bool {
        ["qemu-img", "qemu-io"].into_iter().all(is_installed)
    }

    /// Creates all images below `$TMPDIR`, or /var/tmp: about 400 MiB.
    pub(crate) fn make() -> Result<TestImages, Error> {
        let made = || {
            let directory = temporary_directory(None)?;
            let test_images = TestImages { directory };
            test_images.fill()?;
            Ok(test_images)
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

    /// Creates a layer of the chain over `backing`, with the clusters whose number modulo the
    /// length of the chain is `part`.
    fn add_to_chain(&self, name: &str, backing: &str, format: &str, part: u64) -> io::Result<()> {
        let create = ["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, name];
        self.run("qemu-img", &create)?;
        let clusters = (part..DATA_BYTES / CLUSTER_BYTES).step_by(CHAIN as usize);
        let commands: Vec<String> = clusters
            // The data of the raw file is random, so that no storage can compress it.
            .map(|cluster| format!("write -q -s raw {} {CLUSTER_BYTES}", cluster * CLUSTER_BYTES))
            .collect();
        let mut arguments = vec!["-t", "writeback", "-f", "qcow2"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        arguments.push(name);
        self.run("qemu-io", &arguments)
    }

    /// The path of the image of this name.
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The directory of all images.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// One of the images; no page of it or of its backing files is in the page cache. The overlay
    /// is created again.
    pub(crate) fn image(&self, kind: ImageKind) -> io::Result<Target> {
        let (name, format, spare) = match kind {
            ImageKind::Raw => ("raw", Format::Raw, 0),
            ImageKind::Qcow2 => ("qcow2", Format::Qcow2, 0),
            ImageKind::Chain => ("chain", Format::Qcow2, 0),
            ImageKind::Overlay => ("overlay", Format::Qcow2, SPARE_BYTES),
        };
        if kind == ImageKind::Overlay {
            remove_if_there(&self.path(name))?;
            let size = (DATA_BYTES + SPARE_BYTES).to_string();
            let create = ["create", "-q", "-f", "qcow2", "-b", "qcow2", "-F", "qcow2"];
            self.run("qemu-img", &[&create[..], &[name, &size]].concat())?;
        }
        for name in NAMES {
            drop_cached(&File::open(self.path(name))?)?;
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
        let message = String::from_utf8_lossy(&output.stderr);
        let message = message.lines().next().unwrap_or_default();
        Err(io::Error::other(format!("{program} ended with {}: {message}", output.status)))
    }
}
