//! A block device over storage: the mapping of its bytes to files, and the order of its requests.

pub(crate) mod image_format;
pub(crate) mod range_lock;
pub(crate) mod flush_coalescer;
pub(crate) mod waiting_flushes;
pub(crate) mod ahead_map;
pub(crate) mod write_guard;
pub(crate) mod block_map;
pub(crate) mod allocation_cache;
pub(crate) mod allocate_ahead;
mod device_file;
pub(crate) mod device;
pub(crate) mod guarded_map;
mod file_requests;
