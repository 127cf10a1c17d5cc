//! The devices that exports of a server are, beside what NBD clients choose.

pub(crate) mod ublk_nodes;
pub(crate) mod vhost_sockets;
