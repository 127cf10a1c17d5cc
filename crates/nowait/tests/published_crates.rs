//! Each crate that is published says whom it is for, in its README and on the first page of its
//! documentation, and how docs.rs builds it; the public names of `nowait` are counted.
//!
//! Invariant: a name that only the sibling crates use is behind `nowait::internal`.

use std::fs;
use std::path::{Path, PathBuf};

/// Public names on the first page of `nowait`, without those of `sim`; fewer are better.
const PUBLIC_NAMES: usize = 75;

fn published() -> Vec<PathBuf> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let all = fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path());
    let is_published = |path: &PathBuf| {
        let manifest = fs::read_to_string(path.join("Cargo.toml"));
        manifest.is_ok_and(|manifest| !manifest.contains("publish = false"))
    };
    all.filter(is_published).collect()
}

#[test]
fn each_published_crate_says_whom_it_is_for() {
    let crates = published();
    assert!(crates.len() >= 10, "{crates:?}");
    for path in crates {
        let shown = path.display();
        let read = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        assert!(
            read("README.md").lines().any(|line| line.starts_with("For ")),
            "{shown}/README.md"
        );
        let page = read("src/lib.rs");
        assert!(page.lines().any(|line| line.starts_with("//! For ")), "{shown}/src/lib.rs");
        assert!(read("Cargo.toml").contains("[package.metadata.docs.rs]"), "{shown}/Cargo.toml");
    }
}

#[test]
fn the_public_names_of_the_engine_do_not_become_more() {
    let root =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let shown = root.split("#[doc(hidden)]\npub mod internal").next().unwrap();
    let exports = shown.split("pub use ").skip(1).map(|rest| rest.split(';').next().unwrap());
    let names = exports.flat_map(|path| match path.split_once('{') {
        Some((_, group)) => group.split(',').map(str::trim).filter(|it| it.len() > 1).collect(),
        None => vec![path],
    });
    let of_sim = shown.matches("#[cfg(feature = \"sim\")]\npub use ").count();
    assert_eq!(names.count() - of_sim, PUBLIC_NAMES);
}
