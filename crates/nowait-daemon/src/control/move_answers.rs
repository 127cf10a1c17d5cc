//! Moves and replications of disks as the control interface begins them.
//!
//! Invariant: what can be told to be impossible is refused before anything is copied.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use nowait_control::{ControlError, MoveInfo, ReplicationInfo, StartMove, StartReplication};
use nowait_copy::MirroredDisk;
use nowait_image::Image;
use nowait_image::bitmap_changes::NewBitmap;
use nowait_remote::Location;
use nowait_server::{ExportError, ExportId, Exports};

use crate::control::bitmap_answers::refused;
use crate::control::export_bitmaps::ExportBitmaps;
use crate::control::replica_bitmap;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::image_exchange::ImageExchange;
use crate::disks::open_disk::Common;
use crate::disks::served_disks::{ServedDisk, ServedDisks};
use crate::moves::Tasks;
use crate::moves::move_state::Job;
use crate::moves::move_thread::MoveThread;
use crate::moves::replica_thread::ReplicaThread;
use crate::moves::replication_state::Replica;
use crate::moves::target::{MoveTarget, MovedDisk};

/// How long an export may be paused for the exchange, in milliseconds.
/// Beyond it: 400.
const MAX_PAUSES_MS: RangeInclusive<u64> = 10..=60_000;
/// The pause without a wish of the user.
const DEFAULT_MAX_PAUSE_MS: u64 = 2_000;

/// How often a round of a replication begins, in seconds.
/// Beyond it: 400.
const EVERY_SECONDS: RangeInclusive<u64> = 1..=86_400;
/// The default, without a wish of the user.
const DEFAULT_EVERY_SECONDS: u64 = 60;

/// The parts of a server that a move needs.
pub(crate) struct MovingServer<'a> {
    pub(crate) exports: &'a Exports,
    pub(crate) disks: &'a ServedDisks,
    pub(crate) allowed: &'a AllowedPlaces,
    pub(crate) common: &'a Common,
    pub(crate) moves: &'a Tasks<Job>,
    pub(crate) replicas: &'a Tasks<Replica>,
}

impl MovingServer<'_> {
    /// Begins to move the disk of export `id`.
    ///
    /// # Errors
    /// Why it cannot begin: then nothing has changed.
    pub(crate) fn start(&self, id: ExportId, start: &StartMove) -> Result<MoveInfo, ControlError> {
        let Self { exports, disks, moves, .. } = *self;
        let max_pause_ms = start.max_pause_ms.unwrap_or(DEFAULT_MAX_PAUSE_MS);
        if !MAX_PAUSES_MS.contains(&max_pause_ms) {
            let why = "the longest pause is 10 to 60000 milliseconds";
            return Err(ControlError::Invalid(why.into()));
        }
        check_rate(start.rate_bytes)?;
        let max_pause = Duration::from_millis(max_pause_ms);
        moves.refuse_during(id)?;
        self.replicas.refuse_during(id)?;
        let (moved, source) = self.moved(id)?;
        let target = MoveTarget::open(start, &moved, self.allowed, self.common)?;
        let is_it = |other: &ServedDisk| other.disk.identity.is_same(&target.disk().identity);
        if disks.lock().iter().any(is_it) {
            return Err(ControlError::Conflict(format!("{}: it is served already", target.name)));
        }
        // An export that cannot be paused is found now, and not when all is copied. One that is busy may be paused later.
        match exports.pause_export(id, max_pause) {
            Ok(_) | Err(ExportError::DoesNotEnd) => {}
            Err(error) => return Err(error.into()),
        }
        let tracker = exports.track_changes(id).map_err(refused)?;
        let job = Arc::new(Job::new(target.name.clone(), moved.size));
        moves.add(id, &job)?;
        let thread = MoveThread {
            exports: exports.clone(),
            disks: disks.clone(),
            id,
            moves: moves.clone(),
            job: job.clone(),
            tracker,
            source,
            max_pause,
            rate: start.rate_bytes,
        };
        thread.start(target).map_err(|error| {
            moves.forget(id);
            ControlError::Failed(format!("there is no thread for it: {error}"))
        })?;
        Ok(job.info())
    }

    /// Begins to replicate the disk of export `id`.
    ///
    /// # Errors
    /// Why it cannot begin: then nothing has changed.
    pub(crate) fn replicate(
        &self,
        id: ExportId,
        start: &StartReplication,
    ) -> Result<ReplicationInfo, ControlError> {
        let thread = self.replica_thread(id, start)?;
        let image = thread.open().map_err(ControlError::Conflict)?;
        self.begin_replication(thread, Some(image))
    }

    /// Like [`MovingServer::replicate`], for a replication that has begun in this server, or in the one before it, and was
    /// ended: also while its target cannot be reached.
    ///
    /// # Errors
    /// Like [`MovingServer::replicate`].
    pub(crate) fn replicate_again(
        &self,
        id: ExportId,
        start: &StartReplication,
    ) -> Result<ReplicationInfo, ControlError> {
        self.begin_replication(self.replica_thread(id, start)?, None)
    }

    fn begin_replication(
        &self,
        thread: ReplicaThread,
        image: Option<Image>,
    ) -> Result<ReplicationInfo, ControlError> {
        let (id, replica) = (thread.id, thread.replica.clone());
        self.replicas.add(id, &replica)?;
        let bitmap = self.replica_bitmap(&thread).inspect_err(|_| self.replicas.forget(id))?;
        let thread = ReplicaThread { bitmap, ..thread };
        thread.start(image).map_err(|error| {
            self.replicas.forget(id);
            ControlError::Failed(format!("there is no thread for it: {error}"))
        })?;
        Ok(replica.info())
    }

    /// The stored bitmap of a replication that goes on after a restart.
    fn replica_bitmap(&self, thread: &ReplicaThread) -> Result<Option<String>, ControlError> {
        let Self { exports, disks, allowed, .. } = *self;
        let start = &thread.replica.start;
        if !start.resume {
            return Ok(None);
        }
        let bitmaps = ExportBitmaps(ImageExchange { exports, disks, id: thread.id });
        replica_bitmap::prepare(&bitmaps, allowed, thread.size, &start.target).map(Some)
    }

    fn replica_thread(
        &self,
        id: ExportId,
        start: &StartReplication,
    ) -> Result<ReplicaThread, ControlError> {
        let Self { exports, replicas, .. } = *self;
        let every = start.every_seconds.unwrap_or(DEFAULT_EVERY_SECONDS);
        if !EVERY_SECONDS.contains(&every) {
            let why = "a round begins every 1 to 86400 seconds";
            return Err(ControlError::Invalid(why.into()));
        }
        check_rate(start.rate_bytes)?;
        replicas.refuse_during(id)?;
        self.moves.refuse_during(id)?;
        let (moved, source) = self.moved(id)?;
        let target = match Location::parse(&start.target.clone().into()) {
            Ok(location @ Location::Nbd(_)) => location,
            Ok(_) => {
                let why = "a disk is replicated to an export of an NBD server (nbd://HOST/NAME)";
                return Err(ControlError::Invalid(why.into()));
            }
            Err(why) => return Err(ControlError::Invalid(why)),
        };
        self.allowed.image(&start.target)?;
        let image = &moved.named.image;
        let beside = (!moved.named.is_remote()).then(|| image.parent()).flatten();
        let scratch = self.allowed.directory_for_scratch(beside)?;
        let every = Duration::from_secs(every);
        Ok(ReplicaThread {
            exports: exports.clone(),
            id,
            replicas: replicas.clone(),
            replica: Arc::new(Replica::new(start, every)),
            source: source.name,
            size: moved.size,
            target,
            bitmap: None,
            remote: self.common.remote.clone(),
            backup: replica_name(&moved.named.name),
            scratch,
            every,
            rate: start.rate_bytes,
        })
    }

    /// The disk of export `id`.
    fn moved(&self, id: ExportId) -> Result<(MovedDisk, MirroredDisk), ControlError> {
        let bitmaps = self.exports.bitmaps(id).unwrap_or_default();
        let stored = bitmaps.iter().filter(|bitmap| bitmap.persistent);
        let bitmaps = stored.map(|bitmap| NewBitmap::from(&bitmap.spec)).collect();
        let disks = self.disks.lock();
        let served = disks.iter().find(|served| served.id == id).ok_or(ExportError::NotFound)?;
        let disk = &served.disk;
        if !disk.options.writable {
            return Err(ControlError::Conflict(
                "it is served read-only, so it does not change: copy it (nowait copy), and serve the copy".into(),
            ));
        }
        let (size, device) = (disk.image.size(), disk.image.device());
        let name = disk.named.full_name().to_string_lossy().into_owned();
        let moved = MovedDisk {
            named: disk.named.clone(),
            options: disk.options.clone(),
            description: disk.description.clone(),
            size,
            bitmaps,
        };
        Ok((moved, MirroredDisk { name, device }))
    }
}

fn check_rate(bytes: Option<u64>) -> Result<(), ControlError> {
    match bytes {
        Some(0) => Err(ControlError::Invalid("a rate is at least 1 byte a second".into())),
        _ => Ok(()),
    }
}

/// The name of the backups by which the export called `export` is replicated.
fn replica_name(export: &str) -> String {
    if export.is_empty() { "replica".into() } else { format!("{export}.replica") }
}
