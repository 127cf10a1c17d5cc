//! A ublk device from its making to its end: added or recovered, started, served, stopped or left.
//!
//! Invariant: a node that a program may have open is never taken away unasked where the driver keeps
//! it for the next server. The device is deleted only when it has no node, or never had one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nowait_image::Image;

use crate::locking::lock;
use crate::rate_limit::ClientBuckets;
use crate::ublk::abandoned_queues::complete_queues;
use crate::ublk::control_commands::{quiesce, stop_device, stop_if_unused, update_size};
use crate::ublk::control_ring::{ControlRing, character_device, node, within};
use crate::ublk::device_parameters::{Parameters, can_register};
use crate::ublk::device_set_up::{
    APPEAR_TIMEOUT, RETRY, UblkOptions, added, existing, open_character_device, recovered,
};
use crate::ublk::node_users;
use crate::ublk::ublk_cmd::{
    CONTROL_DEVICE, ControlOp, DeviceInfo, DeviceState, F_AUTO_BUF_REG, F_QUIESCE,
    F_UNPRIVILEGED_DEV, F_UPDATE_SIZE, F_USER_RECOVERY, F_ZERO_COPY,
};
use crate::ublk::ublk_error::UblkError;

/// How long the driver may take to start a device, which includes reading its partition table.
/// Beyond it: the start fails.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the driver may take to delete a device that has no node any more.
/// Beyond it: the device is left.
const DELETE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the commands of the queues may take to end when the driver keeps requests back, before it is
/// told again.
/// Beyond it: the driver is told again.
const ABORT_TIMEOUT: Duration = Duration::from_millis(20);
/// How often it is told.
const QUIESCE_TRIES: u32 = 25;
/// How often the driver is asked whether it has noticed that the device was given back.
const RELEASE_INTERVAL: Duration = Duration::from_millis(1);
/// How often the users of a node are looked for, which reads the descriptors of all processes.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

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
        let (info, block, recovers) = match found {
            Some(info) => {
                let (info, block) = recovered(&mut control, info, image, &options)?;
                (info, Some(block), true)
            }
            None => {
                let copies = !options.zero_copy || !can_register(image);
                let features = if copies { features & !F_ZERO_COPY } else { features };
                (added(&mut control, features, &options)?, None, false)
            }
        };
        let parameters = Parameters::of(image, options.block_size, info.max_io_bytes);
        let block = block.unwrap_or(parameters.block);
        let size = Parameters::whole_blocks(parameters.size, block);
        let parameters = Parameters { size, block, ..parameters };
        let device = UblkDevice {
            info,
            parameters,
            size: AtomicU64::new(parameters.size),
            recovers: AtomicBool::new(recovers),
            character_device: Mutex::new(None),
            live_queues: AtomicU32::new(0),
            has_node: AtomicBool::new(recovers),
            handing_over: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            client: Arc::default(),
        };
        let node = Self(Arc::new(device));
        if parameters.size == 0 {
            return Err(UblkError::new("the image is too small to be a block device"));
        }
        if !recovers {
            let opened = open_character_device(info.id)?;
            *lock(&node.0.character_device) = Some(opened);
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
        self.0.start()
    }
}

impl Drop for UblkNode {
    fn drop(&mut self) {
        let opened = lock(&self.0.character_device).take();
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
    /// Those that it begins with.
    parameters: Parameters,
    /// Size of the node in bytes.
    size: AtomicU64,
    /// A server before this one had it, or this one before a pause.
    recovers: AtomicBool,
    /// The threads have descriptors of their own. One open file is all that the driver allows.
    character_device: Mutex<Option<OwnedFd>>,
    /// Queues that get requests.
    live_queues: AtomicU32,
    /// The node is there, or waits for a server.
    has_node: AtomicBool,
    /// The driver ends the commands of the queues, so that it can keep requests for the next server.
    handing_over: AtomicBool,
    /// The queues take no more requests: the next server gets them.
    leaving: AtomicBool,
    /// It has not come back after a pause, and waits for another server.
    lost: AtomicBool,
    /// The limits of its queues together.
    pub(crate) client: Arc<ClientBuckets>,
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

    /// The paths that its server opens while it serves and when it stops.
    #[must_use]
    pub fn paths(&self) -> [String; 3] {
        [CONTROL_DEVICE.to_owned(), character_device(self.info.id), self.node()]
    }

    /// Queues of the device: the threads that have to serve it.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.info.queues
    }

    /// Whether the node is there, or waits for a server.
    #[must_use]
    pub fn has_node(&self) -> bool {
        self.has_node.load(Ordering::Acquire)
    }

    /// Whether this server has taken the node over from another one.
    #[must_use]
    pub fn is_recovered(&self) -> bool {
        self.recovers.load(Ordering::Acquire)
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.info.id
    }

    /// Whether it is this server's: its node neither waits for another one nor was removed.
    pub(crate) fn is_served(&self) -> bool {
        !self.is_lost() && self.has_node()
    }

    /// Whether the node waits for another server.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Like [`UblkNode::start`].
    pub(crate) fn start(&self) -> Result<(), UblkError> {
        let (info, recovers) = (self.info, self.is_recovered());
        let parameters = Parameters { size: self.size(), ..self.parameters };
        let (id, by_path) = (info.id, self.by_path());
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
            Some(Err(errno)) => return Err(UblkError::os(self.node(), errno)),
            None => {
                let what = format!("{}: the driver does not start it", self.node());
                return Err(UblkError::new(what));
            }
        }
        self.has_node.store(true, Ordering::Release);
        if recovers && info.features & F_UPDATE_SIZE != 0 {
            // The image may have been made larger while there was no server.
            self.resize(self.size());
        }
        Ok(())
    }

    /// Whether the driver keeps requests back in a pause.
    pub(crate) fn keeps_requests(&self) -> bool {
        let needed = F_QUIESCE | F_USER_RECOVERY;
        self.info.features & needed == needed
    }

    /// Has the driver keep requests back. The queues answer what they have, get no more, and end;
    /// `wake` wakes their threads. If the driver cannot do that now, what they have not taken is done
    /// again after the pause.
    pub(crate) fn pause(&self, wake: impl Fn()) {
        self.keep_back();
        for _ in 0..QUIESCE_TRIES {
            if let Err(error) = quiesce(&self.info) {
                tracing::debug!("{error}");
                break;
            }
            let deadline = Instant::now() + ABORT_TIMEOUT;
            while self.live_queues.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
                std::thread::sleep(RELEASE_INTERVAL);
            }
            // A tag that was answered while the driver ended the other commands has one again: the next
            // call ends that.
            if self.live_queues.load(Ordering::Acquire) == 0 {
                return;
            }
        }
        self.leaving.store(true, Ordering::Release);
        wake();
    }

    /// The driver ends the commands of the queues.
    pub(crate) fn keep_back(&self) {
        self.handing_over.store(true, Ordering::Release);
    }

    /// Gives the device back to the driver, when no queue is left: this server or another one can take
    /// it over. Waits until `deadline` for the driver; returns whether it is ready for that.
    pub(crate) fn give_to_driver(&self, deadline: Instant) -> bool {
        drop(lock(&self.character_device).take());
        let id = self.info.id;
        loop {
            let info = ControlRing::open().ok().and_then(|mut control| control.info(id).ok()?);
            match info.map(|info| info.state) {
                Some(DeviceState::Quiesced | DeviceState::FailIo) => return true,
                Some(DeviceState::Live | DeviceState::Other(_)) if Instant::now() < deadline => {
                    // Commands that a queue has left in a ring hold the device until they end.
                    let _ = quiesce(&self.info);
                    std::thread::sleep(RELEASE_INTERVAL);
                }
                _ => return false,
            }
        }
    }

    /// New threads are about to serve it after a pause, and then [`UblkDevice::start`] is called.
    pub(crate) fn begin_again(&self) {
        self.recovers.store(true, Ordering::Release);
        self.leaving.store(false, Ordering::Release);
        self.handing_over.store(false, Ordering::Release);
    }

    /// It cannot be served again.
    pub(crate) fn lose(&self, why: &dyn std::fmt::Display) {
        self.lost.store(true, Ordering::Release);
        let (node, id) = (self.node(), self.info.id);
        tracing::error!("{node} waits for the next 'nowait serve --ublk={id}': {why}");
    }

    /// Size of the node in bytes: that of the image, in whole blocks.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The image has `size` bytes now. The node gets as many whole blocks, and its users are told, if
    /// the driver can do that. To be called on a thread that does not serve.
    pub(crate) fn resize(&self, size: u64) {
        let size = Parameters::whole_blocks(size, self.parameters.block);
        self.size.store(size, Ordering::Release);
        if !self.has_node.load(Ordering::Acquire) {
            return;
        }
        match update_size(&self.info, size >> 9) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                "{} keeps its size: this kernel's ublk driver cannot change it",
                self.node()
            ),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// A device of one queue without a driver.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn simulated(
        character_device: OwnedFd,
        (depth, max_io_bytes): (u16, u32),
        features: u64,
    ) -> Self {
        let info = DeviceInfo {
            queues: 1,
            depth,
            state: DeviceState::Live,
            max_io_bytes,
            id: 0,
            pid: 0,
            features,
            server_data: 0,
        };
        let parameters =
            Parameters { size: 0, block: 512, read_only: false, discards: true, max_io_bytes };
        Self {
            info,
            parameters,
            size: AtomicU64::new(0),
            recovers: AtomicBool::new(false),
            character_device: Mutex::new(Some(character_device)),
            live_queues: AtomicU32::new(0),
            has_node: AtomicBool::new(true),
            handing_over: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            client: Arc::default(),
        }
    }

    /// The queues take no more requests.
    #[cfg(test)]
    pub(crate) fn leave_for_test(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// Whether the driver registers the data of requests instead of copying them.
    pub(crate) fn registers_data(&self) -> bool {
        self.info.features & F_AUTO_BUF_REG != 0
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
        let mut device = lock(&self.character_device);
        if device.is_none() && self.is_recovered() {
            let opened =
                begin_recovery(&self.info).and_then(|()| open_character_device(self.info.id));
            let opened = opened.inspect_err(|error| tracing::error!("{error}"));
            *device = Some(opened.map_err(|_| libc::ENODEV)?);
        }
        let device = device.as_ref().ok_or(libc::ENODEV)?;
        let clone = device.as_fd().try_clone_to_owned();
        clone.map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))
    }

    /// A queue gets requests from now on.
    pub(crate) fn queue_begins(&self) {
        self.live_queues.fetch_add(1, Ordering::AcqRel);
    }

    /// A queue gets none any more. Returns whether it was the last one, of a device that is neither
    /// stopped by this server nor left: another program has stopped it.
    pub(crate) fn queue_ends(&self) -> bool {
        let last = self.live_queues.fetch_sub(1, Ordering::AcqRel) == 1;
        let left = self.is_leaving() || self.handing_over.load(Ordering::Acquire);
        last && !left && self.has_node.swap(false, Ordering::AcqRel)
    }

    /// Whether the queues take no more requests.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Ends the serving of the device; `wake` wakes its threads, which must serve meanwhile. Waits at
    /// most `timeout` for the users of the node to leave. If they have, the node is removed; if not,
    /// it is left to the next server, where the driver allows that. To be called on a thread that
    /// does not serve.
    pub(crate) fn stop_serving(&self, timeout: Duration, wake: impl Fn()) {
        let deadline = Instant::now() + timeout;
        let mut said = String::new();
        loop {
            if !self.has_node.load(Ordering::Acquire)
                || self.live_queues.load(Ordering::Acquire) == 0
            {
                return;
            }
            let users = self.remove_if_unused();
            if users.is_empty() {
                return;
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

    /// Removes the node if nothing uses it; otherwise returns what does.
    fn remove_if_unused(&self) -> Vec<String> {
        // The queues may end before the driver has answered.
        self.has_node.store(false, Ordering::Release);
        match stop_if_unused(&self.info) {
            Ok(users) if users.is_empty() => {
                tracing::info!("{} is removed", self.node());
                users
            }
            Ok(users) => {
                // Another program may have stopped it meanwhile.
                let is_there = self.live_queues.load(Ordering::Acquire) > 0;
                self.has_node.store(is_there, Ordering::Release);
                users
            }
            Err(error) => {
                tracing::warn!("{error}");
                Vec::new()
            }
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
        self.keep_back();
        // Without this the requests that the threads do not take any more are done again by the next
        // server, after the driver has noticed the end of this one.
        match quiesce(&self.info) {
            Ok(true) => tracing::info!("{node}: the driver keeps its requests for the next server"),
            Ok(false) => {}
            Err(error) => tracing::debug!("{error}"),
        }
        self.leaving.store(true, Ordering::Release);
        wake();
    }
}

/// Makes the driver ready for another server of a device.
fn begin_recovery(info: &DeviceInfo) -> Result<(), UblkError> {
    let (node, by_path) = (node(info.id), info.features & F_UNPRIVILEGED_DEV != 0);
    complete_queues(info)?;
    let mut control = ControlRing::open()?;
    let deadline = Instant::now() + APPEAR_TIMEOUT;
    loop {
        match control.command(ControlOp::START_USER_RECOVERY, info.id, 0, by_path, &mut []) {
            Ok(_) => return Ok(()),
            // The last server's descriptors are being closed.
            Err(libc::EBUSY) if Instant::now() < deadline => std::thread::sleep(RETRY),
            // The driver is ready: the last server was killed after this call.
            Err(libc::EINVAL) => return Ok(()),
            Err(errno) => {
                return Err(UblkError::os(format!("{node} cannot be taken over"), errno));
            }
        }
    }
}
