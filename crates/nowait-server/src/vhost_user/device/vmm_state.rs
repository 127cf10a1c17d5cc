//! Set-up of a device by its VMM, as one process hands it over to another.
//!
//! Invariant: no request is in flight, so what the guest has made available and was not told is in its
//! rings. What another process says is checked as what a VMM says.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserLog};
use vhost::vhost_user::{
    Error as MessageError, Result as Handled, VhostUserBackendReqHandlerMut as _,
};

use crate::vhost_user::device::{Device, Ring, UserAddresses, eventfd, refused};
use crate::vhost_user::dirty_log::LogPlace;
use crate::vhost_user::guest_memory::{GuestMemory, MAX_REGIONS, RegionAddress};
use crate::vhost_user::inflight_region::InflightPlace;
use crate::vhost_user::virtqueue::MAX_QUEUE_SIZE;

/// A VMM's connection between two processes.
#[derive(Debug)]
pub struct VmmState {
    /// Its socket.
    pub socket: OwnedFd,
    /// Where it is told of changes.
    pub channel: Option<OwnedFd>,
    /// The set-up itself.
    pub setup: VmmSetup,
    /// The files of that, in its order.
    pub files: Vec<OwnedFd>,
}

/// Set-up of a device by its VMM. Each region, each descriptor of a ring that is there, the
/// region of requests in flight and the log have a file, in this order.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VmmSetup {
    pub(crate) features: u64,
    pub(crate) protocol_features: u64,
    /// The driver has the device cache writes.
    cache: bool,
    /// The guest is not served until it resets the device.
    broken: bool,
    regions: Vec<RegionAddress>,
    rings: Vec<RingSetup>,
    inflight: Option<InflightPlace>,
    log: Option<LogPlace>,
}

/// A queue.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct RingSetup {
    index: u16,
    size: u16,
    addresses: Option<UserAddresses>,
    /// The entry of the available ring that is taken next.
    base: u16,
    enabled: bool,
    has_kick: bool,
    has_call: bool,
    has_err: bool,
}

impl Device {
    /// The state for another process, with copies of all descriptors. The device is suspended.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn vmm_state(
        &self,
        socket: &UnixStream,
        channel: Option<&OwnedFd>,
    ) -> io::Result<VmmState> {
        let mut files = self.memory.files()?;
        let mut rings = Vec::new();
        for (index, ring) in (0..).zip(&self.rings) {
            let Ring { size, addresses, base, kick, call, err, enabled, .. } = ring;
            let is_set_up = *size > 0 || addresses.is_some() || kick.is_some() || *enabled;
            if !is_set_up && call.is_none() && err.is_none() {
                continue;
            }
            for fd in [kick, call, err].into_iter().flatten() {
                files.push(fd.try_clone()?);
            }
            rings.push(RingSetup {
                index,
                size: *size,
                addresses: *addresses,
                base: *base,
                enabled: *enabled,
                has_kick: kick.is_some(),
                has_call: call.is_some(),
                has_err: err.is_some(),
            });
        }
        let inflight = self.inflight.as_ref().map(|region| region.place()).transpose()?;
        let log = self.log.as_ref().map(|log| log.place()).transpose()?;
        let (inflight, inflight_file) = inflight.unzip();
        let (log, log_file) = log.unzip();
        files.extend(inflight_file.into_iter().chain(log_file));
        let setup = VmmSetup {
            features: self.features.0,
            protocol_features: self.protocol_features,
            cache: self.state.wce.load(Ordering::Relaxed),
            broken: self.state.is_broken(),
            regions: self.memory.addresses(),
            rings,
            inflight,
            log,
        };
        let socket = socket.as_fd().try_clone_to_owned()?;
        let channel = channel.map(OwnedFd::try_clone).transpose()?;
        Ok(VmmState { socket, channel, setup, files })
    }

    /// Sets up a new device, whose features are set, as another process has left it; then its queues
    /// run.
    ///
    /// # Errors
    /// What is refused from a VMM; a file is missing.
    pub(crate) fn set_up(&mut self, state: VmmState) -> Handled<()> {
        let VmmSetup { cache, broken, regions, rings, inflight, log, .. } = state.setup;
        let mut files = state.files.into_iter().map(File::from);
        let mut file = || files.next().ok_or(MessageError::IncorrectFds);
        if regions.len() > MAX_REGIONS {
            return Err(MessageError::InvalidParam);
        }
        let with_file = |region: RegionAddress| Ok((region, file()?));
        let regions = regions.into_iter().map(with_file).collect::<Handled<Vec<_>>>()?;
        self.memory = Arc::new(GuestMemory::map(regions).map_err(refused)?);
        for setup in rings {
            let fits =
                setup.size <= MAX_QUEUE_SIZE && (setup.size & setup.size.wrapping_sub(1)) == 0;
            let mut fd = |is_there: bool| {
                let file = is_there.then(&mut file).transpose()?;
                eventfd(file)
            };
            let (kick, call, err) = (fd(setup.has_kick)?, fd(setup.has_call)?, fd(setup.has_err)?);
            let ring = self.ring(u32::from(setup.index))?;
            if !fits {
                return Err(MessageError::InvalidParam);
            }
            let RingSetup { size, addresses, base, enabled, .. } = setup;
            *ring = Ring { size, addresses, base, kick, call, err, enabled, running: None };
        }
        self.set_cache(cache);
        if broken {
            self.state.stay_broken();
        }
        if let Some(InflightPlace { bytes, offset, queues, queue_size }) = inflight {
            let given = VhostUserInflight::new(bytes, offset, queues, queue_size);
            self.set_inflight_fd(&given, file()?)?;
        }
        if let Some(LogPlace { bytes, offset }) = log {
            self.set_log_base(&VhostUserLog::new(bytes, offset), file()?)?;
        }
        self.start_all()
    }
}
