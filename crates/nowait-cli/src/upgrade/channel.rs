//! Messages with open files between the program that hands over and the one that takes over.
//!
//! Invariant: a message is received whole or not at all, and waiting for one is bounded in time. The
//! peer's end shows as an end of file.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most files of one packet; the kernel's limit is 253 (unix(7), `SCM_MAX_FD`).
const FILES_OF_PACKET: usize = 200;
/// The only byte of a packet: whether more packets of the message follow.
const MORE: u8 = 1;
const LAST: u8 = 0;
/// The most files of a message.
const MAX_FILES: usize = 1 << 20;
/// The longest text of a message in bytes, and the most bytes behind it.
const MAX_TEXT: u64 = 1 << 30;

/// One end of the connection between the two programs.
pub(crate) struct Channel(OwnedFd);

/// A message: what it says, bytes that belong to it, and open files.
pub(crate) struct Message<T> {
    pub(crate) body: T,
    pub(crate) bytes: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
}

impl Channel {
    /// Both ends; the second is for the program that is to be started.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(near), far))
    }

    /// The end that another process has left to this one.
    #[cfg(test)]
    fn of(end: OwnedFd) -> Self {
        Self(end)
    }

    /// The end that is this process's standard input, which is /dev/null from then on.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`; /dev/null cannot be opened.
    pub(crate) fn of_standard_input() -> io::Result<Self> {
        let end = io::stdin().as_fd().try_clone_to_owned()?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
        Ok(Self(end))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `EPIPE`, `ECONNRESET`: the peer has ended. `EAGAIN`: it has not received for `timeout`.
    /// `ENOMEM`, `EMFILE`, `ENFILE`.
    pub(crate) fn send<T: Serialize>(
        &self,
        body: &T,
        bytes: &[&[u8]],
        files: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> io::Result<()> {
        set_socket_timeout(&self.0, Timeout::Send, Some(timeout))?;
        let text = serde_json::to_vec(body)?;
        let mut memory = File::from(memfd_create("nowait-upgrade", MemfdFlags::CLOEXEC)?);
        memory.write_all(&(text.len() as u64).to_le_bytes())?;
        memory.write_all(&text)?;
        bytes.iter().try_for_each(|bytes| memory.write_all(bytes))?;
        let all: Vec<BorrowedFd<'_>> =
            std::iter::once(memory.as_fd()).chain(files.iter().copied()).collect();
        let packets = all.chunks(FILES_OF_PACKET);
        let last = packets.len().saturating_sub(1);
        for (n, files) in packets.enumerate() {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_OF_PACKET))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(files));
            let byte = [if n == last { LAST } else { MORE }];
            sendmsg(&self.0, &[IoSlice::new(&byte)], &mut control, SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    /// Receives the next message.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer has ended. `EAGAIN`: nothing has come for `timeout`, if there is one. `InvalidData`:
    /// it is no such message.
    pub(crate) fn receive<T: DeserializeOwned>(
        &self,
        timeout: impl Into<Option<Duration>>,
    ) -> io::Result<Message<T>> {
        set_socket_timeout(&self.0, Timeout::Recv, timeout.into())?;
        let mut files = Vec::new();
        while self.receive_packet(&mut files)? == MORE {
            if files.len() > MAX_FILES {
                return Err(invalid("too many files"));
            }
        }
        if files.is_empty() {
            return Err(invalid("a message without its text"));
        }
        let mut memory = File::from(files.remove(0));
        memory.rewind()?;
        let mut length = [0; 8];
        memory.read_exact(&mut length)?;
        let (length, all) = (u64::from_le_bytes(length), memory.metadata()?.len());
        if length > MAX_TEXT || all > 2 * MAX_TEXT {
            return Err(invalid("a message that is too long"));
        }
        let mut text = Vec::new();
        (&memory).take(length).read_to_end(&mut text)?;
        let mut bytes = Vec::new();
        (&memory).take(MAX_TEXT).read_to_end(&mut bytes)?;
        Ok(Message { body: serde_json::from_slice(&text)?, bytes, files })
    }

    fn receive_packet(&self, files: &mut Vec<OwnedFd>) -> io::Result<u8> {
        let mut byte = [LAST];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_OF_PACKET))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let pieces = &mut [IoSliceMut::new(&mut byte)];
        let received = loop {
            match recvmsg(&self.0, pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                received => break received?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                files.extend(more);
            }
        }
        match received.bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(byte[0]),
        }
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(20);

    #[test]
    fn a_message_arrives_with_its_bytes_and_its_files_in_their_order() {
        let (near, far) = Channel::pair().unwrap();
        let sender = std::thread::spawn(move || {
            let far = Channel::of(far);
            let mut files = Vec::new();
            for n in 0..450u32 {
                let mut file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
                file.write_all(&n.to_le_bytes()).unwrap();
                files.push(file);
            }
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            far.send(&"text", &[b"by", b"tes"], &fds, LATE).unwrap();
            far.send(&7, &[], &[], LATE).unwrap();
        });
        let Message { body, bytes, files } = near.receive::<String>(LATE).unwrap();
        assert_eq!((&*body, &*bytes, files.len()), ("text", &b"bytes"[..], 450));
        for (n, file) in files.into_iter().enumerate() {
            let mut file = File::from(file);
            let mut number = [0; 4];
            file.rewind().unwrap();
            file.read_exact(&mut number).unwrap();
            assert_eq!(u32::from_le_bytes(number) as usize, n);
        }
        assert_eq!(near.receive::<u32>(LATE).unwrap().body, 7);
        sender.join().unwrap();
        let ended = near.receive::<u32>(LATE).err().unwrap();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_peer_that_says_nothing_or_something_else_is_an_error() {
        let (near, far) = Channel::pair().unwrap();
        let silent = near.receive::<u32>(SOON).err().unwrap();
        assert_eq!(silent.kind(), io::ErrorKind::WouldBlock);
        let far = Channel::of(far);
        far.send(&"no number", &[], &[], LATE).unwrap();
        assert!(near.receive::<u32>(LATE).is_err());
        rustix::net::send(&far.0, &[LAST], SendFlags::NOSIGNAL).unwrap();
        let empty = near.receive::<u32>(LATE).err().unwrap();
        assert_eq!(empty.kind(), io::ErrorKind::InvalidData);
    }
}
