//! What the control interface of a running server does with its exports and their images.
//!
//! Invariant: what a request names is opened only in the directories that the user has allowed.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nowait::RegisteredMemory;
use nowait_control::{
    AddExport, AddFrontend, BucketInfo, ConnectionInfo, ControlError, ControlledServer, ExportInfo,
    FrontendInfo, PatchExport, ServerInfo, SnapshotReport, SnapshotRequest, StoreInfo,
    UpgradeReport, UpgradeRequest,
};
use nowait_image::{ChainOptions, Format};
use nowait_remote::StoreCounts;
use nowait_server::{AnyExport, ExportId, ExportStatus, Exports, Limits, Listener};
use rustix::io::Errno;

use crate::export_spec::{NamedExport, parse_name};
use crate::image_exchange::ImageExchange;
use crate::listen_address;
use crate::open_disk::{OpenedDisk, is_same_file};
use crate::served_disks::{ServedDisk, ServedDisks};
use crate::upgrade::hand_over::{Upgrades, hand_over};
use crate::upgrade::messages::ExportState;
use crate::upgrade::parked_disks::ParkedDisks;

/// How long an export that is removed may take to end its requests.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The most places where an export that is added can be reached beside the server's addresses.
const MAX_FRONTENDS: usize = 16;

/// What the exports that are added later have in common.
pub(crate) struct Additions {
    pub(crate) options: ChainOptions,
    /// The directories of their images, and those of their sockets.
    pub(crate) allowed: Vec<PathBuf>,
    pub(crate) allowed_for_sockets: Vec<PathBuf>,
    pub(crate) workers: u32,
    pub(crate) max_connections: u32,
    pub(crate) places: Places,
}

/// Where an export of a name can be reached.
pub(crate) type Places = Box<dyn Fn(&NamedExport) -> Vec<String> + Send + Sync>;

/// A running server, as its control interface sees it.
pub(crate) struct RunningServer {
    exports: Exports,
    disks: ServedDisks,
    additions: Additions,
    /// Held while an image is being opened, so that none is opened twice, and while one is exchanged.
    changing: Mutex<()>,
    upgrades: Upgrades,
    since: Instant,
}

impl RunningServer {
    /// The server of `exports`, whose images are `disks`.
    pub(crate) fn new(
        exports: Exports,
        disks: ServedDisks,
        additions: Additions,
        upgrades: Upgrades,
    ) -> Self {
        let (changing, since) = (Mutex::default(), Instant::now());
        Self { exports, disks, additions, changing, upgrades, since }
    }

    fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn image_exchange(&self, id: ExportId) -> ImageExchange<'_> {
        let Self { exports, disks, additions, .. } = self;
        ImageExchange { exports, disks, workers: additions.workers, id }
    }

    fn id_of(&self, id: u64) -> Result<ExportId, ControlError> {
        let found = self.exports.list().into_iter().find(|(known, _)| known.number() == id);
        found.map(|(id, _)| id).ok_or_else(no_such_export)
    }

    fn info_of(&self, status: ExportStatus, disks: &[ServedDisk]) -> ExportInfo {
        let mut info = ExportInfo {
            id: status.id.number(),
            size_bytes: status.size,
            read_only: status.read_only,
            members: status.members as u64,
            in_flight: status.in_flight as u64,
            frontends: FrontendInfo::of_all(&status.totals),
            mechanisms: status
                .mechanisms
                .into_iter()
                .map(|(n, count)| (n.to_owned(), count))
                .collect(),
            limits: status.limits.into(),
            connection_limits: status.client_limits.into(),
            name: status.name,
            description: status.description,
            ..ExportInfo::default()
        };
        if let Some(served) = disks.iter().find(|served| served.id == status.id) {
            let OpenedDisk { named, image, .. } = &served.disk;
            let image_path = std::path::absolute(&named.image);
            let image_path = image_path.unwrap_or_else(|_| named.image.clone());
            info.image = image_path.to_string_lossy().into_owned();
            info.format = image.format().name().to_owned();
            info.direct_io = image.is_direct();
            info.places.clone_from(&served.places);
        }
        info
    }

    /// The exports, for a program that takes over.
    fn states(&self) -> Vec<ExportState> {
        let all = self.exports.status();
        let state = |served: &ServedDisk| {
            let OpenedDisk { named, options, description, .. } = &served.disk;
            let status = all.iter().find(|status| status.id == served.id);
            let as_given = || named.image.clone();
            let image = match named.is_remote() {
                true => as_given(),
                false => std::path::absolute(&named.image).unwrap_or_else(|_| as_given()),
            };
            let changes = status.map_or_else(PatchExport::default, |status| PatchExport {
                limits: Some(status.limits.into()),
                connection_limits: Some(status.client_limits.into()),
                read_only: Some(status.read_only).filter(|read_only| *read_only),
                ..PatchExport::default()
            });
            ExportState {
                name: named.name.clone(),
                description: description.clone(),
                image: image.into(),
                format: options.format.map(|format| format.name().to_owned()),
                read_only: !options.writable,
                backing_dirs: options.backing_dirs.iter().map(|dir| dir.clone().into()).collect(),
                changes,
            }
        };
        self.disks.lock().iter().map(state).collect()
    }

    fn export(&self, id: u64) -> Result<ExportInfo, ControlError> {
        self.exports().into_iter().find(|export| export.id == id).ok_or_else(no_such_export)
    }

    /// The image that a request names, without symbolic links.
    fn allowed(&self, path: &str) -> Result<PathBuf, ControlError> {
        let Additions { allowed, .. } = &self.additions;
        if allowed.is_empty() {
            absolute(path)?;
            return Err(no_directory());
        }
        inside(allowed, absolute(path)?)
    }

    /// Refuses what can be told to be impossible before anything is changed.
    fn check_change(&self, id: ExportId, change: &PatchExport) -> Result<(), ControlError> {
        let limits = [change.limits, change.connection_limits];
        if !limits.into_iter().flatten().all(|limits| Limits::from(limits).is_valid()) {
            let why = "a limit has a size of at least 1 and a refill_time of 1 to 86400000";
            return Err(ControlError::Invalid(why.into()));
        }
        let disks = self.disks.lock();
        let image = disks.iter().find(|served| served.id == id).map(|served| &served.disk.image);
        match (change.read_only, image) {
            (Some(false), Some(image)) if image.is_read_only() => {
                Err(conflict("its image was opened for reading only"))
            }
            _ => Ok(()),
        }
    }

    /// The path of a socket that a request names: its directory is without symbolic links.
    fn allowed_socket(&self, path: &str) -> Result<PathBuf, ControlError> {
        new_file(&self.additions.allowed_for_sockets, absolute(path)?)
    }

    /// Listens at the sockets of `frontends`. Returns them and where they are.
    fn listen(
        &self,
        frontends: Vec<AddFrontend>,
    ) -> Result<(Vec<Listener>, Vec<String>), ControlError> {
        if frontends.len() > MAX_FRONTENDS {
            let why = format!("an export has at most {MAX_FRONTENDS} frontends");
            return Err(ControlError::Invalid(why));
        }
        let listen = |AddFrontend::VhostUser(path): AddFrontend| {
            let path = self.allowed_socket(&path)?;
            let shown = path.display();
            listen_address::unix(path.clone()).map_err(ControlError::Invalid)?;
            let listener =
                Listener::unix(&path).map_err(|error| conflict(format!("{shown}: {error}")))?;
            Ok((listener, format!("vhost-user:{shown}")))
        };
        frontends.into_iter().map(listen).collect()
    }
}

fn absolute(path: &str) -> Result<&Path, ControlError> {
    let path = Path::new(path);
    match path.is_absolute() {
        true => Ok(path),
        false => Err(ControlError::Invalid("a path must be absolute".into())),
    }
}

/// What is at `path`, without symbolic links, if that is in one of the directories `allowed`.
fn inside(allowed: &[PathBuf], path: &Path) -> Result<PathBuf, ControlError> {
    let allowed = allowed.iter().filter_map(|dir| dir.canonicalize().ok());
    // A path elsewhere is refused in the same words whether there is something or not.
    match path.canonicalize() {
        Ok(real) if allowed.clone().any(|dir| real.starts_with(dir)) => Ok(real),
        Err(error) if allowed.clone().any(|dir| path.starts_with(dir)) => {
            Err(ControlError::NotFound(format!("{}: {error}", path.display())))
        }
        _ => Err(ControlError::Forbidden(format!(
            "{} is not in a directory of --allow-dir",
            path.display()
        ))),
    }
}

/// The path of a file that is to be made at `path`, in one of the directories `allowed` or below.
fn new_file(allowed: &[PathBuf], path: &Path) -> Result<PathBuf, ControlError> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ControlError::Invalid("the path names no file".into()));
    };
    Ok(inside(allowed, directory)?.join(name))
}

fn no_directory() -> ControlError {
    ControlError::Forbidden(
        "this server takes no more images (it was started without --allow-dir)".into(),
    )
}

fn no_such_export() -> ControlError {
    ControlError::NotFound("there is no such export".into())
}

fn failed(error: impl ToString) -> ControlError {
    ControlError::Failed(error.to_string())
}

fn conflict(error: impl ToString) -> ControlError {
    ControlError::Conflict(error.to_string())
}

/// The objects that images are read from.
fn stores() -> Vec<StoreInfo> {
    let info = |(url, counts): (String, StoreCounts)| StoreInfo {
        url,
        hits: counts.hits,
        misses: counts.misses,
        corrupt: counts.corrupt,
        stored: counts.stored,
        fetched_bytes: counts.fetched_bytes,
        requests: counts.requests(),
        retries: counts.retries,
        sum_seconds: counts.latency_sum.as_secs_f64(),
        buckets: counts
            .latencies()
            .map(|(bound, requests)| BucketInfo {
                below_seconds: bound.is_finite().then_some(bound),
                requests,
            })
            .collect(),
    };
    nowait_remote::open_stores().into_iter().map(info).collect()
}

impl ControlledServer for RunningServer {
    fn info(&self) -> ServerInfo {
        ServerInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.since.elapsed().as_secs_f64(),
            connections: self.exports.connections().len() as u64,
            max_connections: u64::from(self.additions.max_connections),
            registered_bytes: RegisteredMemory::of_this_process().bytes as u64,
            stores: stores(),
            // The interface knows who follows it.
            ..ServerInfo::default()
        }
    }

    fn exports(&self) -> Vec<ExportInfo> {
        let (status, disks) = (self.exports.status(), self.disks.lock());
        status.into_iter().map(|status| self.info_of(status, &disks)).collect()
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        let names = self.exports.list();
        let now = SystemTime::now();
        let info = |status: nowait_server::ConnectionStatus| ConnectionInfo {
            id: status.id,
            frontend: status.frontend.name().to_owned(),
            peer: status.peer,
            export: status.export.and_then(|id| {
                names.iter().find(|(known, _)| *known == id).map(|(_, name)| name.clone())
            }),
            tls: status.tls,
            age_seconds: now.duration_since(status.since).unwrap_or_default().as_secs_f64(),
        };
        self.exports.connections().into_iter().map(info).collect()
    }

    fn add(&self, export: AddExport) -> Result<ExportInfo, ControlError> {
        let AddExport { name, path, format, read_only, description, frontends } = export;
        let name = parse_name(&name).map_err(ControlError::Invalid)?;
        let image = self.allowed(&path)?;
        let format = match format.as_deref() {
            None => None,
            Some("raw") => Some(Format::Raw),
            Some("qcow2") => Some(Format::Qcow2),
            Some(_) => return Err(ControlError::Invalid("the format is raw or qcow2".into())),
        };
        let _changing = self.begin_change();
        let is_it = |other: &ServedDisk| is_same_file(&other.disk.named.image, &image);
        let same = self.disks.lock().iter().any(is_it);
        if same && !read_only {
            return Err(conflict(format!("{}: it is served already", image.display())));
        }
        let named = NamedExport { name, image };
        let mut options = self.additions.options.clone();
        (options.format, options.writable) = (format, !read_only);
        options.backing_dirs.extend(self.additions.allowed.iter().cloned());
        let mut places = (self.additions.places)(&named);
        let disk = OpenedDisk::open(named, options, description).map_err(conflict)?;
        let (listeners, sockets) = self.listen(frontends)?;
        places.extend(sockets);
        let export = disk.export(self.additions.workers);
        let id = self.exports.add(listeners.into_iter().fold(export, AnyExport::at_vhost_user));
        let id = id.map_err(|error| match Errno::from_raw_os_error(error.errno()) {
            Errno::EXIST => conflict("there is an export of that name"),
            _ => failed(error),
        })?;
        self.disks.lock().push(ServedDisk { id, disk, places });
        self.export(id.number())
    }

    fn remove(&self, id: u64, hard: bool) -> Result<(), ControlError> {
        let id = self.id_of(id)?;
        let removed = match hard {
            true => self.exports.remove_by_force(id, REMOVE_TIMEOUT),
            false => self.exports.remove_unused(id, REMOVE_TIMEOUT),
        };
        removed.map_err(|error| match Errno::from_raw_os_error(error.errno()) {
            Errno::USERS => {
                let all = self.exports.connections();
                let count = all.iter().filter(|client| client.export == Some(id)).count();
                conflict(format!("{count} clients use it (mode=hard disconnects them)"))
            }
            Errno::BUSY => conflict("the default export cannot be removed"),
            Errno::TIMEDOUT => conflict("clients are left; it ends with the last one"),
            Errno::NOENT => no_such_export(),
            _ => failed(error),
        })?;
        let served = {
            let mut disks = self.disks.lock();
            let at = disks.iter().position(|served| served.id == id);
            at.map(|at| disks.remove(at))
        };
        served.map_or(Ok(()), |served| served.disk.close(true)).map_err(failed)
    }

    fn change(&self, id: u64, change: PatchExport) -> Result<ExportInfo, ControlError> {
        let id = self.id_of(id)?;
        self.check_change(id, &change)?;
        if let Some(size) = change.size_bytes {
            let _changing = self.begin_change();
            self.image_exchange(id).resize(size, change.shrink)?;
        }
        if let Some(limits) = change.limits {
            self.exports.set_limits(id, limits.into()).map_err(failed)?;
        }
        if let Some(limits) = change.connection_limits {
            self.exports.set_client_limits(id, limits.into()).map_err(failed)?;
        }
        if let Some(read_only) = change.read_only {
            self.exports.set_read_only(id, read_only).map_err(failed)?;
        }
        self.export(id.number())
    }

    fn flush(&self, id: u64) -> Result<(), ControlError> {
        let id = self.id_of(id)?;
        self.exports.flush(id).map_err(failed)
    }

    fn snapshot(&self, id: u64, request: SnapshotRequest) -> Result<SnapshotReport, ControlError> {
        let id = self.id_of(id)?;
        if self.additions.allowed.is_empty() {
            return Err(no_directory());
        }
        let overlay = new_file(&self.additions.allowed, absolute(&request.overlay)?)?;
        let _changing = self.begin_change();
        self.image_exchange(id).snapshot(&overlay)
    }

    fn upgrade(&self, upgrade: UpgradeRequest) -> Result<UpgradeReport, ControlError> {
        let binary = upgrade.binary.as_deref().map(absolute).transpose()?;
        let _changing = self.begin_change();
        let park = || ParkedDisks::new(&self.exports, self.disks.lock());
        hand_over(&self.upgrades, binary, self.states(), park)
    }

    fn disconnect(&self, id: u64) -> Result<(), ControlError> {
        match self.exports.disconnect(id) {
            true => Ok(()),
            false => Err(ControlError::NotFound("there is no such connection".into())),
        }
    }
}
