//! The first phase: what the process was given at its start.
//!
//! Invariant: nothing is opened, and there is one thread.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;

use nowait_nbd::Address;
use nowait_server::Listener;
use rustix::process::{Resource, Rlimit, getrlimit};

use crate::devices;
use crate::error::CliError;
use crate::process::lifetime::Parent;
use crate::process::systemd;
use crate::serve::Context;

/// A server that is to be.
pub(super) struct Plan<'a> {
    pub(super) context: Context<'a>,
    /// The limit of descriptors with which the process was started.
    pub(super) descriptors: Rlimit,
    pub(super) parent: Parent,
    /// Connections of clients of devices, by their descriptors.
    pub(super) connections: HashMap<i32, UnixStream>,
    /// Sockets that the service manager has handed over.
    pub(super) inherited: Vec<(Listener, Address)>,
    /// Private: no other module makes one.
    _made_here: (),
}

impl<'a> Plan<'a> {
    /// The plan of `context`, in a process that was started with the limit `descriptors`. The sockets that were handed
    /// over wait from now on.
    ///
    /// # Errors
    /// A descriptor that was named is not a socket, or not open.
    pub(super) fn of(context: Context<'a>, descriptors: Rlimit) -> Result<Self, CliError> {
        let parent = Parent::now();
        let connections = devices::connections(context.config, context.receiver.is_some())?;
        let inherited = systemd::sockets()?;
        *context.waiting =
            inherited.iter().filter_map(|(listener, _)| listener.try_clone().ok()).collect();
        Ok(Self { context, descriptors, parent, connections, inherited, _made_here: () })
    }

    /// The plan of `context` for a server that takes nothing of what its process was given.
    pub(super) fn of_embedded(context: Context<'a>) -> Self {
        let (descriptors, parent) = (getrlimit(Resource::Nofile), Parent::now());
        let (connections, inherited) = (HashMap::new(), Vec::new());
        Self { context, descriptors, parent, connections, inherited, _made_here: () }
    }
}
