//! The gate and the journal that a test has made for a file, as the observer of its storage.

use std::sync::Arc;

use nowait::FileStorage;

use crate::qcow2_disk::tests::failed_batches::{self, Supply};
use crate::qcow2_disk::tests::gate::Gate;
use crate::qcow2_disk::tests::journal::{Event, Journal};
use crate::qcow2_disk::tests::{gate, journal};
use crate::tests::observed_storage::{Change, ObservedStorage, Observer};

/// The observer of a file.
pub(crate) struct FileObserver {
    gate: Option<Arc<Gate>>,
    /// The journal, and the number of the file in it.
    journal: Option<(Journal, usize)>,
    supply: Option<Arc<Supply>>,
}

/// `storage` with the gate and the journal that its file has by now.
pub(crate) fn observed(storage: FileStorage) -> ObservedStorage<FileObserver> {
    let gate = gate::of(storage.lock_fd());
    let journal = journal::find(storage.lock_fd());
    let supply = failed_batches::of(storage.lock_fd());
    ObservedStorage { inner: storage, observer: FileObserver { gate, journal, supply } }
}

impl Observer for FileObserver {
    fn begin(&self, change: Change) -> usize {
        let Some((journal, file)) = &self.journal else { return 0 };
        journal.push(Event::Begun(*file, change))
    }

    fn completed(&self, begun: usize) {
        if let Some((journal, _)) = &self.journal {
            journal.push(Event::Ended(begun));
        }
    }

    fn reading(&self) {
        if let Some(gate) = &self.gate {
            gate.enter();
        }
    }

    fn read(&self, bytes: u64) {
        if let Some(gate) = &self.gate {
            gate.passed(bytes);
        }
    }

    fn fails(&self) -> bool {
        self.supply.as_ref().is_some_and(|supply| supply.is_over())
    }

    fn keeps_unsynced(&self) -> bool {
        self.supply.is_some()
    }
}
