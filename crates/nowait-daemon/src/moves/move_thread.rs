//! The thread of a move: copies the disk, then what has changed meanwhile until that is little, and then has the export
//! exchange its image.
//!
//! Invariant: clients wait for at most the pause that the user allows, and for the flush, the name and the open tables that
//! the exchange needs beside it; a pause that does not suffice is given up, and the export goes on where it is.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait_control::ControlError;
use nowait_copy::{Error, Mirror, MirrorPart, MirroredDisk, Phase, Progress};
use nowait_server::{ChangeTracker, ExportId, Exports, copy_changes};
use tracing::{info, warn};

use crate::disks::image_exchange::ImageExchange;
use crate::disks::open_disk::OpenedDisk;
use crate::disks::served_disks::ServedDisks;
use crate::error::plain;
use crate::moves::move_state::{End, Job, Stage};
use crate::moves::target::MoveTarget;
use crate::moves::{Task, Tasks};

/// So few changed bytes are left for the pause.
const FEW_BYTES: u64 = 4 << 20;
/// After so many rounds that do not leave less to copy, the writers are called faster.
const ROUNDS_WITHOUT_PROGRESS: u32 = 5;
/// The first wait between two attempts to exchange the image, as a multiple of the pause.
const PAUSES_APART: u32 = 10;
/// The longest wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How long a round waits for changes when there is nothing to do.
const IDLE_WAIT: Duration = Duration::from_millis(50);

/// A move, ready to begin.
pub(crate) struct MoveThread {
    pub(crate) exports: Exports,
    pub(crate) disks: ServedDisks,
    pub(crate) id: ExportId,
    pub(crate) moves: Tasks<Job>,
    pub(crate) job: Arc<Job>,
    pub(crate) tracker: ChangeTracker,
    pub(crate) source: MirroredDisk,
    /// How long the export may be paused.
    pub(crate) max_pause: Duration,
    /// Bytes a second at most.
    pub(crate) rate: Option<u64>,
}

/// Why a move has ended too early.
enum Failure {
    Copy(Error),
    Refused(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Copy(error)
    }
}

/// Counts what is copied.
struct Counter<'a> {
    job: &'a Job,
    tracker: &'a ChangeTracker,
    /// Bytes of the parts before, of the present part so far, and of all of it.
    before: Cell<u64>,
    moved: Cell<u64>,
    part: Cell<u64>,
}

impl Counter<'_> {
    /// A part of `bytes` bytes begins.
    fn begin(&self, bytes: u64) {
        self.before.set(self.copied());
        self.moved.set(0);
        self.part.set(bytes);
    }

    fn copied(&self) -> u64 {
        self.before.get() + self.moved.get()
    }

    fn on_progress(&self, progress: Progress) {
        if progress.phase == Phase::Copying {
            self.moved.set(progress.moved);
        }
        let left = self.part.get().saturating_sub(self.moved.get());
        self.job.set_progress(self.copied(), left + self.tracker.changed_bytes());
    }
}

/// When the image is exchanged.
struct Pace {
    max_pause: Duration,
    /// Bytes a second that are copied.
    speed: f64,
    /// The fewest bytes that a round has left, and the rounds since then.
    fewest: u64,
    rounds_without_progress: u32,
    /// Pauses that did not suffice.
    late: u32,
    next_attempt: Instant,
}

impl Pace {
    /// Notes that `bytes` were copied since `begin`.
    fn on_copied(&mut self, bytes: u64, begin: Instant) {
        if bytes > 0 {
            self.speed = bytes as f64 / begin.elapsed().as_secs_f64().max(1e-6);
        }
    }

    /// Notes that a round has left `left` bytes.
    fn on_round(&mut self, left: u64) {
        let has_progress = left < self.fewest / 10 * 9;
        self.fewest = self.fewest.min(left);
        self.rounds_without_progress =
            if has_progress { 0 } else { self.rounds_without_progress + 1 };
    }

    /// Whether `left` bytes can be copied in a pause, and waiting does not make them fewer.
    fn is_ready(&self, left: u64) -> bool {
        let seconds = left as f64 / self.speed.max(1.0);
        let is_few = left <= FEW_BYTES || self.rounds_without_progress > 0;
        is_few
            && seconds <= self.max_pause.as_secs_f64() / 2.0
            && Instant::now() >= self.next_attempt
    }

    /// Notes that a pause did not suffice.
    fn on_late(&mut self) {
        self.late += 1;
        let wait = self.max_pause.saturating_mul(PAUSES_APART).saturating_mul(self.late);
        self.next_attempt = Instant::now() + wait.min(LONGEST_WAIT);
    }

    fn is_behind(&self) -> bool {
        self.rounds_without_progress >= ROUNDS_WITHOUT_PROGRESS || self.late > 0
    }
}

impl MoveThread {
    /// Begins to move the disk to `target`, on a thread of its own.
    ///
    /// # Errors
    /// There is no thread: nothing was moved.
    pub(crate) fn start(self, target: MoveTarget) -> io::Result<()> {
        let name = "nowait-move".to_owned();
        std::thread::Builder::new().name(name).spawn(move || self.run(target)).map(drop)
    }

    fn run(self, target: MoveTarget) {
        let (job, moves) = (self.job.clone(), self.moves.clone());
        let name = plain(&self.source.name);
        let end = self.ended(target);
        match &end {
            End::Completed(pause) => {
                let (to, pause) = (job.target(), pause.as_secs_f64() * 1e3);
                info!("{name} has moved to {to}, after a pause of {pause:.1} ms");
            }
            End::Failed(why) => warn!("{name} stays where it is: {why}"),
            End::Cancelled => info!("{name} stays where it is: its move was cancelled"),
        }
        job.end(&end);
        moves.notify();
    }

    /// Moves the disk, and closes what is not served then.
    fn ended(self, target: MoveTarget) -> End {
        let (in_place, place) = (!target.is_new(), target.name.clone());
        let mut has_written = false;
        let moved = self.move_to(target, &mut has_written);
        let job = self.job.clone();
        // The source is closed when nothing reads it any more.
        drop(self);
        let part = match in_place && has_written {
            true => format!("; {place} is written in part"),
            false => String::new(),
        };
        match moved {
            Ok((pause, before)) => {
                if let Err(error) = before.close(true) {
                    let note = format!("the image before was not closed properly: {error}");
                    warn!("{note}");
                    job.note(note);
                }
                End::Completed(pause)
            }
            Err(Failure::Copy(Error::Interrupted)) => {
                if in_place && has_written {
                    job.note(format!("{place} is written in part"));
                }
                End::Cancelled
            }
            Err(Failure::Copy(error)) => End::Failed(format!("{error}{part}")),
            Err(Failure::Refused(why)) => End::Failed(format!("{why}{part}")),
        }
    }

    fn move_to(
        &self,
        target: MoveTarget,
        has_written: &mut bool,
    ) -> Result<(Duration, OpenedDisk), Failure> {
        let job = &*self.job;
        let cells = <[Cell<u64>; 3]>::default();
        let [before, moved, part] = cells;
        let counter = Counter { job, tracker: &self.tracker, before, moved, part };
        let mut report = |progress| counter.on_progress(progress);
        let device = target.disk().image.device();
        let to = MirroredDisk { name: target.name.clone(), device };
        let mut mirror =
            Mirror::new(&self.source, &to, self.rate, job.state.cancel_flag(), &mut report)?;
        let moved = self.copy_and_pivot(&mut mirror, &counter, target);
        *has_written = mirror.has_written();
        moved
    }

    fn copy_and_pivot(
        &self,
        mirror: &mut Mirror<'_>,
        counter: &Counter<'_>,
        target: MoveTarget,
    ) -> Result<(Duration, OpenedDisk), Failure> {
        let begin = Instant::now();
        counter.begin(mirror.size());
        mirror.copy_all(target.is_new())?;
        mirror.flush(None)?;
        let mut pace = Pace {
            max_pause: self.max_pause,
            speed: 0.0,
            fewest: u64::MAX,
            rounds_without_progress: 0,
            late: 0,
            next_attempt: begin,
        };
        pace.on_copied(counter.copied(), begin);
        self.job.set_stage(Stage::Following);
        let mut target = Some(target);
        loop {
            if self.job.state.is_cancelled() {
                return Err(Error::Interrupted.into());
            }
            let left = self.tracker.changed_bytes();
            if pace.is_ready(left) {
                self.job.set_stage(Stage::Pivoting);
                if let Some(pivoted) = self.pivot(mirror, counter, &mut target)? {
                    return Ok(pivoted);
                }
                mirror.settle()?;
                pace.on_late();
            }
            self.round(mirror, counter, &mut pace)?;
        }
    }

    /// Copies what has changed since the last round.
    fn round(
        &self,
        mirror: &mut Mirror<'_>,
        counter: &Counter<'_>,
        pace: &mut Pace,
    ) -> Result<(), Failure> {
        let was_behind = pace.is_behind();
        let (begin, left) = (Instant::now(), self.tracker.changed_bytes());
        let copied = counter.copied();
        self.copy_changes(mirror, counter, None)?;
        mirror.flush(None)?;
        self.job.count_round();
        pace.on_copied(counter.copied() - copied, begin);
        pace.on_round(self.tracker.changed_bytes());
        self.job.set_stage(if pace.is_behind() { Stage::Behind } else { Stage::Following });
        if !was_behind && pace.is_behind() && left > 0 {
            let name = plain(&self.source.name);
            warn!(
                "{name}: its writers are faster than its move: limit them (nowait export limit), or allow a longer pause \
                 (nowait export move --max-pause)"
            );
        }
        if left == 0 {
            std::thread::sleep(IDLE_WAIT);
        }
        Ok(())
    }

    /// Copies what has changed, once over the disk, until `deadline` at most.
    fn copy_changes(
        &self,
        mirror: &mut Mirror<'_>,
        counter: &Counter<'_>,
        deadline: Option<Instant>,
    ) -> Result<MirrorPart, Error> {
        let is_complete = copy_changes(&self.tracker, |ranges| {
            counter.begin(ranges.iter().map(|range| range.len).sum());
            Ok(mirror.copy_ranges(ranges, deadline)? == MirrorPart::Complete)
        })?;
        Ok(if is_complete { MirrorPart::Complete } else { MirrorPart::Late })
    }

    /// Exchanges the image, if the rest is copied within the pause.
    fn pivot(
        &self,
        mirror: &mut Mirror<'_>,
        counter: &Counter<'_>,
        target: &mut Option<MoveTarget>,
    ) -> Result<Option<(Duration, OpenedDisk)>, Failure> {
        let Self { exports, disks, id, .. } = self;
        self.note_bitmaps(target.as_ref());
        let size = mirror.size();
        let mut failure = None;
        let last_copy = |deadline: Instant| {
            let mut copy = || {
                Ok(self.copy_changes(mirror, counter, Some(deadline))? == MirrorPart::Complete
                    && mirror.flush(Some(deadline))? == MirrorPart::Complete)
            };
            match copy() {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) => {
                    failure = Some(error);
                    return Ok(None);
                }
            }
            if self.source.device.size() != size {
                return Err(ControlError::Conflict("the disk has another size now".into()));
            }
            target.take().map(MoveTarget::complete).transpose().map_err(ControlError::Failed)
        };
        let pivoted = ImageExchange { exports, disks, id: *id }.pivot(self.max_pause, last_copy);
        match (failure, pivoted) {
            (Some(error), _) => Err(Failure::Copy(error)),
            (None, Ok(pivoted)) => Ok(pivoted),
            (None, Err(error)) => Err(Failure::Refused(error.to_string())),
        }
    }

    /// Says which bitmaps are not stored any more.
    fn note_bitmaps(&self, target: Option<&MoveTarget>) {
        let Some(target) = target.filter(|_| !self.job.has_notes()) else { return };
        let all = self.exports.bitmaps(self.id).unwrap_or_default();
        let lost = all.iter().filter(|it| it.persistent && !target.stores_bitmap(&it.spec.name));
        let names: Vec<_> = lost.map(|bitmap| bitmap.spec.name.as_str()).collect();
        if !names.is_empty() {
            self.job.note(format!(
                "{} stores no bitmaps of it: these go on in memory only: {}",
                target.name,
                names.join(", ")
            ));
        }
    }
}
