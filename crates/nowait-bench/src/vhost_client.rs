//! The load generator for vhost-user-blk: a VMM and the driver of its guest in one thread, which
//! keeps a fixed number of requests in each queue, and sleeps while it waits to be called.
//!
//! Invariant: between two calls of [`VhostClient::run_for`] each slot is either in flight or free,
//! never both; a used element that fits no slot in flight is an error. The data are never touched,
//! so that the server is the bottleneck and not the client.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::address::SILENCE_MAX;
use crate::cancel::CancelFlag;
use crate::client::{Interval, Load, latency_histogram, silent};
use crate::offsets::{Offsets, Region};
use crate::split_queue::{QueueLayout, SplitQueue};
use crate::workload::{Direction, Workload};

/// Descriptors of a queue, as QEMU has them by default.
const QUEUE_SIZE: usize = 128;
/// Features that the server must offer: VERSION_1, PROTOCOL_FEATURES, EVENT_IDX, INDIRECT_DESC.
const NEEDED: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28;
/// Features that are used if they are offered: MQ, FLUSH.
const WANTED: u64 = 1 << 12 | 1 << 9;
/// Bytes of the capacity at the start of the configuration, which counts sectors.
const CAPACITY_BYTES: u32 = 8;
const SECTOR_BYTES: u64 = 512;

/// A virtual machine as far as the server sees it.
pub(crate) struct VhostClient {
    queues: Vec<Queue>,
    /// Watches the calls of all queues. Each write to one is another event, so they are not read.
    calls: Epoll,
    /// The connection, whose end ends the device.
    _vmm: Frontend,
}

/// A queue with its requests.
struct Queue {
    ring: SplitQueue,
    kick: EventFd,
    call: EventFd,
    /// For each slot the time when its request was made; `None` if the slot is free.
    sent: Vec<Option<Instant>>,
    free: Vec<usize>,
    offsets: Offsets,
}

impl VhostClient {
    /// Connects to the socket at `path` and applies the load to the first `bytes` of the disk,
    /// with `queues` queues.
    pub(crate) fn connect(
        path: &Path,
        workload: &Workload,
        queues: usize,
        bytes: u64,
    ) -> io::Result<VhostClient> {
        let stream = UnixStream::connect(path)?;
        // A server that never answers is stuck.
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        let mut vmm = Frontend::from_stream(stream, queues as u64);
        negotiate(&mut vmm, queues, bytes)?;
        let size = workload.depth.next_power_of_two().max(QUEUE_SIZE) as u16;
        let mut layouts = Vec::new();
        let mut end = 0;
        for _ in 0..queues {
            let layout = QueueLayout::new(end, size, workload.depth, workload.block_bytes);
            end = layout.end;
            layouts.push(layout);
        }
        let memory = Arc::new(guest_memory(end)?);
        if workload.direction == Direction::Write {
            layouts.iter().try_for_each(|layout| fill(&memory, layout))?;
        }
        let info = VhostUserMemoryRegionInfo::from_guest_region(&memory).map_err(refused)?;
        vmm.set_mem_table(&[info]).map_err(refused)?;
        let region = Region { start: 0, bytes, block: workload.block_bytes as u64 };
        let start = |(index, layout): (usize, &QueueLayout)| {
            let ring =
                SplitQueue::new(memory.clone(), *layout, workload.depth, workload.direction)?;
            let first = region.blocks() * index as u64 / queues as u64;
            let offsets = Offsets::endless(workload.order, region, first);
            Queue::start(&mut vmm, index, &memory, *layout, ring, (workload.depth, offsets))
        };
        let queues: Vec<Queue> =
            layouts.iter().enumerate().map(start).collect::<io::Result<_>>()?;
        let calls = Epoll::new()?;
        for queue in &queues {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
            calls.ctl(ControlOperation::Add, queue.call.as_raw_fd(), event)?;
        }
        Ok(VhostClient { queues, calls, _vmm: vmm })
    }

    /// Sleeps until the server calls one of the queues, unless something has ended already.
    fn wait(&self) -> io::Result<()> {
        for queue in &self.queues {
            if queue.ring.ask_for_call()? {
                return Ok(());
            }
        }
        let mut events = [EpollEvent::default()];
        loop {
            match self.calls.wait(SILENCE_MAX.as_millis() as i32, &mut events) {
                Ok(0) => return Err(silent()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome.map(drop),
            }
        }
    }
}

impl Load for VhostClient {
    fn run_for(
        &mut self,
        duration: Duration,
        latencies_ns: &mut Histogram<u64>,
        stop: &CancelFlag,
    ) -> io::Result<Interval> {
        let begin = Instant::now();
        let (mut requests, mut now) = (0, begin);
        loop {
            for queue in &mut self.queues {
                queue.send(now)?;
            }
            self.wait()?;
            now = Instant::now();
            for queue in &mut self.queues {
                requests += queue.receive(now, latencies_ns)?;
            }
            if now - begin >= duration || stop.requested() {
                return Ok(Interval { requests, elapsed: now - begin });
            }
        }
    }

    fn finish(mut self) -> io::Result<()> {
        let mut unused = latency_histogram()?;
        while self.queues.iter().any(|queue| queue.free.len() < queue.sent.len()) {
            self.wait()?;
            for queue in &mut self.queues {
                queue.receive(Instant::now(), &mut unused)?;
            }
        }
        Ok(())
    }
}

impl Queue {
    /// Has the server serve queue number `index`.
    fn start(
        vmm: &mut Frontend,
        index: usize,
        memory: &GuestRegionMmap,
        layout: QueueLayout,
        ring: SplitQueue,
        (depth, offsets): (usize, Offsets),
    ) -> io::Result<Queue> {
        let user = |at: usize| {
            let address = memory.get_host_address(MemoryRegionAddress(at as u64));
            address.map(|address| address as u64).map_err(io::Error::other)
        };
        let config = VringConfigData {
            queue_max_size: layout.size,
            queue_size: layout.size,
            flags: 0,
            desc_table_addr: user(layout.descriptors)?,
            used_ring_addr: user(layout.used)?,
            avail_ring_addr: user(layout.available)?,
            log_addr: None,
        };
        let kick = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let call = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        vmm.set_vring_num(index, layout.size).map_err(refused)?;
        vmm.set_vring_base(index, 0).map_err(refused)?;
        vmm.set_vring_addr(index, &config).map_err(refused)?;
        vmm.set_vring_call(index, &call).map_err(refused)?;
        vmm.set_vring_kick(index, &kick).map_err(refused)?;
        vmm.set_vring_enable(index, true).map_err(refused)?;
        let (sent, free) = (vec![None; depth], (0..depth).rev().collect());
        Ok(Queue { ring, kick, call, sent, free, offsets })
    }

    /// Makes a request of every free slot. Latencies start at `now`.
    fn send(&mut self, now: Instant) -> io::Result<()> {
        while let Some(slot) = self.free.pop() {
            // The offsets are endless.
            let Some(position) = self.offsets.next() else { break };
            self.ring.offer(slot, position)?;
            if let Some(sent) = self.sent.get_mut(slot) {
                *sent = Some(now);
            }
        }
        if self.ring.publish()? { self.kick.write(1) } else { Ok(()) }
    }

    /// Takes all requests that have ended. Returns how many.
    fn receive(&mut self, now: Instant, latencies_ns: &mut Histogram<u64>) -> io::Result<u64> {
        let mut count = 0;
        while let Some(slot) = self.ring.take()? {
            let Some(sent) = self.sent.get_mut(slot).and_then(Option::take) else {
                return Err(io::Error::other("the server answered a request that was never made"));
            };
            let ns = u64::try_from((now - sent).as_nanos()).unwrap_or(u64::MAX);
            latencies_ns.saturating_record(ns);
            self.free.push(slot);
            count += 1;
        }
        Ok(count)
    }
}

/// Agrees on features, and checks that the disk has `bytes`.
fn negotiate(vmm: &mut Frontend, queues: usize, bytes: u64) -> io::Result<()> {
    vmm.set_owner().map_err(refused)?;
    let offered = vmm.get_features().map_err(refused)?;
    if offered & NEEDED != NEEDED {
        return Err(io::Error::other("the server lacks a feature that every guest uses"));
    }
    vmm.set_features(offered & (NEEDED | WANTED)).map_err(refused)?;
    let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
    let offered = vmm.get_protocol_features().map_err(refused)?;
    vmm.set_protocol_features(offered & wanted).map_err(refused)?;
    if queues > 1 && vmm.get_queue_num().map_err(refused)? < queues as u64 {
        return Err(io::Error::other("the server has too few queues"));
    }
    let (flags, zeros) = (VhostUserConfigFlags::WRITABLE, [0; CAPACITY_BYTES as usize]);
    let (_, capacity) = vmm.get_config(0, CAPACITY_BYTES, flags, &zeros).map_err(refused)?;
    let capacity = capacity.first_chunk().copied().map_or(0, u64::from_le_bytes);
    if capacity < bytes / SECTOR_BYTES {
        return Err(io::Error::other("the disk is smaller than the file"));
    }
    Ok(())
}

/// Memory of the guest from address 0 on, of zeros, shared with the server.
fn guest_memory(bytes: usize) -> io::Result<GuestRegionMmap> {
    let file = File::from(memfd_create("nowait-bench", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, bytes as u64)?;
    let offset = Some(FileOffset::new(file, 0));
    let region = GuestRegionMmap::from_range(GuestAddress(0), bytes, offset);
    let region = region.map_err(io::Error::other)?;
    // Each page exists from the start.
    let zeros = vec![0u8; bytes];
    region.write_slice(&zeros, MemoryRegionAddress(0)).map_err(io::Error::other)?;
    Ok(region)
}

/// Fills the data of a queue with bytes that cannot be compressed.
fn fill(memory: &GuestRegionMmap, layout: &QueueLayout) -> io::Result<()> {
    let mut data = vec![0; layout.end - layout.data];
    Rng::with_seed(0).fill(&mut data);
    let at = MemoryRegionAddress(layout.data as u64);
    memory.write_slice(&data, at).map_err(io::Error::other)
}

fn refused(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("the server refused to be set up: {error}"))
}
