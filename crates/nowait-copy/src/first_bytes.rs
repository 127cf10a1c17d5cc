//! Reads the first bytes of a disk before it is copied, to see which format a raw copy would
//! resemble.
//!
//! Invariant: no request is in flight when the function returns successfully.

use std::sync::atomic::{AtomicBool, Ordering};

use nowait::{ByteRange, IoBuffer};
use nowait_image::PROBE_BYTES;
use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use crate::endpoint::{CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, words};

/// The longest sleep: a cancelled copy ends within this time.
const WAIT_SLICE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The first [`PROBE_BYTES`] of the disk, rounded up to its alignment; fewer if the disk is
/// smaller.
///
/// # Errors
/// The read failed; [`Error::Interrupted`].
pub(crate) fn first_bytes(
    endpoint: &mut dyn Endpoint,
    cancel: &AtomicBool,
) -> Result<Vec<u8>, Error> {
    let capabilities = endpoint.capabilities();
    let len = (PROBE_BYTES as u64).next_multiple_of(capabilities.alignment).min(capabilities.size);
    if len == 0 {
        return Ok(Vec::new());
    }
    let memory = IoBuffer::zeroed(len as usize).map_err(|error| Error::at(&"memory", error))?;
    let range = ByteRange::new(0, len);
    endpoint.submit(CopyRequest {
        operation: CopyOperation::Read,
        range,
        tag: 0,
        memory: Some(memory),
    });
    loop {
        endpoint.advance()?;
        if let Some(done) = endpoint.next() {
            let bytes = done.memory.as_ref().and_then(|memory| memory.get(..len as usize));
            return Ok(bytes.unwrap_or_default().to_vec());
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let mut poll_fds = Vec::new();
        endpoint.poll_fds(&mut poll_fds);
        let mut fds: Vec<PollFd<'_>> =
            poll_fds.into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
        match poll(&mut fds, Some(&WAIT_SLICE)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::at(&"poll", words(&errno.into()))),
        }
    }
}
