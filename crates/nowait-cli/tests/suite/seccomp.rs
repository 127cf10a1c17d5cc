//! A system that refuses io_uring, or memory for it, is no reason not to serve.
//!
//! Knows: seccomp(2) by way of Python's ctypes, setpriv(1), prlimit(1). Known by: nobody.

use crate::common::{KIB, MIB, PYTHON, Scratch, Server, require_tool};

/// Forbids io_uring_setup, as container run-times do, and becomes the command it is given.
const WITHOUT_IO_URING: &str = r#"
import ctypes, os, struct, sys

IO_URING_SETUP = 425
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH_EPERM = 0x7fff0000, 0x00050001
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38

program = b"".join(struct.pack("HBBI", *step) for step in (
    (LOAD_NUMBER, 0, 0, 0),
    (JUMP_IF_EQUAL, 0, 1, IO_URING_SETUP),
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
os.execvp(sys.argv[1], sys.argv[1:])
"#;

#[test]
fn where_io_uring_is_forbidden_threads_serve_and_one_line_says_so() {
    if !require_tool(PYTHON) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    let server = Server::start_under(&[PYTHON, "-c", WITHOUT_IO_URING], &image, &[]);
    assert_eq!(warnings(&server).len(), 1, "{}", server.log());
    writes_and_reads(&server);
    server.stop();
}

/// The lines in which the server says that it went over to threads.
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
fn whatever_the_limit_on_locked_memory_any_number_of_queues_serves() {
    if !require_tool("setpriv") || !require_tool("prlimit") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    // None at all; not enough for one ring, for one and a probe, for as many as there are queues;
    // enough.
    for kibibytes in [0, 64, 256, 1024, 8192] {
        println!("{kibibytes} KiB");
        let limit = format!("--memlock={}", kibibytes * KIB);
        // Root's limit does not count unless it gives up what makes it so.
        let mortal = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
        let wrapper = match rustix::process::geteuid().is_root() {
            true => [&mortal[..], &["prlimit", &limit]].concat(),
            false => vec!["prlimit", &limit],
        };
        let server = Server::start_under(&wrapper, &image, &["--queues", "16"]);
        assert!(warnings(&server).len() <= 1, "{}", server.log());
        writes_and_reads(&server);
        server.stop();
    }
}
