//! Answers of the control interface of a running server: it acts with its exports and their images.
//!
//! Invariant: what a request names is opened only where the user has allowed it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nowait::internal::RegisteredMemory;
use nowait_control::{
    AddBitmap, AddExport, AddFrontend, BackupInfo, BitmapInfo, ConnectionInfo, ControlError,
    ControlledServer, ExportInfo, MergeBitmaps, MoveInfo, PatchBitmap, PatchExport,
    ReplicationInfo, ServerInfo, SnapshotReport, SnapshotRequest, StartBackup, StartMove,
    StartReplication, UpgradeReport, UpgradeRequest,
};
use nowait_image::{NamedStorages, formats};
use nowait_server::{
    AnyExport, BackupEnd, ExportError, ExportId, ExportStatus, Exports, Limits, NewDevice,
};
use tracing::warn;

use crate::config::export_spec::{NamedExport, parse_name};
use crate::control::backup_answers;
use crate::control::bitmap_answers::refused;
use crate::control::export_bitmaps::ExportBitmaps;
use crate::control::move_answers::MovingServer;
use crate::control::replica_bitmap;
use crate::devices;
use crate::disks::allowed_places::{AllowedPlaces, absolute};
use crate::disks::image_exchange::ImageExchange;
use crate::disks::open_disk::{Common, ImageIdentity, OpenedDisk};
use crate::disks::served_disks::{ServedDisk, ServedDisks, change_settings};
use crate::error::{CliError, plain};
use crate::moves::move_state::Job;
use crate::moves::replication_state::Replica;
use crate::moves::{CANCEL_TIMEOUT, Task, Tasks};
use crate::upgrade::messages::{BitmapMessage, ExportState};
use crate::upgrade::paused_disks::PausedDisks;
use crate::upgrade::sender::{self, Upgrades};

/// How long an export that is removed may take to end its requests.
/// Beyond it: the removal fails.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The most places where an export that is added can be reached beside the server's addresses.
/// Beyond it: 400.
const MAX_FRONTENDS: usize = 16;
/// The most backing images that a request for an export names.
/// Beyond it: 400.
const MAX_BACKINGS: usize = 16;

/// Options that the exports that are added later have in common.
pub(crate) struct Additions {
    pub(crate) common: Common,
    pub(crate) allowed: AllowedPlaces,
    pub(crate) max_connections: u32,
    pub(crate) places: Places,
}

/// Where an export of a name can be reached.
pub(crate) type Places = Box<dyn Fn(&NamedExport) -> Vec<String> + Send + Sync>;

/// Which process serves.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Serving {
    #[default]
    Here,
    /// Another one, since an upgrade.
    Elsewhere,
}

/// A running server, as its control interface sees it.
pub(crate) struct RunningServer {
    exports: Exports,
    disks: ServedDisks,
    moves: Tasks<Job>,
    replicas: Tasks<Replica>,
    additions: Additions,
    /// Held by each change, from its look at the exports to its end: no image is opened twice, and no change comes
    /// between the state that an upgrade passes on and the moment from which another process serves.
    changing: Mutex<Serving>,
    upgrades: Upgrades,
    since: Instant,
}

impl RunningServer {
    /// The server of `exports`, whose images are `disks`.
    pub(crate) fn new(
        exports: Exports,
        disks: ServedDisks,
        (moves, replicas): (Tasks<Job>, Tasks<Replica>),
        additions: Additions,
        upgrades: Upgrades,
    ) -> Self {
        let (changing, since) = (Mutex::default(), Instant::now());
        Self { exports, disks, moves, replicas, additions, changing, upgrades, since }
    }

    /// Waits for the change that is being made, if there is one: an upgrade takes 30 s at most, a removal 10.
    fn begin_change(&self) -> Result<MutexGuard<'_, Serving>, ControlError> {
        let serving = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        match *serving {
            Serving::Here => Ok(serving),
            Serving::Elsewhere => Err(ControlError::Unavailable(
                "another process has taken over in an upgrade: ask again".into(),
            )),
        }
    }

    /// The number of export `id`, whose image no other change holds.
    fn id_to_change(&self, id: u64) -> Result<ExportId, ControlError> {
        let id = self.id_of(id)?;
        self.moves.refuse_during(id)?;
        Ok(id)
    }

    fn moving_server(&self) -> MovingServer<'_> {
        let Self { exports, disks, moves, replicas, additions, .. } = self;
        let Additions { allowed, common, .. } = additions;
        MovingServer { exports, disks, allowed, common, moves, replicas }
    }

    fn image_exchange(&self, id: ExportId) -> ImageExchange<'_> {
        ImageExchange { exports: &self.exports, disks: &self.disks, id }
    }

    fn bitmaps_of(&self, id: ExportId) -> ExportBitmaps<'_> {
        ExportBitmaps(self.image_exchange(id))
    }

    fn id_of(&self, id: u64) -> Result<ExportId, ControlError> {
        self.exports.with_number(id).ok_or_else(no_such_export)
    }

    /// An export as of `status`, whose image is `served`, unless it was removed meanwhile.
    fn info_of(&self, status: ExportStatus, served: Option<&ServedDisk>) -> ExportInfo {
        let backup = status.backup.clone().map(backup_answers::info_of);
        let moving = self.moves.get(status.id).map(|job| job.info());
        let replication = self.replicas.get(status.id).map(|replica| replica.info());
        let mut info = ExportInfo { backup, moving, replication, ..ExportInfo::from(status) };
        if let Some(served) = served {
            let OpenedDisk { named, image, .. } = &served.disk;
            info.image = named.full_name().to_string_lossy().into_owned();
            info.format = image.format().name().to_owned();
            info.direct_io = image.is_direct();
            info.places.clone_from(&served.places);
        }
        info
    }

    /// The exports, for a program that takes over.
    fn states(&self) -> Vec<ExportState> {
        let state = |served: &ServedDisk| {
            let OpenedDisk { named, image, options, description, .. } = &served.disk;
            let bitmaps = self.exports.bitmap_specs(served.id);
            let changes = self.exports.changes_of(served.id);
            let changes = changes.map(|changes| PatchExport {
                limits: Some(changes.limits.into()),
                connection_limits: Some(changes.client_limits.into()),
                weight: Some(changes.weight).filter(|weight| *weight != Exports::DEFAULT_WEIGHT),
                read_only: Some(changes.read_only).filter(|read_only| *read_only),
                ..PatchExport::default()
            });
            ExportState {
                name: named.name.clone(),
                description: description.clone(),
                image: named.full_name().into(),
                format: options.format.map(|format| format.name().to_owned()),
                settled_raw: options.format.is_none() && image.format().is_raw(),
                read_only: !options.writable,
                backing_dirs: options.backing_dirs.iter().map(|dir| dir.clone().into()).collect(),
                backing: options.backing_storages.names().map(str::to_owned).collect(),
                changes: changes.unwrap_or_default(),
                bitmaps: bitmaps.into_iter().map(BitmapMessage::from).collect(),
                replication: self.replication_of(served.id),
            }
        };
        self.disks.lock().iter().map(state).collect()
    }

    /// Options with which the replication of export `id` was started, if it runs.
    fn replication_of(&self, id: ExportId) -> Option<StartReplication> {
        let replica = self.replicas.get(id).filter(|replica| replica.is_running());
        replica.map(|replica| replica.start.clone())
    }

    /// Begins the replications of `exports` again, which another program has handed over.
    pub(crate) fn restore_replications(&self, exports: &[ExportState]) {
        let ids: Vec<_> = self.disks.lock().iter().map(|served| served.id).collect();
        let all = ids.into_iter().zip(exports);
        let all = all.filter_map(|(id, export)| Some((id, export.replication.as_ref()?)));
        all.for_each(|(id, start)| self.replicate_again(id, start));
    }

    fn replicate_again(&self, id: ExportId, start: &StartReplication) {
        if let Err(error) = self.moving_server().replicate_again(id, start) {
            warn!("the replication to {} has ended: {error}", plain(&start.target));
        }
    }

    /// Numbers of the local block devices, each with the index of its export.
    fn nodes(&self) -> Vec<(usize, u32)> {
        let disks = self.disks.lock();
        let all = disks.iter().enumerate();
        all.filter_map(|(at, served)| Some((at, served.node()?.id()))).collect()
    }

    /// The storages that all exports may stand on, and those of `backing`, which are opened unless
    /// another export stands on them.
    fn storages_below(&self, backing: &[String]) -> Result<NamedStorages, ControlError> {
        let Additions { common, allowed, .. } = &self.additions;
        if backing.len() > MAX_BACKINGS {
            let why = format!("an export names at most {MAX_BACKINGS} backing images");
            return Err(ControlError::Invalid(why));
        }
        let mut storages = common.options.backing_storages.clone();
        for name in backing {
            if storages.get(name).is_some() {
                continue;
            }
            let location = allowed.backing(name)?;
            let of_another =
                |served: &ServedDisk| served.disk.options.backing_storages.get(name).cloned();
            let open = || nowait_remote::open_storage(&location, true, &common.remote);
            let shared = self.disks.lock().iter().find_map(of_another);
            let storage = shared.map_or_else(open, Ok).map_err(conflict)?;
            storages.add(name.clone(), storage);
        }
        Ok(storages)
    }

    /// Refuses what can be told to be impossible before anything is changed.
    fn check_change(&self, id: ExportId, change: &PatchExport) -> Result<(), ControlError> {
        let limits = [change.limits, change.connection_limits];
        if !limits.into_iter().flatten().all(|limits| Limits::from(limits).is_valid()) {
            return Err(ExportError::InvalidLimits.into());
        }
        if change.weight.is_some_and(|weight| !Exports::WEIGHTS.contains(&weight)) {
            return Err(ExportError::InvalidWeight.into());
        }
        let disks = self.disks.lock();
        let image = disks.iter().find(|served| served.id == id).map(|served| &served.disk.image);
        match (change.read_only, image) {
            (Some(false), Some(image)) if image.is_read_only() => Err(ExportError::ReadOnly.into()),
            _ => Ok(()),
        }
    }

    /// Makes the devices of `frontends`. Returns them and where they are.
    fn devices(
        &self,
        frontends: Vec<AddFrontend>,
    ) -> Result<(Vec<NewDevice>, Vec<String>), ControlError> {
        if frontends.len() > MAX_FRONTENDS {
            let why = format!("an export has at most {MAX_FRONTENDS} frontends");
            return Err(ControlError::Invalid(why));
        }
        let device = |frontend| devices::added(frontend, &self.additions.allowed);
        frontends.into_iter().map(device).collect()
    }
}

fn no_such_export() -> ControlError {
    ExportError::NotFound.into()
}

fn failed(error: impl ToString) -> ControlError {
    ControlError::Failed(error.to_string())
}

/// An image that cannot be added. The options that would allow files beside it are the server's; the
/// request has none.
fn refused_image(error: &CliError) -> ControlError {
    let of_server = |text: String, option: &str| {
        text.replace(
            &format!("(allow it with {option} "),
            &format!("(allow it with nowait serve {option} "),
        )
    };
    conflict(["--backing-dir", "--data-file"].into_iter().fold(error.to_string(), of_server))
}

fn conflict(error: impl ToString) -> ControlError {
    ControlError::Conflict(error.to_string())
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
            warnings: self.upgrades.warning().map(str::to_owned).into_iter().collect(),
            stores: nowait_remote::open_stores().into_iter().map(Into::into).collect(),
            block_memory: nowait_remote::block_memory(),
            nbd_servers: nowait_remote::open_links().into_iter().map(Into::into).collect(),
            // The interface knows who follows it.
            ..ServerInfo::default()
        }
    }

    fn exports(&self) -> Vec<ExportInfo> {
        let (status, disks) = (self.exports.status(), self.disks.lock());
        let served: BTreeMap<_, _> = disks.iter().map(|served| (served.id, served)).collect();
        let info = |status: ExportStatus| {
            let served = served.get(&status.id).copied();
            self.info_of(status, served)
        };
        status.into_iter().map(info).collect()
    }

    fn find(&self, name: &str) -> Option<u64> {
        self.exports.find(name).map(ExportId::number)
    }

    fn export(&self, id: u64) -> Result<ExportInfo, ControlError> {
        let status = self.exports.status_of(self.id_of(id)?).ok_or_else(no_such_export)?;
        let disks = self.disks.lock();
        let served = disks.iter().find(|served| served.id == status.id);
        Ok(self.info_of(status, served))
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        let names: BTreeMap<_, _> = self.exports.list().into_iter().collect();
        let now = SystemTime::now();
        let info = |status: nowait_server::ConnectionStatus| ConnectionInfo {
            id: status.id,
            frontend: status.frontend.name().to_owned(),
            peer: status.peer,
            export: status.export.and_then(|id| names.get(&id).cloned()),
            tls: status.tls,
            age_seconds: now.duration_since(status.since).unwrap_or_default().as_secs_f64(),
        };
        self.exports.connections().into_iter().map(info).collect()
    }

    fn add(&self, export: AddExport) -> Result<ExportInfo, ControlError> {
        let AddExport { name, path, backing, format, read_only, description, frontends } = export;
        let name = parse_name(&name).map_err(ControlError::Invalid)?;
        let image = self.additions.allowed.image(&path)?;
        let format = match format.as_deref() {
            None => None,
            Some(name) => match formats::by_name(name) {
                Some(format) => Some(format),
                None => {
                    let names = formats::names(false);
                    return Err(ControlError::Invalid(format!("the formats are {names}")));
                }
            },
        };
        let _changing = self.begin_change()?;
        let identity = ImageIdentity::of(&image);
        let is_it = |other: &ServedDisk| other.disk.identity.is_same(&identity);
        let same = self.disks.lock().iter().any(is_it);
        if same && !read_only {
            return Err(conflict(format!("{}: it is served already", image.display())));
        }
        let named = NamedExport { name, image };
        let Additions { common, allowed, .. } = &self.additions;
        let mut options = common.options.clone();
        (options.format, options.writable) = (format, !read_only);
        options.no_links = !named.is_remote();
        options.backing_dirs.extend(allowed.directories.iter().cloned());
        options.backing_storages = self.storages_below(&backing)?;
        let mut places = (self.additions.places)(&named);
        let disk = OpenedDisk::open_anywhere(named, options, description, common)
            .map_err(|error| refused_image(&error))?;
        let (devices, others) = self.devices(frontends)?;
        places.extend(others);
        let export = disk.export_with_stored_bitmaps();
        let id = self.exports.add(devices.into_iter().fold(export, AnyExport::with_device))?;
        self.disks.lock().push(ServedDisk { id, disk, places, local: None });
        self.export(id.number())
    }

    fn remove(&self, id: u64, hard: bool) -> Result<(), ControlError> {
        let _changing = self.begin_change()?;
        let id = self.id_to_change(id)?;
        self.replicas.refuse_during(id)?;
        match hard {
            true => self.exports.remove_by_force(id, REMOVE_TIMEOUT),
            false => self.exports.remove_unused(id, REMOVE_TIMEOUT),
        }?;
        self.moves.forget(id);
        self.replicas.forget(id);
        let served = {
            let mut disks = self.disks.lock();
            let at = disks.iter().position(|served| served.id == id);
            at.map(|at| disks.remove(at))
        };
        served.map_or(Ok(()), |served| served.disk.close(true)).map_err(failed)
    }

    fn change(&self, id: u64, change: PatchExport) -> Result<ExportInfo, ControlError> {
        let _changing = self.begin_change()?;
        let id = self.id_of(id)?;
        self.check_change(id, &change)?;
        if let Some(size) = change.size_bytes {
            self.moves.refuse_during(id)?;
            self.replicas.refuse_during(id)?;
            self.exports.cover_with_bitmaps(id, size).map_err(refused)?;
            self.image_exchange(id).resize(size, change.shrink, &self.additions.allowed)?;
        }
        change_settings(&self.exports, id, &change)?;
        self.export(id.number())
    }

    fn flush(&self, id: u64) -> Result<(), ControlError> {
        // Without the lock, because a flush waits for the storage as long as that takes. One that ran beside an
        // upgrade may have found nothing to flush.
        drop(self.begin_change()?);
        let id = self.id_of(id)?;
        let flushed = self.exports.flush(id);
        drop(self.begin_change()?);
        Ok(flushed?)
    }

    fn snapshot(&self, id: u64, request: SnapshotRequest) -> Result<SnapshotReport, ControlError> {
        let _changing = self.begin_change()?;
        let id = self.id_to_change(id)?;
        let overlay = self.additions.allowed.new_image(&request.overlay)?;
        self.image_exchange(id).snapshot(&overlay)
    }

    fn upgrade(&self, upgrade: UpgradeRequest) -> Result<UpgradeReport, ControlError> {
        let binary = upgrade.binary.as_deref().map(|path| absolute(Path::new(path))).transpose()?;
        let mut serving = self.begin_change()?;
        self.moves.refuse_during_any()?;
        let replicas = self.replicas.running();
        let pause = || {
            if !self.replicas.end_all(CANCEL_TIMEOUT) {
                let why = "a replication waits for its storage, and ends when that answers: upgrade then, and begin it again";
                return Err(ControlError::Conflict(why.into()));
            }
            PausedDisks::new(&self.exports, self.disks.lock())
        };
        let sent = sender::send(&self.upgrades, binary, self.states(), &self.nodes(), pause);
        let report = sent.inspect_err(|_| {
            let ended = replicas.iter().filter(|(_, replica)| !replica.is_running());
            ended.for_each(|(id, replica)| self.replicate_again(*id, &replica.start));
        })?;
        *serving = Serving::Elsewhere;
        Ok(report)
    }

    fn bitmaps(&self, id: u64) -> Result<Vec<BitmapInfo>, ControlError> {
        self.bitmaps_of(self.id_of(id)?).list()
    }

    fn add_bitmap(&self, id: u64, bitmap: AddBitmap) -> Result<BitmapInfo, ControlError> {
        let _changing = self.begin_change()?;
        replica_bitmap::refuse(&bitmap.name)?;
        self.bitmaps_of(self.id_to_change(id)?).add(bitmap, &self.additions.allowed)
    }

    fn remove_bitmap(&self, id: u64, name: &str) -> Result<(), ControlError> {
        let _changing = self.begin_change()?;
        let id = self.id_to_change(id)?;
        if replica_bitmap::refuse(name).is_err() {
            self.replicas.refuse_during(id)?;
        }
        self.bitmaps_of(id).remove(name)
    }

    fn clear_bitmap(&self, id: u64, name: &str) -> Result<(), ControlError> {
        let _changing = self.begin_change()?;
        replica_bitmap::refuse(name)?;
        self.bitmaps_of(self.id_to_change(id)?).clear(name)
    }

    fn change_bitmap(
        &self,
        id: u64,
        name: &str,
        change: PatchBitmap,
    ) -> Result<BitmapInfo, ControlError> {
        let _changing = self.begin_change()?;
        replica_bitmap::refuse(name)?;
        let (id, exports) = (self.id_to_change(id)?, &self.exports);
        self.bitmaps_of(id).change(name, || match change.enabled {
            Some(enabled) => exports.enable_bitmap(id, name, enabled),
            None => Ok(()),
        })
    }

    fn merge_bitmaps(
        &self,
        id: u64,
        name: &str,
        merge: MergeBitmaps,
    ) -> Result<BitmapInfo, ControlError> {
        let _changing = self.begin_change()?;
        let (id, exports) = (self.id_to_change(id)?, &self.exports);
        self.bitmaps_of(id).change(name, || exports.merge_bitmaps(id, name, &merge.sources))
    }

    fn start_backup(
        &self,
        ids: &[u64],
        backup: StartBackup,
    ) -> Result<Vec<BackupInfo>, ControlError> {
        let _changing = self.begin_change()?;
        backup.bitmap.as_deref().map_or(Ok(()), replica_bitmap::refuse)?;
        let ids = ids.iter().map(|id| self.id_to_change(*id)).collect::<Result<Vec<_>, _>>()?;
        let Self { exports, disks, additions, .. } = self;
        backup_answers::start(exports, disks, &additions.allowed, &ids, backup)
    }

    fn end_backup(&self, ids: &[u64], end: BackupEnd) -> Result<(), ControlError> {
        let _changing = self.begin_change()?;
        let ids = ids.iter().map(|id| self.id_of(*id)).collect::<Result<Vec<_>, _>>()?;
        backup_answers::end(&self.exports, &ids, end)
    }

    fn start_move(&self, id: u64, start: StartMove) -> Result<MoveInfo, ControlError> {
        let _changing = self.begin_change()?;
        self.moving_server().start(self.id_of(id)?, &start)
    }

    fn disk_move(&self, id: u64) -> Result<MoveInfo, ControlError> {
        let none = || ControlError::NotFound("it was not moved".into());
        self.moves.get(self.id_of(id)?).map(|job| job.info()).ok_or_else(none)
    }

    fn cancel_move(&self, id: u64) -> Result<MoveInfo, ControlError> {
        Ok(self.moves.cancel(self.id_of(id)?)?.info())
    }

    fn start_replication(
        &self,
        id: u64,
        start: StartReplication,
    ) -> Result<ReplicationInfo, ControlError> {
        let _changing = self.begin_change()?;
        self.moving_server().replicate(self.id_of(id)?, &start)
    }

    fn replication(&self, id: u64) -> Result<ReplicationInfo, ControlError> {
        let none = || ControlError::NotFound("it was not replicated".into());
        self.replicas.get(self.id_of(id)?).map(|replica| replica.info()).ok_or_else(none)
    }

    fn stop_replication(&self, id: u64) -> Result<ReplicationInfo, ControlError> {
        Ok(self.replicas.cancel(self.id_of(id)?)?.info())
    }

    fn disconnect(&self, id: u64) -> Result<(), ControlError> {
        let _changing = self.begin_change()?;
        match self.exports.disconnect(id) {
            true => Ok(()),
            false => Err(ControlError::NotFound("there is no such connection".into())),
        }
    }
}
