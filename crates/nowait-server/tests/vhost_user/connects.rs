//! VMMs that listen: the server connects to them, one after the other.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::path::Path;

use nowait_testkit::{BOUND, wait_for};

use crate::driver::*;
use crate::scene::{SIZE, Scene};

/// A VMM at `socket`, which listens until the server has connected.
fn connected(listener: &UnixListener) -> Driver {
    listener.set_nonblocking(true).unwrap();
    let (stream, _) = wait_for("a connection of the server", || listener.accept());
    stream.set_nonblocking(false).unwrap();
    Driver::connected(stream)
}

fn reads(driver: &mut Driver) {
    assert_eq!(driver.request(READ, SIZE / 512 - 1, &[(DATA, 512)]), (OK, 513));
    assert_eq!(driver.read(DATA, 512), [7; 512]);
}

#[test]
fn a_vmm_is_connected_to_when_it_listens_and_again_when_the_one_before_has_left() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vmm");
    let scene = Scene::connecting(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    let mut driver = connected(&listener);
    reads(&mut driver);
    let second = listener.accept().map(drop).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::WouldBlock, "one connection at a time");
    drop(driver);
    reads(&mut connected(&listener));
    // The socket of another VMM at the same path, after a while without one.
    drop(listener);
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    reads(&mut connected(&listener));
    drop(scene);
    assert!(socket.exists(), "it is the VMM's");
}

#[test]
fn a_server_whose_vmm_does_not_listen_stops_and_hands_the_path_over() {
    for socket in [
        Path::new("/nonexistent/vmm"),
        Path::new("/dev/null"),
        &Path::new("/").join("x".repeat(200)),
    ] {
        let scene = Scene::connecting(socket);
        let parked = scene.exports.pause(BOUND).unwrap();
        let devices = parked.devices(BOUND).unwrap();
        let [(_, device)] = &devices[..] else { panic!("{} devices", devices.len()) };
        assert_eq!(device.connects_to.as_deref(), Some(socket));
        assert!(device.listener.is_none() && device.vmm.is_none());
        drop((devices, parked));
    }
}

#[test]
fn no_connection_is_made_while_the_server_is_paused() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vmm");
    let scene = Scene::connecting(&socket);
    let parked = scene.exports.pause(BOUND).unwrap();
    let devices = parked.devices(BOUND).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    // Longer than the pause between two attempts.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(listener.accept().map(drop).unwrap_err().kind(), ErrorKind::WouldBlock);
    drop((devices, parked));
    reads(&mut connected(&listener));
}
