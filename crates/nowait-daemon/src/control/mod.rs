//! The control interface of a server: its sockets, and what it does for who asks there.

pub mod control_socket;
pub mod token_file;
pub(crate) mod bitmap_answers;
pub(crate) mod backup_answers;
pub(crate) mod export_bitmaps;
pub(crate) mod replica_bitmap;
pub(crate) mod move_answers;
pub(crate) mod control_tcp;
pub(crate) mod running_server;
pub(crate) mod control_interface;
