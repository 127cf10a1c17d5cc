//! Format detection by the first bytes of a file, for a file whose format is not given.
//!
//! A guest can write any bytes to its raw disk, and these must not decide the disk's format at the
//! next start. So a file that begins like a format that is not supported here is refused instead of
//! being taken for raw, unless it is marked as raw: a guest that encrypts its disk makes it begin like LUKS. The mark
//! is an extended attribute, set when a raw file is opened for writing. A marked file that begins like a supported one is refused:
//! the user may have put an image in its place, or a guest may have made it one where the user declared it raw.
//!
//! Invariant: a guess is raw only if the first bytes are those of no known format, or were when the file was opened first.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::XattrFlags;

use crate::formats::format::Format;
use crate::formats::table::DRIVERS;
use crate::image_file::ImageFile;

/// The signatures of all formats lie in this many first bytes.
pub const PROBE_BYTES: usize = 512;

/// The extended attribute with the format that the user declared (xattr(7)).
const MARK: &str = "user.nowait.format";
const MARKED_RAW: &[u8] = b"raw";

/// The format that a file begins like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// A supported format.
    Supported(Format),
    /// Another disk image: its usual name, and `qemu-img`'s name for it.
    Image(&'static str, &'static str),
    /// An encrypted disk, which a client decrypts.
    Luks,
    /// A compressed file: the usual name of the compression, and the program that decompresses it.
    Compressed(&'static str, &'static str),
}

const BZIP2: Signature = Signature::Compressed("bzip2", "bunzip2");

/// Position and bytes of each signature of a format that is not supported, and that format.
const SIGNATURES: [(usize, &[u8], Signature); 13] = [
    (0, b"QED\0", Signature::Image("QED", "qed")),
    (0, b"COWD", Signature::Image("VMDK", "vmdk")),
    (64, &[0x7f, 0x10, 0xda, 0xbe], Signature::Image("VDI", "vdi")),
    (0, b"conectix", Signature::Image("VHD", "vpc")),
    (0, b"WithoutFreeSpace", Signature::Image("Parallels", "parallels")),
    (0, b"WithouFreSpacExt", Signature::Image("Parallels", "parallels")),
    (0, b"Bochs Virtual HD Image", Signature::Image("Bochs", "bochs")),
    (0, b"LUKS\xba\xbe", Signature::Luks),
    (0, &[0x1f, 0x8b, 8], Signature::Compressed("gzip", "gunzip")),
    (0, b"\xfd7zXZ\0", Signature::Compressed("xz", "unxz")),
    (0, &[0x28, 0xb5, 0x2f, 0xfd], Signature::Compressed("zstd", "unzstd")),
    (0, b"BZh", BZIP2),
    (0, &[4, 0x22, 0x4d, 0x18], Signature::Compressed("lz4", "unlz4")),
];

impl Signature {
    /// The signature in the first bytes of a file. `first` has at least [`PROBE_BYTES`] bytes, or
    /// all of the file.
    #[must_use]
    pub fn of(first: &[u8]) -> Option<Self> {
        if let Some(driver) = DRIVERS.iter().find(|driver| driver.begins(first)) {
            return Some(Self::Supported(driver.format));
        }
        let found = SIGNATURES.iter().find(|(at, magic, _)| {
            first.get(*at..).is_some_and(|from_there| from_there.starts_with(magic))
        });
        let found = found.map(|&(_, _, signature)| signature);
        // In a bzip2 file, a digit and the magic number of a block follow the three letters.
        found.filter(|&signature| signature != BZIP2 || first.get(4..10) == Some(b"1AY&SY"))
    }

    /// Whether it is qcow2's.
    #[must_use]
    pub fn is_qcow2(self) -> bool {
        self == Self::Supported(Format::Qcow2)
    }

    /// The signature that `file` begins with.
    ///
    /// # Errors
    /// The errnos of pread(2).
    pub fn probe(file: &ImageFile) -> io::Result<Option<Self>> {
        let mut first = [0; PROBE_BYTES];
        file.read_at(0, &mut first)?;
        Ok(Self::of(&first))
    }

    /// The format's name, as in "it begins like …".
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::Supported(format) => format!("a {} image", format.name()),
            Self::Image(name, _) => format!("a {name} image"),
            Self::Luks => "an encrypted disk (LUKS)".into(),
            Self::Compressed(name, _) => format!("a file packed with {name}"),
        }
    }

    /// The reason for not taking the file for raw, to follow the file's name.
    pub(crate) fn refusal(self) -> String {
        let begins = format!("it begins like {}", self.words());
        match self {
            Self::Supported(_) => begins,
            Self::Image(_, format) => format!(
                "{begins}, which is not supported (make one that is, with qemu-img convert -f \
                 {format} -O qcow2; to have its bytes as they are: -f raw)"
            ),
            Self::Luks => format!("{begins}, which only a client can open (say so: -f raw)"),
            Self::Compressed(_, program) => format!(
                "{begins} (unpack it with {program}; to have its bytes as they are: -f raw)"
            ),
        }
    }
}

/// The reason for refusing a file without a given format that is marked as raw and begins like a supported format.
pub(crate) fn refusal_of_marked(format: Format) -> String {
    format!(
        "it was written to as a raw disk and begins like {}, which a guest may have made so (say \
         which it is: -f raw or -f {})",
        Signature::Supported(format).words(),
        format.name()
    )
}

/// The reason for refusing a file without a given format that begins like `format` and is called otherwise.
pub(crate) fn refusal_of_unnamed(format: Format) -> String {
    let (name, ending) = (format.name(), format.driver().guessed_ending.unwrap_or_default());
    let begins = Signature::Supported(format).words();
    format!(
        "it begins like {begins}, and its name does not end in .{ending} (say which it is: -f {name} or \
         -f raw)"
    )
}

/// Marks the file as declared raw: its first bytes then do not tell its format.
///
/// # Errors
/// Those of fsetxattr(2): `EOPNOTSUPP` where the file system has no such attributes.
pub fn mark_raw(file: impl AsFd) -> io::Result<()> {
    if is_marked_raw(&file) {
        return Ok(());
    }
    Ok(rustix::fs::fsetxattr(file, MARK, MARKED_RAW, XattrFlags::empty())?)
}

/// Whether the file is marked as raw. False where the attribute cannot be read.
pub(crate) fn is_marked_raw(file: impl AsFd) -> bool {
    let mut value = [0; MARKED_RAW.len() + 1];
    let got = rustix::fs::fgetxattr(file, MARK, &mut value[..]);
    got.is_ok_and(|len: usize| value.get(..len) == Some(MARKED_RAW))
}

/// Ensures that a raw file with the first bytes `first`, which a guest chose, is not taken for
/// another format later. If the user declared it raw (`named`), it is marked; if not, it must not
/// begin like a known format. `option` is the command-line option for that declaration.
///
/// # Errors
/// A message with the format that the file would begin like.
pub fn settle_raw(file: impl AsFd, first: &[u8], named: bool, option: &str) -> Result<(), String> {
    let signature = Signature::of(first);
    let marked = if named { mark_raw(&file).is_ok() } else { is_marked_raw(&file) };
    match signature {
        Some(signature) if !marked && named => Err(format!(
            "it would begin like {}, and its file system has no attributes (xattr) to mark it as raw",
            signature.words()
        )),
        Some(signature) if !marked => Err(format!(
            "it would begin like {} and be taken for that (if it is to be raw, say so: {option})",
            signature.words()
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_format_is_detected_and_one_that_only_resembles_it_is_not() {
        let supported = DRIVERS.iter().flat_map(|driver| {
            driver.magics.iter().map(|magic| (0, *magic, Signature::Supported(driver.format)))
        });
        for (at, magic, signature) in SIGNATURES.into_iter().chain(supported) {
            let mut first = vec![0; PROBE_BYTES];
            first[at..at + magic.len()].copy_from_slice(magic);
            if signature == BZIP2 {
                assert_eq!(Signature::of(&first), None);
                first[..10].copy_from_slice(b"BZh91AY&SY");
            }
            assert_eq!(Signature::of(&first), Some(signature));
            first[at] ^= 1;
            assert_eq!(Signature::of(&first), None, "{signature:?}");
        }
        assert_eq!(Signature::of(&[]), None);
        assert_eq!(Signature::of(b"QFI"), None);
        let mut iso = vec![0; PROBE_BYTES];
        iso[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(Signature::of(&iso), None);
    }

    #[test]
    fn a_raw_file_that_a_guest_wrote_to_is_marked_or_begins_like_no_known_format() {
        let file = tempfile::tempfile().unwrap();
        settle_raw(&file, &[0; 512], false, "-O raw").unwrap();
        assert!(!is_marked_raw(&file));
        let error = settle_raw(&file, b"QFI\xfb", false, "-O raw").unwrap_err();
        assert!(error.contains("a qcow2 image") && error.contains("-O raw"), "{error}");
        if settle_raw(&file, b"QFI\xfb", true, "-O raw").is_err() {
            nowait_testkit::skip("no extended attributes in the temporary directory");
            return;
        }
        assert!(is_marked_raw(&file));
        settle_raw(&file, b"QFI\xfb", false, "-O raw").unwrap();
    }
}
