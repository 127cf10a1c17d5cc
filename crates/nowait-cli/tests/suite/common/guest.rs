//! A virtual machine with a stock kernel, emulated by QEMU.
//!
//! Invariant: the machine powers off, or is killed when it has used too much processor time or is stuck; its console
//! output is kept.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::guest_watchdog::powered_off;
use super::{Finished, Scratch, path_of, require_tool, skip, tool};

/// The start of every script: `load MODULE [PARAMETER...]` says so if it fails, and does nothing where it is loaded. `cmp`
/// is the host's, which compares a word at a time: busybox's takes the emulator a second for each 10 MiB.
const BEGIN: &str = r#"
cmp() { /test/cmp "$@"; }
load() { module=$1; shift; [ -d /sys/module/$module ] || insmod /modules/$module.ko "$@" || echo "guest: insmod $module failed"; }
"#;

/// The memory of a machine, MiB. The root file system takes at most half of it, and while it is unpacked
/// its archive is there as well: fio comes with 80 MiB of libraries.
const MEMORY: &str = "1024";

/// The processor time after which the emulator is killed, in seconds: several times as much as any test needs.
const PROCESSOR_SECONDS: u32 = 300;

/// The random bytes for a script, in `/test/random`. The guest's own cost a second of the emulator for each 8 MiB.
const RANDOM_BYTES: u64 = 16 << 20;

/// The kernel to boot, by Debian's series.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Debian 12's own.
    V6_1,
    /// The newest kernel in Debian 12's backports.
    V6_12,
    /// One of Debian 13's backports, with all that ublk has learned since.
    V7_3,
}

impl Kernel {
    fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::V7_3 => "7.3",
        }
    }
}

/// The directory that a script has made: what environment variable `variable` says, or `name` in the user's
/// cache directory.
pub(crate) fn made_by_script(variable: &str, name: &str) -> PathBuf {
    let cache = || match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"),
    };
    std::env::var_os(variable).map_or_else(|| cache().join(name), PathBuf::from)
}

/// A guest that can be booted.
pub(crate) struct Guest {
    /// The directory with the files of all kernels.
    files: PathBuf,
    kernel: Kernel,
    /// cmp(1).
    cmp: PathBuf,
}

impl Guest {
    /// A guest with `kernel`; `None` if the test cannot run here.
    pub(crate) fn with(kernel: Kernel) -> Option<Self> {
        if !["qemu-system-x86_64", "cpio"].into_iter().all(require_tool) {
            return None;
        }
        let Some(cmp) = path_of("cmp") else {
            skip("no cmp");
            return None;
        };
        let files = made_by_script("NOWAIT_GUEST_DIR", "nowait-guest");
        let guest = Self { files, kernel, cmp };
        let complete = [guest.busybox(), guest.file("vmlinux"), guest.file("initramfs.gz")]
            .into_iter()
            .all(|path| path.is_file());
        let why = || {
            let directory = guest.files.display();
            let series = kernel.series();
            format!("no guest with Linux {series} in {directory} (scripts/guest-files makes it)")
        };
        (complete || skip(&why())).then_some(guest)
    }

    /// A static busybox.
    pub(crate) fn busybox(&self) -> PathBuf {
        self.files.join("busybox")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.files.join(self.kernel.series()).join(name)
    }

    /// Boots with the ext4 root on the first disk of `devices`, which are arguments of QEMU.
    /// Returns its console output until it powered off.
    pub(crate) fn boot(&self, devices: &[&str]) -> String {
        powered_off(&mut self.machine(&self.file("initramfs.gz"), devices))
    }

    /// Boots without a disk to run the shell script `script` as its first process, which ends with
    /// `poweroff -f`; busybox's commands are available, modules are in `/modules` for `load`,
    /// `programs` and cmp(1) with their libraries in `/test`, and [`RANDOM_BYTES`] there if the script names them. Returns its
    /// console output.
    pub(crate) fn run(&self, script: &str, programs: &[&Path], devices: &[&str]) -> String {
        let scratch = Scratch::new();
        let root = scratch.join("root");
        fs::create_dir_all(root.join("test")).expect("a directory");
        fs::write(root.join("test/init"), [BEGIN, script].concat()).expect("a script");
        if script.contains("/test/random") {
            let mut random = File::open("/dev/urandom").expect("a device").take(RANDOM_BYTES);
            let mut file = File::create(root.join("test/random")).expect("a file");
            io::copy(&mut random, &mut file).expect("random bytes");
        }
        for program in programs.iter().copied().chain([&*self.cmp]) {
            let name = program.file_name().expect("a program has a name");
            put(program, &root.join("test").join(name));
            for library in libraries_of(program) {
                put(&library, &root.join(library.strip_prefix("/").expect("an absolute path")));
            }
        }
        // The new archive is first, because an uncompressed archive must begin at a multiple of 4.
        let initramfs = scratch.join("initramfs");
        let pack = r#"cd "$1" && { find . | cpio --quiet -o -H newc -R 0:0; cat "$2"; } >"$3""#;
        tool("sh")
            .args(["-c", pack, "sh"])
            .args([&root, &self.file("initramfs.gz"), &initramfs])
            .succeeds();
        powered_off(&mut self.machine(&initramfs, devices))
    }

    fn machine(&self, initramfs: &Path, devices: &[&str]) -> Command {
        // Not a bound on time: how fast the emulator is depends on the load.
        let mut machine = Command::new("prlimit");
        machine.arg(format!("--cpu={PROCESSOR_SECONDS}")).arg("qemu-system-x86_64");
        // Linux patches its code while the second processor runs it, which QEMU 7.2 with a thread for
        // each processor sometimes answers with a trap at boot ("Oops: int3"), or with nothing.
        machine.args(["-accel", "tcg,thread=single", "-m", MEMORY, "-nodefaults", "-no-reboot"]);
        machine.args(["-display", "none", "-serial", "stdio"]);
        machine.arg("-kernel").arg(self.file("vmlinux")).arg("-initrd").arg(initramfs);
        // Without its check of the timer, which fails where the emulator is given no processor for a moment, and
        // without its defences against processors that tell secrets, which cost an emulated one an eighth of its time. The
        // emulator translates a program for each address that it is loaded at: at the same one each time, a server
        // starts in a quarter of the time. The queues are for NVMe devices, which few guests have.
        let line = "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off norandmaps nvme.poll_queues=1";
        machine.args(["-append", line]).args(devices);
        machine
    }
}

/// Copies a file into the root file system of the guest, a program without symbols.
fn put(file: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a place in a directory")).expect("a directory");
    let stripped = Command::new("strip").arg("--strip-all").arg("-o").args([to, file]).output();
    if stripped.is_ok_and(|output| output.status.success()) {
        return;
    }
    fs::copy(file, to).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}

/// The libraries and the loader that a program needs, none if it is static.
fn libraries_of(program: &Path) -> Vec<PathBuf> {
    // Lines of ldd(1): `NAME => PATH (ADDRESS)` or `PATH (ADDRESS)`.
    let printed = tool("ldd").arg(program).succeeds();
    let paths =
        printed.lines().flat_map(str::split_whitespace).filter(|word| word.starts_with('/'));
    paths.map(PathBuf::from).collect()
}
