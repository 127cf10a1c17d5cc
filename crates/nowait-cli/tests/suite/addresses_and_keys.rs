//! Addresses that a server cannot listen on, and the protection of private keys.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::common::{MIB, Scratch, Server, refusal};
use nowait_testkit::certificates::{Authority, Flaw, Role};

#[test]
fn an_address_that_is_a_directory_or_a_file_is_refused_and_left_unchanged() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let image = image.to_str().expect("a name in UTF-8");
    let file = scratch.sparse("precious", MIB);
    for (path, what) in
        [(scratch.path(), "it is a directory"), (&file, "it is a file, not a socket")]
    {
        let listen = format!("unix:{}", path.display());
        refusal(&["serve", image, "--nbd", &listen]).says(&[what, "(give another path)"]);
        assert!(path.exists());
    }
}

#[test]
fn read_only_is_suggested_only_where_the_image_can_be_read() {
    if rustix::process::geteuid().is_root() {
        nowait_testkit::say_skipped("root may open everything");
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    for (mode, proposed) in [(0o400, true), (0o000, false)] {
        fs::set_permissions(&image, fs::Permissions::from_mode(mode)).expect("its own file");
        let refused = refusal(&["serve", image.to_str().expect("a name in UTF-8")]);
        refused.says(&["Permission denied"]);
        assert_eq!(refused.error.contains("try --read-only"), proposed, "{}", refused.error);
    }
}

/// A directory with a server's certificate, whose key has these permission bits.
fn certificates(mode: u32) -> Scratch {
    let certs = Scratch::new();
    let authority = Authority::new("the authority");
    authority.trusted_in(certs.path());
    authority.certify(certs.path(), Role::Server, Flaw::None);
    let key = certs.join("server-key.pem");
    fs::set_permissions(key, fs::Permissions::from_mode(mode)).expect("its own file");
    certs
}

#[test]
fn a_private_key_that_every_user_may_read_is_warned_of_in_one_line() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    for (mode, lines) in [(0o600, 0), (0o640, 0), (0o644, 1)] {
        let certs = certificates(mode);
        let directory = certs.path().to_str().expect("a name in UTF-8");
        let server = Server::start(&image, &["--tls-certs", directory]);
        let log = server.log();
        assert_eq!(log.lines().count(), lines, "{mode:o}: {log}");
        assert_eq!(log.matches("this private key is open to every user").count(), lines, "{log}");
        server.stop();
    }
}

#[test]
fn a_server_with_a_private_key_leaves_no_core_dump() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let certs = certificates(0o600);
    let directory = certs.path().to_str().expect("a name in UTF-8");
    let server = Server::start(&image, &["--tls-certs", directory]);
    let limits = server.proc("limits");
    let line = limits.lines().find(|line| line.starts_with("Max core file size"));
    let limit = line.and_then(|line| line["Max core file size".len()..].split_whitespace().next());
    assert_eq!(limit, Some("0"), "{limits}");
    // The proc(5) files of a process that is not dumpable belong to root.
    assert_eq!(server.proc_owner(), 0);
    server.stop();
}
