//! The last phase: the server has stopped, and its images are flushed, or another process has them.
//!
//! Invariant: what another process has taken over is not touched, removed or closed.

use std::path::Path;
use std::sync::mpsc;

use nowait::internal::RegisteredMemory;
use nowait_remote::RbdStorage;
use tracing::{info, warn};

use crate::config::ServeConfig;
use crate::config::control_address::ControlAddress;
use crate::control::control_interface::ControlInterface;
use crate::disks::open_disk::OpenedDisk;
use crate::error::{CliError, os_message};
use crate::process::systemd;
use crate::serve::CLOSE_TIMEOUT;
use crate::serve::bound::Places;
use crate::serve::serving::Serving;
use crate::size::human;
use crate::summary;

/// A server that has stopped.
pub(super) struct Flushed<'a> {
    config: &'a ServeConfig,
    /// The result of the flush; `None` if another process serves.
    flushed: Option<Result<(), CliError>>,
    control: Option<ControlInterface>,
    places: Places,
}

impl<'a> Flushed<'a> {
    /// Waits until the server that is `serving` is stopped, and flushes its images.
    ///
    /// # Errors
    /// A queue has failed.
    pub(super) fn of(serving: Serving<'a>) -> Result<Self, CliError> {
        let Serving {
            config, ending, places, disks, moves, replicas, control, image, server, ..
        } = serving;
        let exports = server.exports();
        let stopped = server.run(CLOSE_TIMEOUT).map_err(|e| CliError::at(&image, e))?;
        summary::log(&exports);
        if stopped.handed_over {
            info!("another process is serving now");
            return Ok(Self { config, flushed: None, control, places });
        }
        warn_of_unfinished(stopped.unfinished);
        ending.flushing();
        systemd::notify_flushing();
        let have_ended = [moves.stop(CLOSE_TIMEOUT), replicas.stop(CLOSE_TIMEOUT)];
        // Without unfinished requests the flush has no timeout: the cache may hold much data.
        let all = disks.take();
        let flushed = match stopped.unfinished {
            0 if have_ended == [true; 2] => close(all, true),
            _ => close_with_timeout(all, &image),
        };
        Ok(Self { config, flushed: Some(flushed), control, places })
    }

    /// Removes what the server has made, unless another process has taken it over.
    ///
    /// # Errors
    /// Those of the flush.
    pub(super) fn end(self) -> Result<(), CliError> {
        let Self { config, flushed, control, places } = self;
        let Some(flushed) = flushed else {
            control.into_iter().for_each(|control| control.leave(is_control_given(config)));
            std::mem::forget(places);
            return Ok(());
        };
        drop((control, places));
        flushed?;
        // The last thread of its export may be closing an image.
        RbdStorage::wait_until_closed(CLOSE_TIMEOUT);
        log_stop();
        Ok(())
    }
}

fn log_stop() {
    let most = RegisteredMemory::of_this_process().most_bytes as u64;
    info!("registered buffers: {} at most", human(most));
    info!("stopped, everything is flushed");
}

/// Whether the control socket is at a path that was given, and stays there.
fn is_control_given(config: &ServeConfig) -> bool {
    matches!(config.control_socket(), Some(ControlAddress::Unix(_)))
}

fn warn_of_unfinished(requests: usize) {
    if requests > 0 {
        let time = CLOSE_TIMEOUT.as_secs();
        warn!("{requests} requests did not complete within {time} s and were left");
    }
}

/// Flushes every image, also when one of them fails.
fn close(all: Vec<OpenedDisk>, ended: bool) -> Result<(), CliError> {
    let mut result = Ok(());
    for opened in all {
        let closed = opened.close(ended);
        match (&result, closed) {
            (Ok(()), closed) => result = closed,
            (Err(_), Ok(())) => {}
            (Err(_), Err(error)) => warn!("{error}"),
        }
    }
    result
}

/// Like `close` with requests in flight, but waits at most `CLOSE_TIMEOUT`: storage that leaves
/// requests unanswered may never answer the flush either.
fn close_with_timeout(all: Vec<OpenedDisk>, image: &Path) -> Result<(), CliError> {
    let (sender, closed) = mpsc::channel();
    let closing = std::thread::Builder::new().spawn(move || sender.send(close(all, false)));
    closing.map_err(|e| CliError::at(image, format!("cannot flush: {}", os_message(&e))))?;
    let unanswered = |_| {
        let time = CLOSE_TIMEOUT.as_secs();
        Err(CliError::at(image, format!("not flushed: its storage did not answer for {time} s")))
    };
    closed.recv_timeout(CLOSE_TIMEOUT).unwrap_or_else(unanswered)
}
