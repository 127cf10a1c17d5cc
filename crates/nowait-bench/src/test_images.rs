//! The images of the benchmark of formats: the same disk in a raw file, in a qcow2 image, and in a chain of three.
//!
//! Invariant: they are removed after the measurement, and have all of their data on
//! storage from the start. The tools of QEMU create them, so that no server is measured on its own
//! layout.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::error::Error;
use crate::image_kind::ImageKind;
use crate::other_programs::is_installed;
use crate::test_file::{Target, drop_cached, put_random, temporary_directory};

const MIB: u64 = 1 << 20;
/// Bytes of the disk with data.
const DATA_BYTES: u64 = 128 * MIB;
const CLUSTER_BYTES: u64 = 64 << 10;
/// The names of all images.
const NAMES: [&str; 4] = ["raw", "qcow2", "middle", "chain"];
/// The number of images in the chain.
const CHAIN: u64 = 3;

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

    /// One of the images.
    pub(crate) fn image(&self, kind: ImageKind) -> io::Result<Target> {
        let name = match kind {
            ImageKind::Raw => "raw",
            ImageKind::Qcow2 => "qcow2",
            ImageKind::Chain => "chain",
        };
        Target::of_image(self.path(name), kind, DATA_BYTES)
    }

    /// Leaves no page of an image in the page cache.
    pub(crate) fn drop_cached(&self) -> io::Result<()> {
        NAMES.into_iter().try_for_each(|name| drop_cached(&File::open(self.path(name))?))
    }

    /// Adds a dirty bitmap to the qcow2 image, or removes it, by the `action` of `qemu-img bitmap`.
    pub(crate) fn bitmap(&self, action: &str, name: &str) -> io::Result<()> {
        self.run("qemu-img", &["bitmap", action, "qcow2", name])
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
