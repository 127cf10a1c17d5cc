//! The thread of a replication: again and again it brings an export of another server to the state of the disk at an
//! instant, by a backup of which it copies what has changed since the last instant.
//!
//! Invariant: what has changed and is not durable on the target is in the tracker, so that a later round copies it.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use nowait::ByteRange;
use nowait_copy::{Error, Mirror, MirroredDisk, Phase, Progress};
use nowait_image::{ChainOptions, Format, Image};
use nowait_remote::{Location, RemoteOptions};
use nowait_server::{
    BackupEnd, BackupSpec, ChangeTracker, ChangedRanges, ExportId, Exports, copy_changes,
    scratch_file,
};
use tracing::{info, warn};

use crate::error::{os_message, plain};
use crate::moves::replication_state::Replica;
use crate::moves::{Task, Tasks};

/// How long requests in flight may take to end at the begin of a round.
/// Beyond it: the round fails, and is tried again.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The waits after a round that has failed: the first one, which doubles, and the longest.
const BACK_OFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// How often a thread that waits looks whether it is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A replication, ready to begin.
pub(crate) struct ReplicaThread {
    pub(crate) exports: Exports,
    pub(crate) id: ExportId,
    pub(crate) replicas: Tasks<Replica>,
    pub(crate) replica: Arc<Replica>,
    /// The path or URI of the disk, for messages.
    pub(crate) source: String,
    pub(crate) size: u64,
    pub(crate) target: Location,
    /// The stored bitmap that has what the target lacks; without one that is in memory.
    pub(crate) bitmap: Option<String>,
    pub(crate) remote: RemoteOptions,
    /// The name of the backup of each round, and where its scratch is.
    pub(crate) backup: String,
    pub(crate) scratch: PathBuf,
    pub(crate) every: Duration,
    /// Bytes a second at most.
    pub(crate) rate: Option<u64>,
}

/// The state of a replication between two rounds.
#[derive(Default)]
pub(super) struct Rounds {
    /// Changes since the last instant; `None`: all is to be copied, or a stored bitmap has them.
    changes: Option<ChangeTracker>,
    /// Whether a round by a stored bitmap has been completed since the target was opened.
    pub(super) is_compared: bool,
    /// Whether the target was found to lack what a stored bitmap calls clean.
    pub(super) is_other_target: bool,
    /// The target, unless it has failed.
    image: Option<Image>,
    /// Rounds that have failed since the last one that has not.
    failures: u32,
}

impl ReplicaThread {
    /// Opens the target.
    ///
    /// # Errors
    /// One line that says why it cannot be the copy of the disk.
    pub(crate) fn open(&self) -> Result<Image, String> {
        let format = Some(Format::Raw);
        let options = ChainOptions { format, writable: true, ..ChainOptions::default() };
        let image = nowait_remote::open(&self.target, &options, &self.remote);
        let image = image.map_err(|error| error.to_string())?;
        match image.size() {
            size if size == self.size => Ok(image),
            size => Err(format!(
                "{}: it has {size} bytes, and the disk {}: a disk is replicated to one of its size",
                self.replica.target(),
                self.size
            )),
        }
    }

    /// Begins to replicate the disk to `image`, on a thread of its own; without one, to the target as soon as that is opened.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn start(self, image: Option<Image>) -> io::Result<()> {
        let rounds = Rounds { image, ..Rounds::default() };
        let name = "nowait-replica".to_owned();
        thread::Builder::new().name(name).spawn(move || self.run(rounds)).map(drop)
    }

    fn run(self, mut rounds: Rounds) {
        let source = plain(&self.source);
        while !self.replica.state.is_cancelled() {
            let begin = Instant::now();
            let wait = match self.round(&mut rounds) {
                Ok(instant) => {
                    if rounds.failures > 0 {
                        info!("{source}: it is replicated again");
                    }
                    rounds.failures = 0;
                    self.replica.on_round(instant);
                    self.every.saturating_sub(begin.elapsed())
                }
                Err(why) if !self.replica.state.is_cancelled() => {
                    if rounds.failures == 0 {
                        warn!("{source}: it is not replicated: {why}");
                    }
                    self.replica.on_failure(why);
                    rounds.image = None;
                    rounds.is_compared = false;
                    rounds.failures += 1;
                    let doubled = BACK_OFF[0] * 2_u32.saturating_pow(rounds.failures.min(8) - 1);
                    doubled.min(BACK_OFF[1])
                }
                Err(_) => break,
            };
            self.wait(&rounds, Instant::now() + wait);
        }
        drop(rounds);
        self.replica.end();
        self.replicas.notify();
    }

    fn wait(&self, rounds: &Rounds, until: Instant) {
        while Instant::now() < until && !self.replica.state.is_cancelled() {
            let changed = match &self.bitmap {
                Some(name) => self.dirty_bytes(name),
                None => rounds.changes.as_ref().map(ChangeTracker::changed_bytes),
            };
            self.replica.set_left(changed.unwrap_or(self.size));
            thread::sleep(LOOK_INTERVAL.min(until.saturating_duration_since(Instant::now())));
        }
    }

    /// Brings the target to an instant, which is returned.
    fn round(&self, rounds: &mut Rounds) -> Result<SystemTime, String> {
        let image = match rounds.image.take() {
            Some(image) => image,
            None => self.open()?,
        };
        if let Some(name) = &self.bitmap {
            let instant = self.resumed_round(rounds, &image, name)?;
            rounds.image = Some(image);
            rounds.is_compared = true;
            return Ok(instant);
        }
        let image = &*rounds.image.insert(image);
        let instant = SystemTime::now();
        if rounds.changes.as_ref().is_some_and(|it| it.changed_bytes() == 0) {
            return Ok(instant);
        }
        // Changes of after the instant are in both trackers, if they end before the first one does.
        let next = self.exports.track_changes(self.id).map_err(|error| error.to_string())?;
        let backup = self.begin_backup(None)?;
        self.replica.begin_copying();
        let changes = rounds.changes.as_ref().map(|it| (it, move |_| it.changed_bytes()));
        let copied = self.copy(image, backup, changes);
        let ended = self.exports.end_backups(&[self.id], BackupEnd::Commit, DRAIN_TIMEOUT);
        let ended = ended
            .or_else(|_| self.exports.end_backups(&[self.id], BackupEnd::Abort, DRAIN_TIMEOUT));
        if let Err(error) = ended {
            warn!("{}: a backup has not ended: {}", plain(&self.source), error.why);
        }
        match (copied, &rounds.changes) {
            (Ok(()), _) => rounds.changes = Some(next),
            (Err(error), Some(before)) => {
                move_changes(before, &next);
                rounds.changes = Some(next);
                return Err(error.to_string());
            }
            (Err(error), None) => return Err(error.to_string()),
        }
        Ok(instant)
    }

    /// Begins the backup of a round, which freezes `bitmap`.
    pub(super) fn begin_backup(&self, bitmap: Option<String>) -> Result<ExportId, String> {
        let scratch_bytes = BackupSpec::scratch_size(self.size);
        let scratch = scratch_file(&self.scratch, None, scratch_bytes).map_err(|error| {
            let why = os_message(&error.into());
            format!("{}: cannot make the scratch file: {why}", self.scratch.display())
        })?;
        let spec = BackupSpec {
            export: self.id,
            name: self.backup.clone(),
            bitmap,
            only_dirty: false,
            discards: false,
            scratch,
            scratch_bytes,
        };
        let begun = self.exports.begin_backups(vec![spec], DRAIN_TIMEOUT);
        let begun = begun.map_err(|error| error.why.to_string())?;
        begun.into_iter().next().ok_or_else(|| "there is no backup".into())
    }

    /// Copies what `changes` has, or all, as it was at the instant of `backup`. With `changes` comes how many bytes are left when so
    /// many are copied.
    pub(super) fn copy<C: ChangedRanges>(
        &self,
        image: &Image,
        backup: ExportId,
        changes: Option<(&C, impl Fn(u64) -> u64)>,
    ) -> Result<(), Error> {
        let gone = || Error::At { place: self.source.clone(), what: "its backup is gone".into() };
        let device = self.exports.device(backup).ok_or_else(gone)?;
        let source = MirroredDisk { name: self.source.clone(), device };
        let target = MirroredDisk { name: self.replica.target(), device: image.device() };
        let (mut counted, mut copied) = (0, 0);
        let (changes, left) = changes.unzip();
        let mut report = |progress: Progress| {
            if progress.phase == Phase::Copying {
                // A part begins at 0.
                counted = if progress.moved < counted { 0 } else { counted };
                self.replica.count(progress.moved - counted);
                copied += progress.moved - counted;
                counted = progress.moved;
                let rest = left.as_ref().map_or(progress.total - progress.done, |it| it(copied));
                self.replica.set_left(rest);
            }
        };
        let cancel = self.replica.state.cancel_flag();
        let mut mirror = Mirror::new(&source, &target, self.rate, cancel, &mut report)?;
        let Some(changes) = changes else {
            mirror.copy_all(false)?;
            return mirror.flush(None).map(drop);
        };
        let copied = copy_changes(changes, |ranges| {
            // Changes that are not durable when the connection is lost may be lost with it.
            mirror.copy_ranges(ranges, None).and_then(|_| mirror.flush(None)).map(|_| true)
        });
        copied.map(drop)
    }
}

/// Marks in `to` what is changed in `from`.
fn move_changes(from: &ChangeTracker, to: &ChangeTracker) {
    let mark = |ranges: &[ByteRange]| {
        to.put_back(ranges);
        Ok::<_, Infallible>(true)
    };
    let Ok(_) = copy_changes(from, mark);
}
