//! Where the data of a queue's requests are: in a buffer that each tag has, or in memory of the
//! request itself, which the driver registers with the ring.
//!
//! Invariant: a tag's buffer is the driver's while its fetch command is in the ring, and the
//! engine's while its request is there. Registered memory is used by number only.

use std::os::fd::BorrowedFd;

use nowait::{BlockMap, ByteRange, DeviceHandle, Engine, IoQueue, PooledBuffer};
use rustix::io::{pread, pwrite};

use crate::ublk::ublk_cmd::{data_position, register_as};

/// A number under which no memory can be registered, so that the driver marks each request.
const NO_NUMBER: u16 = u16::MAX;

/// The data of a queue's requests, by tag.
pub(crate) enum RequestData {
    /// The driver copies.
    Copied {
        /// Taken while the request of the tag is in the engine.
        buffers: Vec<Option<PooledBuffer>>,
        /// The addresses of the buffers, which are those of the fetch commands.
        addresses: Vec<u64>,
    },
    /// Nothing is copied, except for a request that the engine cannot serve so.
    Registered {
        /// The number of the first tag's memory; the next ones follow.
        first: Option<u16>,
        /// The request of the tag was tried so, and has to be copied.
        must_copy: Vec<bool>,
    },
}

impl RequestData {
    /// Buffers of `bytes` for `tags` tags; `None` if there is no memory for them.
    pub(crate) fn copied<Q: IoQueue>(
        engine: &mut Engine<Q, dyn BlockMap>,
        device: &DeviceHandle<dyn BlockMap>,
        tags: u16,
        bytes: u32,
    ) -> Option<Self> {
        let whole = ByteRange::new(0, bytes.into());
        let buffers =
            (0..tags).map(|_| engine.buffer(device, whole)).collect::<Option<Vec<_>>>()?;
        let address = |buffer: &PooledBuffer| buffer.as_ptr().expose_provenance() as u64;
        let addresses = buffers.iter().map(address).collect();
        Some(Self::Copied { buffers: buffers.into_iter().map(Some).collect(), addresses })
    }

    /// The memory of the requests of `tags` tags.
    pub(crate) fn registered<Q: IoQueue>(
        engine: &mut Engine<Q, dyn BlockMap>,
        device: &DeviceHandle<dyn BlockMap>,
        tags: u16,
    ) -> Self {
        let must_copy = vec![false; tags.into()];
        Self::Registered { first: engine.reserve_buffers(device, tags), must_copy }
    }

    /// Gives the numbers of the memory back: no command of the queue is left.
    pub(crate) fn release<Q: IoQueue>(&mut self, engine: &mut Engine<Q, dyn BlockMap>) {
        if let Self::Registered { first, .. } = self
            && let Some(first) = first.take()
        {
            engine.release_buffers(first);
        }
    }

    /// The address of the entry of a fetch command, and that in its arguments.
    #[inline]
    pub(crate) fn addresses(&self, tag: u16) -> (u64, u64) {
        match self {
            Self::Copied { addresses, .. } => {
                (0, addresses.get(usize::from(tag)).copied().unwrap_or_default())
            }
            Self::Registered { first, .. } => {
                (register_as(first.map_or(NO_NUMBER, |first| first + tag)), 0)
            }
        }
    }

    /// The number of the memory of `tag`, if its request can be tried with it.
    #[inline]
    pub(crate) fn number(&self, tag: u16) -> Option<u16> {
        match self {
            Self::Registered { first: Some(first), must_copy } => {
                (!must_copy.get(usize::from(tag))?).then_some(first + tag)
            }
            _ => None,
        }
    }

    /// The request of `tag` must be copied, or the next one need not be.
    #[inline]
    pub(crate) fn set_must_copy(&mut self, tag: u16, must: bool) {
        if let Self::Registered { must_copy, .. } = self
            && let Some(place) = must_copy.get_mut(usize::from(tag))
        {
            *place = must;
        }
    }

    /// Whether the request of `tag` is in the engine with a buffer other than that of the tag.
    #[inline]
    pub(crate) fn is_copied_here(&self, tag: u16) -> bool {
        match self {
            Self::Copied { buffers, .. } => {
                buffers.get(usize::from(tag)).is_some_and(Option::is_some)
            }
            Self::Registered { .. } => true,
        }
    }

    /// Copies the data of a write of `tag` to `bytes`: from the driver, a queue `queue` of `device`, or where it has left
    /// them.
    ///
    /// # Errors
    /// The errno of pread(2); `EIO` if there are fewer.
    pub(crate) fn copy_in(
        &self,
        (device, queue): (BorrowedFd<'_>, u16),
        tag: u16,
        bytes: &mut [u8],
    ) -> Result<(), i32> {
        match self {
            Self::Registered { .. } => copy_in(device, queue, tag, bytes),
            Self::Copied { buffers, .. } => {
                let own = buffers.get(usize::from(tag)).and_then(Option::as_ref);
                let own = own.and_then(|own| own.get(..bytes.len())).ok_or(libc::EIO)?;
                bytes.copy_from_slice(own);
                Ok(())
            }
        }
    }

    /// Copies the data of a read of `tag` from `bytes`, and after them `padding` zeros, to where the driver takes them.
    ///
    /// # Errors
    /// The errno of pwrite(2); `EIO` if the driver takes fewer.
    pub(crate) fn copy_out(
        &mut self,
        (device, queue): (BorrowedFd<'_>, u16),
        tag: u16,
        bytes: &[u8],
        padding: usize,
    ) -> Result<(), i32> {
        match self {
            Self::Registered { .. } => {
                copy_out(device, queue, tag, 0, bytes)?;
                copy_out(device, queue, tag, bytes.len(), &vec![0; padding])
            }
            Self::Copied { buffers, .. } => {
                let own = buffers.get_mut(usize::from(tag)).and_then(Option::as_mut);
                let own = own.and_then(|own| own.get_mut(..bytes.len() + padding));
                let (data, zeros) = own.ok_or(libc::EIO)?.split_at_mut(bytes.len());
                data.copy_from_slice(bytes);
                zeros.fill(0);
                Ok(())
            }
        }
    }

    /// Takes the buffer that the driver copies to and from.
    #[inline]
    pub(crate) fn take_buffer(&mut self, tag: u16) -> Option<PooledBuffer> {
        match self {
            Self::Copied { buffers, .. } => buffers.get_mut(usize::from(tag))?.take(),
            Self::Registered { .. } => None,
        }
    }

    /// Takes a buffer back. One that is not a tag's own is dropped.
    #[inline]
    pub(crate) fn put_buffer(&mut self, tag: u16, buffer: PooledBuffer) {
        if let Self::Copied { buffers, .. } = self
            && let Some(place) = buffers.get_mut(usize::from(tag))
        {
            *place = Some(buffer);
        }
    }

    /// Leaks the memory that the driver may still write to.
    pub(crate) fn leak(&mut self) {
        if let Self::Copied { buffers, .. } = self {
            std::mem::forget(std::mem::take(buffers));
        }
    }
}

/// Copies the data of a write of `tag` from the driver to `bytes`.
///
/// # Errors
/// The errno of pread(2); `EIO` if the driver has fewer.
fn copy_in(device: BorrowedFd<'_>, queue: u16, tag: u16, bytes: &mut [u8]) -> Result<(), i32> {
    let mut done = 0;
    while done < bytes.len() {
        match pread(device, &mut bytes[done..], data_position(queue, tag) + done as u64) {
            Ok(0) => return Err(libc::EIO),
            Ok(more) => done += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.raw_os_error()),
        }
    }
    Ok(())
}

/// Copies the data of a read of `tag` from `bytes` to the driver, from byte `from` of the request on.
///
/// # Errors
/// The errno of pwrite(2); `EIO` if the driver takes fewer.
fn copy_out(
    device: BorrowedFd<'_>,
    queue: u16,
    tag: u16,
    from: usize,
    bytes: &[u8],
) -> Result<(), i32> {
    let mut done = 0;
    while done < bytes.len() {
        match pwrite(device, &bytes[done..], data_position(queue, tag) + (from + done) as u64) {
            Ok(0) => return Err(libc::EIO),
            Ok(more) => done += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.raw_os_error()),
        }
    }
    Ok(())
}
