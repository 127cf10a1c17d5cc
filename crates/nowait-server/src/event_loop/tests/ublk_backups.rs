//! A ublk device as the writer of a disk of which there is a backup.
//!
//! Invariant: the queue and its commands are those of [`super::ublk_requests`].

use std::os::unix::fs::FileExt;

use nowait::BlockingFile;

use crate::backup::backup_spec::BackupSpec;
use crate::backup::scratch::scratch_file;
use crate::backup_transaction::{self, PreparedBackup};
use crate::event_loop::tests::ublk_requests::Scene;
use crate::event_loop::tests::*;
use crate::threads::Shared;
use crate::ublk::ublk_cmd::{F_ZERO_COPY, OP_DISCARD, OP_WRITE, OP_WRITE_ZEROES, data_position};

#[test]
fn c78_a_node_writes_its_disk_while_a_backup_of_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let begin = |shared: &Shared| {
        let export = shared.registry.default_export().unwrap();
        let spec = BackupSpec {
            export: export.id,
            name: "backup".into(),
            bitmap: None,
            only_dirty: false,
            discards: false,
            scratch: scratch_file(directory.path(), None, BackupSpec::scratch_size(SIZE)).unwrap(),
            scratch_bytes: SIZE,
        };
        let prepared = PreparedBackup::new(export, spec, 4096).unwrap();
        backup_transaction::begin(&shared.registry, vec![prepared]).unwrap();
    };
    for features in [0, F_ZERO_COPY] {
        let mut scene = Scene::prepared(SIZE, features, begin);
        let backup = scene.thread.shared.registry.find("backup").unwrap();
        let backup = BlockingFile::new(backup.export().disk().clone());
        for (op, result) in
            [(OP_WRITE, 8192), (OP_WRITE_ZEROES, 0), (OP_DISCARD, 0), (OP_WRITE, 8192)]
        {
            // The data behind the character device, as the driver has it.
            scene.descriptors.write_all_at(&[9; 8192], data_position(0, 1)).unwrap();
            scene.request(1, u32::from(op), 16, 8);
            assert_eq!(scene.answer(1), result, "operation {op}");
            let mut was = [0; 65536];
            backup.read_at(&mut was, 0).unwrap();
            assert!(was == [7; 65536], "operation {op}");
        }
        let copied = registered(&scene.thread).backup().unwrap().point.copied();
        assert_eq!(copied, 8192, "two blocks, once each");
    }
}
