//! Memory for direct I/O: a pool of buffers, single buffers, and the bounce buffers of threads.

pub(crate) mod zeroed;
pub(crate) mod bounded_counter;
pub(crate) mod buffer_pool;
pub(crate) mod arena_memory;
pub(crate) mod io_buffer;
pub(crate) mod io_arena;
pub(crate) mod bounce_buffer;
