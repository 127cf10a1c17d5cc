//! Names that survive a loss of power, on file systems whose device is looked at directly after the call.
//!
//! Invariant: nothing but the call under test makes durable what it changes.

use std::fs;
use std::path::Path;

use nowait::{durable_rename, sync_directory};
use nowait_testkit::file_systems::on_each_loop_after_power_loss;

fn data(byte: u8) -> Vec<u8> {
    vec![byte; 300_001]
}

/// A directory with a file `name`, both durable.
fn durable_file(directory: &Path) {
    fs::create_dir(directory).unwrap();
    fs::write(directory.join("name"), data(1)).unwrap();
    fs::File::open(directory.join("name")).unwrap().sync_all().unwrap();
    sync_directory(directory).unwrap();
    sync_directory(directory.parent().unwrap()).unwrap();
}

#[test]
fn a_durable_rename_over_a_file_of_its_directory_or_of_another_one_survives_a_loss_of_power() {
    for (directory, byte) in [("here", 2), ("there", 3)] {
        let change = |scene: &Path| {
            let (here, there) = (scene.join("here"), scene.join("there"));
            durable_file(&here);
            durable_file(&there);
            fs::write(here.join("new"), data(byte)).unwrap();
            durable_rename(&here.join("new"), &scene.join(directory).join("name")).unwrap();
        };
        on_each_loop_after_power_loss(change, |scene, system| {
            for name in ["here", "there"] {
                let expected = if name == directory { byte } else { 1 };
                let found = fs::read(scene.join(name).join("name")).unwrap();
                assert!(found == data(expected), "{system}, {directory}: {name}");
            }
            assert!(!scene.join("here/new").exists(), "{system}, {directory}: the old name");
        });
    }
}
