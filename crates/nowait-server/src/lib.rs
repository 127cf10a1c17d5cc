//! Block devices from images: one [`Device`] for each export, and the doors to it.
//!
//! A door translates and nothing else: what is on the wire becomes a request of the engine, a
//! completion becomes what goes on the wire. What a request may do is checked in one place,
//! [`Device`]. The modules are listed in the order in which they know each other.
#![deny(unsafe_code)]

mod device;
mod nbd;

pub use device::Device;
#[cfg(feature = "fuzz")]
pub use nbd::fuzz;
pub use nbd::{
    Clients, Credentials, Export, Listener, Options, QueueKind, Server, Stopped, Stopper, Tls,
    TlsError,
};
#[cfg(feature = "sim")]
pub use nbd::{Mistake, Simulated, make};
