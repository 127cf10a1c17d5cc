//! The vhost-user-blk device at its rings: what a driver asks for, and what a hostile one sends.
//!
//! Invariant: beside each hostile driver another one is served by the same thread.

mod beside_nbd;
mod block_size;
mod changes;
mod connects;
mod driver;
mod end_during_hand_over;
mod handed_over;
mod hostile;
mod pauses;
mod request_length;
mod requests;
mod scene;
