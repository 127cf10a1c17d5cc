//! A power cut at every step of a change of the list of bitmaps.
//!
//! Invariant: the list is the old one or the new one, and of each bitmap of both all bits are there.

use std::io::Read;
use std::path::Path;

use crate::chain::Chain;
use crate::error::ImageError;
use crate::formats::format::Format;
use crate::formats::qcow2::bitmaps::Bitmap;
use crate::formats::qcow2::stored_bits::StoredBits;
use crate::image;
use crate::offline::bitmap_changes::{self, NewBitmap};
use crate::offline::resize::resize;
use crate::tests::observed_storage::Change;
use crate::tests::power_loss::{Scene, commit_all, every_cut, options, restore};
use crate::tests::write_log::{UnsyncedWrites, cut, record};

/// Bits of a bitmap, as it has them at first.
const BITS: [u8; 9] = [0xa5, 1, 2, 3, 4, 5, 6, 7, 8];

/// The usable bitmaps of the image at `path`, and whether each has its bits.
fn listed(path: &Path) -> Vec<(String, u64, bool)> {
    let chain = Chain::open(path, &options(false)).unwrap();
    let (file, header) = (&chain.top().file, chain.top().header().unwrap());
    let all = Bitmap::with_entries(file, header).unwrap();
    let described = |(entry, bitmap): (_, Bitmap)| {
        assert!(bitmap.is_usable(), "{bitmap:?}");
        let mut bits = vec![0; BITS.len()];
        StoredBits::new(file, header, &entry).read_exact(&mut bits).unwrap();
        (bitmap.name, bitmap.granularity, bits == BITS)
    };
    all.into_iter().map(described).collect()
}

/// Bitmaps by name, with their granularities and whether they have their bits.
type Bitmaps = &'static [(&'static str, u64, bool)];
type Step = fn(&Chain) -> Result<(), ImageError>;

fn add(chain: &Chain, name: &str, granularity: u64) -> Result<(), ImageError> {
    let new = NewBitmap { name: name.into(), granularity, enabled: true };
    bitmap_changes::add(chain, &new, Some(&mut &BITS[..]))
}

#[test]
fn bitmaps_are_there_or_not_at_any_power_cut() {
    let scene = Scene::new(Format::Qcow2);
    let top = scene.path("top");
    let disk = scene.disk("top", Format::Qcow2, "at first");
    let mut expected: Vec<(String, u64, bool)> = Vec::new();
    let steps: [(Step, Bitmaps); 7] = [
        (|chain| add(chain, "a", 4096), &[("a", 4096, true)]),
        (|chain| add(chain, "b", 512), &[("a", 4096, true), ("b", 512, true)]),
        (|chain| resize(chain, 32 << 20, false).map(drop), &[("a", 4096, true), ("b", 512, true)]),
        (|chain| bitmap_changes::clear(chain, "b"), &[("a", 4096, true), ("b", 512, false)]),
        (|chain| bitmap_changes::remove(chain, "a"), &[("b", 512, false)]),
        (|chain| bitmap_changes::remove(chain, "b"), &[]),
        (|chain| add(chain, "c", 65536), &[("c", 65536, true)]),
    ];
    for (step, then) in steps {
        let before = scene.files();
        let log = record(|| step(&Chain::open(&top, &options(true)).unwrap()).unwrap());
        let after = scene.files();
        let then =
            then.iter().map(|(name, granularity, bits)| (name.to_string(), *granularity, *bits));
        let then: Vec<_> = then.collect();
        assert_eq!(listed(&top), then);
        every_cut(&before, &log, |moment| {
            let found = listed(&top);
            assert!(found == expected || found == then, "{moment}: {found:?}");
            let found = scene.disk("top", Format::Qcow2, moment);
            assert!(found.starts_with(&disk), "{moment}");
        });
        restore(&after);
        expected = then;
    }
}

#[test]
fn c77_a_change_of_bitmaps_is_durable_when_it_is_answered() {
    let scene = Scene::new(Format::Qcow2);
    let top = scene.path("top");
    let steps: [Step; 5] = [
        |chain| add(chain, "a", 4096),
        |chain| add(chain, "b", 512),
        |chain| bitmap_changes::clear(chain, "b"),
        |chain| bitmap_changes::remove(chain, "a"),
        |chain| bitmap_changes::remove(chain, "b"),
    ];
    for (number, step) in steps.into_iter().enumerate() {
        let before = (scene.files(), listed(&top));
        let log = record(|| step(&Chain::open(&top, &options(true)).unwrap()).unwrap());
        let then = listed(&top);
        assert_ne!(then, before.1, "step {number}");
        restore(&cut(&before.0, &log, UnsyncedWrites::Lost));
        assert_eq!(listed(&top), then, "step {number}");
    }
}

/// Whether the file at `path` is synced by `run`, before anything is written to it.
fn syncs_first(path: &Path, run: impl FnOnce()) -> bool {
    let log = record(run);
    let first = log.into_iter().find(|(changed, _)| changed == path);
    matches!(first, Some((_, Change::Sync)))
}

#[test]
fn c77_a_change_of_bitmaps_that_a_kill_has_cut_off_is_durable_before_the_disk_is_written_to() {
    let scene = Scene::new(Format::Qcow2);
    let (top, base) = (scene.path("top"), scene.path("base"));
    let is_synced =
        |writable| syncs_first(&top, || drop(image::open(&top, &options(writable)).unwrap()));
    let change = |path: &Path, step: Step| {
        step(&Chain::open(path, &options(true)).unwrap()).unwrap();
    };
    assert!(!is_synced(true), "an image without bitmaps is opened without a sync");
    change(&top, |chain| add(chain, "a", 4096));
    assert!(is_synced(true));
    assert!(is_synced(true), "a bitmap in use that was disabled could be enabled again");
    change(&top, |chain| bitmap_changes::remove(chain, "a"));
    assert!(is_synced(true), "the removal could come undone");
    assert!(!is_synced(false));
    change(&base, |chain| add(chain, "b", 4096));
    change(&base, |chain| bitmap_changes::remove(chain, "b"));
    assert!(syncs_first(&base, || commit_all(&top)), "a commit writes to an image, too");
}
