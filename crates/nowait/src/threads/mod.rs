//! A thread pool, the fair queue of its jobs, and the list that returns their results.

pub(crate) mod fair_queue;
pub(crate) mod thread_pool;
pub(crate) mod completion_list;
