//! A served image with data and holes where a test needs them.
//!
//! Invariant: dropping a scene shuts the server down without unfinished requests.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nowait::{BlockDevice, Config};
use nowait_server::{
    AnyExport, Export, Exports, Listener, Options, Server, ShutdownHandle, ShutdownReport, Tls,
};
use rustls::pki_types::CertificateDer;
use tempfile::TempDir;

use nowait_testkit::nbd::Mode;

use crate::client::{self, Client};
use crate::stream;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const TIB: u64 = 1 << 40;

/// The name of a second export, and its contents.
pub(crate) const OTHER: &str = "other";
pub(crate) const OTHER_BYTE: u8 = 0xee;

const BESIDE: &str = "beside";

/// Shutdown timeout for the requests in flight.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// The byte of data at `at`; never 0.
pub(crate) fn byte_at(at: u64) -> u8 {
    (at / 512 % 251) as u8 + 1
}

/// The bytes of data in a range; by sectors, because tests read many bytes and are compiled for no speed.
pub(crate) fn bytes_at(range: Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
    let mut at = range.start;
    while at < range.end {
        let end = (at / 512 * 512 + 512).min(range.end);
        bytes.resize((end - range.start) as usize, byte_at(at));
        at = end;
    }
    bytes
}

/// Bytes that differ from those of data everywhere in a range.
pub(crate) fn inverted_at(range: Range<u64>) -> Vec<u8> {
    let mut bytes = bytes_at(range);
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    bytes
}

/// The options of a disk without other writers.
fn locked() -> nowait::OpenOptions {
    nowait::OpenOptions::new().cache_holes(true)
}

/// A running server of one image.
pub(crate) struct Scene {
    image: PathBuf,
    socket: PathBuf,
    stopper: ShutdownHandle,
    exports: Exports,
    running: Option<JoinHandle<Result<ShutdownReport, nowait::Error>>>,
    _directories: [TempDir; 2],
}

impl Scene {
    /// Serves an image of `size` bytes that has data in `data`, each a first byte and a length,
    /// and holes elsewhere.
    pub(crate) fn new(size: u64, data: &[(u64, u64)]) -> Self {
        Self::with(size, data, locked())
    }

    /// The same, opened with `options`.
    pub(crate) fn with(size: u64, data: &[(u64, u64)], options: nowait::OpenOptions) -> Self {
        Self::configured(size, data, options, Config::default(), Tls::Off)
    }

    /// Like `new`, with an engine of `slots` slots.
    pub(crate) fn with_slots(size: u64, data: &[(u64, u64)], slots: u32) -> Self {
        let config = Config { slots, ..Config::default() };
        Self::configured(size, data, locked(), config, Tls::Off)
    }

    /// Like `new`, with TLS on offer. Also returns the server's certificate.
    pub(crate) fn with_tls(size: u64, data: &[(u64, u64)]) -> (Self, CertificateDer<'static>) {
        let (credentials, cert) = stream::credentials();
        let (options, tls) = (locked(), Tls::Offered(credentials));
        (Self::configured(size, data, options, Config::default(), tls), cert)
    }

    /// Like `new`, with a second export called [`OTHER`], of the same size, filled with
    /// [`OTHER_BYTE`].
    pub(crate) fn with_other(size: u64, data: &[(u64, u64)]) -> Self {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().write_all_at(&vec![OTHER_BYTE; size as usize], 0).unwrap();
        file.as_file().sync_all().unwrap();
        let options = locked();
        let disk = Arc::new(BlockDevice::open(file.path(), options).unwrap());
        let other = AnyExport::new(Export::new(disk, OTHER.into(), String::new()));
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
        other: Option<AnyExport>,
    ) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.img");
        let file = File::create(&image).unwrap();
        file.set_len(size).unwrap();
        for &(pos, len) in data {
            file.write_all_at(&bytes_at(pos..pos + len), pos).unwrap();
        }
        file.sync_all().unwrap();
        let disk = Arc::new(BlockDevice::open(&image, options).unwrap());
        disk.scan();
        // The path of a Unix socket has a length limit that the path of this directory may exceed.
        let sockets = tempfile::tempdir().unwrap();
        let socket = sockets.path().join("nbd");
        let paths = [socket.clone(), socket.with_file_name(BESIDE)];
        let listeners = paths.map(|path| Listener::unix(&path).unwrap()).into();
        let export = Export::new(disk, String::new(), String::new());
        let options = Options { config, tls, max_connections: 16, ..Options::default() };
        let exports = [AnyExport::new(export)].into_iter().chain(other).collect();
        let server = Server::start(exports, listeners, options).unwrap();
        let (stopper, exports) = (server.shutdown_handle(), server.exports());
        let running = Some(std::thread::spawn(move || server.run(SHUTDOWN_TIMEOUT)));
        Self { image, socket, stopper, exports, running, _directories: [directory, sockets] }
    }

    pub(crate) fn connect(&self, mode: Mode) -> Client {
        client::connect(&self.socket, mode)
    }

    pub(crate) fn exports(&self) -> &Exports {
        &self.exports
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// A second socket of the same server.
    pub(crate) fn socket_beside(&self) -> PathBuf {
        self.socket.with_file_name(BESIDE)
    }

    /// The image file, bypassing the server.
    pub(crate) fn file(&self) -> File {
        OpenOptions::new().read(true).open(&self.image).unwrap()
    }

    /// The same, for changes behind the server's back.
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
