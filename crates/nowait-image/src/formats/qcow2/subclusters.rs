//! Extended L2 entries: 16 bytes for a cluster, with a bitmap of the states of its 32 subclusters.
//!
//! A *unit* is what an image maps on its own: a subcluster of an image with extended L2 entries, and a cluster of any
//! other. Lookups count in units, and allocations in clusters.
//!
//! Invariant: as for [`Cluster::parse`]; the bits of a parsed entry agree with each other. Source: QEMU
//! docs/interop/qcow2.txt, "Extended L2 Entries".

use crate::formats::qcow2::entries::{BadEntry, Cluster};
use crate::formats::qcow2::header::{Header, be64};

/// A cluster has 1 << this many subclusters.
const SUBCLUSTER_SHIFT: u32 = 5;
/// The bits of the subclusters that are allocated; those that read as zeros are 32 bits above.
pub(crate) const ALL_ALLOCATED: u64 = 0xffff_ffff;
/// The bits of a cluster all of which reads as zeros.
pub(crate) const ALL_ZEROS: u64 = ALL_ALLOCATED << 32;

impl Header {
    /// A cluster has 1 << this many units.
    #[must_use]
    pub const fn unit_shift(&self) -> u32 {
        if self.has_extended_l2() { SUBCLUSTER_SHIFT } else { 0 }
    }

    /// Units have 1 << this bytes.
    #[must_use]
    pub const fn unit_bits(&self) -> u32 {
        self.cluster_bits - self.unit_shift()
    }

    /// Bytes of a unit: a power of two, 512 to 2 MiB.
    #[must_use]
    pub const fn unit_bytes(&self) -> u64 {
        1 << self.unit_bits()
    }

    /// Units that an L2 table covers.
    #[must_use]
    pub const fn l2_units(&self) -> u64 {
        self.l2_entries() << self.unit_shift()
    }

    /// Eight-byte words of an L2 entry: 1 or 2.
    pub(crate) const fn entry_words(&self) -> usize {
        if self.has_extended_l2() { 2 } else { 1 }
    }

    /// Bytes of an L2 entry.
    pub(crate) const fn entry_bytes(&self) -> u64 {
        self.entry_words() as u64 * 8
    }
}

/// The bits of `count` subclusters from `first` on, as those of the allocated ones.
pub(crate) const fn mask(first: u64, count: u64) -> u64 {
    let below = if count >= 32 { ALL_ALLOCATED } else { (1 << count) - 1 };
    (below << first) & ALL_ALLOCATED
}

/// Checks the bitmap of `cluster`, an entry of an image with extended L2 entries.
///
/// # Errors
/// [`BadEntry::Bitmap`].
pub(crate) fn check_bitmap(cluster: Cluster, bitmap: u64) -> Result<(), BadEntry> {
    let fits = match cluster {
        Cluster::Compressed { .. } => bitmap == 0,
        Cluster::Data { .. } => bitmap >> 32 & bitmap == 0,
        _ => bitmap & ALL_ALLOCATED == 0,
    };
    if fits { Ok(()) } else { Err(BadEntry::Bitmap) }
}

/// The mapping of unit number `unit` of the cluster with these words of an L2 entry.
#[inline]
fn unit(entry: u64, bitmap: u64, unit: u64, header: &Header) -> Result<Cluster, BadEntry> {
    let cluster = Cluster::parse(entry, header)?;
    if !header.has_extended_l2() {
        return Ok(cluster);
    }
    check_bitmap(cluster, bitmap)?;
    let is_allocated = bitmap >> unit & 1 != 0;
    let is_zero = bitmap >> (32 + unit) & 1 != 0;
    let inside = unit << header.unit_bits();
    Ok(match cluster {
        Cluster::Data { host, copied } if is_allocated => {
            Cluster::Data { host: host + inside, copied }
        }
        Cluster::Data { host, copied } if is_zero => {
            Cluster::Zero { host: Some(host + inside), copied }
        }
        Cluster::Data { host, copied } => Cluster::Reserved { host: host + inside, copied },
        Cluster::Unallocated if is_zero => Cluster::Zero { host: None, copied: false },
        other => other,
    })
}

/// The mappings of units, in order, from number `first` of the first of the entries in `bytes` on.
#[inline]
pub(crate) fn units<'a>(
    bytes: &'a [u8],
    first: u64,
    header: &'a Header,
) -> impl Iterator<Item = Result<Cluster, BadEntry>> + 'a {
    let (shift, size) = (header.unit_shift(), header.entry_bytes() as usize);
    (first..).map_while(move |number| {
        let at = (number >> shift) as usize * size;
        let entry = bytes.get(at..at + size)?;
        Some(unit(be64(entry, 0), be64(entry, 8), number & ((1 << shift) - 1), header))
    })
}

/// The whole cluster with these words of an L2 entry: its units, if all of them are alike, and
/// [`Cluster::Mixed`] otherwise.
pub(crate) fn whole(words: &[u64], header: &Header) -> Result<Cluster, BadEntry> {
    let word = |at: usize| words.get(at).copied().unwrap_or_default();
    let (entry, bitmap) = (word(0), word(1));
    let cluster = Cluster::parse(entry, header)?;
    if !header.has_extended_l2() {
        return Ok(cluster);
    }
    check_bitmap(cluster, bitmap)?;
    Ok(match cluster {
        Cluster::Data { .. } if bitmap == ALL_ALLOCATED => cluster,
        Cluster::Data { host, copied } if bitmap == ALL_ZEROS => {
            Cluster::Zero { host: Some(host), copied }
        }
        Cluster::Data { host, copied } => Cluster::Mixed { host: Some(host), copied },
        Cluster::Unallocated if bitmap == ALL_ZEROS => Cluster::Zero { host: None, copied: false },
        Cluster::Unallocated if bitmap != 0 => Cluster::Mixed { host: None, copied: false },
        other => other,
    })
}

/// The words of an L2 entry that maps a whole cluster alike, as one of an image without subclusters has them in `entry`.
pub(crate) const fn words_of_whole(entry: u64, header: &Header) -> [u64; 2] {
    match entry {
        _ if !header.has_extended_l2() => [entry, 0],
        0 => [0, 0],
        crate::formats::qcow2::entries::ZERO => [0, ALL_ZEROS],
        _ => [entry, ALL_ALLOCATED],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::qcow2::entries::{COPIED, ZERO};

    const HOST: u64 = 5 << 16;

    fn header() -> Header {
        Header::empty(1 << 30, 16).with_extended_l2()
    }

    fn entry(words: [u64; 2]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn each_subcluster_has_the_state_of_its_bits() {
        let header = header();
        assert_eq!(
            (header.unit_bytes(), header.l2_entries(), header.l2_units()),
            (2048, 4096, 131_072)
        );
        let bytes = entry([HOST | COPIED, 1 << 3 | 1 << (32 + 4)]);
        let found: Vec<_> = units(&bytes, 3, &header).take(3).map(Result::unwrap).collect();
        let at = |unit: u64| HOST + unit * 2048;
        assert_eq!(
            found,
            [
                Cluster::Data { host: at(3), copied: true },
                Cluster::Zero { host: Some(at(4)), copied: true },
                Cluster::Reserved { host: at(5), copied: true },
            ]
        );
        assert_eq!(units(&bytes, 0, &header).count(), 32);
        let nowhere = entry([0, 1 << 63]);
        let last: Vec<_> = units(&nowhere, 30, &header).map(Result::unwrap).collect();
        assert_eq!(last, [Cluster::Unallocated, Cluster::Zero { host: None, copied: false }]);
        assert_eq!((mask(0, 32), mask(31, 1), mask(2, 3)), (ALL_ALLOCATED, 1 << 31, 0b11100));
    }

    #[test]
    fn bits_that_contradict_each_other_are_no_entry() {
        let header = header();
        for words in [[HOST, 1 | 1 << 32], [0, 1], [1 << 62 | HOST, 1], [1 << 62 | HOST, 1 << 40]] {
            let bytes = entry(words);
            for unit in units(&bytes, 0, &header) {
                assert_eq!(unit, Err(BadEntry::Bitmap), "{words:x?}");
            }
            assert_eq!(whole(&words, &header), Err(BadEntry::Bitmap));
        }
        let bytes = entry([HOST | ZERO, 0]);
        assert_eq!(units(&bytes, 0, &header).next(), Some(Err(BadEntry::Reserved)));
    }

    #[test]
    fn a_whole_cluster_is_what_all_its_subclusters_are() {
        let header = header();
        let plain = Header::empty(1 << 30, 16);
        for entry in [0, ZERO, HOST | COPIED] {
            let words = words_of_whole(entry, &header);
            let expected = Cluster::parse(entry, &plain);
            assert_eq!(whole(&words, &header), expected, "{entry:x}");
            assert_eq!(whole(&words_of_whole(entry, &plain), &plain), expected);
        }
        let mixed = whole(&[HOST, 1], &header);
        assert_eq!(mixed, Ok(Cluster::Mixed { host: Some(HOST), copied: false }));
        let mixed = whole(&[0, 1 << 32], &header);
        assert_eq!(mixed, Ok(Cluster::Mixed { host: None, copied: false }));
    }
}
