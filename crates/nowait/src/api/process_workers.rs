//! The worker pool of the process, for all files that are not given another one.
//!
//! Invariant: it is made once and never ends; its threads start when first needed.

use std::sync::LazyLock;

use crate::blocking::worker_pool::WorkerPool;

/// The pool, of [`WorkerPool::DEFAULT_LIMIT`] threads.
pub(crate) fn process_workers() -> WorkerPool {
    static WORKERS: LazyLock<WorkerPool> = LazyLock::new(WorkerPool::default);
    WORKERS.clone()
}
