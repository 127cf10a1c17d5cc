//! A driver of a virtio block device, and the VMM that connects it: it writes to its memory and its
//! rings whatever a test wants.
//!
//! Invariant: every wait is bounded.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;

use nowait_testkit::wait_for;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(crate) const READ: u32 = 0;
pub(crate) const WRITE: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITABLE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Descriptors of the queue.
pub(crate) const QUEUE_SIZE: u16 = 64;
/// The memory: two regions that touch in the guest.
pub(crate) const REGION_BYTES: u64 = 512 << 10;
pub(crate) const MEMORY_BYTES: u64 = 2 * REGION_BYTES;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Where each request has its header, 16 bytes for each index, and its status.
pub(crate) const HEADERS: u64 = 0x3000;
pub(crate) const STATUSES: u64 = 0x4000;
/// Where tests may have data.
pub(crate) const DATA: u64 = 0x10000;
/// A status that no device stores.
const NO_STATUS: u8 = 0xff;

/// A driver with its VMM.
pub(crate) struct Driver {
    pub(crate) vmm: Frontend,
    memory: GuestMemoryMmap,
    pub(crate) files: [File; 2],
    kick: EventFd,
    pub(crate) call: EventFd,
    err: EventFd,
    available: u16,
    seen: u16,
}

fn eventfd() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

impl Driver {
    /// Connects to the device at `socket`, and starts its first queue.
    pub(crate) fn connect(socket: &Path) -> Self {
        Self::connect_with(socket, None)
    }

    /// Connects without the features of the bits `refused`.
    pub(crate) fn connect_without(socket: &Path, refused: u64) -> Self {
        Self::with(socket, None, refused)
    }

    /// The same, with memory for requests in flight that an earlier server has left.
    pub(crate) fn connect_with(socket: &Path, inflight: Option<(VhostUserInflight, File)>) -> Self {
        Self::with(socket, inflight, 0)
    }

    fn with(socket: &Path, inflight: Option<(VhostUserInflight, File)>, refused: u64) -> Self {
        Self::of(Frontend::connect(socket, 8).unwrap(), inflight, refused)
    }

    /// The VMM at the other end of a connection that the device has made.
    pub(crate) fn connected(stream: UnixStream) -> Self {
        Self::of(Frontend::from_stream(stream, 8), None, 0)
    }

    fn of(vmm: Frontend, inflight: Option<(VhostUserInflight, File)>, refused: u64) -> Self {
        let files = [(); 2].map(|()| {
            let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&file, REGION_BYTES).unwrap();
            file
        });
        let region = |n: usize| {
            let file = FileOffset::new(files[n].try_clone().unwrap(), 0);
            let address = GuestAddress(n as u64 * REGION_BYTES);
            GuestRegionMmap::from_range(address, REGION_BYTES as usize, Some(file)).unwrap()
        };
        let memory = GuestMemoryMmap::from_regions(vec![region(0), region(1)]).unwrap();
        let [kick, call, err] = [(); 3].map(|()| eventfd());
        let mut driver = Self { vmm, memory, files, kick, call, err, available: 0, seen: 0 };
        driver.negotiate(refused);
        if let Some((layout, file)) = inflight {
            driver.vmm.set_inflight_fd(&layout, file.as_raw_fd()).unwrap();
        }
        driver.start();
        driver
    }

    /// The features that the device offers.
    pub(crate) fn vmm_features(&mut self) -> u64 {
        self.vmm.get_features().unwrap()
    }

    fn negotiate(&mut self, refused: u64) {
        let vmm = &mut self.vmm;
        vmm.set_owner().unwrap();
        let features = vmm.get_features().unwrap();
        vmm.set_features(features & !(1 << 26) & !refused).unwrap();
        let offered = vmm.get_protocol_features().unwrap();
        assert!(offered.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        vmm.set_protocol_features(offered).unwrap();
        vmm.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let info = |region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        let regions: Vec<_> = self.memory.iter().map(info).collect();
        vmm.set_mem_table(&regions).unwrap();
    }

    /// Starts the queue from what is available next.
    pub(crate) fn start(&mut self) {
        let base = self.available;
        self.start_from(base);
    }

    /// Starts the queue from the available entry `base`.
    pub(crate) fn start_from(&mut self, base: u16) {
        let user = |address| self.memory.get_host_address(GuestAddress(address)).unwrap() as u64;
        let config = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: user(DESCRIPTORS),
            used_ring_addr: user(USED),
            avail_ring_addr: user(AVAILABLE),
            log_addr: None,
        };
        let vmm = &mut self.vmm;
        vmm.set_vring_num(0, QUEUE_SIZE).unwrap();
        vmm.set_vring_base(0, base).unwrap();
        vmm.set_vring_addr(0, &config).unwrap();
        vmm.set_vring_call(0, &self.call).unwrap();
        vmm.set_vring_err(0, &self.err).unwrap();
        vmm.set_vring_kick(0, &self.kick).unwrap();
        vmm.set_vring_enable(0, true).unwrap();
    }

    /// Stops the queue. Returns the available entry that it takes next.
    pub(crate) fn stop(&mut self) -> u32 {
        self.vmm.get_vring_base(0).unwrap()
    }

    /// Resets the device as a driver does that begins again, and starts the queue.
    pub(crate) fn reset(&mut self) {
        self.stop();
        (self.available, self.seen) = (0, 0);
        self.memory.write_slice(&[0; 0x1000], GuestAddress(AVAILABLE)).unwrap();
        self.memory.write_slice(&[0; 0x1000], GuestAddress(USED)).unwrap();
        self.start();
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// Writes a descriptor to the table at `table`.
    pub(crate) fn describe_at(
        &self,
        table: u64,
        index: u16,
        (address, len): (u64, u32),
        flags: u16,
        next: u16,
    ) {
        let at = table + 16 * u64::from(index);
        self.write(at, &address.to_le_bytes());
        self.write(at + 8, &len.to_le_bytes());
        self.write(at + 12, &flags.to_le_bytes());
        self.write(at + 14, &next.to_le_bytes());
    }

    /// Writes a descriptor to the queue's table.
    pub(crate) fn describe(&self, index: u16, memory: (u64, u32), flags: u16, next: u16) {
        self.describe_at(DESCRIPTORS, index, memory, flags, next);
    }

    /// Writes the header of a request to its place for the chain that begins at `head`.
    pub(crate) fn header(&self, head: u16, kind: u32, sector: u64) -> (u64, u32) {
        let at = HEADERS + 16 * u64::from(head);
        self.write(at, &kind.to_le_bytes());
        self.write(at + 4, &[0; 4]);
        self.write(at + 8, &sector.to_le_bytes());
        self.write(STATUSES + u64::from(head), &[NO_STATUS]);
        (at, 16)
    }

    /// The place of the status for the chain that begins at `head`.
    pub(crate) fn status_place(head: u16) -> (u64, u32) {
        (STATUSES + u64::from(head), 1)
    }

    /// Puts a well-formed request into the descriptors from `head` on, with `data` in between.
    pub(crate) fn prepare(&self, head: u16, kind: u32, sector: u64, data: &[(u64, u32)]) {
        let writable = if matches!(kind, READ | GET_ID) { WRITABLE } else { 0 };
        self.describe(head, self.header(head, kind, sector), NEXT, head + 1);
        for (n, part) in (head + 1..).zip(data) {
            self.describe(n, *part, NEXT | writable, n + 1);
        }
        self.describe(head + 1 + data.len() as u16, Self::status_place(head), WRITABLE, 0);
    }

    /// Makes the chain that begins at `head` available, without a kick.
    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.available % QUEUE_SIZE);
        self.write(AVAILABLE + 4 + 2 * slot, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.set_available(self.available);
    }

    /// Stores the flags of the available ring.
    pub(crate) fn set_flags(&self, flags: u16) {
        self.memory.store(flags, GuestAddress(AVAILABLE), Ordering::Release).unwrap();
    }

    /// Stores the index of the available ring.
    pub(crate) fn set_available(&self, index: u16) {
        self.memory.store(index, GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
    }

    pub(crate) fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Waits for the next used element: the head and the bytes written.
    pub(crate) fn used(&mut self) -> (u16, u32) {
        let seen = self.seen;
        wait_for("a request's end", || {
            let used: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
            if used == seen { Err(used) } else { Ok(()) }
        });
        self.seen = seen.wrapping_add(1);
        let element = self.read(USED + 4 + 8 * u64::from(seen % QUEUE_SIZE), 8);
        let number = |at: usize| u32::from_le_bytes(element[at..at + 4].try_into().unwrap());
        (number(0) as u16, number(4))
    }

    /// The index of the used ring.
    pub(crate) fn used_index(&self) -> u16 {
        self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap()
    }

    /// The status of the request that began at `head`.
    pub(crate) fn status(&self, head: u16) -> u8 {
        self.read(STATUSES + u64::from(head), 1)[0]
    }

    /// Does a request with its data in one part. Returns its status and the bytes written.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) -> (u8, u32) {
        self.prepare(0, kind, sector, data);
        self.offer(0);
        self.kick();
        let (head, written) = self.used();
        assert_eq!(head, 0);
        (self.status(0), written)
    }

    /// Waits until the device says that the queue cannot go on.
    pub(crate) fn await_breakdown(&self) {
        wait_for("the end of the queue", || self.err.read());
    }
}
