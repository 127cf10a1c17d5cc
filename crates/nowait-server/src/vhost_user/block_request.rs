//! A request of the driver: its descriptor chain, read once and checked.
//!
//! Invariant: nothing is read twice from memory that the guest can change meanwhile. A chain that
//! breaks a rule of the ring is [`Malformed`]; a request that is only wrong is for the caller to
//! answer.

use nowait::IoSegment;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress};

use crate::vhost_user::guest_memory::GuestMemory;

/// The most descriptors of a chain: the most segments that the engine takes, a header and a status.
/// Beyond it: the device stops.
const MAX_DESCRIPTORS: usize = nowait::MAX_SEGMENTS + 2;
const DESCRIPTOR_BYTES: u32 = 16;
/// Bytes of `struct virtio_blk_outhdr`.
const HEADER_BYTES: u32 = 16;
/// Bytes of `struct virtio_blk_discard_write_zeroes`.
const RANGE_BYTES: usize = 16;

/// The reason why a queue cannot go on: what its driver has broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Unknown,
}

/// The status that tells of `errno`.
pub(crate) fn status_of(errno: i32) -> u32 {
    if errno == libc::EOPNOTSUPP { VIRTIO_BLK_S_UNSUPP } else { VIRTIO_BLK_S_IOERR }
}

/// A request whose data are [`RequestReader::data`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRequest {
    pub(crate) kind: Kind,
    /// Its first sector, if it has one.
    pub(crate) sector: u64,
    /// Where its status goes.
    pub(crate) status: GuestAddress,
    /// Bytes of its data.
    pub(crate) len: u64,
    /// It has memory of the direction that its kind does not use.
    pub(crate) has_stray: bool,
}

/// A part of the memory of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) address: GuestAddress,
    pub(crate) len: u32,
    writable: bool,
}

/// The range of a discard or a write of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SectorRange {
    pub(crate) sector: u64,
    pub(crate) sectors: u32,
    pub(crate) flags: u32,
}

/// Reads requests, with memory that is used again for each.
#[derive(Default)]
pub(crate) struct RequestReader {
    parts: Vec<Part>,
    segments: Vec<IoSegment>,
}

impl RequestReader {
    /// Reads the request whose chain begins with descriptor `head` of the `size` descriptors at
    /// `table`.
    ///
    /// # Errors
    /// [`Malformed`].
    pub(crate) fn read(
        &mut self,
        memory: &GuestMemory,
        (table, size): (GuestAddress, u16),
        head: u16,
    ) -> Result<BlockRequest, Malformed> {
        self.read_chain(memory, table, size, head)?;
        let header = self.take_header(memory)?;
        let status = self.take_status()?;
        let [kind, _, sector_low, sector_high] = header;
        let kind = match kind {
            VIRTIO_BLK_T_IN => Kind::Read,
            VIRTIO_BLK_T_OUT => Kind::Write,
            VIRTIO_BLK_T_FLUSH => Kind::Flush,
            VIRTIO_BLK_T_GET_ID => Kind::GetId,
            VIRTIO_BLK_T_DISCARD => Kind::Discard,
            VIRTIO_BLK_T_WRITE_ZEROES => Kind::WriteZeroes,
            _ => Kind::Unknown,
        };
        let writable = matches!(kind, Kind::Read | Kind::GetId);
        let before = self.parts.len();
        self.parts.retain(|part| part.writable == writable);
        Ok(BlockRequest {
            kind,
            sector: u64::from(sector_high) << 32 | u64::from(sector_low),
            status,
            len: self.parts.iter().map(|part| u64::from(part.len)).sum(),
            has_stray: self.parts.len() < before,
        })
    }

    /// The data of the request that was read last: those that its kind uses.
    pub(crate) fn data(&self) -> &[Part] {
        &self.parts
    }

    /// Keeps of the data `len` bytes from byte `from` on.
    #[cold]
    pub(crate) fn keep(&mut self, mut from: u64, mut len: u64) {
        for part in &mut self.parts {
            let skipped = from.min(part.len.into()) as u32;
            from -= u64::from(skipped);
            // Only a part of no bytes has an address that overflows.
            part.address = part.address.checked_add(skipped.into()).unwrap_or(part.address);
            part.len = len.min(u64::from(part.len - skipped)) as u32;
            len -= u64::from(part.len);
        }
        self.parts.retain(|part| part.len > 0);
    }

    /// Keeps the first `len` bytes of the data. Returns a reader of the others.
    #[cold]
    pub(crate) fn split_off(&mut self, len: u64) -> Self {
        let mut others = Self { parts: self.parts.clone(), segments: Vec::new() };
        others.keep(len, u64::MAX);
        self.keep(0, len);
        others
    }

    /// The segment in the memory of this process.
    ///
    /// # Errors
    /// [`Malformed`]: a part of them is in no region.
    #[inline]
    pub(crate) fn segments(&mut self, memory: &GuestMemory) -> Result<&[IoSegment], Malformed> {
        self.segments.clear();
        for part in &self.parts {
            if !memory.push_segments(part.address, u64::from(part.len), &mut self.segments) {
                return Err(Malformed("a buffer is outside of the memory"));
            }
        }
        Ok(&self.segments)
    }

    /// Copies the data to `to`, as many as both have.
    ///
    /// # Errors
    /// [`Malformed`]: a part of them is in no region.
    pub(crate) fn copy_data(&self, memory: &GuestMemory, to: &mut [u8]) -> Result<(), Malformed> {
        let mut rest = to;
        for part in &self.parts {
            let len = rest.len().min(part.len as usize);
            let (now, later) = rest.split_at_mut(len);
            let read = memory.bytes().read_slice(now, part.address);
            read.map_err(|_| Malformed("a buffer is outside of the memory"))?;
            rest = later;
        }
        Ok(())
    }

    /// Copies `from` to the memory for the data, as many as both have.
    ///
    /// # Errors
    /// [`Malformed`]: a part of it is in no region.
    pub(crate) fn fill_data(&self, memory: &GuestMemory, from: &[u8]) -> Result<(), Malformed> {
        let mut rest = from;
        for part in &self.parts {
            let (now, later) = rest.split_at(rest.len().min(part.len as usize));
            let written = memory.bytes().write_slice(now, part.address);
            written.map_err(|_| Malformed("a buffer is outside of the memory"))?;
            rest = later;
        }
        Ok(())
    }

    /// The range of a discard or a write of zeroes; `None` unless its data are one range.
    ///
    /// # Errors
    /// Like [`RequestReader::copy_data`].
    pub(crate) fn range(
        &self,
        memory: &GuestMemory,
        request: &BlockRequest,
    ) -> Result<Option<SectorRange>, Malformed> {
        if request.len != RANGE_BYTES as u64 {
            return Ok(None);
        }
        let mut bytes = [0; RANGE_BYTES];
        self.copy_data(memory, &mut bytes)?;
        let [low, high, sectors, flags] = words(bytes);
        let sector = u64::from(high) << 32 | u64::from(low);
        Ok(Some(SectorRange { sector, sectors, flags }))
    }

    fn read_chain(
        &mut self,
        memory: &GuestMemory,
        mut table: GuestAddress,
        size: u16,
        head: u16,
    ) -> Result<(), Malformed> {
        self.parts.clear();
        let (mut size, mut index) = (u32::from(size), u32::from(head));
        let mut is_indirect = false;
        loop {
            if index >= size {
                return Err(Malformed("a descriptor is outside of its table"));
            }
            let at = table.checked_add(u64::from(index) * u64::from(DESCRIPTOR_BYTES));
            let read = at.and_then(|at| memory.read::<Descriptor>(at));
            let descriptor = read.ok_or(Malformed("a descriptor is outside of the memory"))?;
            if descriptor.refers_to_indirect_table() {
                let len = descriptor.len();
                if is_indirect || descriptor.has_next() || !len.is_multiple_of(DESCRIPTOR_BYTES) {
                    return Err(Malformed("an indirect table is not valid"));
                }
                (table, size, index) = (descriptor.addr(), len / DESCRIPTOR_BYTES, 0);
                is_indirect = true;
                continue;
            }
            let writable = descriptor.is_write_only();
            if !writable && self.parts.last().is_some_and(|last| last.writable) {
                return Err(Malformed("readable memory follows writable memory"));
            }
            if self.parts.len() == MAX_DESCRIPTORS {
                return Err(Malformed("a descriptor chain is too long"));
            }
            let (address, len) = (descriptor.addr(), descriptor.len());
            self.parts.push(Part { address, len, writable });
            if !descriptor.has_next() {
                return Ok(());
            }
            index = u32::from(descriptor.next());
        }
    }

    /// Takes the header off the first parts.
    fn take_header(&mut self, memory: &GuestMemory) -> Result<[u32; 4], Malformed> {
        if let Some(first) = self.parts.first_mut().filter(|first| !first.writable)
            && first.len >= HEADER_BYTES
            && let Some(address) = first.address.checked_add(u64::from(HEADER_BYTES))
            && let Some(bytes) = memory.read(first.address)
        {
            (first.address, first.len) = (address, first.len - HEADER_BYTES);
            return Ok(words(bytes));
        }
        let mut bytes = [0; HEADER_BYTES as usize];
        let mut filled = 0;
        let readable = self.parts.iter_mut().take_while(|part| !part.writable);
        for part in readable {
            let rest = bytes.get_mut(filled..).unwrap_or_default();
            let len = rest.len().min(part.len as usize);
            let read =
                memory.bytes().read_slice(rest.get_mut(..len).unwrap_or_default(), part.address);
            read.map_err(|_| Malformed("a header is outside of the memory"))?;
            filled += len;
            part.len -= len as u32;
            // An address that overflows belongs to a part of no bytes.
            part.address = part.address.checked_add(len as u64).unwrap_or(part.address);
        }
        if filled < bytes.len() {
            return Err(Malformed("a header is missing"));
        }
        Ok(words(bytes))
    }

    /// Takes the status off the last part, and drops the parts that are empty.
    fn take_status(&mut self) -> Result<GuestAddress, Malformed> {
        self.parts.retain(|part| part.len > 0);
        let missing = Malformed("the byte for the status is missing");
        let last = self.parts.last_mut().filter(|last| last.writable).ok_or(missing)?;
        last.len -= 1;
        let status = last.address.checked_add(u64::from(last.len)).ok_or(missing)?;
        if last.len == 0 {
            self.parts.pop();
        }
        Ok(status)
    }
}

/// Four numbers in the byte order of the protocol.
fn words(bytes: [u8; 16]) -> [u32; 4] {
    let word = |at: usize| {
        let [a, b, c, d] = [at, at + 1, at + 2, at + 3].map(|at| bytes.get(at).copied());
        u32::from_le_bytes([a, b, c, d].map(Option::unwrap_or_default))
    };
    [word(0), word(4), word(8), word(12)]
}
