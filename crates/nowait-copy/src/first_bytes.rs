//! Reads the first bytes of a disk before it is copied, to see which format a raw copy would
//! resemble.
//!
//! Invariant: no request is in flight when the function returns successfully.

use std::sync::atomic::{AtomicBool, Ordering};

use nowait::{ByteRange, IoBuffer};
use nowait_image::PROBE_BYTES;

use crate::copy_loop::wait_for;
use crate::endpoint::{CopyOperation, CopyRequest, Endpoint};
use crate::error::Error;

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
        wait_for(&[&*endpoint])?;
    }
}
