//! What is copied where, by whom, and how each is told to.
//!
//! Invariant: all that copy on one route have the same source and the same kind of target, which is new or
//! zeros. Knows: nothing. Known by: race, table.

use std::ffi::OsString;
use std::path::Path;

/// What is in the disk that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Random bytes all over.
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

/// From what to what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
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

impl Route {
    /// All of them, in the order of the tables.
    pub const ALL: [Route; 5] =
        [Route::RawToRaw, Route::RawToQcow2, Route::Qcow2ToRaw, Route::FileToNbd, Route::NbdToFile];

    /// Its name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Route::RawToRaw => "raw to raw",
            Route::RawToQcow2 => "raw to qcow2",
            Route::Qcow2ToRaw => "qcow2 to raw",
            Route::FileToNbd => "file to NBD",
            Route::NbdToFile => "NBD to file",
        }
    }

    pub(super) const fn formats(self) -> (&'static str, &'static str) {
        match self {
            Route::RawToQcow2 => ("raw", "qcow2"),
            Route::Qcow2ToRaw => ("qcow2", "raw"),
            Route::RawToRaw | Route::FileToNbd | Route::NbdToFile => ("raw", "raw"),
        }
    }

    const fn has_nbd(self) -> bool {
        matches!(self, Route::FileToNbd | Route::NbdToFile)
    }
}

/// Who copies, and in which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copier {
    /// `nowait copy`: past the page cache, flushed.
    Nowait,
    /// `qemu-img convert`, past the page cache, flushed.
    QemuImgDirect,
    /// The same with sixteen requests in any order.
    QemuImgUnordered,
    /// `qemu-img convert` as it comes: through the page cache, not flushed.
    QemuImg,
    /// `nbdcopy`, through the page cache, flushed.
    NbdcopyFlushed,
    /// `nbdcopy` as it comes: through the page cache, not flushed.
    Nbdcopy,
}

impl Copier {
    /// All of them, in the order of the tables.
    pub const ALL: [Copier; 6] = [
        Copier::Nowait,
        Copier::QemuImgDirect,
        Copier::QemuImgUnordered,
        Copier::QemuImg,
        Copier::NbdcopyFlushed,
        Copier::Nbdcopy,
    ];

    /// The command as it stands in tables and JSON.
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

    /// Whether what it has copied is on storage when it ends.
    #[must_use]
    pub const fn flushes(self) -> bool {
        !matches!(self, Copier::QemuImg | Copier::Nbdcopy)
    }

    pub(super) fn takes(self, route: Route) -> bool {
        match self {
            Copier::Nowait | Copier::QemuImgDirect | Copier::QemuImg => true,
            Copier::QemuImgUnordered => !route.has_nbd(),
            Copier::NbdcopyFlushed | Copier::Nbdcopy => route.has_nbd(),
        }
    }

    /// The program, and what it is told to copy `from` to `to` on `route`.
    pub(super) fn command<'a>(
        self,
        nowait: &'a Path,
        route: Route,
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
                if route == Route::FileToNbd {
                    // The target is there, and known to be zeros.
                    arguments.extend(["-n", "--target-is-zero"]);
                }
                (Path::new("qemu-img"), arguments)
            }
            Copier::NbdcopyFlushed => (Path::new("nbdcopy"), vec!["--flush"]),
            Copier::Nbdcopy => (Path::new("nbdcopy"), Vec::new()),
        };
        if matches!(self, Copier::NbdcopyFlushed | Copier::Nbdcopy) && route == Route::FileToNbd {
            arguments.push("--destination-is-zero");
        }
        arguments.extend([from, to]);
        (program.into(), arguments)
    }
}
