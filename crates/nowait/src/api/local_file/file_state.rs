//! The state that the handles and the futures of one file share.
//!
//! Invariant: the engine has no request of a file whose state is dropped.

use std::rc::Rc;

use crate::api::handle_disk::HandleDisk;
use crate::api::local_file::shared_engine::SharedEngine;

pub(crate) struct FileState {
    pub(crate) engine: Rc<SharedEngine>,
    /// The number of the file in the engine.
    pub(crate) number: u32,
    pub(crate) disk: HandleDisk,
}

impl Drop for FileState {
    /// Waits for the requests of the file, whose futures are gone.
    fn drop(&mut self) {
        self.engine.close(self.number);
    }
}
