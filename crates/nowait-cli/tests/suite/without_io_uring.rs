//! The server works without io_uring, and without memory for it.

use crate::common::{
    KIB, MIB, PYTHON, Scratch, Server, bench_program, refusal_under, require_tool, skip, tool,
};
use nowait_testkit::nbd::Command;

/// Forbids the system call of the number that comes first, as container run-times forbid
/// io_uring_setup, and executes the command after it.
const WITHOUT_CALL: &str = r#"
import ctypes, os, struct, sys

FORBIDDEN = int(sys.argv[1])
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH_EPERM = 0x7fff0000, 0x00050001
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38

program = b"".join(struct.pack("HBBI", *step) for step in (
    (LOAD_NUMBER, 0, 0, 0),
    (JUMP_IF_EQUAL, 0, 1, FORBIDDEN),
    (RETURN, 0, 0, FAIL_WITH_EPERM),
    (RETURN, 0, 0, ALLOW),
))
steps = ctypes.create_string_buffer(program, len(program))
header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(steps)))
libc = ctypes.CDLL(None, use_errno=True)
zero = ctypes.c_ulong(0)
for call in ((PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero), (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header)):
    if libc.prctl(*call, zero, zero) != 0:
        sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
"#;

const IO_URING_SETUP: &str = "425";

/// The prefix of a command that cannot make the system call `number`.
pub(crate) fn without_call(number: &str) -> [&str; 4] {
    [PYTHON, "-c", WITHOUT_CALL, number]
}

#[test]
fn without_io_uring_threads_serve_and_one_line_reports_it() {
    nowait_testkit::needs!(require_tool(PYTHON));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    let server = Server::start_under(&without_call(IO_URING_SETUP), &image, &[]);
    assert_eq!(warnings(&server).len(), 1, "{}", server.log());
    writes_and_reads(&server);
    server.stop();
}

/// The lines in which the server reports the fallback to threads.
fn warnings(server: &Server) -> Vec<String> {
    server.log().lines().filter(|line| line.contains("thread")).map(str::to_owned).collect()
}

fn writes_and_reads(server: &Server) {
    let mut client = server.connect();
    let data = vec![0x5a; 64 * KIB as usize];
    client.write(1001, &data).expect("a write");
    assert!(client.read(1001, 64 * KIB as u32).expect("a read") == data);
}

#[test]
fn any_number_of_queues_serves_with_any_limit_on_locked_memory() {
    if !may_limit_memlock(8 * MIB) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    // No memory; too little for one ring, for one and a probe, for all queues; enough.
    for kibibytes in [0, 64, 256, 1024, 8192] {
        println!("{kibibytes} KiB");
        let limit = format!("--memlock={}", kibibytes * KIB);
        let server = Server::start_under(&limited(&limit), &image, &["--queues", "16"]);
        assert!(warnings(&server).len() <= 1, "{}", server.log());
        writes_and_reads(&server);
        server.stop();
    }
}

/// Whether a command may have a limit of `bytes` on locked memory: a user may not raise the hard
/// limit. Otherwise false and a message.
fn may_limit_memlock(bytes: u64) -> bool {
    if !require_tool("setpriv") || !require_tool("prlimit") {
        return false;
    }
    let limit = format!("--memlock={bytes}");
    let prefix = limited(&limit);
    let ended = tool(prefix[0]).args(&prefix[1..]).arg("true").output();
    ended.expect("timeout(1)").status.success()
        || skip(&format!("the hard limit on locked memory is below {bytes} bytes"))
}

/// The prefix that puts a command under `limit`, an option of prlimit(1). Root must drop
/// CAP_IPC_LOCK for the limit to apply.
fn limited(limit: &str) -> Vec<&str> {
    let mortal = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
    match rustix::process::geteuid().is_root() {
        true => [&mortal[..], &["prlimit", limit]].concat(),
        false => vec!["prlimit", limit],
    }
}

#[test]
fn four_busy_servers_of_one_user_have_rings_and_leave_half_of_the_limit_on_locked_memory() {
    const LIMIT_BYTES: u64 = 8 * MIB;
    const REQUESTS: u64 = 24;
    if !may_limit_memlock(LIMIT_BYTES) {
        return;
    }
    let scratch = Scratch::new();
    let limit = format!("--memlock={LIMIT_BYTES}");
    let mut pinned = 0;
    let mut servers = Vec::new();
    for number in 0..4 {
        let image = scratch.random(&format!("{number}.img"), REQUESTS * MIB, number);
        let server = Server::start_under(&limited(&limit), &image, &["--queues", "2"]);
        let mut client = server.connect();
        for n in 0..REQUESTS {
            let read = Command::Read { offset: n * MIB, len: MIB as u32 };
            client.send(&read).expect("a server that takes requests");
        }
        for _ in 0..REQUESTS {
            let (_, answer) = client.receive().expect("an answer");
            answer.expect("data");
        }
        pinned += server.memory("VmPin");
        servers.push(server);
    }
    for server in servers {
        assert!(warnings(&server).is_empty(), "{}", server.log());
        server.stop();
    }
    assert!(pinned <= LIMIT_BYTES / 2, "{pinned} bytes are pinned");
}

#[test]
fn an_incomplete_bench_exits_with_1_and_reports_what_is_missing_and_why() {
    if !require_tool(PYTHON) || bench_program().is_none() {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.sparse("disk.img", 64 * MIB);
    let file = file.to_str().expect("a path in UTF-8");
    let short = ["bench", "completion", "--rounds", "1", "--seconds", "0.05", "--overwrite"];
    let bench = [&short[..], &["--file", file]].concat();
    let refused = refusal_under(&without_call(IO_URING_SETUP), &bench);
    refused.says(&[
        "not everything could be measured",
        "4K write: deferred",
        "io_uring is forbidden",
    ]);
}
