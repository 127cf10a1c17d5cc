//! System calls that fail on demand, for one thread and the threads that it starts: a seccomp(2)
//! filter.
//!
//! Invariant: the filter ends with these threads and does not affect the rest of the program.
#![allow(unsafe_code)]

use std::thread;

/// Which calls fail.
#[derive(Clone, Copy)]
pub(crate) struct Deny {
    /// The number of the system call.
    pub(crate) call: libc::c_long,
    /// Only calls whose fourth argument is at least this; for preadv2(2) and pwritev2(2) that is
    /// the position in bytes, below 4 GiB.
    pub(crate) from: u32,
    /// The errno that they fail with.
    pub(crate) errno: i32,
}

impl Deny {
    /// Every `call` fails.
    pub(crate) fn all(call: libc::c_long, errno: i32) -> Self {
        Self { call, from: 0, errno }
    }
}

/// Offsets in `struct seccomp_data` of the number and of the low half of the fourth argument.
const NUMBER: u32 = 0;
const FOURTH: u32 = 16 + 3 * 8 + if cfg!(target_endian = "big") { 4 } else { 0 };

const fn step(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Makes the calls fail on this thread. False where the system has no such filters.
fn install(deny: Deny) -> bool {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let jump = |test| libc::BPF_JMP | test | libc::BPF_K;
    let verdict = |k| step(libc::BPF_RET | libc::BPF_K, 0, 0, k);
    let mut steps = [
        step(load, 0, 0, NUMBER),
        step(jump(libc::BPF_JEQ), 0, 3, deny.call as u32),
        step(load, 0, 0, FOURTH),
        step(jump(libc::BPF_JGE), 0, 1, deny.from),
        verdict(libc::SECCOMP_RET_ERRNO | deny.errno as u32),
        verdict(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}

/// Runs `work` on a thread of its own on which the calls fail. `None`, with a message, where the
/// system has no such filters.
pub(crate) fn denied<T: Send>(deny: Deny, work: impl FnOnce() -> T + Send) -> Option<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(|| install(deny).then(work));
        let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if done.is_none() {
            nowait_testkit::skip("no seccomp filters");
        }
        done
    })
}

/// A filter that allows the set-up of a ring and forbids its use.
#[test]
fn a_ring_that_may_not_be_entered_gives_way_to_threads() {
    use nowait::{
        BlockingFile, Flags, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions, QueueKind,
    };
    for errno in [libc::EPERM, libc::ENOSYS] {
        let done = denied(Deny::all(libc::SYS_io_uring_enter, errno), || {
            let queue = QueueKind::Auto.open(64).unwrap();
            assert!(queue.ring().is_none());
            let refusal = queue.refusal().map(|error| error.errno());
            let ring = QueueKind::Uring.open(64).err().map(|error| error.errno());
            assert_eq!(ring, refusal);
            let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let (driver, options) = (LocalDriver::new().unwrap(), OpenOptions::new());
            let local = LocalAsyncFile::open(file.path(), options).unwrap();
            let buffer = IoBuffer::zeroed(8192).unwrap();
            assert_eq!(driver.block_on(local.write_at(buffer, 4096, Flags::NONE)).0, Ok(8192));
            let buffer = IoBuffer::zeroed(8192).unwrap();
            assert_eq!(driver.block_on(local.read_at(buffer, 4096)).0, Ok(8192));
            assert_eq!(BlockingFile::open(file.path(), options).unwrap().size(), 12_288);
            refusal
        });
        let Some(refusal) = done else { return };
        if nowait::Uring::new().is_ok() {
            assert_eq!(refusal, Some(errno));
        }
    }
}
