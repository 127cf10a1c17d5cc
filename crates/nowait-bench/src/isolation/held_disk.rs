//! A disk on a file system of this process (FUSE), which answers as it is told.
//!
//! Invariant: it is read-only, and all zeros. A read that is held is answered, with an error, when it is told
//! otherwise or is dropped: no process hangs in it afterwards.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry,
    ReplyOpen, Request,
};

/// The name of the only file.
const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
/// How long the kernel may remember names and attributes.
const TTL: Duration = Duration::from_secs(3600);

/// How reads are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// With zeros, immediately.
    Zeros,
    /// With zeros, after this time each, however many there are.
    Late(Duration),
    /// With `EIO`, immediately.
    Error,
    /// Not at all, until another answer is set.
    Never,
}

/// The common state of all reads of the file.
struct Reads {
    answer: Answer,
    held: Vec<ReplyData>,
}

#[derive(Clone)]
struct SharedReads(Arc<Mutex<Reads>>);

impl SharedReads {
    fn lock(&self) -> MutexGuard<'_, Reads> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers like this from now on, and what is held with an error.
    fn set(&self, answer: Answer) {
        let held = {
            let mut reads = self.lock();
            reads.answer = answer;
            std::mem::take(&mut reads.held)
        };
        held.into_iter().for_each(|reply| reply.error(Errno::EIO));
    }
}

/// A read that is answered at a time.
type LateRead = (Instant, u32, ReplyData);

/// A mounted disk.
pub(super) struct HeldDisk {
    reads: SharedReads,
    path: PathBuf,
    session: Option<BackgroundSession>,
}

impl HeldDisk {
    /// Mounts a disk of `bytes` bytes at `directory`, which is empty.
    ///
    /// # Errors
    /// The file system cannot be mounted: by a user who may not, or without `fusermount3`.
    pub(super) fn mount(directory: &Path, bytes: u64) -> io::Result<Self> {
        let reads = Reads { answer: Answer::Zeros, held: Vec::new() };
        let reads = SharedReads(Arc::new(Mutex::new(reads)));
        let (late, due) = channel();
        thread::Builder::new().spawn(move || answer_late(&due))?;
        let files = Files { bytes, reads: reads.clone(), late };
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::RO, MountOption::FSName("nowait-bench".to_owned())];
        let session = fuser::spawn_mount(files, directory, &config)?;
        Ok(Self { reads, path: directory.join(NAME), session: Some(session) })
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Answers reads like this from now on.
    pub(super) fn set(&self, answer: Answer) {
        self.reads.set(answer);
    }
}

impl Drop for HeldDisk {
    fn drop(&mut self) {
        self.reads.set(Answer::Error);
        // Left behind only if another process has a file open there.
        let _ = self.session.take().map(BackgroundSession::umount_and_join);
    }
}

/// Answers reads when they are due: all wait for the same time, so that the first one is due first.
fn answer_late(due: &Receiver<LateRead>) {
    while let Ok((at, size, reply)) = due.recv() {
        thread::sleep(at.saturating_duration_since(Instant::now()));
        reply.data(&vec![0; size as usize]);
    }
}

/// The file system.
struct Files {
    bytes: u64,
    reads: SharedReads,
    late: Sender<LateRead>,
}

impl Files {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let is_file = inode == FILE;
        FileAttr {
            ino: inode,
            size: if is_file { self.bytes } else { 0 },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            perm: if is_file { 0o444 } else { 0o555 },
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == NAME {
            reply.entry(&TTL, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match inode == FILE {
            // Past the page cache, whatever the server asks for.
            true => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
            false => reply.error(Errno::EISDIR),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let left = self.bytes.saturating_sub(offset);
        let size = u32::try_from(left).unwrap_or(u32::MAX).min(size);
        let mut reads = self.reads.lock();
        match reads.answer {
            Answer::Never => reads.held.push(reply),
            Answer::Zeros => reply.data(&vec![0; size as usize]),
            Answer::Error => reply.error(Errno::EIO),
            // The thread lives as long as this file system.
            Answer::Late(time) => drop(self.late.send((Instant::now() + time, size, reply))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nowait::{
        BlockDevice, ByteRange, Completion, Config, Engine, FileStorage, Flags, Op, OpenOptions,
        Request, Storage, WorkerPool,
    };
    use nowait_testkit::{BOUND, TestQueueKind, WaitForRequests, output, skip, wait_until};

    use super::*;

    const BLOCK: u64 = 4096;
    /// More than the kernel's workers of a ring, and than the threads of a queue without one.
    const READS: u64 = 24;

    /// A directory with the file `good`, and one where a disk that can stop answering is mounted, which is unmounted first.
    struct Places {
        held: HeldDisk,
        good: PathBuf,
        directory: tempfile::TempDir,
    }

    impl Places {
        /// `None`, and a message, where no FUSE file system can be mounted.
        fn new() -> Option<Self> {
            let directory = tempfile::tempdir().unwrap();
            let [mount, files] = ["mount", "files"].map(|name| directory.path().join(name));
            [&mount, &files].iter().for_each(|path| std::fs::create_dir(path).unwrap());
            let good = files.join("good");
            std::fs::write(&good, [1; BLOCK as usize]).unwrap();
            match HeldDisk::mount(&mount, 1 << 20) {
                Ok(held) => Some(Self { held, good, directory }),
                Err(error) => {
                    skip(&format!("no FUSE file system can be mounted: {error}"));
                    None
                }
            }
        }
    }

    /// Workers wait in the first reads of `hung`, which the file system never answers. The engine's thread does not, nor
    /// does a read of `other`.
    fn never_answered_reads_leave_others_alone(held: &HeldDisk, hung: &Path, other: &Path) {
        for kind in TestQueueKind::REAL {
            let config = Config { slots: 64, ..Config::default() };
            let Some(queue) = kind.queue(config.slots) else { continue };
            held.set(Answer::Zeros);
            let open = |path| BlockDevice::open(path, OpenOptions::new().read_only(true)).unwrap();
            let mut engine = Engine::new(queue, WorkerPool::new(4), config).unwrap();
            let [hung, other] = [hung, other].map(|path| Arc::new(open(path)));
            let [hung, other] = [hung, other].map(|disk| engine.attach(disk).unwrap());
            held.set(Answer::Never);
            let io = |n| {
                let range = ByteRange::new(2 * n * BLOCK, BLOCK);
                Request { op: Op::Read, flags: Flags::NONE, range }
            };
            for tag in 0..READS {
                let buf = engine.buffer(&hung, io(tag).range).unwrap();
                assert!(engine.submit(&hung, io(tag), buf, tag).is_ok(), "{kind:?}");
            }
            engine.poll().unwrap();
            wait_until("a read to hang", || !held.reads.lock().held.is_empty());
            let buf = engine.buffer(&other, io(0).range).unwrap();
            assert!(engine.submit(&other, io(0), buf, READS).is_ok(), "{kind:?}");
            let (mut done, begun) = (Vec::new(), Instant::now());
            while done.is_empty() {
                assert!(begun.elapsed() < BOUND, "the other read waits, too: {kind:?}");
                engine.wait(Some(Duration::from_secs(1)), &mut |_, _| {}).unwrap();
                done.extend(std::iter::from_fn(|| engine.next()));
            }
            let outcome = |it: &Completion| (it.tag, it.result().map_err(|error| error.errno()));
            assert_eq!(outcome(&done[0]), (READS, Ok(BLOCK)), "{kind:?}");
            for tag in 0..READS {
                assert_eq!(engine.cancel(&hung, tag), 1, "{kind:?}");
            }
            held.set(Answer::Error);
            done.extend(engine.finish());
            let of = |errno| done.iter().filter(|it| outcome(it).1 == Err(errno)).count() as u64;
            let (cancelled, failed) = (of(libc::ECANCELED), of(libc::EIO));
            assert!(failed > 0 && cancelled > 0, "{kind:?}: {failed} and {cancelled}");
            assert_eq!(cancelled + failed, READS, "{kind:?}");
        }
    }

    #[test]
    fn c89_reads_that_a_file_system_never_answers_leave_the_thread_of_the_engine_to_others() {
        let Some(places) = Places::new() else { return };
        never_answered_reads_leave_others_alone(&places.held, places.held.path(), &places.good);
    }

    /// An overlay of the disk's file system and of that of `good`: files of both take no `RWF_NOWAIT`.
    #[test]
    fn c97_reads_that_never_end_of_a_file_without_nowait_leave_other_such_files_alone() {
        let Some(places) = Places::new() else { return };
        let Places { held, good, directory } = &places;
        let overlay = directory.path().join("overlay");
        std::fs::create_dir(&overlay).unwrap();
        let [upper, lower] = [good, held.path()].map(|file| file.parent().unwrap().display());
        let layers = format!("lowerdir={upper}:{lower}");
        let mut mount = Command::new("mount");
        let mounted = output(mount.args(["-t", "overlay", "-o", &layers, "none"]).arg(&overlay));
        if !mounted.status.success() {
            skip("no overlay can be mounted by this user");
            return;
        }
        let overlay = Unmounted(overlay);
        let [hung, other] =
            [held.path(), good].map(|file| overlay.0.join(file.file_name().unwrap()));
        let properties =
            FileStorage::open(&hung, OpenOptions::new().read_only(true)).unwrap().properties();
        assert!(!properties.nowait && properties.waits_in_queue);
        never_answered_reads_leave_others_alone(held, &hung, &other);
    }

    /// A mount point, unmounted at the end.
    struct Unmounted(PathBuf);

    impl Drop for Unmounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").args(["-l"]).arg(&self.0).output();
        }
    }
}
