//! The control interface of this server: its sockets, and the thread that answers there.
//!
//! Invariant: what a program that takes over has is not removed by this one.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use crate::error::CliError;
use nowait_control::{HttpListener, HttpServer};
use nowait_server::{Credentials, Listener};

use crate::config::ServeConfig;
use crate::control::control_socket::{self, BoundSocket};
use crate::control::control_tcp::ControlTcp;
use crate::control::running_server::RunningServer;
use crate::control::token_file::OwnTokenFile;
use crate::endpoints::tls_files::TlsFiles;
use crate::upgrade::messages::ControlStates;
use crate::upgrade::receiver::Receiver;

/// Where the clients of the interface will connect.
pub(crate) struct BoundControl {
    socket: Option<BoundSocket>,
    tcp: Option<ControlTcp>,
}

/// The control interface, until it is dropped.
pub(crate) struct ControlInterface {
    server: HttpServer,
    socket: Option<Listener>,
    token_file: Option<OwnTokenFile>,
}

impl BoundControl {
    /// Binds what `config` say, or takes it over.
    ///
    /// # Errors
    /// An address that was given cannot be bound, or may not be used as it was given.
    pub(crate) fn bind(
        config: &ServeConfig,
        mut receiver: Option<&mut Receiver>,
    ) -> Result<Self, CliError> {
        let unix = receiver.as_deref_mut().map(Receiver::control).transpose()?.flatten();
        let tcp = receiver.map(Receiver::control_tcp).transpose()?.unwrap_or_default();
        let tcp = ControlTcp::bind(config, tcp)?;
        Ok(Self { socket: control_socket::bind(config.control_socket(), unix)?, tcp })
    }

    /// The sockets for a program that takes over.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn states(&self) -> Result<ControlStates, CliError> {
        Ok(ControlStates {
            unix: self.socket.as_ref().map(BoundSocket::state).transpose()?.flatten(),
            tcp: self.tcp.as_ref().map(ControlTcp::states).transpose()?.unwrap_or_default(),
        })
    }

    /// The certificates of the interface, and where they are read from.
    pub(crate) fn tls(&self) -> Option<(TlsFiles, Credentials)> {
        self.tcp.as_ref().and_then(ControlTcp::tls)
    }

    /// The file of the token that was made for it.
    pub(crate) fn token_file(&self) -> Option<&Path> {
        self.tcp.as_ref().and_then(ControlTcp::token_file)
    }

    /// Answers the clients for `running`. If no thread can be started for that, the log says so, and
    /// there is no control interface.
    pub(crate) fn serve(self, running: RunningServer) -> Option<ControlInterface> {
        match self.start(running) {
            Ok(interface) => interface,
            Err(error) => {
                tracing::warn!("no control socket: {error}");
                None
            }
        }
    }

    fn start(self, running: RunningServer) -> std::io::Result<Option<ControlInterface>> {
        let (mut listeners, mut socket, mut token_file) = (Vec::new(), None, None);
        if let Some(BoundSocket { listener, path, .. }) = self.socket {
            listeners.push(HttpListener::Unix(UnixListener::from(
                listener.as_fd().try_clone_to_owned()?,
            )));
            tracing::info!("control socket: {}", path.display());
            socket = Some(listener);
        }
        if let Some(tcp) = self.tcp {
            let (more, file) = tcp.listeners()?;
            listeners.extend(more);
            token_file = file.map(OwnTokenFile::own);
        }
        if listeners.is_empty() {
            return Ok(None);
        }
        let server = HttpServer::start(listeners, Arc::new(running))?;
        Ok(Some(ControlInterface { server, socket, token_file }))
    }
}

impl ControlInterface {
    /// Another process serves: answers the last requests, and leaves what it has, a Unix socket only
    /// if `is_socket_handed_over`.
    pub(crate) fn leave(self, is_socket_handed_over: bool) {
        self.server.finish();
        self.token_file.into_iter().for_each(OwnTokenFile::leave);
        if is_socket_handed_over {
            self.socket.into_iter().for_each(Listener::abandon);
        }
    }
}
