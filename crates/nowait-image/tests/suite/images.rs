//! Images chosen by a seed, made by QEMU's tools.
//!
//! Invariant: the same seed gives the same image.

use std::path::{Path, PathBuf};
use std::process::Command;

use nowait_testkit::{Finished, Random, tool};

/// Runs `qemu-img` with `arguments`, which must succeed. Returns its standard output.
pub(crate) fn qemu_img(directory: &Path, arguments: &[&str]) -> String {
    tool("qemu-img").current_dir(directory).args(arguments).succeeds()
}

/// Runs `qemu-io` on `image` of `format`, with one `-c` for each of `commands`.
pub(crate) fn qemu_io(directory: &Path, format: &str, image: &str, commands: &[String]) {
    let mut qemu = tool("qemu-io");
    qemu.current_dir(directory).args(["--cache", "unsafe", "-f", format]);
    for command in commands {
        qemu.args(["-c", command]);
    }
    // A command that the format does not support (compressing a cluster a second time) fails and
    // changes nothing.
    let (status, said) = output(qemu.arg(image));
    assert!(status == Some(0) || said.contains("ops/sec"), "{qemu:?}: {said}");
}

/// A chain of images in a directory of its own.
pub(crate) struct Images {
    directory: tempfile::TempDir,
    top: String,
}

impl Images {
    /// An empty directory; the test makes `top` later.
    pub(crate) fn none(top: &str) -> Self {
        Self { directory: tempfile::tempdir().unwrap(), top: top.to_owned() }
    }

    /// A qcow2 image of `size` with `options`, after the `commands` of qemu-io.
    pub(crate) fn qcow2(size: &str, options: &str, commands: &[&str]) -> Self {
        let images = Self::none("disk.qcow2");
        let mut arguments = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        arguments.extend(["disk.qcow2", size]);
        qemu_img(images.directory(), &arguments);
        if !commands.is_empty() {
            let commands: Vec<String> = commands.iter().map(ToString::to_string).collect();
            qemu_io(images.directory(), "qcow2", "disk.qcow2", &commands);
        }
        images
    }

    /// A chain of one to four images, chosen by `seed`.
    pub(crate) fn seeded(seed: u64) -> Self {
        let mut random = Random::from_seed(seed);
        let mut images = Self::none("");
        let depth = random.below(4);
        let mut below: Option<(String, &str)> = None;
        for level in (0..=depth).rev() {
            let raw = level == depth && level > 0 && random.chance(50);
            let (name, format) = match raw {
                true => (format!("{level}.raw"), "raw"),
                false => (format!("{level}.qcow2"), "qcow2"),
            };
            let size = 512 * (1 + random.below(24 << 10));
            let cluster = images.create(&mut random, &name, format, size, below.as_ref());
            let commands = commands(&mut random, size, cluster, format);
            qemu_io(images.directory(), format, &name, &commands);
            below = Some((name, format));
        }
        images.top = below.unwrap().0;
        images
    }

    fn create(
        &self,
        random: &mut Random,
        name: &str,
        format: &str,
        size: u64,
        below: Option<&(String, &str)>,
    ) -> u64 {
        let cluster = [512, 4096, 65536, 65536, 65536, 1 << 20][random.below(6) as usize];
        let size = size.to_string();
        let mut arguments = vec!["create", "-q", "-f", format];
        let mut options = Vec::new();
        if format == "qcow2" {
            options.push(format!("cluster_size={cluster}"));
            match random.below(8) {
                1 if cluster >= 16 << 10 => options.push("extended_l2=on".into()),
                0 | 1 => options.push("compat=0.10".into()),
                2 => options.push("lazy_refcounts=on".into()),
                3 => options.push("refcount_bits=1".into()),
                4 => options.push("refcount_bits=64".into()),
                5 if below.is_none() => options.push(format!("data_file={name}.data")),
                6 if below.is_none() => options.push("preallocation=metadata".into()),
                7 => options.push("compression_type=zstd".into()),
                _ if cluster >= 16 << 10 => options.push("extended_l2=on".into()),
                _ => {}
            }
        }
        let options = options.join(",");
        if !options.is_empty() {
            arguments.extend(["-o", &options]);
        }
        if let Some((name, format)) = below {
            arguments.extend(["-b", name, "-F", format]);
        }
        arguments.extend([name, &size]);
        qemu_img(self.directory(), &arguments);
        cluster
    }

    /// The external data files of the images.
    pub(crate) fn data_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.directory()).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|kind| kind == "data")).collect()
    }

    /// The directory of all files.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The name of the top image in the directory.
    pub(crate) fn name(&self) -> &str {
        &self.top
    }

    /// The path of the top image.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory().join(&self.top)
    }
}

/// Commands of qemu-io for a new image: writes of all kinds, with every alignment to sectors.
fn commands(random: &mut Random, size: u64, cluster: u64, format: &str) -> Vec<String> {
    let mut commands = Vec::new();
    for pattern in 1..=2 + random.below(20) {
        let pos = random.below(size / 512) * 512;
        let longest = (size - pos).min([4096, 256 << 10, 2 << 20][random.below(3) as usize]);
        let len = (1 + random.below(longest / 512)) * 512;
        let start = pos / cluster * cluster;
        commands.push(match random.below(10) {
            0 => format!("write -z {pos} {len}"),
            1 => format!("write -z -u {pos} {len}"),
            2 => format!("discard {pos} {len}"),
            3 if format == "qcow2" && start + cluster <= size => {
                format!("write -c -P {pattern} {start} {cluster}")
            }
            _ => format!("write -P {pattern} {pos} {len}"),
        });
    }
    commands
}

/// Kills the command when it hangs, as [`tool`] does; returns its status and standard output.
pub(crate) fn output(command: &mut Command) -> (Option<i32>, String) {
    let output = nowait_testkit::output(command);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}
