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

use crate::sandbox::file_access::FileAccess;

/// Allowed with any arguments.
const ALLOWED: &[c_long] = &[
    // Transfers.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
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
    // The address in its argument is of no effect for the sockets that can be made.
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
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
    // Facts of the process itself.
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

/// The commands of fcntl(2): no other process gets a signal by any of them.
const FCNTL: &[i32] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];
/// The requests of ioctl(2): what is asked of terminals, sockets, files and block devices.
const IOCTL: &[u64] = &[
    libc::TCGETS,
    libc::TIOCGWINSZ,
    libc::FIONREAD,
    libc::FIONBIO,
    libc::FIOCLEX,
    // BLKROGET, BLKGETSIZE, BLKSSZGET, BLKGETSIZE64 and BLKPBSZGET (linux/fs.h)
    0x125e,
    0x1260,
    0x1268,
    0x8008_1272,
    0x127b,
    // FS_IOC_FIEMAP
    0xc020_660b,
];
/// The operations of io_uring_register(2) by their numbers (linux/io_uring.h): buffers, files, an
/// eventfd, what the kernel has, the start of a ring and the most workers.
const REGISTER: &[u64] = &[0, 1, 2, 3, 4, 5, 6, 8, 12, 13, 14, 15, 16, 19];

/// Puts the filter in force for all threads of this process, which makes the connections that `files` allow.
///
/// # Errors
/// A message: the kernel or this architecture has no seccomp filter, or it is forbidden.
pub(super) fn enter(files: &FileAccess) -> Result<(), String> {
    apply_filter_all_threads(&program(files)?).map_err(|error| error.to_string())
}

fn program(files: &FileAccess) -> Result<BpfProgram, String> {
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> =
        ALLOWED.iter().chain(ALLOWED_HERE).map(|call| (*call, Vec::new())).collect();
    let sockets = if files.is_unrestricted() { all_sockets() } else { tcp_sockets() };
    let tcp = files.connects_by_tcp().then_some(sockets).into_iter().flatten();
    if files.connects() {
        rules.insert(libc::SYS_connect, Vec::new());
    }
    if files.connects_by_tcp() {
        // The last use of a file of a cache.
        rules.insert(libc::SYS_utimensat, Vec::new());
    }
    if files.is_unrestricted() {
        // Ceph's library looks up names, for which the C library sends two questions in one call.
        rules.extend([libc::SYS_sendto, libc::SYS_sendmmsg].map(|call| (call, Vec::new())));
    }
    for (call, conditions) in conditional().into_iter().chain(commands()).chain(tcp) {
        if rules.get(&call).is_some_and(Vec::is_empty) {
            continue;
        }
        let conditions: Result<Vec<_>, _> = conditions
            .into_iter()
            .map(|(arg, op, value)| SeccompCondition::new(arg, length(call), op, value))
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

/// The bits of a socket's type that are its kind; the others are flags (linux/net.h).
const SOCKET_KIND: u64 = 0xf;

/// An argument's index, and what it is compared with.
type Condition = (u8, SeccompCmpOp, u64);

/// Allowed where all conditions hold; of several lines for one call one is enough.
fn conditional() -> Vec<(c_long, Vec<Condition>)> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let number = |number: i32| number as u64;
    let thread = number(libc::CLONE_THREAD);
    let executable = number(libc::PROT_EXEC);
    let own = u64::from(std::process::id());
    let asynchronous = number(libc::O_ASYNC);
    let kind = |kind: i32| (1, MaskedEq(SOCKET_KIND), number(kind));
    let unix = |of: i32| vec![(0, Eq, number(libc::AF_UNIX)), kind(of)];
    vec![
        // A thread, and no process. clone3 has its flags where no filter can look.
        (libc::SYS_clone, vec![(0, MaskedEq(thread), thread)]),
        // No memory that can be executed.
        (libc::SYS_mmap, vec![(2, MaskedEq(executable), 0)]),
        (libc::SYS_mprotect, vec![(2, MaskedEq(executable), 0)]),
        // For listeners, and pairs for threads and new programs: none that sends to an address.
        (libc::SYS_socket, unix(libc::SOCK_STREAM)),
        (libc::SYS_socketpair, unix(libc::SOCK_STREAM)),
        (libc::SYS_socketpair, unix(libc::SOCK_SEQPACKET)),
        (libc::SYS_sendto, vec![(4, Eq, 0)]),
        // A change of flags without O_ASYNC, by which a descriptor sends signals.
        (libc::SYS_fcntl, vec![(1, Eq, number(libc::F_SETFL)), (2, MaskedEq(asynchronous), 0)]),
        // A thread's name; no core dump of private keys.
        (libc::SYS_prctl, vec![(0, Eq, number(libc::PR_SET_NAME))]),
        (libc::SYS_prctl, vec![(0, Eq, number(libc::PR_SET_DUMPABLE)), (1, Eq, 0)]),
        // The priority of the calling thread only.
        (libc::SYS_getpriority, vec![(0, Eq, number(libc::PRIO_PROCESS as i32)), (1, Eq, 0)]),
        (libc::SYS_setpriority, vec![(0, Eq, number(libc::PRIO_PROCESS as i32)), (1, Eq, 0)]),
        // Limits and signals of this process only.
        (libc::SYS_prlimit64, vec![(0, Eq, 0)]),
        (libc::SYS_tgkill, vec![(0, Eq, own)]),
    ]
}

/// The calls whose first or second argument says what they do.
fn commands() -> impl Iterator<Item = (c_long, Vec<Condition>)> {
    let one = |call, value| (call, vec![(1, SeccompCmpOp::Eq, value)]);
    let fcntl = FCNTL.iter().map(move |&command| one(libc::SYS_fcntl, command as u64));
    let ioctl = IOCTL.iter().map(move |&request| one(libc::SYS_ioctl, request));
    let register = REGISTER.iter().map(move |&what| one(libc::SYS_io_uring_register, what));
    fcntl.chain(ioctl).chain(register)
}

/// How much of the arguments of `call` is compared: of addresses all, of others 32 bits, as the
/// kernel takes no more.
fn length(call: c_long) -> SeccompCmpArgLen {
    if call == libc::SYS_sendto { SeccompCmpArgLen::Qword } else { SeccompCmpArgLen::Dword }
}

/// Sockets for connections to the servers of images, whose protocol is TCP: landlock knows the ports of no other one.
fn tcp_sockets() -> Vec<(c_long, Vec<Condition>)> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let of = |family: i32, protocol: i32| {
        let kind = (1, MaskedEq(SOCKET_KIND), libc::SOCK_STREAM as u64);
        (libc::SYS_socket, vec![(0, Eq, family as u64), kind, (2, Eq, protocol as u64)])
    };
    let families = [libc::AF_INET, libc::AF_INET6];
    families
        .into_iter()
        .flat_map(|family| [0, libc::IPPROTO_TCP].map(|it| of(family, it)))
        .collect()
}

/// All sockets of the internet, also those by which addresses of names are asked for.
fn all_sockets() -> Vec<(c_long, Vec<Condition>)> {
    let of = |family: i32| (libc::SYS_socket, vec![(0, SeccompCmpOp::Eq, family as u64)]);
    vec![of(libc::AF_INET), of(libc::AF_INET6)]
}
