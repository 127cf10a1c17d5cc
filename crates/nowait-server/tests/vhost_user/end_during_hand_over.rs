//! A server that another one takes over ends for one reason, whatever else happens meanwhile.
//!
//! Invariant: the only client is a VMM on a connection that was given, with whose end a server ends.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use nowait::{BlockDevice, OpenOptions};
use nowait_server::{
    AnyExport, DeviceSocket, Export, Exports, Options, PausedServer, Server, ShutdownHandle,
    ShutdownReport,
};
use nowait_testkit::{BOUND, within};
use tempfile::NamedTempFile;
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;

use crate::scene::SIZE;

/// A server without a socket of its own.
struct Serving {
    exports: Exports,
    stopper: ShutdownHandle,
    running: JoinHandle<Result<ShutdownReport, nowait::Error>>,
}

impl Serving {
    fn start(export: AnyExport) -> Self {
        let server = Server::start(vec![export], Vec::new(), Options::default()).unwrap();
        let (exports, stopper) = (server.exports(), server.shutdown_handle());
        Self { exports, stopper, running: std::thread::spawn(move || server.run(BOUND)) }
    }

    /// Waits for its end, for which nothing is done here. Returns whether another server serves.
    fn ends_handed_over(self) -> bool {
        let Self { exports, stopper, running } = self;
        let report = within("the end of a server", move || running.join().unwrap()).unwrap();
        drop((exports, stopper));
        assert_eq!(report.unfinished, 0);
        report.handed_over
    }

    /// Begins to hand its VMM over.
    fn hand_over(&self) -> PausedServer {
        let mut parked = self.exports.pause(BOUND).unwrap();
        parked.begin_handing_over().unwrap();
        parked
    }

    /// Another server takes its VMM over.
    fn succeed(&self, parked: PausedServer, next: AnyExport) -> Self {
        let next = Self::start(next);
        let id = next.exports.list()[0].0;
        let mut devices = parked.devices(BOUND).unwrap();
        assert_eq!(devices.len(), 1);
        parked.release();
        next.exports.restore_device(id, devices.pop().unwrap().1).unwrap();
        next
    }
}

/// An image, a server of it, and the VMM at its connection.
fn serve() -> (NamedTempFile, Serving, Frontend) {
    let image = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(SIZE).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let server = Serving::start(export_of(&image).with_device(DeviceSocket::Connected(far)));
    let vmm = Frontend::from_stream(near, 1);
    vmm.get_features().unwrap();
    (image, server, vmm)
}

fn export_of(image: &NamedTempFile) -> AnyExport {
    let disk = Arc::new(BlockDevice::open(image.path(), OpenOptions::default()).unwrap());
    AnyExport::new(Export::new(disk, "disk".into(), String::new()))
}

#[test]
fn a_server_whose_vmm_leaves_when_the_next_one_is_told_to_serve_ends_by_that_only() {
    for _ in 0..20 {
        let (image, server, vmm) = serve();
        let parked = server.hand_over();
        drop(vmm);
        let next = server.succeed(parked, export_of(&image));
        assert!(server.ends_handed_over());
        assert!(!next.ends_handed_over(), "it ends with its VMM");
    }
}

#[test]
fn a_server_whose_vmm_leaves_ends_with_it_where_the_next_one_cannot_be_told() {
    let (_image, server, vmm) = serve();
    let parked = server.hand_over();
    drop(parked.devices(BOUND).unwrap());
    drop(vmm);
    drop(parked);
    assert!(!server.ends_handed_over());
}

#[test]
fn a_server_that_is_asked_to_stop_when_the_next_one_is_told_to_serve_hands_its_vmm_over() {
    for _ in 0..20 {
        let (image, server, vmm) = serve();
        let parked = server.hand_over();
        server.stopper.stop();
        let next = server.succeed(parked, export_of(&image));
        server.stopper.stop();
        assert!(server.ends_handed_over());
        vmm.get_features().unwrap();
        drop(vmm);
        assert!(!next.ends_handed_over());
    }
}

#[test]
fn a_stop_is_carried_out_where_the_next_server_cannot_be_told() {
    let (_image, server, vmm) = serve();
    let parked = server.hand_over();
    server.stopper.stop();
    drop(parked);
    assert!(!server.ends_handed_over());
    assert!(vmm.get_features().is_err(), "it is served");
    // One that stops already is not handed over.
    let (_image, server, _vmm) = serve();
    let mut parked = server.exports.pause(BOUND).unwrap();
    server.stopper.stop();
    assert!(parked.begin_handing_over().is_err());
    drop(parked);
    assert!(!server.ends_handed_over());
}
