//! Threads on the way of the I/O of a disk that this host itself uses: `PR_SET_IO_FLUSHER` of prctl(2).
//!
//! Invariant: it is set before the process has a second thread, so that every thread and every successor inherits it,
//! the kernel's threads for the rings too.

use std::io;

use rustix::process::configure_io_flusher_behavior;
use tracing::warn;

use crate::config::ServeConfig;
use crate::error::{CliError, os_message};

/// Memory that this process asks the kernel for, and its writes to the page cache, wait for no disk but that which it
/// writes to, if `config` say that this host uses the disks: reclaim would wait for requests that this process serves.
///
/// # Errors
/// `--io-flusher`, and the process may not (`EPERM`) or the kernel cannot (`EINVAL`, before Linux 5.6). Without that
/// option the reason is a warning.
pub(crate) fn set_if_asked(config: &ServeConfig) -> Result<(), CliError> {
    let devices = config.devices().into_iter().find_map(|devices| devices.used_by_host());
    if !config.io_flusher && devices.is_none() {
        return Ok(());
    }
    let option = devices.unwrap_or_default();
    match configure_io_flusher_behavior(true) {
        Ok(()) => Ok(()),
        Err(errno) if config.io_flusher => {
            Err(CliError::new(format!("--io-flusher: {}", refusal(errno.into()))))
        }
        Err(errno) => {
            let why = refusal(errno.into());
            warn!("{option}: when memory is short, this server may wait for its own device: {why}");
            Ok(())
        }
    }
}

fn refusal(error: io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            "the capability CAP_SYS_RESOURCE is missing (be root, outside of containers)".into()
        }
        Some(libc::EINVAL) => "the kernel does not support it (Linux 5.6 does)".into(),
        _ => os_message(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_what_is_missing() {
        let refused = |errno| refusal(io::Error::from_raw_os_error(errno));
        assert!(refused(libc::EPERM).contains("CAP_SYS_RESOURCE"));
        assert!(refused(libc::EINVAL).contains("Linux 5.6"));
        assert_eq!(refused(libc::ENOSYS), "Function not implemented");
    }
}
