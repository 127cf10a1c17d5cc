//! A server of disks of two formats, its clients, and writers that change all of a disk at random.
//!
//! Invariant: dropping a scene shuts the server down without unfinished requests.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nowait::{BlockDevice, BlockMap, Error, OpenOptions, Storage};
use nowait_image::create::{CreateOptions, create};
use nowait_image::{ChainOptions, Format, Image};
use nowait_server::{
    AnyExport, BackupEnd, BackupError, BackupSpec, BackupStatus, Export, ExportId, Exports,
    Listener, Options, Server, ShutdownHandle, ShutdownReport, scratch_file,
};
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::{BOUND, Random, Scratch};

pub(crate) const BLOCK: u64 = BackupSpec::BLOCK_BYTES;
/// The disks end within a block.
pub(crate) const SIZE: u64 = 40 * BLOCK + 4096;
/// How long a pause may take.
pub(crate) const PAUSE: Duration = Duration::from_secs(30);

pub(crate) type Disk = Arc<BlockDevice<dyn BlockMap>>;

/// A kind of disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Raw,
    /// Raw, with its holes cached.
    Sparse,
    Qcow2,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Raw, Self::Sparse, Self::Qcow2];

    /// An empty disk, and the image that has to stay open with it.
    fn open(self, path: &Path) -> (Disk, Option<Image>) {
        if let Self::Qcow2 = self {
            create(path, &CreateOptions::new(Format::Qcow2, Some(SIZE))).expect("an image");
            let options = ChainOptions { writable: true, ..ChainOptions::default() };
            let image = nowait_image::open(path, &options).expect("the image");
            return (image.device(), Some(image));
        }
        std::fs::File::create(path).and_then(|file| file.set_len(SIZE)).expect("a sparse file");
        let options = OpenOptions::new().cache_holes(matches!(self, Self::Sparse));
        let disk = BlockDevice::open(path, options).expect("the file");
        disk.scan();
        (Arc::new(disk), None)
    }
}

/// A running server.
pub(crate) struct Scene {
    pub(crate) exports: Exports,
    pub(crate) directory: Scratch,
    stopper: ShutdownHandle,
    running: Option<JoinHandle<Result<ShutdownReport, Error>>>,
    _images: Vec<Image>,
}

impl Scene {
    /// A server of empty disks of these kinds, named by their indices, on two threads.
    pub(crate) fn of(kinds: &[Kind]) -> Self {
        let directory = Scratch::new();
        let (mut images, mut disks) = (Vec::new(), Vec::new());
        for (n, kind) in kinds.iter().enumerate() {
            let (disk, image) = kind.open(&directory.join(&format!("{n}.img")));
            images.extend(image);
            disks.push(disk);
        }
        Self::serving(directory, disks, images)
    }

    /// A server of `disks`, named by their indices, on two threads.
    pub(crate) fn serving(directory: Scratch, disks: Vec<Disk>, images: Vec<Image>) -> Self {
        let export = |(n, disk): (usize, Disk)| {
            AnyExport::new(Export::new(disk, n.to_string(), String::new()))
        };
        let exports = disks.into_iter().enumerate().map(export).collect();
        let listener = Listener::unix(&directory.join("s")).expect("a socket");
        let options = Options { threads: 2, max_connections: 64, ..Options::default() };
        let server = Server::start(exports, vec![listener], options).expect("a server");
        let (stopper, exports) = (server.shutdown_handle(), server.exports());
        let running = Some(std::thread::spawn(move || server.run(BOUND)));
        Self { exports, directory, stopper, running, _images: images }
    }

    pub(crate) fn connect(&self, name: &str) -> Client {
        Client::connect_to(&self.directory.join("s"), name, Mode::Structured).expect("a client")
    }

    pub(crate) fn id(&self, name: &str) -> ExportId {
        self.exports.find(name).expect("the export")
    }

    /// A storage for scratch as large as a disk.
    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        let size = BackupSpec::scratch_size(SIZE);
        scratch_file(self.directory.path(), None, size).expect("a scratch file")
    }

    /// A backup of an export, with scratch for all of its disk.
    pub(crate) fn spec(&self, name: &str) -> BackupSpec {
        BackupSpec {
            export: self.id(name),
            name: BackupSpec::usual_name(name),
            bitmap: None,
            only_dirty: false,
            discards: false,
            scratch: self.storage(),
            scratch_bytes: BackupSpec::scratch_size(SIZE),
        }
    }

    /// Begins a backup.
    pub(crate) fn begin(&self, spec: BackupSpec) -> Result<Vec<ExportId>, BackupError> {
        self.exports.begin_backups(vec![spec], PAUSE)
    }

    /// Ends the backup of an export.
    pub(crate) fn end(&self, name: &str, end: BackupEnd) -> Result<(), BackupError> {
        self.exports.end_backups(&[self.id(name)], end, PAUSE)
    }

    /// The only backup.
    pub(crate) fn status(&self) -> BackupStatus {
        let mut all = self.exports.backups();
        assert_eq!(all.len(), 1);
        all.remove(0)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stopper.stop();
        } else if self.running.is_some() {
            self.stop();
        }
    }
}

impl Scene {
    /// Ends the server. What is known of its exports stays.
    pub(crate) fn stop(&mut self) {
        self.stopper.stop();
        let report = self.running.take().expect("a server").join().expect("its end");
        assert_eq!(report.expect("its report").unfinished, 0);
    }
}

/// All bytes of an export.
pub(crate) fn all_of(client: &mut Client) -> Vec<u8> {
    let parts = (0..client.size).step_by(1 << 20).collect::<Vec<_>>();
    let size = client.size;
    let read = |at| client.read(at, (size - at).min(1 << 20) as u32).expect("a read");
    parts.into_iter().flat_map(read).collect()
}

/// A random change of the disk, of bytes that are whole sectors or not.
pub(crate) fn change(random: &mut Random) -> Command {
    let unit = [1, 512, 4096, BLOCK][random.below(4) as usize];
    let offset = random.below(SIZE / unit) * unit;
    let most = [1, 4096, 3 * BLOCK, 20 * BLOCK][random.below(4) as usize];
    let len = (random.below(most) + 1).next_multiple_of(unit).min(SIZE - offset);
    match random.below(5) {
        0 => Command::Zero { offset, len: len as u32, keep: random.chance(50) },
        1 => Command::Trim { offset, len: len as u32 },
        2 => Command::Flush,
        _ => Command::Write { offset, data: random.bytes(len as usize), fua: random.chance(10) },
    }
}

/// Makes `count` changes, up to `depth` simultaneously.
pub(crate) fn change_all(client: &mut Client, random: &mut Random, count: u64, depth: u64) {
    let mut in_flight = 0;
    for _ in 0..count {
        while in_flight > 0 && (in_flight >= depth || random.chance(30)) {
            client.receive().expect("an answer").1.expect("a change");
            in_flight -= 1;
        }
        client.send(&change(random)).expect("a server that takes requests");
        in_flight += 1;
    }
    for _ in 0..in_flight {
        client.receive().expect("an answer").1.expect("a change");
    }
}

/// Runs `writers` clients of export `name`, which change it at random until `run` has returned.
pub(crate) fn while_written<T>(
    scene: &Scene,
    name: &str,
    (writers, seed): (u64, u64),
    run: impl FnOnce() -> T,
) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (is_over, mut client) = (&is_over, scene.connect(name));
            scope.spawn(move || {
                let mut random = Random::from_seed(seed + writer);
                while !is_over.load(Ordering::SeqCst) {
                    let depth = 1 + random.below(16);
                    change_all(&mut client, &mut random, 20, depth);
                }
            });
        }
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        is_over.store(true, Ordering::SeqCst);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
