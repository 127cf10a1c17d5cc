//! The new program's side of an upgrade: it takes over what the old one has.
//!
//! Invariant: nothing is served and nothing is changed on disk before the old program has said that
//! it touches nothing any more. If it ends before, this one ends, too.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{CliError, os_message};
use nowait_image::{ChainOptions, HandedOver, NamedStorages, formats};
use nowait_nbd::Address;
use nowait_remote::Location;
use nowait_server::{
    ConnectionState, ExportId, Exports, Listener, PausedDevice, SplitState, VmmState,
};
use tracing::warn;

use crate::config::export_spec::NamedExport;
use crate::disks::open_disk::{Common, OPENING_THREADS, OpenedDisk};
use crate::disks::parallel_map;
use crate::disks::served_disks::change_settings;
use crate::upgrade::channel::{Bounds, Channel, Message};
use crate::upgrade::messages::{
    Answer, Begin, DeviceMessage, Drained, ExportState, Go, ListenerState, PROTOCOL, VmmMessage,
};
use crate::upgrade::receiver_policy::ReceiverPolicy;
use crate::upgrade::{ENVIRONMENT, SUCCESSOR};

/// How long the old program may take for one message: it ends requests and flushes meanwhile.
/// Beyond it: the new program exits.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Tells an old program, if this process was started to take over from one, why it cannot.
pub fn refuse(why: &str) {
    if let Ok(Some(receiver)) = Receiver::of_this_process() {
        receiver.fail(&CliError::new(why));
    }
}

/// Everything that an old program hands over to this one.
pub(crate) struct Receiver {
    channel: Channel,
    /// The default export first.
    pub(crate) exports: Vec<ExportState>,
    listeners: Vec<(ListenerState, OwnedFd)>,
    control: Option<(ListenerState, OwnedFd)>,
    control_tcp: Vec<(ListenerState, OwnedFd)>,
    /// Numbers of the local block devices, each with the index of its export.
    pub(crate) nodes: Vec<(usize, u32)>,
}

/// The state of the old program at the moment from which it changes nothing.
pub(crate) struct SavedState {
    /// The files of each export's image.
    pub(crate) images: Vec<HandedOver>,
    pub(crate) clients: SavedClients,
}

/// The clients of the old program, each with the index of its export.
#[derive(Default)]
pub(crate) struct SavedClients {
    pub(crate) connections: Vec<(usize, ConnectionState)>,
    pub(crate) devices: Vec<(usize, PausedDevice)>,
    /// Files with the bits of the dirty bitmaps of each export, for which there is one.
    pub(crate) bitmaps: Vec<Vec<Option<OwnedFd>>>,
}

impl Receiver {
    /// The state that an old program hands over; `None` if this process was not started for that.
    ///
    /// # Errors
    /// The old program has ended, or does not speak as this one.
    pub(crate) fn of_this_process() -> Result<Option<Self>, CliError> {
        if std::env::var_os(ENVIRONMENT).is_none_or(|purpose| purpose != SUCCESSOR) {
            return Ok(None);
        }
        let channel = Channel::of_standard_input().map_err(|error| lost(&error))?;
        let Message { body, files, .. } =
            channel.receive::<Begin>(in_time(), Bounds::STATE).map_err(|error| lost(&error))?;
        let (nodes, is_understood) = (body.nodes(), body.is_understood());
        let Begin { protocol, exports, listeners, control, control_tcp, .. } = body;
        if !is_understood {
            return Err(CliError::new(format!(
                "the running program hands over by version {protocol}, this one takes over by {PROTOCOL} (restart \
                 it instead)"
            )));
        }
        let mut files = VecDeque::from(files);
        let mut with_file = |state| {
            let file = files.pop_front();
            file.map(|file| (state, file)).ok_or_else(|| CliError::new("a socket is missing"))
        };
        let listeners = listeners.into_iter().map(&mut with_file).collect::<Result<_, _>>()?;
        let control = control.map(&mut with_file).transpose()?;
        let control_tcp = control_tcp.into_iter().map(&mut with_file).collect::<Result<_, _>>()?;
        Ok(Some(Self { channel, exports, listeners, control, control_tcp, nodes }))
    }

    /// The sockets that listen, with their addresses, and the directories to be removed with them.
    ///
    /// # Errors
    /// One is not a socket that listens.
    pub(crate) fn listeners(&mut self) -> Result<Vec<ReceivedListener>, CliError> {
        std::mem::take(&mut self.listeners).into_iter().map(ReceivedListener::of).collect()
    }

    /// The control socket at the path that was given.
    ///
    /// # Errors
    /// It is not a socket that listens.
    pub(crate) fn control(&mut self) -> Result<Option<ReceivedListener>, CliError> {
        self.control.take().map(ReceivedListener::of).transpose()
    }

    /// The sockets of the control interface on TCP.
    ///
    /// # Errors
    /// One is not a socket that listens.
    pub(crate) fn control_tcp(&mut self) -> Result<Vec<ReceivedListener>, CliError> {
        std::mem::take(&mut self.control_tcp).into_iter().map(ReceivedListener::of).collect()
    }

    /// Tells that this program waits for the images, and waits until no request is in flight.
    ///
    /// # Errors
    /// The old program has ended, or has called it off; it tells of more than is `policy`.
    pub(crate) fn wait(&self, policy: &ReceiverPolicy<'_>) -> Result<SavedState, CliError> {
        let listeners = self.listeners.iter().map(|(state, _)| state);
        let control = self.control.as_ref().map(|(state, _)| state);
        policy.check(&self.exports, listeners, control, &self.nodes)?;
        self.agree()?;
        let message = self.channel.receive::<Drained>(in_time(), Bounds::STATE);
        let message = message.map_err(|error| lost(&error))?;
        let Message { body: drained, bytes, files: all } = message;
        let Drained { files, connections, devices, bitmaps } = drained;
        let mut sockets = devices.iter().filter_map(|it| it.listener.as_ref());
        sockets.try_for_each(|state| policy.check_device(state))?;
        let mut vmms = devices.iter().filter_map(|it| it.connects_to.as_ref());
        vmms.try_for_each(|path| policy.check_vmm(path))?;
        let mut all = all.into_iter();
        let images = files
            .iter()
            .map(|&count| HandedOver::new(all.by_ref().take(count).collect()))
            .collect();
        let mut bytes = bytes.into_iter();
        let mut take = |count| bytes.by_ref().take(count).collect::<Vec<u8>>();
        let connections = connections.into_iter().zip(all.by_ref()).map(|(it, socket)| {
            let (unparsed, unsent) = (take(it.unparsed), take(it.unsent));
            let (reply_mode, contexts, discard) = (it.reply_mode, it.contexts, it.discard);
            let bitmaps = it.bitmaps;
            let split = it.split.map(SplitState::from);
            let ended = it.ended;
            let state = ConnectionState {
                socket,
                reply_mode,
                contexts,
                bitmaps,
                discard,
                split,
                unparsed,
                unsent,
                ended,
            };
            (it.export, state)
        });
        let connections = connections.collect();
        let devices = devices.into_iter().map(|it| Ok((it.export, restored_device(it, &mut all)?)));
        let devices = devices.collect::<Result<_, CliError>>()?;
        let mut has_file = bitmaps.into_iter();
        let mut file = || has_file.next().unwrap_or_default().then(|| all.next()).flatten();
        let mut files_of = |export: &ExportState| export.bitmaps.iter().map(|_| file()).collect();
        let bitmaps = self.exports.iter().map(&mut files_of).collect();
        Ok(SavedState { images, clients: SavedClients { connections, devices, bitmaps } })
    }

    /// Tells that this program is ready, and waits for the word to serve.
    ///
    /// # Errors
    /// The old program has ended, or has called it off.
    fn ready(&self) -> Result<(), CliError> {
        self.agree()?;
        let go = self.channel.receive::<Go>(in_time(), Bounds::ANSWER);
        go.map_err(|error| lost(&error)).map(drop)
    }

    /// Opens the images, as `common` to all, as each was opened, and as is `policy`.
    ///
    /// # Errors
    /// One line that names the file and what is wrong with it.
    pub(crate) fn open(
        &self,
        images: Vec<HandedOver>,
        common: &Common,
        policy: &ReceiverPolicy<'_>,
    ) -> Result<Vec<OpenedDisk>, CliError> {
        let mut storages = common.options.backing_storages.clone();
        let mut to_open = Vec::new();
        for (state, handed_over) in self.exports.iter().zip(images) {
            let backing_storages = state.storages_below(common, &mut storages)?;
            let options = policy.options(state, state.options(&common.options)?);
            to_open.push((state, ChainOptions { handed_over, backing_storages, ..options }));
        }
        parallel_map::try_map(to_open, OPENING_THREADS, |(state, options)| {
            let (named, description) = (state.named(), state.description.clone());
            let opened = OpenedDisk::open_anywhere(named, options, description, common)?;
            policy.check_opened(state, &opened.image)?;
            Ok(opened)
        })
    }

    /// Tells that this program is ready and, at the old one's word, serves what it has left: the clients
    /// of `listeners`, `clients`, and the exports as they were changed.
    ///
    /// # Errors
    /// The old program has ended, or has called it off.
    pub(crate) fn restore(
        &self,
        server: &Exports,
        listeners: Vec<Listener>,
        clients: SavedClients,
    ) -> Result<(), CliError> {
        let ids: Vec<_> = server.list().into_iter().map(|(id, _)| id).collect();
        for (id, state) in ids.iter().zip(&self.exports) {
            if let Err(error) = change_settings(server, *id, &state.changes) {
                warn!("export {:?} is not as it was changed: {error}", state.name);
            }
        }
        for ((id, state), files) in ids.iter().zip(&self.exports).zip(clients.bitmaps) {
            restore_bitmaps(server, *id, state, files);
        }
        self.ready()?;
        for (export, device) in clients.devices {
            if let Some(Err(error)) = ids.get(export).map(|id| server.restore_device(*id, device)) {
                warn!("a disk of virtual machines is not served: {error}");
            }
        }
        for (export, connection) in clients.connections {
            if let Some(id) = ids.get(export) {
                server.restore(*id, connection);
            }
        }
        server.listen(listeners);
        Ok(())
    }

    /// Tells why this program cannot serve.
    pub(crate) fn fail(&self, why: &CliError) {
        // The old program may have ended.
        let _ = self.send(&Answer::No { why: why.to_string() });
    }

    fn agree(&self) -> Result<(), CliError> {
        self.send(&Answer::Yes { version: env!("CARGO_PKG_VERSION").to_owned() })
    }

    fn send(&self, body: &Answer) -> Result<(), CliError> {
        self.channel.send(body, &[], &[], in_time()).map_err(|error| lost(&error))
    }
}

/// Gives export `id` the dirty bitmaps of `state`, whose bits are in `files`. Of one that is not whole all is dirty.
fn restore_bitmaps(
    server: &Exports,
    id: ExportId,
    state: &ExportState,
    files: Vec<Option<OwnedFd>>,
) {
    for (bitmap, file) in state.bitmaps.iter().zip(files) {
        let mut file = file.map(File::from).filter(is_plain);
        let content = file.as_mut().map(|file| file as &mut dyn Read);
        if let Err(why) = server.restore_bitmap(id, &bitmap.clone().into(), content) {
            warn!("export {:?}, bitmap {:?}: {why}", state.name, bitmap.name);
        }
    }
}

/// Whether `file`, which another process has written, can be read from its begin on without a wait.
fn is_plain(file: &File) -> bool {
    let is_file = file.metadata().is_ok_and(|meta| meta.is_file());
    is_file && (&*file).rewind().is_ok()
}

/// The device of `message`, whose files are the next of `files`.
fn restored_device(
    message: DeviceMessage,
    files: &mut impl Iterator<Item = OwnedFd>,
) -> Result<PausedDevice, CliError> {
    let mut file = || files.next().ok_or_else(|| CliError::new("a socket is missing"));
    let DeviceMessage { listener, connects_to, vmm, .. } = message;
    let connects_to = connects_to.map(PathBuf::from);
    let listener = listener.map(|state| ReceivedListener::of((state, file()?))).transpose()?;
    let listener = listener.map(|handed| Arc::new(handed.listener));
    let state = |VmmMessage { setup, has_channel, files }: VmmMessage| {
        let socket = file()?;
        let channel = has_channel.then(&mut file).transpose()?;
        let files = (0..files).map(|_| file()).collect::<Result<_, _>>()?;
        Ok::<_, CliError>(VmmState { socket, channel, setup, files })
    };
    Ok(PausedDevice { listener, connects_to, vmm: vmm.map(state).transpose()? })
}

fn in_time() -> Instant {
    Instant::now() + TIMEOUT
}

fn lost(error: &io::Error) -> CliError {
    CliError::new(format!("the program that hands over to this one: {}", os_message(error)))
}

impl ExportState {
    /// Its name and its image.
    pub(crate) fn named(&self) -> NamedExport {
        NamedExport { name: self.name.clone(), image: PathBuf::from(&self.image) }
    }

    /// The storages that its image may stand on, out of those that are `opened` if they are there.
    ///
    /// # Errors
    /// One line that names a storage and what is wrong with it.
    fn storages_below(
        &self,
        common: &Common,
        opened: &mut NamedStorages,
    ) -> Result<NamedStorages, CliError> {
        let mut storages = common.options.backing_storages.clone();
        for name in &self.backing {
            if storages.get(name).is_some() {
                continue;
            }
            if opened.get(name).is_none() {
                let location = Location::parse(&name.into()).map_err(CliError::new)?;
                let storage = nowait_remote::open_storage(&location, true, &common.remote);
                opened.add(name.clone(), storage.map_err(|error| CliError::of_image(&error))?);
            }
            opened.get(name).into_iter().for_each(|it| storages.add(name.clone(), it.clone()));
        }
        Ok(storages)
    }

    /// How its image is opened, `common` to all exports of the server apart.
    ///
    /// # Errors
    /// The format is unknown to this program.
    pub(crate) fn options(&self, common: &ChainOptions) -> Result<ChainOptions, CliError> {
        let format = match self.format.as_deref() {
            None => None,
            Some(name) => match formats::by_name(name) {
                Some(format) => Some(format),
                None => return Err(CliError::new(format!("the format {name} is not known"))),
            },
        };
        let backing_dirs = self.backing_dirs.iter().map(PathBuf::from).collect();
        let (settled_raw, writable) = (self.settled_raw, !self.read_only);
        Ok(ChainOptions { format, settled_raw, writable, backing_dirs, ..common.clone() })
    }
}

/// A socket that another program has bound, and that is this one's now.
pub(crate) struct ReceivedListener {
    pub(crate) listener: Listener,
    pub(crate) address: Address,
    /// The directory that is removed with it.
    pub(crate) temporary: Option<PathBuf>,
}

impl ReceivedListener {
    fn of((state, socket): (ListenerState, OwnedFd)) -> Result<Self, CliError> {
        let ListenerState { path, host, port, is_own, temporary } = state;
        let listener = Listener::handed_over(socket, is_own).map_err(|error| lost(&error))?;
        let address = match path {
            Some(path) => Address::Unix(path.into()),
            None => Address::Tcp { host, port },
        };
        Ok(Self { listener, address, temporary: temporary.map(PathBuf::from) })
    }
}
