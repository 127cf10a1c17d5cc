//! VMMs and guests that break rules fill no log: each fault is told once in full, and then counted.
//!
//! Invariant: the messages are those of the protocol (QEMU, docs/interop/vhost-user.rst), byte by byte.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nowait_testkit::{BOUND, wait_for, wait_until};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::common::{MIB, Scratch, Server};

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_ERR: u32 = 14;
const SET_VRING_ENABLE: u32 = 18;

/// The feature that has queues begin disabled.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Where the VMM has the memory of its machine, and how much that is.
const USER: u64 = 0x10_0000;
const MEMORY: u64 = 0x1_0000;
/// Where the available ring is in it.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Descriptors of the queue.
const SIZE: u16 = 8;

/// A VMM that sends messages.
struct Vmm(UnixStream);

impl Vmm {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("a socket");
        stream.set_read_timeout(Some(BOUND)).expect("a timeout");
        Self(stream)
    }

    /// Sends a message whose body is `words`.
    fn send(&self, request: u32, words: &[u64], file: Option<BorrowedFd<'_>>) {
        let body = words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        let header = [request, 1, body.len() as u32].map(u32::to_ne_bytes).concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let files = file.as_slice();
        assert!(files.is_empty() || rights.push(SendAncillaryMessage::ScmRights(files)));
        let bytes = [IoSlice::new(&header), IoSlice::new(&body)];
        // The server may have closed the connection because of an earlier message.
        let _ = sendmsg(&self.0, &bytes, &mut rights, SendFlags::NOSIGNAL);
    }

    /// Sends a message about queue 0 with a number.
    fn set(&self, request: u32, number: u64) {
        self.send(request, &[number << 32], None);
    }

    /// Takes an answer with `len` bytes of body.
    fn answer(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; 12 + len];
        self.0.read_exact(&mut bytes).expect("an answer");
        bytes.split_off(12)
    }

    /// Negotiates `features`.
    fn negotiate(&mut self, features: u64) {
        self.send(GET_FEATURES, &[], None);
        self.answer(8);
        self.send(SET_FEATURES, &[features], None);
    }

    /// Sets queue 0 up, without what starts it.
    fn set_up_queue(&self) {
        self.set(SET_VRING_NUM, u64::from(SIZE));
        // Index and flags, then descriptors, used ring, available ring, log.
        self.send(SET_VRING_ADDR, &[0, USER, USER + USED, USER + AVAILABLE, 0], None);
    }

    /// Waits until the server has closed the connection.
    fn await_end(mut self) {
        assert_eq!(self.0.read(&mut [0; 64]).unwrap_or(0), 0, "an answer that was not asked for");
    }
}

fn signal() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd")
}

/// A server of a disk at the vhost-user socket `machine.sock`.
fn serve(scratch: &Scratch, extra: &[&str]) -> (Server, PathBuf) {
    let (disk, socket) = (scratch.sparse("disk.img", MIB), scratch.join("machine.sock"));
    (Server::start_vhost_user(&disk, &socket, extra), socket)
}

/// Ends the server. Returns its log.
fn log_of(mut server: Server) -> String {
    server.terminate();
    assert!(server.wait().success());
    server.log()
}

/// QEMU without `share=on`: it sends no table of memory, and starts the queues.
fn start_without_memory(socket: &Path) {
    let mut vmm = Vmm::connect(socket);
    vmm.negotiate(PROTOCOL_FEATURES);
    vmm.set_up_queue();
    vmm.send(SET_VRING_KICK, &[0], Some(signal().as_fd()));
    vmm.set(SET_VRING_ENABLE, 1);
    vmm.await_end();
}

#[test]
fn a_machine_whose_memory_is_not_shared_is_told_once_and_how_to_share_it() {
    let scratch = Scratch::new();
    let (server, socket) = serve(&scratch, &[]);
    (0..3).for_each(|_| start_without_memory(&socket));
    let line = format!(
        "nowait: warning: vhost-user socket {}: the virtual machine's memory is not shared with the \
         server: start QEMU with -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
         memory-backend=mem, cloud-hypervisor with --memory shared=on\n",
        socket.display()
    );
    assert_eq!(log_of(server), line);
}

/// A machine with memory whose driver makes more requests available than its queue has room for, and
/// again each time that its device was reset.
fn break_queue(socket: &Path, times: usize) {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&file, MEMORY).expect("memory");
    let index = (SIZE + 1).to_ne_bytes();
    rustix::io::pwrite(&file, &index, AVAILABLE + 2).expect("memory");
    let mut vmm = Vmm::connect(socket);
    vmm.negotiate(0);
    // One region: its address in the guest, its length, its address in the VMM, its place in the file.
    vmm.send(SET_MEM_TABLE, &[1, 0, MEMORY, USER, 0], Some(file.as_fd()));
    vmm.set_up_queue();
    for _ in 0..times {
        let (kick, err) = (signal(), signal());
        vmm.send(SET_VRING_ERR, &[0], Some(err.as_fd()));
        vmm.send(SET_VRING_KICK, &[0], Some(kick.as_fd()));
        wait_for("the end of the queue", || rustix::io::read(&err, &mut [0; 8]));
        vmm.set(GET_VRING_BASE, 0);
        vmm.answer(8);
    }
}

#[test]
fn a_guest_that_breaks_its_queue_again_and_again_is_told_once_and_then_counted() {
    let scratch = Scratch::new();
    let (server, socket) = serve(&scratch, &[]);
    (0..3).for_each(|_| break_queue(&socket, 7));
    let line = format!(
        "nowait: warning: vhost-user socket {}: its guest is served no more until it resets the \
         device: more requests than the queue has room for\n\
         nowait: warning: 20 more clients were refused: a queue breaks a rule\n",
        socket.display()
    );
    assert_eq!(log_of(server), line);
}

#[test]
fn a_vmm_that_connects_again_and_again_with_a_wrong_message_is_told_once_and_then_counted() {
    let scratch = Scratch::new();
    let (server, socket) = serve(&scratch, &[]);
    for _ in 0..4 {
        let vmm = Vmm::connect(&socket);
        vmm.set(SET_VRING_NUM, 3);
        vmm.await_end();
    }
    let line = format!(
        "nowait: warning: vhost-user socket {}: the VMM was disconnected: invalid parameters\n\
         nowait: warning: 3 more clients were refused: no valid vhost-user message\n",
        socket.display()
    );
    assert_eq!(log_of(server), line);
}

#[test]
fn a_vmm_that_asks_for_features_and_leaves_is_not_a_warning() {
    let scratch = Scratch::new();
    let (server, socket) = serve(&scratch, &["--verbose"]);
    let mut vmm = Vmm::connect(&socket);
    vmm.send(GET_FEATURES, &[], None);
    vmm.answer(8);
    drop(vmm);
    // One that leaves an answer in its socket, and one that takes none at all.
    let vmm = Vmm::connect(&socket);
    vmm.send(GET_FEATURES, &[], None);
    wait_until("an answer", || rustix::io::ioctl_fionread(&vmm.0).expect("a socket") > 0);
    drop(vmm);
    let vmm = Vmm::connect(&socket);
    (0..100).for_each(|_| vmm.send(GET_FEATURES, &[], None));
    drop(vmm);
    let mut vmm = Vmm::connect(&socket);
    vmm.0.write_all(&[1, 0, 0]).expect("a part of a message");
    drop(vmm);
    wait_until("the end of all of them", || {
        server.log().matches("the VMM has left").count() == 4
            || server.log().contains("disconnected")
    });
    assert!(!log_of(server).contains("warning"));
}
