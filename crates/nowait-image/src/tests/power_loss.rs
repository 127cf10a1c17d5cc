//! A power cut at every step of a commit and of a resize, with the writes that were not synced lost
//! or there in part.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::chain::{Chain, ChainOptions, Locking};
use crate::formats::chain_reader::ChainReader;
use crate::formats::format::Format;
use crate::formats::qcow2::editor::Editor;
use crate::offline::check::check;
use crate::offline::commit::{Overlay, commit};
use crate::offline::create::{CreateOptions, create};
use crate::offline::resize::resize;
use crate::tests::observed_storage::Change;
use crate::tests::write_log::{UnsyncedWrites, cut, record};

const CLUSTER: u64 = 4096;
/// Covered by three L2 tables.
const CLUSTERS: u64 = 1200;
/// The overlay's disk is larger, and ends inside a cluster.
const TOP_BYTES: u64 = 1300 * CLUSTER + 512;

/// An overlay on a base image, in a directory of its own.
pub(crate) struct Scene {
    directory: tempfile::TempDir,
}

/// Without locks: a program that another test starts holds those of a file that was just closed
/// from its fork(2) to its execve(2).
pub(crate) fn options(writable: bool) -> ChainOptions {
    let locking = Locking::Unlocked;
    ChainOptions { writable, backing_writable: writable, locking, ..ChainOptions::default() }
}

impl Scene {
    /// Data in the base, and data and zeros in the overlay: beside it, over it and behind its end.
    pub(crate) fn new(base: Format) -> Self {
        let scene = Self { directory: tempfile::tempdir().unwrap() };
        let of_base = CreateOptions {
            cluster_bytes: (base == Format::Qcow2).then_some(CLUSTER),
            ..CreateOptions::new(base, Some(CLUSTERS * CLUSTER))
        };
        create(&scene.path("base"), &of_base).unwrap();
        let of_top = CreateOptions {
            size: Some(TOP_BYTES),
            format: Format::Qcow2,
            backing: Some("base".into()),
            backing_format: Some(base),
            cluster_bytes: Some(512),
            ..of_base
        };
        create(&scene.path("top"), &of_top).unwrap();
        match base {
            Format::Raw => fs::write(scene.path("base"), vec![1; 40 * CLUSTER as usize]).unwrap(),
            _ => scene.write("base", 1, [(0, 5), (20, 24), (600, 603)], []),
        }
        // Enough clusters for two refcount blocks; the last ones are behind the end of the base.
        let data = [(8, 41), (4799, 4830), (5000, 5200), (10398, 10401)];
        scene.write("top", 2, data, [(160, 176), (4840, 4842)]);
        scene
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write<const N: usize, const M: usize>(
        &self,
        name: &str,
        byte: u8,
        data: [(u64, u64); N],
        zeros: [(u64, u64); M],
    ) {
        let chain = Chain::open(&self.path(name), &options(true)).unwrap();
        let mut editor = Editor::open(chain.top()).unwrap();
        let cluster = vec![byte; editor.cluster_bytes() as usize];
        for index in data.into_iter().flat_map(|(from, to)| from..to) {
            editor.write_cluster(index, &cluster).unwrap();
        }
        for index in zeros.into_iter().flat_map(|(from, to)| from..to) {
            editor.zero_cluster(index, true).unwrap();
        }
        editor.finish(false).unwrap();
    }

    pub(crate) fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let names = ["base", "top"].map(|name| self.path(name));
        names.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    }

    /// The disk of the image `name`, whose metadata must not be corrupt.
    pub(crate) fn disk(&self, name: &str, format: Format, moment: &str) -> Vec<u8> {
        let options = ChainOptions { format: Some(format), ..options(false) };
        let chain = Chain::open(&self.path(name), &options).unwrap();
        if chain.top().header().is_some() {
            let report = check(&chain, &mut |_, _| {}).unwrap();
            assert_eq!(report.corruptions, 0, "{name}, {moment}");
        }
        let reader = ChainReader::new(chain.layers()).unwrap();
        let mut disk = vec![0; reader.size() as usize];
        reader.read_at(0, &mut disk).unwrap();
        disk
    }
}

pub(crate) fn restore(files: &BTreeMap<PathBuf, Vec<u8>>) {
    for (path, bytes) in files {
        fs::write(path, bytes).unwrap();
    }
}

/// Calls `verify` for each state that a cut in `steps` may leave, with the files in that state.
pub(crate) fn every_cut(
    before: &BTreeMap<PathBuf, Vec<u8>>,
    steps: &[(PathBuf, Change)],
    mut verify: impl FnMut(&str),
) {
    let is_sync = |number: usize| steps.get(number).is_none_or(|(_, s)| matches!(s, Change::Sync));
    for end in 0..=steps.len() {
        let mut kinds =
            vec![UnsyncedWrites::Lost, UnsyncedWrites::There, UnsyncedWrites::Torn(end as u64 + 1)];
        if is_sync(end) {
            // The most steps are unsynced here: tries each of them alone, and all but each.
            let first = (0..end).rev().find(|&number| is_sync(number)).map_or(0, |sync| sync + 1);
            kinds.extend(
                (first..end).flat_map(|n| [UnsyncedWrites::Only(n), UnsyncedWrites::AllBut(n)]),
            );
        }
        for unsynced in kinds {
            restore(&cut(before, &steps[..end], unsynced));
            verify(&format!("cut at {end} of {}, {unsynced:?}", steps.len()));
        }
    }
}

pub(crate) fn commit_all(top: &Path) {
    let chain = Chain::open(top, &options(true)).unwrap();
    commit(&chain, Overlay::Emptied, false, &mut |_, _| {}).unwrap();
}

fn assert_commit_survives_power_cuts(base: Format) {
    let scene = Scene::new(base);
    let before = scene.files();
    let expected = scene.disk("top", Format::Qcow2, "at first");
    let steps = record(|| commit_all(&scene.path("top")));
    let done = scene.files();
    let committed = scene.disk("base", base, "at last");
    assert!(committed == expected && scene.disk("top", Format::Qcow2, "at last") == expected);
    assert!(steps.len() > 15, "{}", steps.len());
    // The record is complete.
    assert!(cut(&before, &steps, UnsyncedWrites::There) == done);
    let mut cuts = 0;
    every_cut(&before, &steps, |moment| {
        assert!(scene.disk("top", Format::Qcow2, moment) == expected, "{moment}");
        scene.disk("base", base, moment);
        cuts += 1;
        if cuts % 16 == 0 {
            commit_all(&scene.path("top"));
            assert!(scene.disk("base", base, moment) == expected, "again, {moment}");
        }
    });
}

#[test]
fn a_commit_to_a_raw_image_loses_no_data_at_any_power_cut() {
    assert_commit_survives_power_cuts(Format::Raw);
}

#[test]
fn a_commit_to_a_qcow2_image_loses_no_data_at_any_power_cut() {
    assert_commit_survives_power_cuts(Format::Qcow2);
}

#[test]
fn a_resize_leaves_the_old_size_or_the_new_one_at_any_power_cut() {
    let scene = Scene::new(Format::Qcow2);
    let expected = scene.disk("top", Format::Qcow2, "at first");
    // Beyond the reach of the L1 table, smaller than at first, and larger again over the base's
    // data.
    for size in [4000 * CLUSTER, 10 * CLUSTER + 512, 1000 * CLUSTER] {
        let before = scene.files();
        let old = scene.disk("top", Format::Qcow2, "before");
        let steps = record(|| {
            let chain = Chain::open(&scene.path("top"), &options(true)).unwrap();
            resize(&chain, size, true).unwrap();
        });
        let after = scene.files();
        let new = scene.disk("top", Format::Qcow2, "after");
        let kept = old.len().min(new.len());
        assert!(new.len() as u64 == size && new[..kept] == old[..kept]);
        assert!(new[kept..].iter().all(|&byte| byte == 0));
        every_cut(&before, &steps, |moment| {
            let found = scene.disk("top", Format::Qcow2, moment);
            assert!(found.len() == old.len() || found == new, "{moment}");
            assert!(found[..kept] == old[..kept], "{moment}");
        });
        restore(&after);
    }
    assert!(expected.len() as u64 == TOP_BYTES);
}
