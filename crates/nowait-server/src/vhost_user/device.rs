//! A device as its VMM sets it up: the messages of one connection.
//!
//! Invariant: a queue runs only with what was negotiated when it started: whatever changes its
//! memory, features or addresses stops it first, and its requests in flight end before. Everything
//! is checked here, on the thread of the socket.

pub(crate) mod vmm_state;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use nowait::Error;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error as MessageError, GpuBackend, Result as Handled, VhostUserBackendReqHandlerMut,
};

use crate::vhost_user::device_config::{
    BlockProperties, CONFIG_BYTES, Features, MAX_QUEUES, WCE_OFFSET, config,
};
use crate::vhost_user::dirty_log::{DirtyLog, QueueLog};
use crate::vhost_user::guest_memory::{GuestMemory, MAX_REGIONS, RegionAddress};
use crate::vhost_user::inflight_region::{InflightQueue, InflightRegion};
use crate::vhost_user::queue_channel::{
    DeviceState, QueueChannel, QueueCommand, QueueId, QueueStart,
};
use crate::vhost_user::virtqueue::{MAX_QUEUE_SIZE, RingAddresses, Virtqueue};

/// The interval in which a wait for a queue looks whether the server is stopping.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// Why a queue does not start whose VMM shares no memory.
pub(crate) const NO_MEMORY: &str = "the virtual machine's memory is not shared with the server";

/// The serving threads of an export, for the devices on it.
pub(crate) trait QueueThreads: Send + Sync {
    /// The export's properties as of now.
    fn properties(&self) -> BlockProperties;

    /// Sends a queue to one of the threads. Returns the channel to the thread, or `None` if the
    /// server is stopping.
    fn start(&self, start: Box<QueueStart>) -> Option<Arc<QueueChannel>>;

    /// Whether the server is stopping.
    fn is_stopping(&self) -> bool;
}

/// A queue that was started.
struct Running {
    id: QueueId,
    channel: Arc<QueueChannel>,
    /// It was asked to stop.
    answer: Option<Receiver<u16>>,
}

impl Running {
    /// Asks the queue to stop, unless it was asked before. Returns where its answer comes.
    fn stop(&mut self) -> Receiver<u16> {
        self.answer.take().unwrap_or_else(|| {
            let (sender, answer) = sync_channel(1);
            self.channel.send(QueueCommand::Stop(self.id, sender));
            answer
        })
    }
}

/// Where the VMM has the parts of a queue, and where its used ring is logged.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct UserAddresses {
    descriptors: u64,
    used: u64,
    available: u64,
    log: Option<u64>,
}

/// A queue as it was set up.
#[derive(Default)]
struct Ring {
    size: u16,
    addresses: Option<UserAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    enabled: bool,
    running: Option<Running>,
}

/// The device of one connection.
pub(crate) struct Device {
    threads: Arc<dyn QueueThreads>,
    properties: BlockProperties,
    state: Arc<DeviceState>,
    features: Features,
    memory: Arc<GuestMemory>,
    rings: Vec<Ring>,
    /// Bits that the VMM has acknowledged.
    protocol_features: u64,
    inflight: Option<Arc<InflightRegion>>,
    log: Option<Arc<DirtyLog>>,
    /// No queue is started for a while.
    suspended: bool,
}

impl Device {
    /// A device that is not set up, on the export of `threads`.
    pub(crate) fn new(threads: Arc<dyn QueueThreads>, state: Arc<DeviceState>) -> Self {
        let properties = threads.properties();
        Self {
            suspended: false,
            threads,
            properties,
            state,
            features: Features::default(),
            protocol_features: 0,
            memory: Arc::default(),
            rings: (0..MAX_QUEUES).map(|_| Ring::default()).collect(),
            inflight: None,
            log: None,
        }
    }

    /// Whether the VMM shares memory of its virtual machine.
    pub(crate) fn has_memory(&self) -> bool {
        !self.memory.is_empty()
    }

    /// Stops all queues, and waits until their requests in flight have ended.
    pub(crate) fn stop_all(&mut self) {
        (0..self.rings.len()).for_each(|index| self.stop(index));
    }

    /// Stops all queues and starts none until [`Device::resume`]. Waits until `deadline` for their
    /// requests in flight; returns whether all have ended.
    pub(crate) fn suspend(&mut self, deadline: Instant) -> bool {
        self.begin_suspending();
        self.wait_suspended(deadline)
    }

    /// Asks all queues to stop, and starts none until [`Device::resume`].
    pub(crate) fn begin_suspending(&mut self) {
        self.suspended = true;
        for running in self.rings.iter_mut().filter_map(|ring| ring.running.as_mut()) {
            running.answer = Some(running.stop());
        }
    }

    /// Waits until `deadline` for the requests in flight of the queues that [`Device::begin_suspending`] has asked to
    /// stop. Returns whether all have ended.
    pub(crate) fn wait_suspended(&mut self, deadline: Instant) -> bool {
        let mut all = true;
        for ring in &mut self.rings {
            let Some(mut running) = ring.running.take() else { continue };
            let answer = running.stop();
            let left = deadline.saturating_duration_since(Instant::now());
            match answer.recv_timeout(left) {
                Ok(base) => ring.base = base,
                // The server is stopping.
                Err(RecvTimeoutError::Disconnected) => {}
                Err(RecvTimeoutError::Timeout) => {
                    running.channel.send(QueueCommand::Resume(running.id));
                    // It may have stopped before it was told to go on.
                    match answer.recv() {
                        Ok(base) => ring.base = base,
                        Err(_) => (ring.running, all) = (Some(running), false),
                    }
                }
            }
        }
        all
    }

    /// Starts the queues that can run, after [`Device::suspend`].
    pub(crate) fn resume(&mut self) {
        self.suspended = false;
        for index in 0..self.rings.len() {
            if let Err(error) = self.start(index) {
                self.state.break_down(&format!("a queue cannot go on: {error}"));
            }
        }
    }

    /// The driver has the device cache writes, or not; the next server has to know.
    fn set_cache(&self, is_on: bool) {
        self.state.wce.store(is_on, Ordering::Relaxed);
        self.inflight.iter().for_each(|region| region.set_cache(is_on));
    }

    fn ring(&mut self, index: u32) -> Handled<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(MessageError::InvalidParam)
    }

    /// Stops a queue, if it runs.
    fn stop(&mut self, index: usize) {
        let Some(ring) = self.rings.get_mut(index) else { return };
        let Some(mut running) = ring.running.take() else { return };
        let answer = running.stop();
        loop {
            match answer.recv_timeout(STOP_INTERVAL) {
                Ok(base) => ring.base = base,
                Err(RecvTimeoutError::Timeout) if !self.threads.is_stopping() => continue,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            break;
        }
        if self.rings.iter().all(|ring| ring.running.is_none()) {
            self.state.reset();
        }
    }

    /// Starts a queue that is set up and does not run.
    fn start(&mut self, index: usize) -> Handled<()> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let number = index as u16;
        let Some(ring) = self.rings.get(index) else { return Err(MessageError::InvalidParam) };
        let enabled = ring.enabled || !self.features.protocol();
        let (Some(kick), Some(addresses), None) = (&ring.kick, ring.addresses, &ring.running)
        else {
            return Ok(());
        };
        if !enabled || ring.size == 0 || self.suspended {
            return Ok(());
        }
        if !self.has_memory() {
            return Err(MessageError::InvalidOperation(NO_MEMORY));
        }
        let address = |user| self.memory.guest_address(user).ok_or(MessageError::InvalidParam);
        let addresses_in_guest = RingAddresses {
            size: ring.size,
            descriptors: address(addresses.descriptors)?,
            available: address(addresses.available)?,
            used: address(addresses.used)?,
        };
        let part = |region: &Arc<InflightRegion>| {
            InflightQueue::new(region.clone(), number, ring.size).ok_or(MessageError::InvalidParam)
        };
        let inflight = self.inflight.as_ref().map(part).transpose()?;
        let log = self.log.clone().filter(|_| self.features.logs());
        let log = log.map(|log| QueueLog { log, used_ring: addresses.log });
        let start = (ring.base, self.features.event_idx());
        let virtqueue =
            Virtqueue::new(addresses_in_guest, start, self.memory.clone(), inflight, log)
                .map_err(refused)?;
        let copy = |fd: &OwnedFd| fd.try_clone().map_err(MessageError::ReqHandlerError);
        let id = QueueId(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        let start = QueueStart {
            id,
            device: self.state.clone(),
            features: self.features,
            virtqueue,
            kick: copy(kick)?,
            call: ring.call.as_ref().map(copy).transpose()?,
            err: ring.err.as_ref().map(copy).transpose()?,
        };
        let channel = self.threads.start(Box::new(start));
        if let Some(ring) = self.rings.get_mut(index) {
            ring.running = channel.map(|channel| Running { id, channel, answer: None });
        }
        Ok(())
    }

    /// Stops all queues, changes the device, and starts those queues that ran or can run now.
    fn change<T>(&mut self, change: impl FnOnce(&mut Self) -> Handled<T>) -> Handled<T> {
        self.stop_all();
        let result = change(self)?;
        self.start_all()?;
        Ok(result)
    }

    /// Starts the queues that can run.
    fn start_all(&mut self) -> Handled<()> {
        (0..self.rings.len()).try_for_each(|index| self.start(index))
    }

    /// Stops a queue, changes it, and starts it if it can run now.
    fn change_ring(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Ring) -> Handled<()>,
    ) -> Handled<()> {
        self.stop(index as usize);
        change(self.ring(index)?)?;
        self.start(index as usize)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop_all();
    }
}

fn refused(error: Error) -> MessageError {
    MessageError::ReqHandlerError(io::Error::from_raw_os_error(error.errno()))
}

/// An eventfd that the VMM has sent; writing to it does not block.
///
/// # Errors
/// It is another kind of descriptor, as far as the system tells: its reader could hold up a serving
/// thread.
fn eventfd(file: Option<File>) -> Handled<Option<OwnedFd>> {
    let Some(file) = file else { return Ok(None) };
    let fd = OwnedFd::from(file);
    let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
    if let Ok(kind) = std::fs::read_link(format!("/proc/self/fd/{number}"))
        && kind.as_os_str() != "anon_inode:[eventfd]"
    {
        return Err(MessageError::IncorrectFds);
    }
    let set = |errno: rustix::io::Errno| MessageError::ReqHandlerError(errno.into());
    let flags = fcntl_getfl(fd.as_fd()).map_err(set)?;
    fcntl_setfl(fd.as_fd(), flags | OFlags::NONBLOCK).map_err(set)?;
    Ok(Some(fd))
}

fn region_address(region: &VhostUserMemoryRegion) -> RegionAddress {
    RegionAddress {
        guest: region.guest_phys_addr,
        len: region.memory_size,
        user: region.user_addr,
        offset: region.mmap_offset,
    }
}

const UNSUPPORTED: MessageError = MessageError::InvalidOperation("not supported");

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Handled<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Handled<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Handled<()> {
        self.stop_all();
        self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
        self.features = Features::default();
        self.state.reset();
        self.set_cache(true);
        Ok(())
    }

    fn get_features(&mut self) -> Handled<u64> {
        Ok(Features::offered(self.properties).0)
    }

    fn set_features(&mut self, features: u64) -> Handled<()> {
        if features & !Features::offered(self.properties).0 != 0 {
            return Err(MessageError::InvalidParam);
        }
        self.change(|device| {
            device.features = Features(features);
            Ok(())
        })
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Handled<Option<Vec<VhostUserMemoryRegionBase>>> {
        let memory = GuestMemory::map(regions.iter().map(region_address).zip(files));
        let memory = Arc::new(memory.map_err(refused)?);
        self.change(|device| {
            device.memory = memory;
            Ok(None)
        })
    }

    fn get_max_mem_slots(&mut self) -> Handled<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Handled<Option<VhostUserMemoryRegionBase>> {
        let memory = self.memory.with(region_address(region), file).map_err(refused)?;
        self.change(|device| {
            device.memory = Arc::new(memory);
            Ok(None)
        })
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Handled<()> {
        let memory = self.memory.without(region_address(region)).map_err(refused)?;
        self.change(|device| {
            device.memory = Arc::new(memory);
            Ok(())
        })
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Handled<()> {
        let size = u16::try_from(num).ok().filter(|size| size.is_power_of_two());
        let size = size.filter(|size| *size <= MAX_QUEUE_SIZE).ok_or(MessageError::InvalidParam)?;
        self.change_ring(index, |ring| {
            ring.size = size;
            Ok(())
        })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Handled<()> {
        let log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        self.change_ring(index, |ring| {
            ring.addresses = Some(UserAddresses { descriptors, used, available, log });
            Ok(())
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Handled<()> {
        let base = u16::try_from(base).map_err(|_| MessageError::InvalidParam)?;
        self.change_ring(index, |ring| {
            ring.base = base;
            Ok(())
        })
    }

    fn get_vring_base(&mut self, index: u32) -> Handled<VhostUserVringState> {
        self.stop(index as usize);
        let ring = self.ring(index)?;
        // The next kick starts it again.
        (ring.kick, ring.call) = (None, None);
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Handled<()> {
        // Without a descriptor the ring would have to be polled.
        let kick = eventfd(fd)?.ok_or(UNSUPPORTED)?;
        self.change_ring(u32::from(index), |ring| {
            ring.kick = Some(kick);
            Ok(())
        })
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Handled<()> {
        let ring = self.ring(u32::from(index))?;
        ring.call = eventfd(fd)?;
        if let Some(Running { id, channel, .. }) = &ring.running {
            let copy = ring.call.as_ref().map(OwnedFd::try_clone).transpose();
            channel.send(QueueCommand::SetCall(*id, copy.map_err(MessageError::ReqHandlerError)?));
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Handled<()> {
        let ring = self.ring(u32::from(index))?;
        ring.err = eventfd(fd)?;
        if let Some(Running { id, channel, .. }) = &ring.running {
            let copy = ring.err.as_ref().map(OwnedFd::try_clone).transpose();
            channel.send(QueueCommand::SetErr(*id, copy.map_err(MessageError::ReqHandlerError)?));
        }
        Ok(())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Handled<()> {
        self.change_ring(index, |ring| {
            ring.enabled = enable;
            Ok(())
        })
    }

    fn get_protocol_features(&mut self) -> Handled<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, features: u64) -> Handled<()> {
        self.protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Handled<u64> {
        Ok(u64::from(MAX_QUEUES))
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Handled<Vec<u8>> {
        self.properties = self.threads.properties();
        let wce = self.state.wce.load(Ordering::Relaxed);
        let all = config(self.properties, wce).into_iter().chain(std::iter::repeat(0));
        Ok(all.skip(offset as usize).take(size as usize).collect())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Handled<()> {
        if offset as usize + bytes.len() > CONFIG_BYTES {
            return Err(MessageError::InvalidParam);
        }
        // Drivers may write no other field.
        let at = WCE_OFFSET.checked_sub(offset as usize);
        if let Some(wce) = at.and_then(|at| bytes.get(at)) {
            self.set_cache(*wce != 0);
        }
        Ok(())
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Handled<(VhostUserInflight, File)> {
        let VhostUserInflight { num_queues, queue_size, .. } = *asked;
        if num_queues == 0 || num_queues > MAX_QUEUES || queue_size > MAX_QUEUE_SIZE {
            return Err(MessageError::InvalidParam);
        }
        let file = InflightRegion::create(num_queues, queue_size).map_err(refused)?;
        let bytes = InflightRegion::bytes_for(num_queues, queue_size) as u64;
        Ok((VhostUserInflight::new(bytes, 0, num_queues, queue_size), file))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Handled<()> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *given;
        let fits = InflightRegion::bytes_for(num_queues, queue_size) as u64 <= mmap_size;
        if num_queues == 0 || num_queues > MAX_QUEUES || queue_size > MAX_QUEUE_SIZE || !fits {
            return Err(MessageError::InvalidParam);
        }
        let region = InflightRegion::map(file, mmap_offset, num_queues, queue_size);
        let region = Arc::new(region.map_err(refused)?);
        match region.cache() {
            Some(is_on) => self.state.wce.store(is_on, Ordering::Relaxed),
            None => region.set_cache(self.state.wce.load(Ordering::Relaxed)),
        }
        self.change(|device| {
            device.inflight = Some(region);
            Ok(())
        })
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Handled<()> {
        let log = DirtyLog::map(file, log.mmap_offset, log.mmap_size).map_err(refused)?;
        self.change(|device| {
            device.log = Some(Arc::new(log));
            Ok(())
        })
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Handled<()> {
        Err(UNSUPPORTED)
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Handled<File> {
        Err(UNSUPPORTED)
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Handled<Option<File>> {
        Err(UNSUPPORTED)
    }

    fn check_device_state(&mut self) -> Handled<()> {
        Err(UNSUPPORTED)
    }

    fn get_shmem_config(&mut self) -> Handled<VhostUserShMemConfig> {
        Err(UNSUPPORTED)
    }
}
