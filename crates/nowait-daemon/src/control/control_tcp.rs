//! The control interface of a server on TCP.
//!
//! Invariant: without clients' certificates it listens on loopback addresses only, and then each
//! request needs the token.

use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::error::{CliError, os_message};
use nowait_control::{HttpListener, Token};
use nowait_nbd::Address;
use nowait_server::{Credentials, Listener};

use crate::config::ServeConfig;
use crate::control::token_file::{self, OwnTokenFile};
use crate::endpoints::tls_files::TlsFiles;
use crate::upgrade::messages::ListenerState;
use crate::upgrade::receiver::ReceivedListener;

/// The bound sockets of the interface on TCP, and who is let in.
pub(crate) struct ControlTcp {
    listeners: Vec<Listener>,
    address: Address,
    proof: Proof,
}

enum Proof {
    /// The token, and its file if it was made here.
    Token(Token, Option<OwnTokenFile>),
    Certificate(TlsFiles, Credentials),
}

impl ControlTcp {
    /// Binds the address that `config` have, or takes over its sockets; `None` if they have none.
    ///
    /// # Errors
    /// The address cannot be bound, it is for all networks without certificates, or there is no
    /// token.
    pub(crate) fn bind(
        config: &ServeConfig,
        handed: Vec<ReceivedListener>,
    ) -> Result<Option<Self>, CliError> {
        let Some((host, port)) = config.control_tcp() else { return Ok(None) };
        let failed = |error| {
            CliError::new(format!(
                "--control tcp:{host}:{port}: cannot listen: {}",
                os_message(&error)
            ))
        };
        let certificates = config.control_tls_certs.as_deref().map(TlsFiles::verified);
        let certificates = certificates
            .map(|files| files.load().map(|credentials| Proof::Certificate(files, credentials)))
            .transpose()?;
        let is_taken_over = !handed.is_empty();
        let listeners = match is_taken_over {
            true => handed.into_iter().map(|handed| handed.listener).collect(),
            false => Listener::tcp(host, port).map_err(failed)?,
        };
        let mut bound = listeners.iter().filter_map(Listener::tcp_address);
        let port = bound.clone().next().map_or(port, |address| address.port());
        let proof = match (certificates, &config.control_token) {
            (Some(proof), _) => proof,
            (None, _) if !bound.all(|address| address.ip().is_loopback()) => {
                return Err(CliError::new(format!(
                    "--control tcp:{host}:{port}: other machines could read the token there (give --control-tls-certs, \
                     or take 127.0.0.1)"
                )));
            }
            (None, Some(path)) => Proof::Token(token_file::read(path)?, None),
            (None, None) => {
                let (token, file) = token_file::make(port, is_taken_over)?;
                Proof::Token(token, Some(file))
            }
        };
        let address = Address::Tcp { host: host.to_owned(), port };
        Ok(Some(Self { listeners, address, proof }))
    }

    /// The sockets for a program that takes over.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn states(&self) -> Result<Vec<(ListenerState, OwnedFd)>, CliError> {
        let state = |listener| ListenerState::of(listener, &self.address, None);
        let states: Result<_, _> = self.listeners.iter().map(state).collect();
        states.map_err(|error| CliError::new(os_message(&error)))
    }

    /// Its certificates, and where they are read from.
    pub(crate) fn tls(&self) -> Option<(TlsFiles, Credentials)> {
        match &self.proof {
            Proof::Token(..) => None,
            Proof::Certificate(files, credentials) => Some((files.clone(), credentials.clone())),
        }
    }

    /// The file of the token that was made for it.
    pub(crate) fn token_file(&self) -> Option<&Path> {
        match &self.proof {
            Proof::Token(_, file) => file.as_ref().map(OwnTokenFile::path),
            Proof::Certificate(..) => None,
        }
    }

    /// Its listeners, and the file that is removed at the end.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn listeners(self) -> std::io::Result<(Vec<HttpListener>, Option<OwnTokenFile>)> {
        let mut listeners = Vec::new();
        for listener in &self.listeners {
            let socket = TcpListener::from(listener.as_fd().try_clone_to_owned()?);
            listeners.push(match &self.proof {
                Proof::Token(token, _) => HttpListener::Token(socket, token.clone()),
                Proof::Certificate(_, credentials) => {
                    HttpListener::Certificate(socket, credentials.clone())
                }
            });
        }
        if let Address::Tcp { host, port } = &self.address {
            tracing::info!("control: tcp:{host}:{port}");
        }
        match self.proof {
            Proof::Token(_, file) => Ok((listeners, file)),
            Proof::Certificate(..) => Ok((listeners, None)),
        }
    }
}
