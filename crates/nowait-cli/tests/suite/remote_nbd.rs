//! Images that are exports of other NBD servers: a server in front of a server.
//!
//! Invariant: what a client has written is in the image of the server behind, whatever happens to the
//! connection in between.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nowait_testkit::certificates::{Authority, Flaw, Role};
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::{Random, Running, SetOnDrop, seed, wait_until};
use serde_json::Value;

use crate::common::{
    Finished, MIB, Scratch, Server, accepted, refusal, require_qemu, require_tool, text, tool,
};
use crate::upgrade::Upgraded;
use nowait_testkit::nbd::load::{self, bytes};

const DISK_BYTES: u64 = 16 * MIB;

/// A server of the image at `uri`.
fn in_front_of(uri: &str, extra: &[&str]) -> Server {
    Server::start(Path::new(uri), extra)
}

fn unix_uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

#[test]
fn a_proxy_is_upgraded_under_load_and_what_it_was_given_is_in_the_image_behind() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let behind = Server::start(&image, &["-f", "raw"]);
    let mut proxy = Upgraded::in_front_of(&unix_uri(&behind.socket()));
    let (mut client, over) = (proxy.connect(), &AtomicBool::new(false));
    thread::scope(|scope| {
        let load = scope.spawn(|| load::load(&mut client, 0, over));
        let loading = SetOnDrop(over);
        for _ in 0..3 {
            assert_eq!(proxy.upgrade()["connections"], 1);
            proxy.connect().read(0, 512).expect("a new client is served");
            wait_until("the new client has left", || proxy.connections() == 1);
        }
        drop(loading);
        assert!(load.join().expect("no error") > 0);
    });
    client.write(DISK_BYTES - 4096, &bytes(9, 4096)).expect("a write");
    drop(client);
    proxy.stop();
    behind.stop();
    assert!(fs::read(&image).expect("an image").ends_with(&bytes(9, 4096)));
}

/// Every command through `proxy`; returns what the disk has then.
fn use_all_commands(proxy: &Server, model: &mut [u8]) {
    let mut client = proxy.connect();
    let mut random = Random::from_seed(seed());
    for round in 0..200 {
        let pos = random.below(DISK_BYTES - MIB);
        let len = 1 + random.below(if round % 20 == 0 { MIB } else { 9000 });
        let range = pos as usize..(pos + len) as usize;
        let (offset, length) = (pos, len as u32);
        match random.below(6) {
            0 => {
                client.call(&Command::Zero { offset, len: length, keep: round % 2 == 0 }).unwrap();
                model[range].fill(0);
            }
            1 => drop(client.call(&Command::Flush).unwrap()),
            2 => assert!(client.read(pos, length).unwrap() == model[range], "read at {pos}"),
            choice => {
                let data = random.bytes(len as usize);
                model[range].copy_from_slice(&data);
                client.call(&Command::Write { offset, data, fua: choice == 3 }).unwrap();
            }
        }
    }
    client.call(&Command::Flush).unwrap();
    assert!(client.read(0, DISK_BYTES as u32).unwrap() == model, "the whole disk");
}

#[test]
fn a_server_in_front_of_nowait_serves_and_changes_its_disk() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let behind = Server::start(&image, &["-f", "raw"]);
    let mut model = vec![0; DISK_BYTES as usize];
    // With a ring and without one.
    for extra in [&[][..], &["--queue", "threads"], &["--off", "simple,vectored,merge"]] {
        let proxy = in_front_of(&unix_uri(&behind.socket()), extra);
        use_all_commands(&proxy, &mut model);
        proxy.stop();
    }
    behind.stop();
    assert!(fs::read(&image).unwrap() == model, "the image of the server behind");
}

#[test]
fn a_server_in_front_of_qemu_nbd_and_nbdkit_serves_and_changes_their_disks() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let owned = |path: &PathBuf| text(path).to_owned();
    let sockets = [scratch.join("qemu.sock"), scratch.join("nbdkit.sock")];
    let servers = [
        (
            "qemu-nbd",
            vec![
                "-t".into(),
                "-f".into(),
                "raw".into(),
                "-k".into(),
                owned(&sockets[0]),
                owned(&image),
            ],
        ),
        (
            "nbdkit",
            vec!["-f".into(), "-U".into(), owned(&sockets[1]), "file".into(), owned(&image)],
        ),
    ];
    for ((program, arguments), socket) in servers.into_iter().zip(sockets) {
        if !require_tool(program) {
            continue;
        }
        fs::write(&image, vec![0; DISK_BYTES as usize]).unwrap();
        let _behind = Running::start(Process::new(program).args(arguments));
        wait_until("the server's socket", || socket.exists());
        let mut model = vec![0; DISK_BYTES as usize];
        let proxy = in_front_of(&unix_uri(&socket), &[]);
        use_all_commands(&proxy, &mut model);
        proxy.stop();
        assert!(fs::read(&image).unwrap() == model, "the image of {program}");
    }
}

/// Writes and reads in its own part of the disk until it is `done`; returns the part.
fn load(proxy: &Server, part: u64, seed: u64, done: &dyn Fn() -> bool) -> Vec<u8> {
    const PART: u64 = DISK_BYTES / 4;
    let mut client = Client::connect(&proxy.socket(), Mode::Structured).unwrap();
    let mut random = Random::from_seed(seed + part);
    let mut model = vec![0; PART as usize];
    while !done() {
        let at = random.below(PART - 65536);
        let len = 512 * (1 + random.below(128));
        let range = at as usize..(at + len) as usize;
        let offset = part * PART + at;
        match random.below(8) {
            0 => drop(client.call(&Command::Flush).expect("a flush")),
            1..3 => assert!(client.read(offset, len as u32).expect("a read") == model[range]),
            choice => {
                let data = random.bytes(len as usize);
                model[range].copy_from_slice(&data);
                let fua = choice == 3;
                client.call(&Command::Write { offset, data, fua }).expect("a write");
            }
        }
    }
    model
}

#[test]
fn a_server_that_is_killed_and_started_again_under_load_costs_no_error_and_no_byte() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let start = |port: &str| {
        let address = format!("tcp:127.0.0.1:{port}");
        let image = image.to_str().unwrap();
        Server::start_by(&[], &["serve", image, "-f", "raw", "--nbd", &address])
    };
    let mut behind = start("0");
    let port = behind.port().to_owned();
    // Over TCP, and out of the sandbox that a server has by default.
    let proxy = in_front_of(&format!("nbd://127.0.0.1:{port}/"), &[]);
    let seed = seed();
    let killing = AtomicBool::new(true);
    let done = || !killing.load(Ordering::Relaxed);
    let parts: Vec<Vec<u8>> = thread::scope(|scope| {
        let (proxy, done) = (&proxy, &done);
        let clients: Vec<_> =
            (0..4).map(|part| scope.spawn(move || load(proxy, part, seed, done))).collect();
        for _ in 0..5 {
            thread::sleep(Duration::from_millis(100));
            behind.signal(rustix::process::Signal::KILL);
            behind.wait();
            behind = start(&port);
        }
        thread::sleep(Duration::from_millis(100));
        killing.store(false, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(proxy.log().contains("connecting again"), "{}", proxy.log());
    proxy.stop();
    behind.stop_but_leave_socket();
    assert!(fs::read(&image).unwrap() == parts.concat(), "the image");
}

#[test]
fn a_server_that_stays_away_is_an_error_in_time_and_none_when_it_is_back() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let socket = scratch.join("behind.sock");
    let listen = format!("unix:{}", socket.display());
    let behind = || {
        let image = image.to_str().unwrap();
        Server::start_by(&[], &["serve", image, "-f", "raw", "--nbd", &listen])
    };
    let first = behind();
    let control = scratch.join("control.sock");
    let address = format!("unix:{}", control.display());
    let arguments = ["--reconnect", "1", "--control", &address];
    let proxy = in_front_of(&unix_uri(&socket), &arguments);
    let told = || {
        let status = accepted(&["status", "--json", "--control", text(&control)]);
        let status: Value = serde_json::from_str(&status).expect("JSON");
        status[0]["server"]["nbd_servers"][0].clone()
    };
    let mut client = proxy.connect();
    client.write(0, &[7; 4096]).unwrap();
    assert_eq!(told()["unflushed_bytes"], 4096);
    client.call(&Command::Flush).unwrap();
    let (now, lost) = (told(), "reconnects");
    assert_eq!(
        (&now["connected"], &now["unflushed_bytes"], &now[lost]),
        (&true.into(), &0.into(), &0.into())
    );
    first.stop_but_leave_socket();
    assert_eq!(client.read(0, 4096).unwrap_err(), 5, "EIO");
    assert!(proxy.log().contains("the server is not there for 1 s"), "{}", proxy.log());
    assert_eq!(told()["connected"], false);
    let second = behind();
    wait_until("the server", || client.read(0, 4096).is_ok_and(|data| data == [7; 4096]));
    assert!(proxy.log().contains("the server answers again"), "{}", proxy.log());
    assert_eq!((&told()["connected"], &told()[lost]), (&true.into(), &1.into()));
    proxy.stop();
    second.stop_but_leave_socket();
}

#[test]
fn after_an_outage_flushes_succeed_again_when_all_unflushed_writes_were_made_again() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let socket = scratch.join("behind.sock");
    let listen = format!("unix:{}", socket.display());
    let serve = ["serve", image.to_str().unwrap(), "-f", "raw", "--nbd", &listen];
    let first = Server::start_by(&[], &serve);
    let proxy = in_front_of(&unix_uri(&socket), &["--reconnect", "1"]);
    let mut client = proxy.connect();
    client.write(8192, &[7; 4096]).unwrap();
    first.stop_but_leave_socket();
    // The host behind has died, and has lost it.
    fs::write(&image, vec![0; DISK_BYTES as usize]).unwrap();
    for _ in 0..3 {
        assert_eq!(client.call(&Command::Flush).unwrap_err(), 5, "EIO");
    }
    assert_eq!(client.write(0, &[8; 4096]).unwrap_err(), 5, "EIO");
    let second = Server::start_by(&[], &serve);
    wait_until("the server", || client.read(0, 4096).is_ok());
    client.call(&Command::Flush).unwrap();
    assert!(fs::read(&image).unwrap()[8192..][..4096] == [7; 4096]);
    let log = proxy.log();
    assert!(log.contains("flush failed: Input/output error"), "{log}");
    assert!(!log.contains("every flush fails"), "{log}");
    proxy.stop();
    second.stop_but_leave_socket();
}

#[test]
fn a_qcow2_image_in_an_export_is_served_where_its_format_is_given() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("16M").succeeds();
    // The file as it is, with room for what is allocated later.
    fs::File::options().write(true).open(&image).unwrap().set_len(64 * MIB).unwrap();
    let behind = Server::start(&image, &["-f", "raw"]);
    let uri = unix_uri(&behind.socket());
    let mut model = vec![0; DISK_BYTES as usize];
    let proxy = in_front_of(&uri, &["-f", "qcow2"]);
    use_all_commands(&proxy, &mut model);
    proxy.stop();
    let info: Value =
        serde_json::from_str(&accepted(&["info", "--json", "-f", "qcow2", &uri])).unwrap();
    assert_eq!((&info["format"], &info["virtual-size"]), (&"qcow2".into(), &DISK_BYTES.into()));
    accepted(&["check", "-f", "qcow2", &uri]);
    behind.stop();
    let raw = scratch.join("flat.raw");
    tool("qemu-img").args(["convert", "-f", "qcow2", "-O", "raw"]).arg(&image).arg(&raw).succeeds();
    assert!(fs::read(raw).unwrap() == model, "what QEMU finds in it");
}

#[test]
fn after_an_outage_the_metadata_of_an_image_in_an_export_are_written_and_flushes_succeed() {
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    accepted(&["create", text(&image), "16M"]);
    // The file as it is, with room for what is allocated later.
    fs::File::options().write(true).open(&image).unwrap().set_len(64 * MIB).unwrap();
    let socket = scratch.join("behind.sock");
    let listen = format!("unix:{}", socket.display());
    let serve = ["serve", text(&image), "-f", "raw", "--nbd", &listen];
    let mut behind = Server::start_by(&[], &serve);
    let uri = unix_uri(&socket);
    let proxy = in_front_of(&uri, &["-f", "qcow2", "--reconnect", "1"]);
    let mut client = proxy.connect();
    // Each outage falls into a later part of the same image.
    for round in 1..5u8 {
        let at = u64::from(round) * MIB;
        client.write(at, &vec![round; 200_000]).unwrap();
        behind.stop_but_leave_socket();
        for _ in 0..2 {
            assert_eq!(client.call(&Command::Flush).unwrap_err(), 5, "EIO");
        }
        behind = Server::start_by(&[], &serve);
        wait_until("the server", || client.read(at, 4096).is_ok());
        client.write(at + 200_000, &vec![round; 100_000]).unwrap();
        client.call(&Command::Flush).unwrap();
    }
    drop(client);
    proxy.stop();
    accepted(&["check", "-f", "qcow2", &uri]);
    let again = in_front_of(&uri, &["-f", "qcow2"]);
    for round in 1..5u8 {
        let data = again.connect().read(u64::from(round) * MIB, 300_000).unwrap();
        assert!(data == vec![round; 300_000], "{round}");
    }
    again.stop();
    behind.stop_but_leave_socket();
}

#[test]
fn a_uri_in_the_header_of_an_image_is_never_opened() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let behind = Server::start(&scratch.sparse("base.img", MIB), &["-f", "raw"]);
    let uri = unix_uri(&behind.socket());
    let image = scratch.join("overlay.qcow2");
    let create = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &uri];
    tool("qemu-img").args(create).arg(&image).arg("1M").succeeds();
    let image = image.to_str().unwrap();
    refusal(&["serve", image]).says(&["overlay.qcow2", "backing file"]);
    refusal(&["map", image]).says(&["overlay.qcow2", "backing file"]);
    behind.stop();
}

#[test]
fn info_and_map_tell_what_a_server_says_of_its_export() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let behind = Server::start(&image, &["-f", "raw"]);
    behind.connect().write(MIB, &[1; MIB as usize]).unwrap();
    let uri = unix_uri(&behind.socket());
    let words = accepted(&["info", &uri]);
    assert!(
        words.contains("NBD export") && words.contains("1 MiB (1048576 bytes) in 1"),
        "{words}"
    );
    let info: Value = serde_json::from_str(&accepted(&["info", "--json", &uri])).unwrap();
    assert_eq!((&info["kind"], &info["data_bytes"]), (&"nbd_export".into(), &MIB.into()));
    let map: Value = serde_json::from_str(&accepted(&["map", "--json", &uri])).unwrap();
    let data: Vec<_> = map.as_array().unwrap().iter().map(|run| &run["data"]).collect();
    assert_eq!(data, [false, true, false]);
    behind.stop();
}

#[test]
fn a_remote_image_that_cannot_be_served_is_refused_with_the_reason() {
    let scratch = Scratch::new();
    let behind = Server::start(&scratch.sparse("disk.img", MIB), &["--read-only", "-x", "disk"]);
    let socket = behind.socket();
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    refusal(&["serve", &uri]).says(&["the export is read-only", "--read-only"]);
    refusal(&["serve", &uri.replace("nbd+", "nbds+")]).says(&["TLS needs certificates"]);
    refusal(&["serve", &uri.replace("/disk?", "/other?")]).says(&["no export 'other'"]);
    refusal(&["serve", "nbd+unix:///?socket=/nonexistent"]).says(&["is the server running?"]);
    refusal(&["info", &uri.replace("/disk?", "/other?")]).says(&["no export 'other'"]);
    refusal(&["serve", "--poll", "--read-only", &uri]).says(&["cannot be polled"]);
    behind.stop();
}

#[test]
fn a_remote_image_gets_no_other_size_and_none_is_added_without_leave() {
    let scratch = Scratch::new();
    let behind = Server::start(&scratch.sparse("disk.img", MIB), &["-f", "raw"]);
    let socket = scratch.join("control.sock");
    let control = format!("unix:{}", socket.display());
    let directory = scratch.path().to_str().unwrap();
    let options = ["--control", &control, "--allow-dir", directory];
    let proxy = in_front_of(&unix_uri(&behind.socket()), &options);
    let at = ["--control", socket.to_str().unwrap()];
    let refused = |words: &[&str]| refusal(&[words, &at].concat());
    refused(&["export", "resize", "@0", "2M"]).says(&["its size is that of the server behind it"]);
    refused(&["export", "add", "b", &unix_uri(&behind.socket())]).says(&["--allow-uri"]);
    proxy.connect().write(0, &[1; 512]).unwrap();
    proxy.stop();
    behind.stop();
}

#[test]
fn a_disk_behind_tls_is_served_and_one_with_another_authority_is_refused() {
    let scratch = Scratch::new();
    let [server, client, stranger] = [(); 3].map(|()| Scratch::new());
    let authority = Authority::new("the authority");
    authority.trusted_in(server.path());
    authority.trusted_in(client.path());
    authority.certify(server.path(), Role::Server, Flaw::None);
    authority.certify(client.path(), Role::Client, Flaw::None);
    Authority::new("another authority").trusted_in(stranger.path());
    let image = scratch.sparse("disk.img", DISK_BYTES);
    let serve = ["serve", text(&image), "-f", "raw", "--nbd", "tcp:localhost:0", "--tls-certs"];
    let behind = Server::start_by(&[], &[&serve[..], &[text(server.path())]].concat());
    let uri = |certificates: &Scratch| {
        format!("{}?tls-certificates={}", behind.uri(), text(certificates.path()))
    };
    refusal(&["serve", &uri(&stranger)]).says(&["certificate is not good"]);
    refusal(&["serve", &behind.uri().replace("nbds:", "nbd:")]).says(&["the server wants TLS"]);
    let mut model = vec![0; DISK_BYTES as usize];
    let proxy = in_front_of(&uri(&client), &[]);
    use_all_commands(&proxy, &mut model);
    proxy.stop();
    behind.stop_but_leave_socket();
    assert!(fs::read(&image).unwrap() == model, "the image of the server behind");
}
