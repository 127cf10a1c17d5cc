//! A served image, of data and holes as a test wants them.
//!
//! Invariant: the server has ended, and in good order, when a scene is over.
//! Knows: the public face of the server, stream, client. Known by: the tests of this program.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nowait::{Config, Disk};
use nowait_server::{Device, Export, Listener, Options, QueueKind, Server, Stopped, Stopper, Tls};
use rustls::pki_types::CertificateDer;
use tempfile::TempDir;

use crate::client::{Client, Mode};
use crate::stream;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const TIB: u64 = 1 << 40;

/// The name of a second export, and what is in it.
pub(crate) const OTHER: &str = "other";
pub(crate) const OTHER_BYTE: u8 = 0xee;

const BESIDE: &str = "beside";

/// How long requests in flight may take when a scene is over.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a byte of data at `at` is; never 0.
pub(crate) fn byte_at(at: u64) -> u8 {
    (at / 512 % 251) as u8 + 1
}

/// A running server of one image.
pub(crate) struct Scene {
    image: PathBuf,
    socket: PathBuf,
    stopper: Stopper,
    running: Option<JoinHandle<Result<Stopped, nowait::Error>>>,
    _directories: [TempDir; 2],
}

impl Scene {
    /// Serves an image of `size` bytes that has data in `data`, each a first byte and a length,
    /// and holes elsewhere.
    pub(crate) fn new(size: u64, data: &[(u64, u64)]) -> Self {
        Self::with(size, data, nowait::OpenOptions::default())
    }

    /// The same, opened with `options`.
    pub(crate) fn with(size: u64, data: &[(u64, u64)], options: nowait::OpenOptions) -> Self {
        Self::configured(size, data, options, Config::default(), Tls::Off)
    }

    /// As `new`, by an engine with so many slots.
    pub(crate) fn with_slots(size: u64, data: &[(u64, u64)], slots: u32) -> Self {
        let config = Config { slots, ..Config::default() };
        Self::configured(size, data, nowait::OpenOptions::default(), config, Tls::Off)
    }

    /// As `new`, for clients that ask for TLS. Also gives the certificate to know it by.
    pub(crate) fn with_tls(size: u64, data: &[(u64, u64)]) -> (Self, CertificateDer<'static>) {
        let (credentials, cert) = stream::credentials();
        let (options, tls) = (nowait::OpenOptions::default(), Tls::Offered(credentials));
        (Self::configured(size, data, options, Config::default(), tls), cert)
    }

    /// As `new`, with a second export called [`OTHER`], of as many bytes, all of which are
    /// [`OTHER_BYTE`].
    pub(crate) fn with_other(size: u64, data: &[(u64, u64)]) -> Self {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().write_all_at(&vec![OTHER_BYTE; size as usize], 0).unwrap();
        file.as_file().sync_all().unwrap();
        let options = nowait::OpenOptions::default();
        let disk = Arc::new(Disk::open(file.path(), options).unwrap());
        let other = Export::new(Device::new(disk, 4, OTHER.into(), String::new()));
        Self::serving(size, data, options, Config::default(), Tls::Off, Some(other))
    }

    fn configured(
        size: u64,
        data: &[(u64, u64)],
        options: nowait::OpenOptions,
        config: Config,
        tls: Tls,
    ) -> Self {
        Self::serving(size, data, options, config, tls, None)
    }

    fn serving(
        size: u64,
        data: &[(u64, u64)],
        options: nowait::OpenOptions,
        config: Config,
        tls: Tls,
        other: Option<Export>,
    ) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.img");
        let file = File::create(&image).unwrap();
        file.set_len(size).unwrap();
        for &(pos, len) in data {
            let bytes: Vec<u8> = (pos..pos + len).map(byte_at).collect();
            file.write_all_at(&bytes, pos).unwrap();
        }
        file.sync_all().unwrap();
        let disk = Arc::new(Disk::open(&image, options).unwrap());
        disk.scan();
        // The path of a Unix socket has a bound that the path of this directory may exceed.
        let sockets = tempfile::tempdir().unwrap();
        let socket = sockets.path().join("nbd");
        let paths = [socket.clone(), socket.with_file_name(BESIDE)];
        let listeners = paths.map(|path| Listener::unix(&path).unwrap()).into();
        let device = Device::new(disk, config.workers, String::new(), String::new());
        let kind = QueueKind::Auto;
        let options = Options { queues: 1, kind, config, tls, max_connections: 16 };
        let exports = [Export::new(device)].into_iter().chain(other).collect();
        let server = Server::start(exports, listeners, options).unwrap();
        let stopper = server.stopper();
        let running = Some(std::thread::spawn(move || server.run(PATIENCE)));
        Self { image, socket, stopper, running, _directories: [directory, sockets] }
    }

    pub(crate) fn connect(&self, mode: Mode) -> Client {
        Client::connect(&self.socket, mode)
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Another socket on which the server listens, too.
    pub(crate) fn socket_beside(&self) -> PathBuf {
        self.socket.with_file_name(BESIDE)
    }

    /// The image, past the server.
    pub(crate) fn file(&self) -> File {
        OpenOptions::new().read(true).open(&self.image).unwrap()
    }

    /// The same, to do something to it that the server does not know of.
    pub(crate) fn writable(&self) -> File {
        OpenOptions::new().write(true).open(&self.image).unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stopper.stop();
        let ended = self.running.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert_eq!(ended.unwrap().unwrap().unwrap().unfinished, 0);
        }
    }
}
