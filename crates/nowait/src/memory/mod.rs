//! Memory for direct I/O: a pool of buffers, and single buffers.

pub(crate) mod bounded_counter;
pub(crate) mod buffer_pool;
pub(crate) mod io_buffer;
