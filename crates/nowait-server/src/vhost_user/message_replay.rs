//! The messages of a VMM whose first ones were handled by another process.
//!
//! Invariant: the VMM is sent nothing that it has not asked for: the answers to the messages that are
//! repeated here go nowhere.
#![allow(unsafe_code)]

use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use crate::vhost_user::device::Device;
use crate::vhost_user::device::vmm_state::VmmState;

/// The requests that tell what was negotiated (vhost-user.rst, "Front-end message types").
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_PROTOCOL_FEATURES: u32 = 16;
/// The flags of a message: the version of the protocol.
const VERSION: u32 = 1;

/// A handler for the messages at `socket` that knows what the VMM of `state` has negotiated, and so
/// does `device`: crate `vhost` learns that only from messages.
///
/// # Errors
/// The device does not have the features; `EMFILE`, `ENFILE`.
pub(crate) fn replayed(
    socket: UnixStream,
    device: Arc<Mutex<Device>>,
    state: &VmmState,
) -> Result<BackendReqHandler<Mutex<Device>>, MessageError> {
    let (near, mut far) = UnixStream::pair().map_err(MessageError::SocketError)?;
    let mut handler = BackendReqHandler::from_stream(near, device);
    let (features, protocol_features) = (state.setup.features, state.setup.protocol_features);
    let messages = [
        (GET_FEATURES, None),
        (SET_FEATURES, Some(features)),
        (SET_PROTOCOL_FEATURES, Some(protocol_features)),
    ];
    for (request, body) in messages {
        let body = body.map_or_else(Vec::new, |body: u64| body.to_ne_bytes().to_vec());
        let header = [request, VERSION, body.len() as u32].map(u32::to_ne_bytes).concat();
        far.write_all(&[header, body].concat()).map_err(MessageError::SocketError)?;
        handler.handle_request()?;
    }
    // SAFETY: the descriptor is the handler's, open as long as the handler lives, and is closed by the
    // handler only; this value is never dropped.
    let mut near = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(handler.as_raw_fd()) });
    rustix::io::dup3(&socket, &mut near, rustix::io::DupFlags::CLOEXEC)
        .map_err(|errno| MessageError::SocketError(errno.into()))?;
    Ok(handler)
}
