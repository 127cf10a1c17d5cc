//! The system calls of a confined process, by seccomp.
//!
//! Invariant: a call that is not listed fails with `ENOSYS`, as on a kernel that does not have it, so
//! that the C library falls back on one that is; the process does not end, for it may hold writes
//! that are not flushed. Calls on the way of a request are allowed whatever their arguments: for these
//! the kernel does not run the filter.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

/// Allowed with any arguments.
const ALLOWED: &[c_long] = &[
    // Transfers.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fadvise64,
    libc::SYS_lseek,
    libc::SYS_copy_file_range,
    // Files; landlock says which.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_fgetxattr,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_unlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    // Connections that clients make.
    libc::SYS_accept4,
    // By path, where landlock allows it.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_memfd_create,
    // Threads and signals.
    libc::SYS_exit,
    libc::SYS_exit_group,
    // The end of the process that starts new programs.
    libc::SYS_wait4,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_membarrier,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // What the process asks about itself.
    libc::SYS_getpid,
    libc::SYS_setsid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_capget,
    libc::SYS_getrusage,
    libc::SYS_getcpu,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
];

/// The older forms that only this architecture has.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rmdir,
    libc::SYS_link,
    libc::SYS_rename,
    libc::SYS_dup2,
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    // Ceph's library, whose exception would end the process.
    libc::SYS_epoll_create,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[c_long] = &[];

/// Puts the filter in force for all threads of this process. It may make TCP sockets if it `connects`.
///
/// # Errors
/// A message: the kernel or this architecture has no seccomp filter, or it is forbidden.
pub(super) fn enter(connects: bool) -> Result<(), String> {
    apply_filter_all_threads(&program(connects)?).map_err(|error| error.to_string())
}

fn program(connects: bool) -> Result<BpfProgram, String> {
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> =
        ALLOWED.iter().chain(ALLOWED_HERE).map(|call| (*call, Vec::new())).collect();
    let tcp = connects.then(tcp_sockets).into_iter().flatten();
    if connects {
        // The C library asks for both kinds of addresses of a name at once.
        rules.insert(libc::SYS_sendmmsg, Vec::new());
        // The last use of a file of a cache.
        rules.insert(libc::SYS_utimensat, Vec::new());
    }
    for (call, conditions) in conditional().into_iter().chain(tcp) {
        let conditions: Result<Vec<_>, _> = conditions
            .into_iter()
            .map(|(arg, op, value)| SeccompCondition::new(arg, SeccompCmpArgLen::Dword, op, value))
            .collect();
        let rule = conditions.and_then(SeccompRule::new).map_err(|error| error.to_string())?;
        rules.entry(call).or_default().push(rule);
    }
    let architecture = std::env::consts::ARCH.try_into();
    let architecture = architecture.map_err(|_| "not on this architecture")?;
    let otherwise = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, otherwise, SeccompAction::Allow, architecture)
        .and_then(TryInto::try_into)
        .map_err(|error| error.to_string())
}

/// An argument's index, and what it is compared with.
type Condition = (u8, SeccompCmpOp, u64);

/// Allowed where all conditions hold; of several lines for one call one is enough.
fn conditional() -> Vec<(c_long, Vec<Condition>)> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let number = |number: i32| number as u64;
    let thread = number(libc::CLONE_THREAD);
    let executable = number(libc::PROT_EXEC);
    let own = u64::from(std::process::id());
    vec![
        // A thread, and no process. clone3 has its flags where no filter can look.
        (libc::SYS_clone, vec![(0, MaskedEq(thread), thread)]),
        // No memory that can be executed.
        (libc::SYS_mmap, vec![(2, MaskedEq(executable), 0)]),
        (libc::SYS_mprotect, vec![(2, MaskedEq(executable), 0)]),
        // The service manager's socket, and a pair for a thread.
        (libc::SYS_socket, vec![(0, Eq, number(libc::AF_UNIX))]),
        (libc::SYS_socketpair, vec![(0, Eq, number(libc::AF_UNIX))]),
        // No input into a terminal.
        (libc::SYS_ioctl, vec![(1, Ne, libc::TIOCSTI), (1, Ne, libc::TIOCLINUX)]),
        // A thread's name; no core dump of private keys.
        (libc::SYS_prctl, vec![(0, Eq, number(libc::PR_SET_NAME))]),
        (libc::SYS_prctl, vec![(0, Eq, number(libc::PR_SET_DUMPABLE)), (1, Eq, 0)]),
        // Limits and signals of this process only.
        (libc::SYS_prlimit64, vec![(0, Eq, 0)]),
        (libc::SYS_tgkill, vec![(0, Eq, own)]),
    ]
}

/// Sockets for connections to the servers of images.
fn tcp_sockets() -> Vec<(c_long, Vec<Condition>)> {
    let of = |family: i32| (libc::SYS_socket, vec![(0, SeccompCmpOp::Eq, family as u64)]);
    vec![of(libc::AF_INET), of(libc::AF_INET6)]
}
