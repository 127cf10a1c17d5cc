//! A server of one image at two vhost-user sockets, and by NBD.
//!
//! Invariant: dropping a scene shuts the server down without unfinished requests.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use nowait::{BlockDevice, BlockMap, Config, OpenOptions};
use nowait_server::{
    AnyExport, Export, Exports, Listener, Options, QueueKind, Server, ShutdownHandle,
    ShutdownReport,
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
    _image_directory: Option<TempDir>,
    _socket_directory: TempDir,
}

impl Scene {
    /// Serves an image on one thread, whose sector N has the bytes N + 1, modulo 251.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.img");
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 251) as u8 + 1).collect();
        std::fs::write(&image, bytes).unwrap();
        let disk = Arc::new(BlockDevice::open(&image, OpenOptions::default()).unwrap());
        let workers = Config::default().workers;
        let mut scene = Self::of(Export::new(disk, workers, "golden".into(), String::new()));
        (scene.image, scene._image_directory) = (image, Some(directory));
        scene
    }

    /// Serves `export` on one thread.
    pub(crate) fn of<M: BlockMap + 'static>(export: Export<M>) -> Self {
        // The path of a socket has a length limit that the path of images may exceed.
        let socket_directory = tempfile::tempdir().unwrap();
        let sockets = ["a", "b"].map(|name| socket_directory.path().join(name));
        let export = sockets.iter().fold(AnyExport::new(export), |export, socket| {
            export.at_vhost_user(Listener::unix(socket).unwrap())
        });
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
            _image_directory: None,
            _socket_directory: socket_directory,
        }
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
