//! Messages with open files between the program that hands over and the one that takes over.
//!
//! Invariant: a message is received whole or not at all, with at most the files and the text that its
//! step needs; a wait for all of its packets together ends at its deadline. The peer's end shows as an
//! end of file.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nowait_server::call_until;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    recvmsg, sendmsg, shutdown, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most files of one packet; the kernel's limit is 253 (unix(7), `SCM_MAX_FD`).
const FILES_OF_PACKET: usize = 200;
/// The only byte of a packet: whether more packets of the message follow.
const MORE: u8 = 1;
const LAST: u8 = 0;
/// How long a sender waits where too many files of its user are on their way already.
const FILES_ON_THEIR_WAY: Duration = Duration::from_millis(1);

/// The most that a message of a step has.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    files: usize,
    /// Bytes of the text, and bytes behind it.
    bytes: u64,
}

impl Bounds {
    /// A few words.
    pub(crate) const ANSWER: Self = Self { files: 0, bytes: 1 << 16 };
    /// A message with one file.
    pub(crate) const ANSWER_WITH_FILE: Self = Self { files: 1, ..Self::ANSWER };
    /// A request to the launcher: the names of a server with thousands of sockets, and a few files.
    pub(crate) const REQUEST: Self = Self { files: 5, bytes: 1 << 22 };
    /// All that a server has.
    pub(crate) const STATE: Self = Self { files: 1 << 20, bytes: 1 << 30 };
}

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
    /// `EPIPE`, `ECONNRESET`: the peer has ended. `EAGAIN`: it has not received all before `deadline`.
    /// `ETOOMANYREFS`: nor has it made room for more files of this user. `ENOMEM`, `EMFILE`, `ENFILE`.
    pub(crate) fn send<T: Serialize>(
        &self,
        body: &T,
        bytes: &[&[u8]],
        files: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
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
            self.send_packet(if n == last { LAST } else { MORE }, files, deadline)?;
        }
        Ok(())
    }

    fn send_packet(&self, byte: u8, files: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<()> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = call_until(Some(deadline), &self.0, PollFlags::OUT, |socket| {
            loop {
                let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_OF_PACKET))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(files));
                match sendmsg(socket, &[IoSlice::new(&[byte])], &mut control, flags) {
                    Err(Errno::TOOMANYREFS) if Instant::now() < deadline => {
                        std::thread::sleep(FILES_ON_THEIR_WAY);
                    }
                    sent => return sent,
                }
            }
        });
        sent.map(drop)
    }

    /// Receives the next message, whose last packet comes before `deadline`, if there is one, and which
    /// keeps `bounds`.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer has ended. `EAGAIN`: the message has not come in time. `EMFILE`: there
    /// are not enough descriptors for its files. `InvalidData`: it is not such a message.
    pub(crate) fn receive<T: DeserializeOwned>(
        &self,
        deadline: impl Into<Option<Instant>>,
        bounds: Bounds,
    ) -> io::Result<Message<T>> {
        let (deadline, mut files) = (deadline.into(), Vec::new());
        // Each packet has a file, so that there are not more packets than files.
        while self.receive_packet(&mut files, 1 + bounds.files, deadline)? == MORE {}
        let mut memory = File::from(files.remove(0));
        memory.rewind()?;
        let mut length = [0; 8];
        memory.read_exact(&mut length)?;
        let (length, all) = (u64::from_le_bytes(length), memory.metadata()?.len());
        if length > bounds.bytes || all > 2 * bounds.bytes {
            return Err(invalid("a message that is too long"));
        }
        let mut text = Vec::new();
        (&memory).take(length).read_to_end(&mut text)?;
        let mut bytes = Vec::new();
        (&memory).take(bounds.bytes).read_to_end(&mut bytes)?;
        Ok(Message { body: serde_json::from_slice(&text)?, bytes, files })
    }

    /// Receives a packet, whose files are appended to `files`, of which there are at most `most` then.
    fn receive_packet(
        &self,
        files: &mut Vec<OwnedFd>,
        most: usize,
        deadline: Option<Instant>,
    ) -> io::Result<u8> {
        let (mut byte, before) = ([LAST], files.len());
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_OF_PACKET))];
        let room = (most - before).min(FILES_OF_PACKET);
        let space = &mut space[..cmsg_space!(ScmRights(room))];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = call_until(deadline, &self.0, PollFlags::IN, |socket| {
            let mut control = RecvAncillaryBuffer::new(space);
            let pieces = &mut [IoSliceMut::new(&mut byte)];
            let received = recvmsg(socket, pieces, &mut control, flags)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    files.extend(more);
                }
            }
            Ok(received)
        })?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let more = files.len() - before;
        let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
        match (more, byte[0]) {
            // There was room, and no descriptor.
            _ if is_cut && more < room => Err(Errno::MFILE.into()),
            _ if is_cut || more > room => Err(invalid("too many files")),
            (0, _) => Err(invalid("a packet without files")),
            (_, MORE) if files.len() >= most => Err(invalid("too many packets")),
            (_, byte) => Ok(byte),
        }
    }

    /// Waits until the peer has ended, or this end was [closed](Self::close).
    pub(crate) fn wait_ended(&self) -> io::Result<()> {
        let ended = |socket: BorrowedFd<'_>| {
            poll(&mut [PollFd::new(&socket, PollFlags::empty())], None).map(drop)
        };
        call_until(None, &self.0, PollFlags::empty(), ended)
    }

    /// Tells the peer that nothing more comes: it receives the end.
    pub(crate) fn close(&self) {
        // It may have ended.
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn files(count: u32) -> Vec<File> {
        let file = |n: u32| {
            let mut file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
            file.write_all(&n.to_le_bytes()).unwrap();
            file
        };
        (0..count).map(file).collect()
    }

    #[test]
    fn a_message_arrives_with_its_bytes_and_its_files_in_their_order() {
        let (near, far) = Channel::pair().unwrap();
        let sender = std::thread::spawn(move || {
            let far = Channel::of(far);
            let files = files(450);
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            far.send(&"text", &[b"by", b"tes"], &fds, late()).unwrap();
            far.send(&7, &[], &[], late()).unwrap();
        });
        let Message { body, bytes, files } = near.receive::<String>(late(), Bounds::STATE).unwrap();
        assert_eq!((&*body, &*bytes, files.len()), ("text", &b"bytes"[..], 450));
        for (n, file) in files.into_iter().enumerate() {
            let mut file = File::from(file);
            let mut number = [0; 4];
            file.rewind().unwrap();
            file.read_exact(&mut number).unwrap();
            assert_eq!(u32::from_le_bytes(number) as usize, n);
        }
        assert_eq!(near.receive::<u32>(late(), Bounds::ANSWER).unwrap().body, 7);
        sender.join().unwrap();
        let ended = near.receive::<u32>(late(), Bounds::ANSWER).err().unwrap();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        near.wait_ended().unwrap();
    }

    #[test]
    fn a_peer_that_says_nothing_or_something_else_is_an_error() {
        let (near, far) = Channel::pair().unwrap();
        let silent = near.receive::<u32>(soon(), Bounds::ANSWER).err().unwrap();
        assert_eq!(silent.kind(), io::ErrorKind::WouldBlock);
        let far = Channel::of(far);
        far.send(&"no number", &[], &[], late()).unwrap();
        assert!(near.receive::<u32>(late(), Bounds::ANSWER).is_err());
        rustix::net::send(&far.0, &[LAST], SendFlags::NOSIGNAL).unwrap();
        let empty = near.receive::<u32>(late(), Bounds::ANSWER).err().unwrap();
        assert_eq!(empty.kind(), io::ErrorKind::InvalidData);
        let long = "x".repeat(1 << 17);
        far.send(&long, &[], &[], late()).unwrap();
        let long = near.receive::<String>(late(), Bounds::ANSWER).err().unwrap();
        assert_eq!(long.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_peer_that_sends_packets_for_ever_holds_no_receiver_longer_than_its_deadline() {
        let (near, far) = Channel::pair().unwrap();
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let sender = std::thread::spawn(move || {
            let far = Channel::of(far);
            // Each packet comes in time, until there is no receiver any more.
            while far.send_packet(MORE, &[file.as_fd()], late()).is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let endless = near.receive::<u32>(soon(), Bounds::STATE).err().unwrap();
        assert_eq!(endless.kind(), io::ErrorKind::WouldBlock);
        let endless = near.receive::<u32>(late(), Bounds::ANSWER).err().unwrap();
        assert_eq!(endless.kind(), io::ErrorKind::InvalidData);
        drop(near);
        sender.join().unwrap();
    }

    #[test]
    fn a_message_with_more_files_than_its_step_needs_is_refused_and_its_files_are_closed() {
        let (near, far) = Channel::pair().unwrap();
        let far = Channel::of(far);
        let files = files(3);
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        for bounds in [Bounds::ANSWER, Bounds::ANSWER_WITH_FILE] {
            far.send(&7, &[], &fds, late()).unwrap();
            let refused = near.receive::<u32>(late(), bounds).err().unwrap();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        }
        far.send(&7, &[], &fds[..1], late()).unwrap();
        assert_eq!(near.receive::<u32>(late(), Bounds::ANSWER_WITH_FILE).unwrap().files.len(), 1);
    }

    #[test]
    fn a_peer_that_receives_nothing_holds_no_sender_longer_than_its_deadline() {
        let (near, _far) = Channel::pair().unwrap();
        let deadline = soon();
        let stuck = loop {
            if let Err(error) = near.send(&7, &[], &[], deadline) {
                break error;
            }
        };
        assert_eq!(stuck.kind(), io::ErrorKind::WouldBlock);
    }
}
