//! A dropped ring leaves nothing pinned: locked memory is limited per user, and a registered file
//! keeps its file system busy.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use nowait_testkit::{WaitForRequests, required, say_skipped, skip, wait_for};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use nowait::internal::RegisteredMemory;
use nowait::{
    BlockDevice, ByteRange, Config, Error, Flags, LinearMap, Op, OpenOptions, Request, SingleDisk,
    Uring, WorkerPool,
};

const BLOCK_BYTES: u64 = 4096;
const FILE_BYTES: u64 = 64 * BLOCK_BYTES;

/// One test at a time: pinned memory is counted for the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Bytes that this process has pinned.
fn pinned_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("the status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("VmPin");
    let kibibytes = line.trim().strip_suffix(" kB").expect("a number of kB");
    kibibytes.parse::<u64>().expect("a number") << 10
}

fn disk_in(directory: &Path) -> Arc<BlockDevice<LinearMap>> {
    let path = directory.join("disk.img");
    File::create(&path).and_then(|file| file.set_len(FILE_BYTES)).expect("a sparse file");
    Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).expect("a disk"))
}

/// Takes 4 MiB of buffers from an engine on a ring, and returns how many bytes that registers.
fn registered_of_four_mebibytes(disk: &Arc<BlockDevice<LinearMap>>) -> usize {
    let before = RegisteredMemory::of_this_process().bytes;
    let queue = Uring::new().expect("a ring");
    let mut engine = SingleDisk::new(disk.clone(), WorkerPool::new(1), queue, Config::default())
        .expect("an engine");
    let buffers: Vec<_> = (0..4)
        .map(|_| engine.buffer(ByteRange::new(0, 1 << 20)).expect("an arena of its own"))
        .collect();
    let registered = RegisteredMemory::of_this_process();
    assert!(registered.most_bytes >= registered.bytes);
    drop(buffers);
    registered.bytes - before
}

/// Makes an engine on a ring, writes a block with it and drops it. Returns the bytes that were
/// pinned meanwhile.
fn use_engine(disk: &Arc<BlockDevice<LinearMap>>) -> Result<u64, Error> {
    let queue = Uring::new()?;
    let mut engine = SingleDisk::new(disk.clone(), WorkerPool::new(1), queue, Config::default())?;
    let range = ByteRange::new(BLOCK_BYTES, BLOCK_BYTES);
    let buf = engine.buffer(range).expect("a buffer");
    let io = Request { op: Op::Write, flags: Flags::NONE, range };
    engine.submit(io, buf, 1).map_err(|rejected| rejected.error)?;
    assert_eq!(engine.only().result()?, BLOCK_BYTES);
    Ok(pinned_bytes())
}

/// Sets the limit on locked memory, and takes the capability that lifts it from this thread, so
/// that the limit counts for root too. Restores both when dropped.
struct Limit {
    before: Rlimit,
    sets: CapabilitySets,
}

impl Limit {
    fn of_bytes(bytes: u64) -> Self {
        let before = getrlimit(Resource::Memlock);
        let sets = capabilities(None).expect("the capabilities");
        let mut without = sets;
        without.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, without).expect("fewer capabilities");
        Self::set(bytes);
        Self { before, sets }
    }

    /// The same, but keeps the capability.
    fn that_does_not_apply(bytes: u64) -> Self {
        let sets = capabilities(None).expect("the capabilities");
        let before = getrlimit(Resource::Memlock);
        Self::set(bytes);
        Self { before, sets }
    }

    fn set(bytes: u64) {
        let limit = Rlimit { current: Some(bytes), ..getrlimit(Resource::Memlock) };
        setrlimit(Resource::Memlock, limit).expect("a limit");
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Memlock, self.before);
        let _ = set_capabilities(None, self.sets);
    }
}

#[test]
fn where_memory_cannot_be_locked_a_ring_is_smaller_and_registers_nothing_and_serves() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().expect("a directory");
    let disk = disk_in(directory.path());
    nowait_testkit::needs!(has_io_uring());
    // Enough for a few small rings and for none of full size, on kernels that count rings.
    let _limit = Limit::of_bytes(64 << 10);
    let mut rings = Vec::new();
    let refused = loop {
        match Uring::new() {
            Ok(ring) if ring.offered().full_size => {
                say_skipped("this kernel does not count a ring's own memory");
                return;
            }
            Ok(ring) => rings.push(ring),
            Err(error) => break error,
        }
    };
    let refusal = Uring::refusal(refused);
    assert!(refusal.contains("ulimit -l"), "{refusal}");
    if rings.pop().is_none() {
        say_skipped("other programs of this user lock all that may be locked");
        return;
    }
    // The kernel frees the ring some time after it was closed.
    let pinned = wait_for("a ring that serves", || use_engine(&disk));
    assert_eq!(pinned, 0);
}

#[test]
fn an_eighth_of_the_limit_is_registered_and_all_buffers_where_the_limit_does_not_apply() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().expect("a directory");
    let disk = disk_in(directory.path());
    nowait_testkit::needs!(has_io_uring());
    let limited = Limit::of_bytes(8 << 20);
    assert_eq!(RegisteredMemory::of_this_process().limit_bytes, Some(1 << 20));
    assert!(registered_of_four_mebibytes(&disk) <= 1 << 20);
    drop(limited);
    let _limit = Limit::that_does_not_apply(8 << 20);
    if RegisteredMemory::of_this_process().limit_bytes.is_some() {
        say_skipped("the limit on locked memory applies to this user");
        return;
    }
    assert_eq!(registered_of_four_mebibytes(&disk), 4 << 20);
}

/// Whether rings can be made here.
fn has_io_uring() -> bool {
    required("io_uring", Uring::new()).is_some()
}

#[test]
fn engines_that_were_dropped_leave_nothing_pinned_while_their_thread_goes_on() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().expect("a directory");
    let disk = disk_in(directory.path());
    nowait_testkit::needs!(has_io_uring());
    let before = pinned_bytes();
    for round in 0..400 {
        let during = use_engine(&disk).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!(pinned_bytes(), before, "round {round}, {during} bytes while it was in use");
        if during == before {
            say_skipped("the limit on locked memory lets nothing be registered here");
            return;
        }
    }
}

#[test]
fn a_file_system_can_be_unmounted_as_soon_as_its_engines_were_dropped() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().expect("a directory");
    let mounted = Mount::tmpfs(directory.path());
    let Some(mounted) = mounted else { return };
    for round in 0..8 {
        let disk = disk_in(directory.path());
        nowait_testkit::needs!(has_io_uring());
        use_engine(&disk).unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
    assert!(mounted.unmount(), "something still uses it");
}

/// A separate file system, unmounted when dropped.
struct Mount<'a>(Option<&'a Path>);

impl<'a> Mount<'a> {
    fn tmpfs(at: &'a Path) -> Option<Self> {
        let mount = Command::new("mount").args(["-t", "tmpfs", "nowait-test"]).arg(at).output();
        match mount {
            Ok(output) if output.status.success() => Some(Self(Some(at))),
            why => {
                skip(&format!("nothing can be mounted here: {why:?}"));
                None
            }
        }
    }

    fn unmount(mut self) -> bool {
        let Some(at) = self.0.take() else { return false };
        let unmounted =
            Command::new("umount").arg(at).status().is_ok_and(|status| status.success());
        if !unmounted {
            self.0 = Some(at);
        }
        unmounted
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.0 {
            let _ = Command::new("umount").arg("--lazy").arg(at).status();
        }
    }
}
