//! The fourth phase: the serving threads run.
//!
//! Invariant: a server without a new node of a block device is confined before its threads start. The driver makes the
//! nodes of a new device, or of one that waits, when its queues are served: then the sandbox comes in the next phase.

use nowait_server::{ExportError, Listener, Options, QueueKind, Server, Tls};

use crate::config::ServeConfig;
use crate::confinement;
use crate::control::control_interface::BoundControl;
use crate::endpoints::reload::Reload;
use crate::endpoints::signals::Ending;
use crate::error::CliError;
use crate::process::background::Detached;
use crate::sandbox::FileAccess;
use crate::serve::Context;
use crate::serve::bound::{Bound, Places};
use crate::serve::opened::Images;
use crate::upgrade::sender::Upgrades;

/// A server whose threads run.
pub(super) struct Started<'a> {
    pub(super) context: Context<'a>,
    pub(super) server: Server,
    pub(super) images: Images,
    /// The sockets that are accepted from when another program has stopped to.
    pub(super) later: Vec<Listener>,
    pub(super) places: Places,
    pub(super) control: BoundControl,
    pub(super) upgrades: Upgrades,
    pub(super) kind: QueueKind,
    /// Files that it may open, unless it is confined already.
    pub(super) files: Option<FileAccess>,
    pub(super) detached: Detached,
    pub(super) ending: Ending,
    /// Private: no other module makes one.
    _made_here: (),
}

impl<'a> Started<'a> {
    /// Starts the threads of the server that is `bound`, confined unless it has nodes that are to appear.
    ///
    /// # Errors
    /// There is no sandbox where it has to be one; the queues cannot be made.
    pub(super) fn of(bound: Bound<'a>) -> Result<Self, CliError> {
        let Bound { context, images, mut listeners, places, control, upgrades, .. } = bound;
        let config = context.config;
        let nodes_appear = context.receiver.is_none() && places.devices.has_local();
        let mut files = Some(bound.files);
        if !nodes_appear && let Some(files) = files.take() {
            confinement::enter(config, files, &places.devices)?;
        }
        // A program that takes over accepts connections when the other one does no more.
        let later = match context.receiver {
            Some(_) => std::mem::take(&mut listeners),
            None => Vec::new(),
        };
        let options = options(config, bound.kind, bound.tls);
        let server = Server::start(bound.exports, listeners, options);
        let server = server.map_err(|error| CliError::at(images.path(), error))?;
        set_up(config, &server).map_err(|error| CliError::at(images.path(), error))?;
        let tls_files = bound.tls_files.into_iter().chain(control.tls()).collect();
        let reload = Reload::new(server.exports(), tls_files, places.log_file.clone());
        bound.ending.serving(server.shutdown_handle(), reload);
        Ok(Self {
            context,
            server,
            images,
            later,
            places,
            control,
            upgrades,
            kind: bound.kind,
            files,
            detached: bound.detached,
            ending: bound.ending,
            _made_here: (),
        })
    }
}

/// How the server of `config` serves.
fn options(config: &ServeConfig, kind: QueueKind, tls: Tls) -> Options {
    Options {
        threads: config.threads(),
        kind,
        config: config.engine(),
        tls,
        max_connections: config.max_connections,
        slow_requests: config.slow_requests.0,
        ..Options::default()
    }
}

/// Sets the limits of `config` for all exports, and when the server ends by itself.
fn set_up(config: &ServeConfig, server: &Server) -> Result<(), ExportError> {
    if config.exit_with_last_client {
        server.stop_after_last_client();
    }
    let exports = server.exports();
    exports.list().into_iter().try_for_each(|(id, _)| {
        exports.set_limits(id, config.limits())?;
        exports.set_client_limits(id, config.limits_per_client())
    })
}
