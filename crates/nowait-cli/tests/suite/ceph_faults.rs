//! Images of a Ceph cluster that does not answer, is full, or shuts this client out.
//!
//! Invariant: a test that takes the cluster's OSD or its space away runs alone among those of the cluster.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use nowait_testkit::nbd::{Client, Command as NbdCommand};
use nowait_testkit::{Running, Scratch, SetOnDrop, ends_with_test, wait_until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::ceph::{OSD, cluster, script, serve};
use crate::common::{Finished, MIB, NOWAIT, refusal, require_tool, text, tool};
use nowait_testkit::nbd::load::load;

/// Errors of NBD.
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

#[test]
fn an_osd_that_is_killed_is_a_pause_and_then_an_error_and_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let _alone = OSD.write().unwrap_or_else(PoisonError::into_inner);
    let server = serve(&cluster.image("killed"), &[]);
    let hasty = serve(&cluster.image("hasty"), &["--reconnect", "2"]);
    let mut client = server.connect();
    client.write(0, &[1; 65536]).expect("a write");
    client.call(&NbdCommand::Flush).expect("a flush");
    hasty.connect().write(0, &[1; 4096]).expect("a write");
    cluster.kill_osd();
    let waiting =
        client.send(&NbdCommand::Write { offset: 65536, data: vec![2; 65536], fua: true });
    assert_eq!(hasty.connect().read(0, 4096).expect_err("no OSD"), EIO);
    cluster.start_osd();
    let (answered, answer) = client.receive().expect("an answer");
    assert_eq!((Some(answered), answer.map(drop)), (waiting.ok(), Ok(())));
    let data = client.read(0, 131_072).expect("a read");
    assert!(data[..65536] == [1; 65536] && data[65536..] == [2; 65536]);
    wait_until("an answer again", || hasty.connect().read(0, 4096).is_ok());
    hasty.stop();
    server.stop();
}

#[test]
fn a_lock_that_another_client_breaks_is_an_error_of_every_request_after_it() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let mut server = serve(&cluster.image("broken"), &[]);
    let mut client = server.connect();
    client.write(0, &[1; 4096]).expect("a write");
    client.call(&NbdCommand::Flush).expect("a flush");
    let locks = cluster.rbd(&["lock", "ls", "broken"]);
    let last: Vec<&str> = locks.lines().last().expect("a lock").split_whitespace().collect();
    // The locker, the two words of the lock's name, and its address.
    cluster.rbd(&["lock", "rm", "broken", &last[1..3].join(" "), last[0]]);
    assert_eq!(client.write(0, &[2; 4096]).expect_err("a broken lock"), EIO);
    assert_eq!(client.call(&NbdCommand::Flush).map(drop), Err(EIO));
    assert_eq!(client.read(0, 4096).expect_err("a client that was shut out"), EIO);
    assert!(cluster.export("broken")[..4096] == [1; 4096], "what was flushed");
    server.terminate();
    assert!(!server.wait().success(), "its last flush has failed");
    let log = server.log();
    assert!(log.contains("another client has broken the lock"), "{log}");
}

#[test]
fn an_image_that_is_served_is_not_removed_by_others_also_when_it_is_only_read() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let location = cluster.image("wanted");
    let remove = || {
        let mut rbd = tool("rbd");
        rbd.arg("-c").arg(&cluster.conf).args(["rm", "--no-progress", "wanted"]);
        rbd
    };
    for extra in [&[][..], &["--read-only"]] {
        let server = serve(&location, extra);
        let said = remove().fails();
        assert!(said.contains("image still has watchers"), "{said}");
        server.stop();
        // A server that has ended has closed it: else it would have a watcher for half a minute.
        for _ in 0..5 {
            let server = serve(&location, extra);
            assert!(server.connect().read(0, 4096).expect("a read") == [0; 4096]);
            server.stop();
            let status = cluster.rbd(&["status", "wanted"]);
            assert!(status.contains("Watchers: none"), "{status}");
        }
    }
    remove().succeeds();
    refusal(&["serve", &location, "--read-only"]).says(&["no such image"]);
}

#[test]
fn a_user_who_may_only_read_serves_read_only() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (keyring, conf) = (scratch.join("keyring"), scratch.join("ceph.conf"));
    let caps = ["mon", "profile rbd", "osd", "profile rbd-read-only"];
    let made = [&["auth", "get-or-create", "client.reader"], &caps[..]].concat();
    fs::write(&keyring, cluster.run("ceph", &made)).expect("a keyring");
    let settings = fs::read_to_string(&cluster.conf).expect("the cluster's ceph.conf");
    let own = format!("{settings}[client.reader]\nkeyring = {}\n", keyring.display());
    fs::write(&conf, own).expect("a ceph.conf");
    cluster.image("shown");
    let location = format!("rbd:rbd/shown:id=reader:conf={}", text(&conf));
    let server = serve(&location, &["--read-only"]);
    assert!(server.connect().read(0, 4096).expect("a read") == [0; 4096]);
    server.stop();
    refusal(&["serve", &location]).says(&["Operation not permitted"]);
}

#[test]
fn a_server_that_is_stopped_while_it_opens_an_image_does_not_crash() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (location, socket) = (cluster.image("opening"), scratch.join("socket"));
    for n in 0..40 {
        let mut serve = Command::new(NOWAIT);
        serve.args(["serve", &location, "--read-only", "--nbd"]);
        serve.arg(format!("unix:{}", socket.display())).stdin(Stdio::null());
        let mut server = ends_with_test(serve.stdout(Stdio::null())).spawn().expect("nowait");
        thread::sleep(Duration::from_millis(3 * n));
        kill_process(Pid::from_child(&server), Signal::TERM).expect("a server");
        let status = server.wait().expect("a server");
        let ended = status.success() || status.signal() == Some(Signal::TERM.as_raw());
        assert!(ended, "after {} ms: {status}", 3 * n);
    }
}

#[test]
fn a_monitor_that_is_not_there_is_an_error_after_the_time_that_was_given() {
    let Some(cluster) = cluster() else { return };
    let scratch = Scratch::new();
    let conf = scratch.join("ceph.conf");
    let settings = fs::read_to_string(&cluster.conf).expect("the cluster's ceph.conf");
    let elsewhere = settings.lines().map(|line| match line.starts_with("mon_host") {
        true => "mon_host = [v2:127.0.0.1:1]\n".to_owned(),
        false => format!("{line}\n"),
    });
    fs::write(&conf, elsewhere.collect::<String>()).expect("a ceph.conf");
    let location = format!("rbd:rbd/any:conf={}", text(&conf));
    let refused = refusal(&["serve", &location, "--reconnect", "1"]);
    refused.says(&[&location, "the cluster cannot be reached", "timed out"]);
}

#[test]
fn daemons_that_are_stopped_for_a_while_under_load_are_a_pause_without_an_error() {
    let Some(cluster) = cluster() else { return };
    let _alone = OSD.write().unwrap_or_else(PoisonError::into_inner);
    let server = serve(&cluster.image("paused"), &[]);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = |region: u64| {
            let (mut client, over) = (server.connect(), &over);
            scope.spawn(move || load(&mut client, region, over))
        };
        let loads = [0, 4 * MIB].map(load);
        let loading = SetOnDrop(&over);
        for daemon in ["mon.a", "osd.0", "osd.0"] {
            let process = cluster.process(daemon);
            kill_process(process, Signal::STOP).expect("a daemon");
            thread::sleep(Duration::from_millis(300));
            kill_process(process, Signal::CONT).expect("a daemon");
            thread::sleep(Duration::from_millis(100));
        }
        drop(loading);
        for load in loads {
            assert!(load.join().expect("what was written is read") > 0);
        }
    });
    server.stop();
}

#[test]
fn a_full_cluster_is_no_space_for_what_needs_some_and_no_error_for_anything_else() {
    let Some(cluster) = cluster() else { return };
    let _alone = OSD.write().unwrap_or_else(PoisonError::into_inner);
    let server = serve(&cluster.image("filled"), &[]);
    let mut client = server.connect();
    client.write(0, &[1; 65536]).expect("a write");
    let set = |ratio: &str, full: bool| {
        // The highest of them counts.
        for kind in ["nearfull", "backfillfull", "full"] {
            cluster.run("ceph", &["osd", &format!("set-{kind}-ratio"), ratio]);
        }
        wait_until("the pool's state", || {
            let pools = cluster.run("ceph", &["osd", "dump"]);
            pools.lines().any(|line| line.contains("'rbd'") && line.contains(",full") == full)
        });
    };
    set("0.000001", true);
    let space = |client: &mut Client| client.write(8 * MIB, &[2; 4096]);
    assert_eq!(space(&mut client).expect_err("no space"), ENOSPC);
    client.write(0, &[3; 4096]).expect("a write where there is space already");
    client.call(&NbdCommand::Trim { offset: 4096, len: 4096 }).expect("a trim");
    client.call(&NbdCommand::Flush).expect("a flush");
    // Its lock needs no space.
    serve(&cluster.location("filled"), &["--read-only"]).stop();
    set("0.95", false);
    space(&mut client).expect("space again");
    client.call(&NbdCommand::Flush).expect("a flush");
    server.stop();
    let data = cluster.export("filled");
    assert!(data[..4096] == [3; 4096] && data[4096..8192] == [0; 4096]);
    assert!(data[8192..65536] == [1; 57344] && data[8 << 20..][..4096] == [2; 4096]);
}

#[test]
fn a_cluster_whose_start_is_interrupted_with_its_test_leaves_no_process() {
    nowait_testkit::needs!(["ceph", "ceph-mon", "ceph-osd", "rbd"].into_iter().all(require_tool));
    let scratch = Scratch::new();
    let directory = scratch.join("interrupted");
    let mut test = Running::start(Command::new("sleep").arg("600"));
    let mut start = Command::new(script());
    start.arg("start").arg(&directory).arg(test.0.id().to_string()).stdout(Stdio::null());
    let mut start = Running::start(&mut start);
    let number = || fs::read_to_string(directory.join("mon.a.pid")).ok()?.trim().parse().ok();
    wait_until("a monitor", || number().is_some());
    let monitor = number().and_then(Pid::from_raw).expect("a process ID");
    test.end();
    start.end();
    wait_until("the monitor's end", || test_kill_process(monitor).is_err());
    wait_until("an empty place", || !directory.exists());
}
