//! Entry point for fuzzing the bytes of a virtqueue and of its requests.
//!
//! Invariant: it runs the code of a serving thread up to the engine, and adds only checks.

use std::fs::File;
use std::sync::Arc;

use nowait::IoSegment;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use crate::vhost_user::block_request::{Kind, Malformed, RequestReader};
use crate::vhost_user::guest_memory::{GuestMemory, RegionAddress};
use crate::vhost_user::inflight_region::{InflightQueue, InflightRegion};
use crate::vhost_user::virtqueue::{RingAddresses, Virtqueue};

/// Descriptors of the queue; their table is at address 0.
const SIZE: u16 = 16;
const AVAILABLE: u64 = 256;
const USED: u64 = 512;
/// Two regions that touch, and one apart.
const REGIONS: [(u64, u64); 3] = [(0, 8192), (8192, 4096), (0x10000, 4096)];

/// A queue in memory that a driver has written.
pub struct FuzzedQueue {
    memory: Arc<GuestMemory>,
    reader: RequestReader,
    /// The addresses of the regions in this process.
    mapped: [(usize, usize); 3],
}

impl FuzzedQueue {
    /// Maps the memory.
    ///
    /// # Errors
    /// What the system refused.
    pub fn new() -> Result<Self, String> {
        let region = |(guest, len): (u64, u64)| {
            let file = memfd_create("guest", MemfdFlags::CLOEXEC).map_err(|e| e.to_string())?;
            ftruncate(&file, len).map_err(|e| e.to_string())?;
            let address = RegionAddress { guest, len, user: guest, offset: 0 };
            Ok((address, File::from(file)))
        };
        let regions = REGIONS.into_iter().map(region).collect::<Result<Vec<_>, String>>()?;
        let memory = Arc::new(GuestMemory::map(regions).map_err(|e| e.to_string())?);
        let mut mapped = [(0, 0); 3];
        for ((guest, len), place) in REGIONS.into_iter().zip(&mut mapped) {
            let mut segments = Vec::new();
            if !memory.push_segments(GuestAddress(guest), len, &mut segments) {
                return Err("a region is not mapped".into());
            }
            let base = segments.first().map_or(0, |segment: &IoSegment| segment.base as usize);
            *place = (base, base + len as usize);
        }
        Ok(Self { memory, reader: RequestReader::default(), mapped })
    }

    /// Takes and ends the requests of a queue whose memory begins with `bytes`.
    ///
    /// # Errors
    /// A description of a broken rule.
    pub fn check(&mut self, bytes: &[u8]) -> Result<(), String> {
        let outside = |_| "the memory is not mapped".to_owned();
        let (first, len) = (bytes.len().min(8192), REGIONS.map(|(_, len)| len as usize));
        for ((guest, _), len) in REGIONS.into_iter().zip(len) {
            let zeros = vec![0; len];
            self.memory.bytes().write_slice(&zeros, GuestAddress(guest)).map_err(outside)?;
        }
        let start = bytes.get(..first).unwrap_or_default();
        self.memory.bytes().write_slice(start, GuestAddress(0)).map_err(outside)?;
        let file = InflightRegion::create(1, SIZE).map_err(|e| e.to_string())?;
        let region = InflightRegion::map(file, 0, 1, SIZE).map_err(|e| e.to_string())?;
        let region = Arc::new(region);
        let addresses = RingAddresses {
            size: SIZE,
            descriptors: GuestAddress(0),
            available: GuestAddress(AVAILABLE),
            used: GuestAddress(USED),
        };
        let inflight = InflightQueue::new(region.clone(), 0, SIZE);
        let queue = Virtqueue::new(addresses, (0, true), self.memory.clone(), inflight, None);
        let Ok(mut queue) = queue else { return Err("the queue is refused".into()) };
        let mut taken = Vec::new();
        // A broken rule stops the queue.
        let broken = self.take_all(&mut queue, &mut taken)?;
        let mut left = InflightQueue::new(region, 0, SIZE).ok_or("no part for the queue")?;
        // The status of a request may overwrite the index; then that decides.
        let ended = self.memory.bytes().read_obj(GuestAddress(USED + 2)).map_err(outside)?;
        let left = left.recover(SIZE, ended);
        if broken.is_none() && left.len() > taken.len() {
            return Err(format!("{left:?} are in flight, {taken:?} were taken"));
        }
        Ok(())
    }

    /// Takes and ends requests until there is none, or one breaks a rule.
    fn take_all(
        &mut self,
        queue: &mut Virtqueue,
        taken: &mut Vec<u16>,
    ) -> Result<Option<Malformed>, String> {
        // A driver can make the same request available again and again.
        for _ in 0..4 * SIZE {
            let head = match queue.take() {
                Ok(Some(head)) => head,
                Ok(None) => break,
                Err(reason) => return Ok(Some(reason)),
            };
            if head >= SIZE {
                return Err(format!("request {head} is outside of the table"));
            }
            taken.push(head);
            match self.begin(queue, head)? {
                Ok(()) => {}
                Err(reason) => return Ok(Some(reason)),
            }
        }
        Ok(queue.ask_for_kick().and_then(|_| queue.wants_call()).err())
    }

    /// Reads and ends one request.
    fn begin(&mut self, queue: &mut Virtqueue, head: u16) -> Result<Result<(), Malformed>, String> {
        let memory = self.memory.clone();
        let request = match self.reader.read(&memory, queue.table(), head) {
            Ok(request) => request,
            Err(reason) => return Ok(Err(reason)),
        };
        if matches!(request.kind, Kind::Discard | Kind::WriteZeroes) {
            let range = self.reader.range(&memory, &request);
            if request.len != 16 && range != Ok(None) {
                return Err("a range was read from other data".into());
            }
        }
        match self.reader.segments(&memory) {
            Err(reason) => return Ok(Err(reason)),
            Ok(segments) => {
                let len: u64 = segments.iter().map(|segment| segment.len as u64).sum();
                if len != request.len {
                    return Err(format!("{len} bytes of memory for {} of data", request.len));
                }
                for IoSegment { base, len } in segments {
                    let (begin, end) = (*base as usize, *base as usize + len);
                    let is_in = |region: &(usize, usize)| region.0 <= begin && end <= region.1;
                    if !self.mapped.iter().any(is_in) {
                        return Err("a segment is outside of the regions".into());
                    }
                }
            }
        }
        if memory.bytes().write_obj(0u8, request.status).is_err() {
            return Ok(Err(Malformed("a status is outside of the memory")));
        }
        Ok(queue.finish(head, request.len as u32))
    }
}
