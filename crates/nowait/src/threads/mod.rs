//! A thread pool, the fair queue of its jobs, the list that returns their results, and adaptive
//! polling.

pub(crate) mod adaptive_poll;
pub(crate) mod work_item;
mod number_hash;
mod device_turns;
pub(crate) mod fair_queue;
pub(crate) mod thread_pool;
pub(crate) mod completion_list;
pub(crate) mod fork_mark;
pub(crate) mod thread_priority;
pub(crate) mod alarm_clock;
