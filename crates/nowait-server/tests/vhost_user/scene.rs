//! A server of one image at two vhost-user sockets.
//!
//! Invariant: dropping a scene shuts the server down without unfinished requests.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use nowait::{BlockDevice, Config, OpenOptions};
use nowait_server::{
    AnyExport, Export, Listener, Options, QueueKind, Server, ShutdownHandle, ShutdownReport,
};
use nowait_testkit::BOUND;
use tempfile::TempDir;

/// Size of the image in bytes.
pub(crate) const SIZE: u64 = 4 << 20;

/// A running server.
pub(crate) struct Scene {
    pub(crate) image: PathBuf,
    pub(crate) sockets: [PathBuf; 2],
    stopper: ShutdownHandle,
    running: Option<JoinHandle<Result<ShutdownReport, nowait::Error>>>,
    _directories: [TempDir; 2],
}

impl Scene {
    /// Serves an image on one thread, whose sector N has the bytes N + 1, modulo 251.
    pub(crate) fn new() -> Self {
        let image_directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // The path of a socket has a length limit that the path of this directory may exceed.
        let socket_directory = tempfile::tempdir().unwrap();
        let image = image_directory.path().join("disk.img");
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 251) as u8 + 1).collect();
        std::fs::write(&image, bytes).unwrap();
        let sockets = ["a", "b"].map(|name| socket_directory.path().join(name));
        let disk = Arc::new(BlockDevice::open(&image, OpenOptions::default()).unwrap());
        let workers = Config::default().workers;
        let export = Export::new(disk, workers, "golden".into(), String::new());
        let export = sockets.iter().fold(AnyExport::new(export), |export, socket| {
            export.at_vhost_user(Listener::unix(socket).unwrap())
        });
        let options = Options { kind: QueueKind::Auto, ..Options::default() };
        let server = Server::start(vec![export], Vec::new(), options).unwrap();
        let stopper = server.shutdown_handle();
        let running = Some(std::thread::spawn(move || server.run(BOUND)));
        let _directories = [image_directory, socket_directory];
        Self { image, sockets, stopper, running, _directories }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stopper.stop();
        let report = self.running.take().unwrap().join().unwrap();
        if !std::thread::panicking() {
            assert_eq!(report.unwrap().unfinished, 0);
            assert!(self.sockets.iter().all(|socket| !socket.exists()), "a socket is left behind");
        }
    }
}
