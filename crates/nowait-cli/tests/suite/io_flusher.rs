//! `--io-flusher`: no thread of a server waits for a disk that it serves when it asks for memory.
//!
//! Invariant: the kernel is asked, thread by thread. Servers that have the right run in a guest (`ublk_pauses.rs`), for a
//! container's root has it not.

use std::fs;

use nowait_testkit::require_tool;

use crate::common::{MIB, Scratch, Server, refusal_under, text};

/// `CAP_SYS_RESOURCE` (linux/capability.h), as a bit of those of a process.
const SYS_RESOURCE: u64 = 1 << 24;
/// `PF_MEMALLOC_NOIO` and `PF_LOCAL_THROTTLE`, in the ninth field of proc(5)'s `stat`.
const IO_FLUSHER: u64 = 0x0008_0000 | 0x0010_0000;

/// Whether a server of this test has the right.
fn has_right() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("the status of this process");
    let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("capabilities");
    let bits = u64::from_str_radix(bits.trim(), 16).expect("a number");
    let users = fs::read_to_string("/proc/self/uid_map").expect("the users of this namespace");
    bits & SYS_RESOURCE != 0 && users.split_whitespace().nth(2) == Some("4294967295")
}

/// The flags of each thread of `process`.
fn flags(process: u32) -> Vec<(String, bool)> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("a process").flatten();
    let flags = threads.filter_map(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
        let (name, rest) = stat.rsplit_once(") ").expect("a name");
        let flags: u64 = rest.split(' ').nth(6).expect("flags").parse().expect("a number");
        Some((name.to_owned(), flags & IO_FLUSHER == IO_FLUSHER))
    });
    flags.collect()
}

#[test]
fn without_the_right_it_is_refused_in_words_and_nothing_is_served() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let less = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"];
    let drops = has_right();
    if drops && !require_tool("setpriv") {
        return;
    }
    let wrapper: &[&str] = if drops { &less } else { &[] };
    let socket = format!("unix:{}", scratch.join("socket").display());
    let arguments = ["serve", text(&image), "--nbd", &socket, "--io-flusher"];
    let refused = refusal_under(wrapper, &arguments);
    refused.says(&["--io-flusher", "CAP_SYS_RESOURCE"]);
    assert_eq!(refused.code, 1);
    assert!(!scratch.join("socket").exists());
}

#[test]
fn a_server_that_was_not_asked_has_no_thread_with_the_flag() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), &[]);
    server.connect().write(0, &[1; 512]).expect("a write");
    let flags = flags(server.pid());
    assert!(flags.len() > 1 && flags.iter().all(|(_, is)| !is), "{flags:?}");
    server.stop();
}
