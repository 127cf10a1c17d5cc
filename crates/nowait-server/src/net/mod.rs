//! Sockets: waits with a deadline, listeners and their acceptor, connected sockets, peer names, and the connection limit.

pub(crate) mod deadline;
pub(crate) mod socket;
pub(crate) mod peer;
pub(crate) mod listener;
pub(crate) mod connection_limit;
pub(crate) mod acceptor;
