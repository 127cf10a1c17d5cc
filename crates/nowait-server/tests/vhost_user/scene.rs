//! A server of one image at two vhost-user sockets, and by NBD.
//!
//! Invariant: dropping a scene shuts the server down without unfinished requests.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use nowait::{BlockDevice, OpenOptions};
use nowait_server::{
    AnyExport, DeviceSocket, Export, Exports, Listener, Options, PausedServer, QueueKind, Server,
    ShutdownHandle, ShutdownReport,
};
use nowait_testkit::BOUND;
use tempfile::TempDir;

/// Size of the image in bytes.
pub(crate) const SIZE: u64 = 4 << 20;

/// A running server.
pub(crate) struct Scene {
    pub(crate) image: PathBuf,
    pub(crate) sockets: [PathBuf; 2],
    /// The socket of NBD.
    pub(crate) nbd: PathBuf,
    pub(crate) exports: Exports,
    stopper: ShutdownHandle,
    running: Option<JoinHandle<Result<ShutdownReport, nowait::Error>>>,
    directories: Vec<TempDir>,
}

impl Scene {
    /// Serves an image on one thread, whose sector N has the bytes N + 1, modulo 251.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.img");
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 251) as u8 + 1).collect();
        std::fs::write(&image, bytes).unwrap();
        let disk = Arc::new(BlockDevice::open(&image, OpenOptions::default()).unwrap());
        let mut scene = Self::of(Export::new(disk, "golden".into(), String::new()));
        scene.image = image;
        scene.directories.push(directory);
        scene
    }

    /// Serves `export` on one thread.
    pub(crate) fn of(export: Export) -> Self {
        // The path of a socket has a length limit that the path of images may exceed.
        let socket_directory = tempfile::tempdir().unwrap();
        let sockets = ["a", "b"].map(|name| socket_directory.path().join(name));
        let export = sockets.iter().fold(AnyExport::new(export), |export, socket| {
            export.with_device(DeviceSocket::Listener(Listener::unix(socket).unwrap()))
        });
        Self::start(export, sockets, socket_directory)
    }

    /// Serves an image to the VMMs that listen at `socket`.
    pub(crate) fn connecting(socket: &Path) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.img");
        std::fs::write(&image, vec![7; SIZE as usize]).unwrap();
        let disk = Arc::new(BlockDevice::open(&image, OpenOptions::default()).unwrap());
        let export = AnyExport::new(Export::new(disk, String::new(), String::new()));
        let export = export.with_device(DeviceSocket::ConnectsTo(socket.to_owned()));
        let mut scene = Self::start(export, Default::default(), tempfile::tempdir().unwrap());
        scene.image = image;
        scene.directories.push(directory);
        scene
    }

    /// Another server takes over the devices of this one, which is parked, as another process does.
    pub(crate) fn succeed(&mut self, parked: PausedServer) {
        let disk = Arc::new(BlockDevice::open(&self.image, OpenOptions::default()).unwrap());
        let export = Export::new(disk, "golden".into(), String::new());
        let directory = tempfile::tempdir().unwrap();
        let export = AnyExport::new(export);
        let mut next = Self::start(export, self.sockets.clone(), directory);
        next.directories.append(&mut self.directories);
        next.image = self.image.clone();
        let devices = parked.devices(BOUND).unwrap();
        assert_eq!(devices.len(), self.sockets.len());
        parked.release();
        let id = next.exports.list()[0].0;
        for (_, mut device) in devices {
            let listener = device.listener.take().unwrap();
            let socket = listener.as_fd().try_clone_to_owned().unwrap();
            device.listener = Some(Arc::new(Listener::handed_over(socket, true).unwrap()));
            next.exports.restore_device(id, device).unwrap();
        }
        *self = next;
    }

    fn start(export: AnyExport, sockets: [PathBuf; 2], socket_directory: TempDir) -> Self {
        let options = Options { kind: QueueKind::Auto, ..Options::default() };
        let nbd = socket_directory.path().join("nbd");
        let listener = Listener::unix(&nbd).unwrap();
        let server = Server::start(vec![export], vec![listener], options).unwrap();
        let (stopper, exports) = (server.shutdown_handle(), server.exports());
        let running = Some(std::thread::spawn(move || server.run(BOUND)));
        Self {
            image: PathBuf::new(),
            sockets,
            nbd,
            exports,
            stopper,
            running,
            directories: vec![socket_directory],
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stopper.stop();
        let report = self.running.take().unwrap().join().unwrap();
        if !std::thread::panicking() {
            let report = report.unwrap();
            assert_eq!(report.unfinished, 0);
            assert!(
                report.handed_over || self.sockets.iter().all(|socket| !socket.exists()),
                "a socket is left behind"
            );
        }
    }
}
