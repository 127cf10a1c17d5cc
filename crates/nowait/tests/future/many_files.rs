//! Many files on shared engines: bytes against models while files are opened and closed, files that are
//! dropped in every order, and files that leave others working.

use std::any::Any;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use nowait::{
    AsyncFile, BlockDevice, BlockMap, Config, Flags, IoBuffer, LocalAsyncFile, LocalDriver,
    OpenOptions, WorkerPool,
};
use nowait_testkit::worker_only_image::{SEVEN, WorkerOnlyImage};
use nowait_testkit::{Random, TestQueueKind, required, seed, wait_until};

use crate::device_share::{Answer, TestFile, poll_once};
use crate::one_thread::{filled, join};
use crate::several_threads::block_on;
use crate::{COUNTED, SLOTS, alive, image};

const FILES: usize = 200;
const FILE_BYTES: u64 = 32 << 10;
/// Tasks that share the files, and the requests of each.
const PLAYERS: usize = 4;
const STEPS: u32 = 800;

/// A file, its contents, and a read that was begun.
struct Model<F: TestFile> {
    path: PathBuf,
    file: F,
    bytes: Vec<u8>,
    begun: Option<F::Request<Answer>>,
}

impl<F: TestFile> Model<F> {
    fn new(path: PathBuf, random: &mut Random, open: fn(&Path) -> F) -> Self {
        let bytes = random.bytes(FILE_BYTES as usize);
        std::fs::write(&path, &bytes).unwrap();
        Self { file: open(&path), path, bytes, begun: None }
    }

    /// A request at a random place; in one step of ten the file is closed, with a read in flight, and
    /// opened again.
    async fn step(&mut self, random: &mut Random, open: fn(&Path) -> F) {
        let pos = random.below(FILE_BYTES);
        let len = 1 + random.below(FILE_BYTES - pos);
        let inside = pos as usize..(pos + len) as usize;
        // The read has to see what was there when it was begun, and the file is not written meanwhile.
        if let Some(begun) = self.begun.take() {
            let (read, buffer) = begun.await;
            assert_eq!(read, Ok(buffer.len()));
            assert!(*buffer == self.bytes[..buffer.len()]);
        }
        match random.below(10) {
            0..5 => {
                let (read, buffer) = self.file.read_at(filled(len as usize, 0xee), pos).await;
                assert!(read == Ok(len as usize) && *buffer == self.bytes[inside]);
            }
            5..8 => {
                let mut buffer = filled(len as usize, 0);
                random.fill(&mut buffer);
                self.bytes[inside].copy_from_slice(&buffer);
                assert_eq!(self.file.write_at(buffer, pos, Flags::NONE).await.0, Ok(len as usize));
            }
            8 => {
                let mut read = self.file.read_at(filled(len as usize, 0xee), 0);
                let poll = |context: &mut Context<'_>| Poll::Ready(begin(&mut read, context));
                self.begun = poll_fn(poll).await.is_pending().then_some(read);
            }
            _ => {
                poll_once(self.file.read_at(filled(len as usize, 0), pos)).await;
                self.file = open(&self.path);
            }
        }
    }
}

fn begin<F: Future + Unpin>(future: &mut F, context: &mut Context<'_>) -> Poll<F::Output> {
    Pin::new(future).poll(context)
}

/// Plays with the files in turn.
async fn play<F: TestFile>(mut models: Vec<Model<F>>, mut random: Random, open: fn(&Path) -> F) {
    for _ in 0..STEPS {
        let at = random.below(models.len() as u64) as usize;
        models[at].step(&mut random, open).await;
    }
    for model in models {
        drop((model.begun, model.file));
        assert!(std::fs::read(&model.path).unwrap() == model.bytes, "{}", model.path.display());
    }
}

/// The files of each player, with its random numbers.
fn players<F: TestFile>(dir: &Path, open: fn(&Path) -> F) -> Vec<(Vec<Model<F>>, Random)> {
    let mut random = Random::from_seed(seed());
    let mut players: Vec<_> =
        (0..PLAYERS).map(|_| (Vec::new(), Random::from_seed(random.word()))).collect();
    for n in 0..FILES {
        let model = Model::new(dir.join(format!("{n}.img")), &mut random, open);
        players[n % PLAYERS].0.push(model);
    }
    players
}

fn open_local(path: &Path) -> LocalAsyncFile {
    LocalAsyncFile::open(path, OpenOptions::default()).unwrap()
}

fn open_async(path: &Path) -> AsyncFile {
    AsyncFile::open(path, OpenOptions::default()).unwrap()
}

#[test]
fn two_hundred_files_of_one_thread_agree_with_their_models_while_they_are_opened_and_closed() {
    let (dir, _) = image(0);
    let players = players(dir.path(), open_local);
    let all = players.into_iter().map(|(models, random)| play(models, random, open_local));
    LocalDriver::new().unwrap().block_on(join(all.collect()));
}

#[test]
fn two_hundred_files_of_several_threads_agree_with_their_models_while_they_are_opened_and_closed() {
    let (dir, _) = image(0);
    thread::scope(|scope| {
        for (models, random) in players(dir.path(), open_async) {
            scope.spawn(move || block_on(play(models, random, open_async)));
        }
    });
}

/// Every order of `n` things.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let longer = |order: Vec<usize>| {
        (0..n).map(move |at| {
            let mut order = order.clone();
            order.insert(at, n - 1);
            order
        })
    };
    orders(n - 1).into_iter().flat_map(longer).collect()
}

/// A driver, two files and a request in flight of each, to be dropped. The driver has run.
fn things(path: &Path) -> Vec<Option<Box<dyn Any>>> {
    let driver = LocalDriver::new().unwrap();
    let files = [open_local(path), open_local(path)];
    driver.block_on(async {
        assert_eq!(files[0].read_at(filled(512, 1), 0).await.0, Ok(512));
    });
    driver.wait(Some(Duration::from_millis(1)));
    let mut reads = files.each_ref().map(|file| file.read_at(filled(COUNTED[2], 1), 0));
    for read in &mut reads {
        assert!(begin(read, &mut Context::from_waker(Waker::noop())).is_pending());
    }
    let ([file, other], [read, other_read]) = (files, reads);
    vec![
        Some(Box::new(driver)),
        Some(Box::new(file)),
        Some(Box::new(other)),
        Some(Box::new(read)),
        Some(Box::new(other_read)),
    ]
}

#[test]
fn c45_files_futures_and_the_driver_may_be_dropped_in_every_order_also_by_the_end_of_their_thread()
{
    thread_local! {
        static HELD: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
    }
    let (_dir, path) = image(COUNTED[2] as u64);
    for order in orders(5) {
        let mut things = things(&path);
        for &at in &order {
            drop(things[at].take());
        }
        assert_eq!(alive(2), 0, "{order:?}");
    }
    // The thread's list of engines is dropped before the files, or after them.
    for is_held_first in [true, false] {
        for order in orders(5).into_iter().step_by(7) {
            let path = path.clone();
            let run = move || {
                if is_held_first {
                    HELD.with_borrow_mut(|held| held.push(Box::new(())));
                }
                let mut things = things(&path);
                for at in order {
                    HELD.with_borrow_mut(|held| held.extend(things[at].take()));
                }
            };
            thread::spawn(run).join().unwrap();
            assert_eq!(alive(2), 0);
        }
    }
}

#[test]
fn a_file_that_is_opened_while_its_thread_ends_is_refused_or_closed() {
    struct OpensAtTheEnd(PathBuf);
    impl Drop for OpensAtTheEnd {
        fn drop(&mut self) {
            if let Err(error) = LocalAsyncFile::open(&self.0, OpenOptions::default()) {
                assert_eq!(error.errno(), libc::ECANCELED);
            }
        }
    }
    thread_local! {
        static HELD: RefCell<Vec<OpensAtTheEnd>> = const { RefCell::new(Vec::new()) };
    }
    let (_dir, path) = image(4096);
    for is_held_first in [true, false] {
        let path = path.clone();
        let run = move || {
            let held = || HELD.with_borrow_mut(|held| held.push(OpensAtTheEnd(path.clone())));
            if is_held_first {
                held();
            }
            drop(open_local(&path));
            held();
        };
        thread::spawn(run).join().unwrap();
    }
}

fn disk(path: &Path) -> Arc<BlockDevice<dyn BlockMap>> {
    Arc::new(BlockDevice::open_mapped(path, OpenOptions::default()).unwrap())
}

/// `SLOTS` slots and so many requests of a file whose disk hangs that they fill all lists.
const TOO_MANY: u64 = 10 * SLOTS as u64;

fn config() -> Config {
    Config { slots: SLOTS, ..Config::default() }
}

/// Sends `TOO_MANY` reads of `file`, none of which ends, to the end of which the result waits.
fn fill<F: TestFile>(file: &F) -> Vec<F::Request<Answer>> {
    let mut reads: Vec<_> = (0..TOO_MANY).map(|n| file.read_at(filled(512, 0), n * 512)).collect();
    for read in &mut reads {
        assert!(begin(read, &mut Context::from_waker(Waker::noop())).is_pending());
    }
    reads
}

/// Reads of two files beside one whose disk hangs: one is served by the kernel, the other by workers.
async fn read_both<F: TestFile>(plain: F, workers: F) {
    for n in 0..50 {
        let (read, buffer) = plain.read_at(filled(512, 0), n * 512).await;
        assert!(read == Ok(512) && buffer.iter().all(|&byte| byte == 0));
        let (read, buffer) = workers.read_at(filled(512, 0), n * 512).await;
        assert!(read == Ok(512) && buffer.iter().all(|&byte| byte == SEVEN));
    }
}

fn all_are_sevens(reads: Vec<Answer>) {
    assert_eq!(reads.len() as u64, TOO_MANY);
    for (read, buffer) in reads {
        assert!(read == Ok(512) && buffer.iter().all(|&byte| byte == SEVEN));
    }
}

#[test]
fn a_file_of_one_thread_whose_disk_hangs_leaves_others_working_however_many_requests_it_has() {
    for kind in TestQueueKind::REAL {
        let (dir, path) = image(TOO_MANY * 512);
        let Some(queue) = required("queue", kind.try_queue(SLOTS)) else { continue };
        let hanging = WorkerOnlyImage::default();
        let device = |name: &str, image: &WorkerOnlyImage| {
            image.device(&dir.path().join(name), TOO_MANY * 512)
        };
        let file = LocalAsyncFile::with_queue(
            device("hangs", &hanging),
            WorkerPool::new(4),
            queue,
            config(),
        )
        .unwrap();
        let driver = LocalDriver::new().unwrap();
        let held = hanging.hold();
        let reads = fill(&file);
        let plain = file.another(disk(&path)).unwrap();
        let workers = file.another(device("works", &WorkerOnlyImage::default())).unwrap();
        driver.block_on(read_both(plain, workers));
        drop(held);
        all_are_sevens(driver.block_on(join(reads)));
    }
}

#[test]
fn a_file_of_several_threads_whose_disk_hangs_leaves_others_working_however_many_requests_it_has() {
    for kind in TestQueueKind::REAL {
        let (dir, path) = image(TOO_MANY * 512);
        if kind.queue(SLOTS).is_none() {
            continue;
        }
        let hanging = WorkerOnlyImage::default();
        let device = |name: &str, image: &WorkerOnlyImage| {
            image.device(&dir.path().join(name), TOO_MANY * 512)
        };
        let make = move || kind.try_queue(SLOTS);
        let disk_that_hangs = device("hangs", &hanging);
        let file =
            AsyncFile::with_queue(disk_that_hangs, WorkerPool::new(4), config(), make).unwrap();
        let held = hanging.hold();
        let reads = fill(&file);
        let plain = file.another(disk(&path)).unwrap();
        let workers = file.another(device("works", &WorkerOnlyImage::default())).unwrap();
        block_on(read_both(plain, workers));
        drop(held);
        all_are_sevens(block_on(join(reads)));
    }
}

/// A file that is closed is closed for the kernel as well, while others of its engine are open.
#[test]
fn a_closed_file_leaves_its_device_while_others_of_its_engine_are_open() {
    let (_dir, path) = image(1 << 20);
    let file = open_local(&path);
    let disk: Arc<BlockDevice<dyn BlockMap>> = disk(&path);
    let other = file.another(disk.clone()).unwrap();
    LocalDriver::new().unwrap().block_on(async {
        assert_eq!(other.read_at(filled(512, 1), 0).await.0, Ok(512));
    });
    drop(other);
    assert_eq!(Arc::strong_count(&disk), 1);
    let file = open_async(&path);
    let other = file.another(disk.clone()).unwrap();
    assert_eq!(block_on(other.read_at(filled(512, 1), 0)).0, Ok(512));
    drop(other);
    wait_until("the end of the device", || Arc::strong_count(&disk) == 1);
    assert_eq!(block_on(file.read_at(filled(512, 1), 0)).0, Ok(512));
}

#[test]
fn a_future_that_was_not_sent_keeps_its_file_open() {
    let (_dir, path) = image(4096);
    let read = open_local(&path).read_at(IoBuffer::zeroed(4096).unwrap(), 0);
    assert_eq!(LocalDriver::new().unwrap().block_on(read).0, Ok(4096));
    let read = open_async(&path).read_at(IoBuffer::zeroed(4096).unwrap(), 0);
    assert_eq!(block_on(read).0, Ok(4096));
}
