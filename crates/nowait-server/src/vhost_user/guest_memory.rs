//! The memory of a guest: regions that the VMM shares, and the addresses in them.
//!
//! Invariant: an address of the guest or of the VMM becomes one of this process only if all of its
//! bytes are in regions that are mapped as long as this value lives. A region whose file was shrunk
//! is told by [`GuestMemory::has_faulted`].

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nowait::{Error, IoSegment, Operation};
use serde::{Deserialize, Serialize};
use vm_memory::{
    AtomicAccess, ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress, VolatileMemory,
};

use crate::vhost_user::fault_guard::{FaultGuard, file_of, map_shared};

/// The most regions of a device.
/// Beyond it: the message is refused.
pub(crate) const MAX_REGIONS: usize = 509;

/// Where a region is, as the VMM tells it. All sums fit 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionAddress {
    /// Address in the guest.
    pub(crate) guest: u64,
    /// Length in bytes, not 0.
    pub(crate) len: u64,
    /// Address in the VMM.
    pub(crate) user: u64,
    /// Offset in its file.
    pub(crate) offset: u64,
}

/// A mapped region. The guard is dropped first.
struct Region {
    guard: FaultGuard,
    mapping: Arc<GuestRegionMmap>,
    address: RegionAddress,
}

impl Region {
    fn map(address: RegionAddress, file: File) -> Result<Self, Error> {
        let (guard, mapping) = map_shared(file, address.offset, address.len)?;
        let mapping = GuestRegionMmap::new(mapping, GuestAddress(address.guest))
            .ok_or(Error::new(libc::EINVAL, Operation::SetUp))?;
        Ok(Self { guard, mapping: Arc::new(mapping), address })
    }
}

/// The memory of a guest, of which changed versions are made.
#[derive(Default)]
pub(crate) struct GuestMemory {
    /// Dropped before the regions, whose guards end before their mappings do.
    all: GuestMemoryMmap,
    regions: Vec<Arc<Region>>,
}

impl GuestMemory {
    /// Maps `regions`.
    ///
    /// # Errors
    /// `EINVAL`: two of them overlap, or one is longer than its file; the errno of mmap(2).
    pub(crate) fn map(
        regions: impl IntoIterator<Item = (RegionAddress, File)>,
    ) -> Result<Self, Error> {
        let map = |(address, file)| Ok(Arc::new(Region::map(address, file)?));
        Self::of(regions.into_iter().map(map).collect::<Result<_, Error>>()?)
    }

    /// This memory and another region.
    ///
    /// # Errors
    /// Like [`GuestMemory::map`]; `ENOSPC`: there are [`MAX_REGIONS`].
    pub(crate) fn with(&self, address: RegionAddress, file: File) -> Result<Self, Error> {
        let mut regions = self.regions.clone();
        if regions.len() >= MAX_REGIONS {
            return Err(Error::new(libc::ENOSPC, Operation::SetUp));
        }
        regions.push(Arc::new(Region::map(address, file)?));
        Self::of(regions)
    }

    /// This memory without the region at the address in the guest and in the VMM and of the length
    /// of `address`.
    ///
    /// # Errors
    /// `ENOENT`: there is none.
    pub(crate) fn without(&self, address: RegionAddress) -> Result<Self, Error> {
        let is_it = |region: &Arc<Region>| {
            RegionAddress { offset: 0, ..region.address } == RegionAddress { offset: 0, ..address }
        };
        let mut regions = self.regions.clone();
        let at = regions.iter().position(is_it);
        regions.remove(at.ok_or(Error::new(libc::ENOENT, Operation::SetUp))?);
        Self::of(regions)
    }

    fn of(mut regions: Vec<Arc<Region>>) -> Result<Self, Error> {
        if regions.is_empty() {
            return Ok(Self::default());
        }
        regions.sort_by_key(|region| region.address.guest);
        let mappings = regions.iter().map(|region| region.mapping.clone()).collect();
        let all = GuestMemoryMmap::from_arc_regions(mappings)
            .map_err(|_| Error::new(libc::EINVAL, Operation::SetUp))?;
        Ok(Self { all, regions })
    }

    /// Whether it has no region.
    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Where its regions are.
    pub(crate) fn addresses(&self) -> Vec<RegionAddress> {
        self.regions.iter().map(|region| region.address).collect()
    }

    /// Copies of the files of its regions, in the same order.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn files(&self) -> io::Result<Vec<OwnedFd>> {
        self.regions.iter().map(|region| region.mapping.file_offset()).map(file_of).collect()
    }

    /// The memory for copies to and from it.
    #[inline]
    pub(crate) fn bytes(&self) -> &GuestMemoryMmap {
        &self.all
    }

    /// The region of `address`, and where in it that is.
    #[inline]
    fn place(&self, address: GuestAddress) -> Option<(&GuestRegionMmap, u64)> {
        let region = self.all.find_region(address)?;
        Some((region, address.0 - region.start_addr().0))
    }

    /// The object at `address`, if its memory exists. Most are in one region, which is looked up once.
    #[inline]
    pub(crate) fn read<T: ByteValued>(&self, address: GuestAddress) -> Option<T> {
        let (region, inside) = self.place(address)?;
        match region.get_ref(inside as usize) {
            Ok(object) => Some(object.load()),
            Err(_) => self.all.read_obj(address).ok(),
        }
    }

    /// Puts `object` at `address`. Returns whether its memory exists.
    #[inline]
    pub(crate) fn write<T: ByteValued>(&self, object: T, address: GuestAddress) -> bool {
        let Some((region, inside)) = self.place(address) else { return false };
        match region.get_ref(inside as usize) {
            Ok(place) => {
                place.store(object);
                true
            }
            Err(_) => self.all.write_obj(object, address).is_ok(),
        }
    }

    /// Loads a number that the guest may change meanwhile; `None` where it is in no region as a whole,
    /// or not aligned.
    #[inline]
    pub(crate) fn load<T: AtomicAccess>(
        &self,
        address: GuestAddress,
        order: Ordering,
    ) -> Option<T> {
        let (region, inside) = self.place(address)?;
        region.load(MemoryRegionAddress(inside), order).ok()
    }

    /// Stores a number that the guest may look at meanwhile. Returns whether it is in one region, and
    /// aligned.
    #[inline]
    pub(crate) fn store<T: AtomicAccess>(
        &self,
        number: T,
        address: GuestAddress,
        order: Ordering,
    ) -> bool {
        let place = self.place(address);
        place.is_some_and(|(region, inside)| {
            region.store(number, MemoryRegionAddress(inside), order).is_ok()
        })
    }

    /// The address in the guest of the byte that the VMM has at `user`.
    pub(crate) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let inside = user.checked_sub(region.address.user)?;
            (inside < region.address.len).then(|| GuestAddress(region.address.guest + inside))
        })
    }

    /// Appends `len` bytes at `address` to `segments`; more than one segment if they are in several
    /// regions. Returns whether all of them exist.
    #[inline]
    pub(crate) fn push_segments(
        &self,
        mut address: GuestAddress,
        mut len: u64,
        segments: &mut Vec<IoSegment>,
    ) -> bool {
        while len > 0 {
            let Some(region) = self.all.find_region(address) else { return false };
            let inside = address.0 - region.start_addr().0;
            let now = len.min(region.len() - inside);
            let base = region.as_ptr().wrapping_add(inside as usize);
            segments.push(IoSegment { base, len: now as usize });
            len -= now;
            match address.0.checked_add(now) {
                Some(next) => address = GuestAddress(next),
                None => return len == 0,
            }
        }
        true
    }

    /// Whether a part of the memory was missing when it was accessed.
    #[inline]
    pub(crate) fn has_faulted(&self) -> bool {
        FaultGuard::any_has_faulted()
            && self.regions.iter().any(|region| region.guard.has_faulted())
    }
}
