//! A guest of a simulation, and what its VMM keeps for it: memory, the region of requests in flight,
//! eventfds. They outlive the servers, which a simulation lets die.
//!
//! Invariant: a server gets here what the messages of a VMM would have given it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nowait::{Error, Operation};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use crate::vhost_user::device_config::{BlockProperties, Features};
use crate::vhost_user::guest_memory::{GuestMemory, RegionAddress};
use crate::vhost_user::inflight_region::{InflightQueue, InflightRegion};
use crate::vhost_user::queue_channel::{DeviceState, ID_BYTES, QueueId, QueueStart};
use crate::vhost_user::virtqueue::{RingAddresses, Virtqueue};

/// Where the parts of a queue are in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct SimRing {
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring.
    pub used: u64,
}

/// The device of one server, which ends with it.
pub struct SimVhostDevice(Arc<DeviceState>);

impl SimVhostDevice {
    /// A device whose writes are durable when they are completed, if `writes_through`.
    #[must_use]
    pub fn new(writes_through: bool) -> Self {
        let state = DeviceState::new([0; ID_BYTES], "simulation".to_owned());
        state.wce.store(!writes_through, Ordering::Relaxed);
        Self(Arc::new(state))
    }

    /// Nothing of the guest is read or written by this server from now on.
    pub fn kill(&self) {
        self.0.break_down("the server has died");
    }

    /// Whether the guest is served no more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.0.is_broken()
    }
}

/// The eventfds of a queue.
struct Signals {
    kick: OwnedFd,
    call: OwnedFd,
}

/// A guest.
pub struct SimGuest {
    memory: Arc<GuestMemory>,
    inflight: File,
    /// Descriptors of each queue.
    queue_size: u16,
    signals: Vec<Signals>,
}

impl SimGuest {
    /// A guest with `bytes` bytes of memory from address 0 on, all zeros, and `queues` queues of
    /// `queue_size` descriptors.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the memory or an eventfd could not be made.
    pub fn new(bytes: u64, queues: u16, queue_size: u16) -> Result<Self, Error> {
        let failed = |e: rustix::io::Errno| Error::new(e.raw_os_error(), Operation::SetUp);
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, bytes).map_err(failed)?;
        let address = RegionAddress { guest: 0, len: bytes, user: 0, offset: 0 };
        let eventfd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed);
        let signals = |_| Ok(Signals { kick: eventfd()?, call: eventfd()? });
        Ok(Self {
            memory: Arc::new(GuestMemory::map([(address, File::from(file))])?),
            inflight: InflightRegion::create(queues, queue_size)?,
            queue_size,
            signals: (0..queues).map(signals).collect::<Result<_, Error>>()?,
        })
    }

    /// Copies memory from `address` on; `None` if it is not all there.
    pub fn read(&self, address: u64, to: &mut [u8]) -> Option<()> {
        self.memory.bytes().read_slice(to, GuestAddress(address)).ok()
    }

    /// Changes memory from `address` on; `None` if it is not all there.
    pub fn write(&self, address: u64, from: &[u8]) -> Option<()> {
        self.memory.bytes().write_slice(from, GuestAddress(address)).ok()
    }

    /// Whether the driver was called for queue `index` since this was asked last.
    #[must_use]
    pub fn take_call(&self, index: usize) -> bool {
        let mut count = [0; 8];
        self.signals.get(index).is_some_and(|it| rustix::io::read(&it.call, &mut count).is_ok())
    }

    /// Queue number `index`, as a VMM starts it on a new server: from `base` on, or from the first entry
    /// on that the driver was not told of.
    pub(crate) fn start(
        &self,
        device: &SimVhostDevice,
        (index, ring, event_idx): (u16, SimRing, bool),
        base: Option<u16>,
    ) -> Result<QueueStart, Error> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let failed = |error: std::io::Error| Error::from_io(&error, Operation::SetUp);
        let none = Error::new(libc::EINVAL, Operation::SetUp);
        let signals = self.signals.get(usize::from(index)).ok_or(none)?;
        let mut told = [0; 2];
        self.read(ring.used + 2, &mut told).ok_or(none)?;
        let addresses = RingAddresses {
            size: self.queue_size,
            descriptors: GuestAddress(ring.descriptors),
            available: GuestAddress(ring.available),
            used: GuestAddress(ring.used),
        };
        let file = self.inflight.try_clone().map_err(failed)?;
        let queues = self.signals.len() as u16;
        let region = Arc::new(InflightRegion::map(file, 0, queues, self.queue_size)?);
        let inflight = InflightQueue::new(region, index, self.queue_size);
        let start = (base.unwrap_or(u16::from_le_bytes(told)), event_idx);
        let properties =
            BlockProperties { size: 0, read_only: false, discards: true, logical: 512, block: 512 };
        Ok(QueueStart {
            id: QueueId(NEXT_ID.fetch_add(1, Ordering::Relaxed)),
            device: device.0.clone(),
            features: Features::offered(properties),
            virtqueue: Virtqueue::new(addresses, start, self.memory.clone(), inflight, None)?,
            kick: signals.kick.try_clone().map_err(failed)?,
            call: Some(signals.call.try_clone().map_err(failed)?),
            err: None,
        })
    }
}
