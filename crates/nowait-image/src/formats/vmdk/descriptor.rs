//! The descriptor of a VMDK image: lines of text that name its parts.
//!
//! Invariant: whatever the bytes are, a parsed descriptor has at most [`MAX_EXTENTS`] extents, whose sizes
//! and positions are in range, and no parent.

use crate::error::plain;

/// The first bytes of a descriptor in a file of its own.
pub(super) const FIRST_LINE: &[u8] = b"# Disk DescriptorFile";
/// The longest descriptor of a VMDK image, in bytes: a line for each extent, and some more.
/// Beyond it: the image is refused.
pub(super) const MAX_BYTES: u64 = 64 << 10;
/// The most extents of a VMDK image, each of which is a file of at most 2 GiB as a rule.
/// Beyond it: the image is refused.
pub(super) const MAX_EXTENTS: usize = 200;
/// The most sectors of a VMDK image: 8 EiB less a half.
/// Beyond it: the image is refused.
pub(super) const MAX_SECTORS: u64 = 1 << 53;
pub(super) const SECTOR_BYTES: u64 = 512;
/// The content identifier of no parent.
const NO_PARENT: &str = "ffffffff";

/// Where the bytes of an extent are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// In a file, from this byte on, as they are.
    Flat { name: String, pos: u64 },
    /// In a file with a header of its own.
    Sparse { name: String },
    /// Nowhere: zeros.
    Zero,
}

/// A part of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Bytes of the disk; not 0.
    pub(super) len: u64,
    pub(super) kind: Kind,
}

/// A parsed descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// The arrangement of the parts, as "monolithicSparse".
    pub(super) create_type: String,
    /// The content identifier, in hexadecimal digits.
    pub(super) cid: String,
    pub(super) extents: Vec<Extent>,
}

impl Descriptor {
    /// Parses `bytes`, up to the first zero.
    ///
    /// # Errors
    /// The reason, in words to follow the image's name.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        let Ok(text) = str::from_utf8(text) else {
            return Err("its descriptor is not text in UTF-8".into());
        };
        let mut found = Self::default();
        let mut parent = NO_PARENT.to_owned();
        for line in text.lines().map(str::trim) {
            if line.starts_with(['#']) || line.is_empty() {
                continue;
            }
            if let Some(extent) = extent(line)? {
                if found.extents.len() == MAX_EXTENTS {
                    return Err(format!(
                        "it has more than {MAX_EXTENTS} extents (make one file of it with qemu-img \
                         convert -O vmdk)"
                    ));
                }
                found.extents.push(extent);
                continue;
            }
            let Some((key, value)) = line.split_once('=') else { continue };
            let value = value.trim().trim_matches('"');
            match key.trim() {
                "createType" => value.clone_into(&mut found.create_type),
                "CID" => value.clone_into(&mut found.cid),
                "parentCID" => value.clone_into(&mut parent),
                "parentFileNameHint" if !value.is_empty() => return Err(refused_parent(value)),
                _ => {}
            }
        }
        if !parent.eq_ignore_ascii_case(NO_PARENT) {
            return Err(refused_parent("another image"));
        }
        let sectors = found.extents.iter().try_fold(0u64, |sum, it| sum.checked_add(it.len));
        if sectors.is_none_or(|bytes| bytes / SECTOR_BYTES > MAX_SECTORS) {
            return Err("its descriptor is damaged: the sizes of its extents".into());
        }
        Ok(found)
    }

    /// Size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.extents.iter().map(|extent| extent.len).sum()
    }
}

fn refused_parent(parent: &str) -> String {
    format!(
        "it stands on a parent, {}, and a vmdk image is only read by itself (make one image of both with \
         qemu-img convert)",
        plain(parent)
    )
}

/// The extent that `line` describes: access, sectors, type, name in quotes, offset in sectors. `None` if it
/// describes none.
fn extent(line: &str) -> Result<Option<Extent>, String> {
    let (access, rest) = line.split_once([' ', '\t']).unwrap_or((line, ""));
    match access {
        "RW" | "RDONLY" => {}
        "NOACCESS" => return Err("an extent of it may not be accessed, as it says".into()),
        _ => return Ok(None),
    }
    let damaged = || format!("its descriptor is damaged: the line '{}'", plain(line));
    let (sectors, rest) = rest.trim_start().split_once([' ', '\t']).ok_or_else(damaged)?;
    let sectors: u64 = sectors.parse().map_err(|_| damaged())?;
    if sectors == 0 || sectors > MAX_SECTORS {
        return Err(damaged());
    }
    let len = sectors * SECTOR_BYTES;
    let (kind, rest) = rest.trim_start().split_once([' ', '\t']).unwrap_or((rest.trim(), ""));
    let name = || {
        let (name, rest) = rest.trim_start().strip_prefix('"')?.split_once('"')?;
        Some((name.to_owned(), rest.trim()))
    };
    let kind = match kind {
        "ZERO" => Kind::Zero,
        "FLAT" | "VMFS" => {
            let (name, rest) = name().ok_or_else(damaged)?;
            let offset = rest.split_whitespace().next().map_or(Ok(0), str::parse::<u64>);
            let offset = offset.ok().filter(|&at| at <= MAX_SECTORS).ok_or_else(damaged)?;
            Kind::Flat { name, pos: offset * SECTOR_BYTES }
        }
        "SPARSE" => Kind::Sparse { name: name().ok_or_else(damaged)?.0 },
        other => {
            return Err(format!(
                "its extents of type {} are not supported (FLAT, VMFS, SPARSE and ZERO are; try \
                 qemu-img convert)",
                plain(other)
            ));
        }
    };
    Ok(Some(Extent { len, kind }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(lines: &str) -> Result<Descriptor, String> {
        let text =
            format!("# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n{lines}\n");
        Descriptor::parse(text.as_bytes())
    }

    #[test]
    fn extents_are_parsed_with_their_sizes_and_positions() {
        let found = with(
            "createType=\"custom\"\nRW 8 FLAT \"a b.vmdk\" 3\nRDONLY 2 ZERO\nRW 1 SPARSE \"c\"",
        );
        let found = found.unwrap();
        let kinds: Vec<_> = found.extents.iter().map(|it| (it.len, it.kind.clone())).collect();
        let flat = Kind::Flat { name: "a b.vmdk".into(), pos: 3 * 512 };
        let sparse = Kind::Sparse { name: "c".into() };
        assert_eq!(kinds, [(4096, flat), (1024, Kind::Zero), (512, sparse)]);
        assert_eq!((found.size(), &*found.create_type), (5632, "custom"));
    }

    #[test]
    fn a_parent_and_what_is_not_supported_or_in_range_is_refused() {
        for (lines, why) in [
            ("parentCID=12345678", "stands on a parent"),
            ("parentFileNameHint=\"/etc/base.vmdk\"", "/etc/base.vmdk"),
            ("RW 0 ZERO", "damaged"),
            ("RW 18446744073709551615 ZERO", "damaged"),
            ("RW 9007199254740993 ZERO", "damaged"),
            ("RW 8 FLAT a 0", "damaged"),
            ("RW 8 FLAT \"a\" x", "damaged"),
            ("RW 8 VMFSRDM \"a\"", "VMFSRDM"),
            ("NOACCESS 8 FLAT \"a\" 0", "may not be accessed"),
            (&"RW 8 ZERO\n".repeat(MAX_EXTENTS + 1), "more than 200 extents"),
        ] {
            let error = with(lines).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(with(&"RW 8 ZERO\n".repeat(MAX_EXTENTS)).unwrap().extents.len(), MAX_EXTENTS);
        assert!(Descriptor::parse(b"\xff\xfe").is_err());
    }
}
