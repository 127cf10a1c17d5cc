//! A ublk device from its making to its end: added or recovered, started, served, stopped or left.
//!
//! Invariant: a node that a program may have open is never taken away unasked where the driver keeps
//! it for the next server. The device is deleted only when it has no node, or never had one.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nowait_image::Image;

use crate::ublk::control_ring::{ControlRing, character_device, within};
use crate::ublk::device_parameters::Parameters;
use crate::ublk::node_users;
use crate::ublk::ublk_cmd::{
    ControlOp, DeviceInfo, DeviceState, F_CMD_IOCTL_ENCODE, F_UNPRIVILEGED_DEV, F_USER_RECOVERY,
    F_USER_RECOVERY_REISSUE,
};
use crate::ublk::ublk_error::UblkError;

/// The most requests of a queue in flight.
const MAX_DEPTH: u16 = 128;
const MIN_DEPTH: u16 = 16;
/// The longest request, in bytes, where there are few queues and where there are many.
const MAX_IO_BYTES: u32 = 512 << 10;
const MIN_IO_BYTES: u32 = 64 << 10;
/// Bytes of the buffers of all queues together: each tag has one of the longest request.
const MAX_BUFFER_BYTES: u64 = 64 << 20;
/// How long a device's last server may take to end once it was killed, and a new node to appear.
const APPEAR_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the driver may take to start a device, which includes reading its partition table.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the driver may take to stop a device, which includes writing what it has cached.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the driver may take to delete a device that has no node any more.
const DELETE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a wait looks again.
const RETRY: Duration = Duration::from_millis(50);
/// How often the users of a node are looked for, which reads the descriptors of all processes.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// What a node is made from.
#[derive(Clone, Copy, Debug)]
pub struct UblkOptions {
    /// Its number; any free one without it.
    pub id: Option<u32>,
    /// Queues, one for each thread; the kernel has at most one for each processor.
    pub queues: u16,
    /// Tells the image from others: a server that takes over a node must have the same one.
    pub image_id: u64,
}

/// A node and the device behind it. Dropped, it deletes the device, unless the node was left to the
/// next server.
pub struct UblkNode(Arc<UblkDevice>);

impl std::fmt::Debug for UblkNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("UblkNode").field(&self.0.node()).finish()
    }
}

impl UblkNode {
    /// Adds a device for `image`, or takes over the one of that number whose server has ended. The
    /// node appears with [`UblkNode::start`].
    ///
    /// # Errors
    /// There is no driver, no right to it, no such number free, or the node to take over had
    /// another image.
    pub fn open(image: &Image, options: UblkOptions) -> Result<Self, UblkError> {
        // Memory for this thread, and for those that it starts, is not to wait for a write to the
        // node, which they would have to serve. Without the right to it (CAP_SYS_RESOURCE) it is so.
        let _ = rustix::process::configure_io_flusher_behavior(true);
        let mut control = ControlRing::open()?;
        let features = control.features()?;
        let found = match options.id {
            Some(id) => existing(&mut control, id)?,
            None => None,
        };
        let (info, recovers) = match found {
            Some(info) => (recovered(&mut control, info, image, options)?, true),
            None => (added(&mut control, features, options)?, false),
        };
        let parameters = Parameters::of(image, info.max_io_bytes);
        let device = UblkDevice {
            info,
            parameters,
            recovers,
            character_device: Mutex::new(None),
            live_queues: AtomicU32::new(0),
            has_node: AtomicBool::new(recovers),
            leaving: AtomicBool::new(false),
        };
        let node = Self(Arc::new(device));
        if parameters.size == 0 {
            return Err(UblkError::new("the image is too small to be a block device"));
        }
        if !recovers {
            let opened = open_character_device(info.id)?;
            *node.0.character_device.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        }
        Ok(node)
    }

    /// The device, for the threads that serve it.
    #[must_use]
    pub fn device(&self) -> Arc<UblkDevice> {
        self.0.clone()
    }

    /// Makes the node appear, or gives it to this server. Its threads must serve already.
    ///
    /// # Errors
    /// The errno of the driver.
    pub fn start(&self) -> Result<(), UblkError> {
        let UblkDevice { info, parameters, recovers, .. } = *self.0;
        let (id, by_path) = (info.id, self.0.by_path());
        let pid = u64::from(std::process::id());
        let started = within(START_TIMEOUT, move |control| {
            if recovers {
                return control.command(ControlOp::END_USER_RECOVERY, id, pid, by_path, &mut []);
            }
            let mut bytes = parameters.to_bytes();
            control.command(ControlOp::SET_PARAMS, id, 0, by_path, &mut bytes)?;
            control.command(ControlOp::START_DEV, id, pid, by_path, &mut [])
        });
        match started? {
            Some(Ok(_)) => {}
            Some(Err(errno)) => return Err(UblkError::os(self.0.node(), errno)),
            None => {
                return Err(UblkError::new(format!(
                    "{}: the driver does not start it",
                    self.0.node()
                )));
            }
        }
        self.0.has_node.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for UblkNode {
    fn drop(&mut self) {
        let opened = self.0.character_device.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(opened);
        if self.0.has_node.load(Ordering::Acquire) {
            return;
        }
        let (id, by_path) = (self.0.info.id, self.0.by_path());
        // The device is deleted at the latest when this process has ended.
        let _ = within(DELETE_TIMEOUT, move |control| match control.info(id) {
            Ok(Some(DeviceInfo { state: DeviceState::Dead, .. })) => {
                control.command(ControlOp::DEL_DEV, id, 0, by_path, &mut [])
            }
            _ => Ok(0),
        });
    }
}

/// The device as its threads see it.
pub struct UblkDevice {
    pub(crate) info: DeviceInfo,
    parameters: Parameters,
    /// A server before this one had it.
    recovers: bool,
    /// The threads have descriptors of their own. One open file is all that the driver allows.
    character_device: Mutex<Option<OwnedFd>>,
    /// Queues that get requests.
    live_queues: AtomicU32,
    /// The node is there, or waits for a server.
    has_node: AtomicBool,
    /// The queues take no more requests: the next server gets them.
    leaving: AtomicBool,
}

impl std::fmt::Debug for UblkDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("UblkDevice").field(&self.node()).finish()
    }
}

impl UblkDevice {
    /// The path of the node.
    #[must_use]
    pub fn node(&self) -> String {
        node(self.info.id)
    }

    /// Queues of the device: the threads that have to serve it.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.info.queues
    }

    /// Whether this server has taken the node over from another one.
    #[must_use]
    pub fn is_recovered(&self) -> bool {
        self.recovers
    }

    /// Size of the node in bytes: that of the image, in whole blocks.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.parameters.size
    }

    /// A device of one queue without a driver.
    #[cfg(test)]
    pub(crate) fn simulated(character_device: OwnedFd, depth: u16, max_io_bytes: u32) -> Self {
        let info = DeviceInfo {
            queues: 1,
            depth,
            state: DeviceState::Live,
            max_io_bytes,
            id: 0,
            pid: 0,
            features: 0,
            server_data: 0,
        };
        let parameters =
            Parameters { size: 0, block: 512, read_only: false, discards: true, max_io_bytes };
        Self {
            info,
            parameters,
            recovers: false,
            character_device: Mutex::new(Some(character_device)),
            live_queues: AtomicU32::new(0),
            has_node: AtomicBool::new(true),
            leaving: AtomicBool::new(false),
        }
    }

    /// The queues take no more requests.
    #[cfg(test)]
    pub(crate) fn leave_for_test(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    fn by_path(&self) -> bool {
        self.info.features & F_UNPRIVILEGED_DEV != 0
    }

    /// A descriptor of the character device for a thread that is ready to fetch requests. The first
    /// call takes a device over that another server had.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`; `ENODEV` if the device was deleted or cannot be taken over, for which the
    /// reason is logged.
    pub(crate) fn descriptor(&self) -> Result<OwnedFd, i32> {
        let mut device = self.character_device.lock().unwrap_or_else(PoisonError::into_inner);
        if device.is_none() && self.recovers {
            let opened =
                begin_recovery(&self.info).and_then(|()| open_character_device(self.info.id));
            let opened = opened.inspect_err(|error| tracing::error!("{error}"));
            *device = Some(opened.map_err(|_| libc::ENODEV)?);
        }
        let device = device.as_ref().ok_or(libc::ENODEV)?;
        let clone = device.as_fd().try_clone_to_owned();
        clone.map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))
    }

    /// Says why the queues of a device that is taken over cannot be mapped.
    pub(crate) fn note_unmappable(&self) {
        let (node, id) = (self.node(), self.info.id);
        if self.recovers {
            tracing::error!(
                "{node} cannot be taken over: a server was killed while it did that ('nowait ublk stop \
                 {id} --force' removes it)"
            );
        }
    }

    /// A queue gets requests from now on.
    pub(crate) fn queue_begins(&self) {
        self.live_queues.fetch_add(1, Ordering::AcqRel);
    }

    /// A queue gets none any more. Returns whether it was the last one, of a device that is neither
    /// stopped by this server nor left: another program has stopped it.
    pub(crate) fn queue_ends(&self) -> bool {
        let last = self.live_queues.fetch_sub(1, Ordering::AcqRel) == 1;
        last && !self.is_leaving() && self.has_node.swap(false, Ordering::AcqRel)
    }

    /// Whether the queues take no more requests.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Ends the serving of the device; `wake` wakes its threads, which must serve meanwhile. Waits at
    /// most `timeout` for the users of the node to leave. If they have, the node is removed; if not,
    /// it is left to the next server, where the driver allows that. To be called on a thread that
    /// does not serve.
    pub(crate) fn stop(&self, timeout: Duration, wake: impl Fn()) {
        let deadline = Instant::now() + timeout;
        let mut said = String::new();
        loop {
            if !self.has_node.load(Ordering::Acquire)
                || self.live_queues.load(Ordering::Acquire) == 0
            {
                return;
            }
            let users = node_users::of(self.info.id);
            if users.is_empty() {
                return self.remove();
            }
            let users = node_users::in_words(&users);
            if Instant::now() >= deadline {
                return self.leave(&users, wake);
            }
            if users != said {
                let seconds = timeout.as_secs();
                tracing::warn!(
                    "{} is in use: {users}; waiting for at most {seconds} s",
                    self.node()
                );
                said = users;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn remove(&self) {
        self.has_node.store(false, Ordering::Release);
        match stop_device(&self.info) {
            Ok(()) => tracing::info!("{} is removed", self.node()),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Leaves the node to the next server, or removes it where the driver cannot keep it.
    fn leave(&self, users: &str, wake: impl Fn()) {
        let (node, id) = (self.node(), self.info.id);
        if self.info.features & F_USER_RECOVERY == 0 {
            tracing::warn!("{node} is removed from under its users: {users}");
            return self.remove();
        }
        tracing::warn!(
            "{node} is left waiting for the next 'nowait serve --ublk={id}', it is in use: {users} \
             ('nowait ublk stop {id} --force' removes it)"
        );
        self.leaving.store(true, Ordering::Release);
        wake();
    }
}

/// The path of the node of device `id`.
pub(crate) fn node(id: u32) -> String {
    format!("/dev/ublkb{id}")
}

/// Takes the node of a device away. Its server must serve meanwhile, as the kernel writes what it
/// has cached.
pub(crate) fn stop_device(info: &DeviceInfo) -> Result<(), UblkError> {
    let (id, by_path) = (info.id, info.features & F_UNPRIVILEGED_DEV != 0);
    let stopped = within(STOP_TIMEOUT, move |control| {
        control.command(ControlOp::STOP_DEV, id, 0, by_path, &mut [])
    })?;
    match stopped {
        Some(Ok(_)) => Ok(()),
        Some(Err(errno)) => Err(UblkError::os(format!("{}: cannot be stopped", node(id)), errno)),
        None => {
            let seconds = STOP_TIMEOUT.as_secs();
            Err(UblkError::new(format!("{}: not stopped within {seconds} s", node(id))))
        }
    }
}

/// Deletes a device that has no node.
pub(crate) fn delete_device(info: &DeviceInfo) -> Result<(), UblkError> {
    let (id, by_path) = (info.id, info.features & F_UNPRIVILEGED_DEV != 0);
    let deleted = within(STOP_TIMEOUT, move |control| {
        control.command(ControlOp::DEL_DEV, id, 0, by_path, &mut [])
    })?;
    match deleted {
        // Its server has deleted it.
        None | Some(Ok(_) | Err(libc::ENODEV)) => Ok(()),
        Some(Err(errno)) => Err(UblkError::os(format!("{}: cannot be deleted", node(id)), errno)),
    }
}

/// The device of number `id` if it waits for a server. One without a node, which a server has left
/// that ended too early, is deleted.
fn existing(control: &mut ControlRing, id: u32) -> Result<Option<DeviceInfo>, UblkError> {
    let deadline = Instant::now() + APPEAR_TIMEOUT;
    loop {
        let info = control.info(id).map_err(|errno| UblkError::os(node(id), errno))?;
        let Some(info) = info else { return Ok(None) };
        let expired = Instant::now() >= deadline;
        match info.state {
            DeviceState::Quiesced | DeviceState::FailIo => return Ok(Some(info)),
            DeviceState::Dead => match open_once(id) {
                Ok(opened) => {
                    drop(opened);
                    delete_device(&info)?;
                    return Ok(None);
                }
                Err(_) if expired => {
                    let what = "another server is making or removing it (take another number)";
                    return Err(UblkError::new(format!("{}: {what}", node(id))));
                }
                Err(_) => {}
            },
            // A server that was killed needs a moment to end.
            DeviceState::Live | DeviceState::Other(_) if expired => {
                let (node, pid) = (node(id), info.pid);
                return Err(UblkError::new(format!(
                    "{node}: process {pid} serves it (take another number)"
                )));
            }
            DeviceState::Live | DeviceState::Other(_) => {}
        }
        std::thread::sleep(RETRY);
    }
}

/// Adds a device.
fn added(
    control: &mut ControlRing,
    features: u64,
    options: UblkOptions,
) -> Result<DeviceInfo, UblkError> {
    let (depth, max_io_bytes) = sizes(options.queues);
    let wanted = F_CMD_IOCTL_ENCODE | F_USER_RECOVERY | F_USER_RECOVERY_REISSUE;
    let info = DeviceInfo {
        queues: options.queues,
        depth,
        state: DeviceState::Dead,
        max_io_bytes,
        id: options.id.unwrap_or(u32::MAX),
        pid: 0,
        features: features & wanted,
        server_data: options.image_id,
    };
    let mut answer = add(control, info);
    if answer == Err(libc::EPERM) && features & F_UNPRIVILEGED_DEV != 0 {
        // Recovery is for privileged devices.
        let features = features & F_CMD_IOCTL_ENCODE | F_UNPRIVILEGED_DEV;
        answer = add(control, DeviceInfo { features, ..info });
    }
    answer.map_err(|errno| match errno {
        libc::EPERM | libc::EACCES => {
            UblkError::new("this user may not add a ublk device (be root, CAP_SYS_ADMIN)")
        }
        errno => UblkError::os("a ublk device cannot be added", errno),
    })
}

fn add(control: &mut ControlRing, info: DeviceInfo) -> Result<DeviceInfo, i32> {
    let mut bytes = info.to_bytes();
    control.command(ControlOp::ADD_DEV, info.id, 0, false, &mut bytes)?;
    Ok(DeviceInfo::from_bytes(&bytes))
}

/// Tags of a queue and bytes of the longest request, so that the buffers stay within their bound.
fn sizes(queues: u16) -> (u16, u32) {
    let (mut depth, mut bytes) = (MAX_DEPTH, MAX_IO_BYTES);
    let all = |depth: u16, bytes: u32| u64::from(queues) * u64::from(depth) * u64::from(bytes);
    while all(depth, bytes) > MAX_BUFFER_BYTES && bytes > MIN_IO_BYTES {
        bytes /= 2;
    }
    while all(depth, bytes) > MAX_BUFFER_BYTES && depth > MIN_DEPTH {
        depth /= 2;
    }
    (depth, bytes)
}

/// Takes over a device whose server has ended.
fn recovered(
    control: &mut ControlRing,
    info: DeviceInfo,
    image: &Image,
    options: UblkOptions,
) -> Result<DeviceInfo, UblkError> {
    let (node, id) = (node(info.id), info.id);
    let by_path = info.features & F_UNPRIVILEGED_DEV != 0;
    let mut bytes = Parameters::of(image, info.max_io_bytes).to_bytes();
    let asked = control.command(ControlOp::GET_PARAMS, id, 0, by_path, &mut bytes);
    asked.map_err(|errno| UblkError::os(&node, errno))?;
    let is_same = Parameters::of(image, info.max_io_bytes).is_as_in(&bytes);
    if info.server_data != options.image_id || !is_same {
        return Err(UblkError::new(format!(
            "{node} waits for the server of another image ('nowait ublk stop {id}' removes it)"
        )));
    }
    Ok(info)
}

/// Makes the driver ready for another server of a device. From here until a queue has fetched, a
/// server must not be killed: the driver of Linux 6.12 then lets no other one take over.
fn begin_recovery(info: &DeviceInfo) -> Result<(), UblkError> {
    let (node, by_path) = (node(info.id), info.features & F_UNPRIVILEGED_DEV != 0);
    let mut control = ControlRing::open()?;
    let deadline = Instant::now() + APPEAR_TIMEOUT;
    loop {
        match control.command(ControlOp::START_USER_RECOVERY, info.id, 0, by_path, &mut []) {
            Ok(_) => return Ok(()),
            // The last server's descriptors are being closed.
            Err(libc::EBUSY) if Instant::now() < deadline => std::thread::sleep(RETRY),
            // A server was killed after this call, which may have left the device as it is to be.
            Err(libc::EINVAL) => return Ok(()),
            Err(errno) => {
                return Err(UblkError::os(format!("{node} cannot be taken over"), errno));
            }
        }
    }
}

/// Opens the character device, which udev may have to make first.
fn open_character_device(id: u32) -> Result<OwnedFd, UblkError> {
    let deadline = Instant::now() + APPEAR_TIMEOUT;
    loop {
        match open_once(id) {
            Ok(opened) => return Ok(opened),
            Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                return Err(UblkError::os(character_device(id), errno));
            }
        }
    }
}

fn open_once(id: u32) -> io::Result<OwnedFd> {
    OpenOptions::new().read(true).write(true).open(character_device(id)).map(OwnedFd::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffers_of_all_queues_stay_within_their_bound() {
        assert_eq!(sizes(1), (128, 512 << 10));
        for queues in [1, 2, 3, 4, 8, 16, 64] {
            let (depth, bytes) = sizes(queues);
            let all = u64::from(queues) * u64::from(depth) * u64::from(bytes);
            assert!(all <= MAX_BUFFER_BYTES, "{queues}");
        }
    }
}
