//! The cases of the copy benchmark: contents, routes, copiers and their command lines.
//!
//! Invariant: all copiers on one route have the same source and the same kind of target, which is
//! new or zeros.

use std::ffi::OsString;
use std::path::Path;

/// The content of the disk that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Random bytes everywhere.
    Full,
    /// 64 KiB of random bytes in each MiB.
    Sparse,
}

impl Content {
    /// Both.
    pub const ALL: [Content; 2] = [Content::Full, Content::Sparse];

    /// Its name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Content::Full => "full",
            Content::Sparse => "sparse",
        }
    }
}

/// The kinds of source and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyCase {
    /// A raw file to a new one.
    RawToRaw,
    /// A raw file to a new qcow2 image.
    RawToQcow2,
    /// A qcow2 image to a new raw file.
    Qcow2ToRaw,
    /// A raw file to an export that is zeros.
    FileToNbd,
    /// An export to a new raw file.
    NbdToFile,
}

impl CopyCase {
    /// All values, in the order of the tables.
    pub const ALL: [CopyCase; 5] = [
        CopyCase::RawToRaw,
        CopyCase::RawToQcow2,
        CopyCase::Qcow2ToRaw,
        CopyCase::FileToNbd,
        CopyCase::NbdToFile,
    ];

    /// Its name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            CopyCase::RawToRaw => "raw to raw",
            CopyCase::RawToQcow2 => "raw to qcow2",
            CopyCase::Qcow2ToRaw => "qcow2 to raw",
            CopyCase::FileToNbd => "file to NBD",
            CopyCase::NbdToFile => "NBD to file",
        }
    }

    pub(crate) const fn formats(self) -> (&'static str, &'static str) {
        match self {
            CopyCase::RawToQcow2 => ("raw", "qcow2"),
            CopyCase::Qcow2ToRaw => ("qcow2", "raw"),
            CopyCase::RawToRaw | CopyCase::FileToNbd | CopyCase::NbdToFile => ("raw", "raw"),
        }
    }

    const fn has_nbd(self) -> bool {
        matches!(self, CopyCase::FileToNbd | CopyCase::NbdToFile)
    }
}

/// The program that copies, with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copier {
    /// `nowait copy`: direct I/O, flushed.
    Nowait,
    /// `qemu-img convert`: direct I/O, flushed.
    QemuImgDirect,
    /// `qemu-img convert` with sixteen unordered requests: direct I/O, flushed.
    QemuImgUnordered,
    /// `qemu-img convert` with its defaults: through the page cache, not flushed.
    QemuImg,
    /// `nbdcopy`, through the page cache, flushed.
    NbdcopyFlushed,
    /// `nbdcopy` with its defaults: through the page cache, not flushed.
    Nbdcopy,
}

impl Copier {
    /// All values, in the order of the tables.
    pub const ALL: [Copier; 6] = [
        Copier::Nowait,
        Copier::QemuImgDirect,
        Copier::QemuImgUnordered,
        Copier::QemuImg,
        Copier::NbdcopyFlushed,
        Copier::Nbdcopy,
    ];

    /// The command as shown in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Copier::Nowait => "nowait copy",
            Copier::QemuImgDirect => "qemu-img convert -T none -t none",
            Copier::QemuImgUnordered => "qemu-img convert -T none -t none -W -m 16",
            Copier::QemuImg => "qemu-img convert",
            Copier::NbdcopyFlushed => "nbdcopy --flush",
            Copier::Nbdcopy => "nbdcopy",
        }
    }

    /// Whether the copy is on storage when the program ends.
    #[must_use]
    pub const fn flushes(self) -> bool {
        !matches!(self, Copier::QemuImg | Copier::Nbdcopy)
    }

    pub(crate) fn takes(self, route: CopyCase) -> bool {
        match self {
            Copier::Nowait | Copier::QemuImgDirect | Copier::QemuImg => true,
            Copier::QemuImgUnordered => !route.has_nbd(),
            Copier::NbdcopyFlushed | Copier::Nbdcopy => route.has_nbd(),
        }
    }

    /// The program and its arguments to copy `from` to `to` on `route`.
    pub(crate) fn command<'a>(
        self,
        nowait: &'a Path,
        route: CopyCase,
        from: &'a str,
        to: &'a str,
    ) -> (OsString, Vec<&'a str>) {
        let (from_format, to_format) = route.formats();
        let (program, mut arguments): (&Path, Vec<&str>) = match self {
            Copier::Nowait => (nowait, vec!["copy", "--from-format", from_format, "-O", to_format]),
            Copier::QemuImgDirect | Copier::QemuImgUnordered | Copier::QemuImg => {
                let mut arguments = vec!["convert", "-f", from_format, "-O", to_format];
                if self != Copier::QemuImg {
                    arguments.extend(["-T", "none", "-t", "none"]);
                }
                if self == Copier::QemuImgUnordered {
                    arguments.extend(["-W", "-m", "16"]);
                }
                if route == CopyCase::FileToNbd {
                    // The target exists and is known to read as zeros.
                    arguments.extend(["-n", "--target-is-zero"]);
                }
                (Path::new("qemu-img"), arguments)
            }
            Copier::NbdcopyFlushed => (Path::new("nbdcopy"), vec!["--flush"]),
            Copier::Nbdcopy => (Path::new("nbdcopy"), Vec::new()),
        };
        if matches!(self, Copier::NbdcopyFlushed | Copier::Nbdcopy) && route == CopyCase::FileToNbd
        {
            arguments.push("--destination-is-zero");
        }
        arguments.extend([from, to]);
        (program.into(), arguments)
    }
}
