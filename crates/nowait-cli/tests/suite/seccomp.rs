//! A kernel that refuses io_uring is no reason not to serve.
//!
//! Knows: seccomp(2) by way of Python's ctypes. Known by: nobody.

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
    let warnings: Vec<_> =
        server.log().lines().filter(|line| line.contains("thread")).map(str::to_owned).collect();
    assert_eq!(warnings.len(), 1, "{}", server.log());

    let mut client = server.connect();
    let data = vec![0x5a; 64 * KIB as usize];
    client.write(1001, &data).expect("a write over threads");
    assert_eq!(client.read(1001, 64 * KIB as u32).expect("a read over threads"), data);
    drop(client);
    server.stop();
}
