//! The log of a vhost-user socket: VMMs that connect, leave, or are disconnected.
//!
//! Invariant: faults of VMMs are logged as [`refusal_log`] allows, so that one which connects again and
//! again cannot fill a log. Memory that is not shared is told once, until a VMM shares some.

use std::io;

use vhost::vhost_user::Error as MessageError;

use crate::refusal_log::{self, Refusal};
use crate::vhost_user::device::NO_MEMORY;

/// How to share the memory, for the log.
const HOW_TO_SHARE: &str = "start QEMU with -object memory-backend-memfd,id=mem,size=SIZE,share=on \
                            -machine memory-backend=mem, cloud-hypervisor with --memory shared=on";

/// The log of a socket.
pub(crate) struct VmmLog {
    label: String,
    told_of_memory: bool,
    /// The last connection could not be made, which was logged.
    has_failed: bool,
}

impl VmmLog {
    /// The log of the socket that is called `label` in it.
    pub(crate) fn new(label: String) -> Self {
        Self { label, told_of_memory: false, has_failed: false }
    }

    /// How the socket is called.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    pub(crate) fn connected(&mut self) {
        self.has_failed = false;
        tracing::info!("{}: a VMM has connected", self.label);
    }

    /// A connection cannot be accepted. Logged once for all failures in a row.
    pub(crate) fn cannot_accept(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!("{}: cannot accept a connection: {error}", self.label);
        }
    }

    /// A VMM that is to listen cannot be connected to. Logged once for all failures in a row.
    pub(crate) fn cannot_connect(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    tracing::info!("{}: waiting until it listens", self.label);
                }
                _ => tracing::warn!("{}: cannot connect: {error}", self.label),
            }
        }
    }

    /// A connection was closed, because no more are allowed.
    pub(crate) fn too_many(&self) {
        let label = &self.label;
        let message = format_args!("{label}: a connection was closed: too many are open");
        refusal_log::note(Refusal::Connections, message);
    }

    /// A VMM is not served any more because of `error`. Returns whether that is its fault.
    pub(crate) fn ended(&mut self, error: &MessageError, had_memory: bool) -> bool {
        let label = &self.label;
        if had_memory {
            self.told_of_memory = false;
        }
        match error {
            // Broken: it has left without taking an answer.
            MessageError::Disconnected
            | MessageError::PartialMessage
            | MessageError::SocketBroken(_) => {
                tracing::info!("{label}: the VMM has left");
                return false;
            }
            MessageError::InvalidOperation(NO_MEMORY) if self.told_of_memory => {
                tracing::info!("{label}: {NO_MEMORY}");
            }
            MessageError::InvalidOperation(NO_MEMORY) => {
                let message = format_args!("{label}: {NO_MEMORY}: {HOW_TO_SHARE}");
                self.told_of_memory = refusal_log::note(Refusal::Memory, message);
            }
            error => {
                let message = format_args!("{label}: the VMM was disconnected: {error}");
                refusal_log::note(Refusal::Message, message);
            }
        }
        true
    }
}
