//! The channel on which a VMM is told that the configuration of its device has changed, as when the
//! export has become larger (message CONFIG_CHANGE_MSG).
//!
//! Invariant: the VMM hands the channel over and may do with its end what it likes: nothing here
//! waits for it.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send,
};

/// The request of the VMM that hands the channel over (SET_BACKEND_REQ_FD).
const SET_CHANNEL: u32 = 21;
/// The message: its number, the version of the protocol, a body of no bytes.
const CONFIG_CHANGE: [u32; 3] = [2, 1, 0];

/// Waits for the next message of the VMM at `socket`, which stays there. Returns the channel that it
/// hands over, if it does: crate `vhost` keeps the descriptor for messages of its own.
pub(crate) fn peek_channel(socket: &impl AsFd) -> Option<OwnedFd> {
    let mut number = [0; 4];
    let (_, len) = recv(socket, &mut number, RecvFlags::PEEK).ok()?;
    if len < number.len() || u32::from_ne_bytes(number) != SET_CHANNEL {
        return None;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut descriptors = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut number)], &mut descriptors, flags).ok()?;
    descriptors.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}

/// Tells the VMM at the other end of `channel` to read the configuration again.
pub(crate) fn tell(channel: &impl AsFd) {
    let mut message = [0; 12];
    for (place, word) in message.chunks_exact_mut(4).zip(CONFIG_CHANGE) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    // A VMM that has left, or does not take its messages, misses this one. What it has handed over
    // may be no socket.
    let _ = send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

    use super::*;

    /// Sends a message that begins with `number`, with a descriptor of `channel`.
    fn hand_over(socket: &UnixStream, number: u32, channel: &UnixStream) {
        let descriptors = [channel.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        assert!(rights.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let bytes = [number.to_ne_bytes(), 1u32.to_ne_bytes(), 0u32.to_ne_bytes()].concat();
        sendmsg(socket, &[IoSlice::new(&bytes)], &mut rights, SendFlags::empty()).unwrap();
    }

    #[test]
    fn a_channel_is_found_in_its_message_which_stays_in_the_socket() {
        let (vmm, device) = UnixStream::pair().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        hand_over(&vmm, SET_CHANNEL, &far);
        for _ in 0..2 {
            tell(&peek_channel(&device).unwrap());
            let mut message = [0; 12];
            near.read_exact(&mut message).unwrap();
            assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!((&device).read(&mut [0; 64]).unwrap(), 12);
        hand_over(&vmm, 1, &far);
        assert!(peek_channel(&device).is_none(), "it is of another message");
        drop(vmm);
        (&device).read_exact(&mut [0; 12]).unwrap();
        assert!(peek_channel(&device).is_none(), "the VMM has left");
    }

    #[test]
    fn a_vmm_that_takes_no_messages_is_not_waited_for() {
        let (near, far) = UnixStream::pair().unwrap();
        (0..10_000).for_each(|_| tell(&far));
        drop(near);
        tell(&far);
        tell(&std::fs::File::open("/dev/null").unwrap());
    }
}
