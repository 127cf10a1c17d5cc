//! A queue of a ublk device on a thread, without the driver: the test takes the commands out of the
//! thread's queue, and answers them as the driver would.
//!
//! Invariant: the event loop and the frontend are the shipped ones; a descriptor is written only
//! while its tag's command is the driver's.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use nowait::{AioThreadQueue, EventSource, IoBuffer, Outcome, QueueFull, Transfer};

use crate::event_loop::tests::*;
use crate::frontend_kind::FrontendKind;
use crate::frontends::Frontends;
use crate::rate_limit::{Limits, TokenBucket};
use crate::threads::Shared;
use crate::ublk::ublk_channel::UblkStart;
use crate::ublk::ublk_cmd::{
    ABORTED, COMMIT_AND_FETCH_REQ, DESCRIPTOR_BYTES, F_ZERO_COPY, FETCH_REQ, IO_FUA,
    IO_NEED_REG_BUF, OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, OP_WRITE_ZEROES, data_position,
};
use crate::ublk::ublk_device::UblkDevice;

const DEPTH: u16 = 8;
const MAX_IO_BYTES: u32 = 64 << 10;

/// A command of the frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    op: u32,
    tag: u16,
    result: i32,
    address: u64,
}

/// The commands in the ring, with their tokens, and those that have ended.
#[derive(Default)]
pub(super) struct Driver {
    pub(super) commands: Vec<(Token, Command)>,
    pub(super) ended: Vec<(Token, i32)>,
    /// The memory of the requests of each tag, which the driver registers.
    memory: Vec<IoBuffer>,
    /// Storage refuses every transfer of it.
    refuses: bool,
    /// Transfers of it that were made.
    direct: u32,
    /// Numbers from which on registered buffers were given back.
    released: Vec<u16>,
}

/// A queue with commands, whose transfers are those of `T`.
pub(super) struct CommandQueue<T> {
    transfers: T,
    driver: Rc<RefCell<Driver>>,
    /// Transfers of registered memory that the storage refuses.
    refused: Vec<Token>,
}

impl<T> CommandQueue<T> {
    pub(super) fn new(transfers: T, driver: &Rc<RefCell<Driver>>) -> Self {
        Self { transfers, driver: driver.clone(), refused: Vec::new() }
    }
}

/// The number of the registered memory of tag 0.
const FIRST_NUMBER: u16 = 300;

// SAFETY: transfers are those of the queue below; tokens of commands have `FD_TOKEN`.
unsafe impl<T: IoQueue> IoQueue for CommandQueue<T> {
    nowait_testkit::pass_on!(self.transfers: attach detach submit);

    // SAFETY: as promised by the caller.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        if transfer.buffer < FIRST_NUMBER || transfer.buffer == u16::MAX {
            // SAFETY: as above.
            return unsafe { self.transfers.push(transfer, token) };
        }
        assert!(transfer.base.is_null() && transfer.must_not_wait);
        let mut driver = self.driver.borrow_mut();
        if driver.refuses {
            self.refused.push(token);
            return Ok(());
        }
        driver.direct += 1;
        let base = driver.memory[usize::from(transfer.buffer - FIRST_NUMBER)].as_mut_ptr();
        // SAFETY: the memory stays where it is until the test ends, and is not read before the
        // answer.
        unsafe { self.transfers.push(&Transfer { base, buffer: u16::MAX, ..*transfer }, token) }
    }

    fn reserve_buffers(&mut self, count: u16) -> Option<u16> {
        let memory = || IoBuffer::zeroed(MAX_IO_BYTES as usize).unwrap();
        self.driver.borrow_mut().memory = (0..count).map(|_| memory()).collect();
        Some(FIRST_NUMBER)
    }

    fn release_buffers(&mut self, first: u16) {
        self.driver.borrow_mut().released.push(first);
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut driver = self.driver.borrow_mut();
        let count = driver.ended.len() + self.refused.len();
        driver.ended.drain(..).for_each(|(token, result)| sink(token, result));
        self.refused.drain(..).for_each(|token| sink(token, -libc::EAGAIN));
        count + self.transfers.drain_completions(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        match self.has_completions() {
            true => Ok(()),
            false => self.transfers.wait(timeout),
        }
    }

    fn has_completions(&mut self) -> bool {
        !self.driver.borrow().ended.is_empty()
            || !self.refused.is_empty()
            || self.transfers.has_completions()
    }

    fn events(&self) -> &dyn EventSource {
        self
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        self
    }
}

impl<T: IoQueue> EventSource for CommandQueue<T> {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        self.transfers.events_mut().watch(fd, token, interest)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.transfers.events_mut().unwatch(fd, token);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.transfers.events().fd()
    }

    // SAFETY: as promised by the caller.
    unsafe fn command(
        &mut self,
        _: BorrowedFd<'_>,
        op: u32,
        _: u64,
        bytes: [u8; 16],
        token: Token,
    ) -> Result<(), Error> {
        assert_eq!(u16::from_ne_bytes([bytes[0], bytes[1]]), 0, "the number of the queue");
        let command = Command {
            op,
            tag: u16::from_ne_bytes([bytes[2], bytes[3]]),
            result: i32::from_ne_bytes(bytes[4..8].try_into().unwrap()),
            address: u64::from_ne_bytes(bytes[8..].try_into().unwrap()),
        };
        self.driver.borrow_mut().commands.push((token, command));
        Ok(())
    }
}

/// A thread with NBD and one queue of a device.
pub(super) struct Scene {
    pub(super) thread: EventLoop<Frontends, CommandQueue<AioThreadQueue>>,
    device: Arc<UblkDevice>,
    driver: Rc<RefCell<Driver>>,
    pub(super) descriptors: std::fs::File,
    removed: Arc<AtomicU32>,
}

impl Scene {
    fn new() -> Self {
        Self::with_features(0)
    }

    /// With a driver that has `features`.
    fn with_features(features: u64) -> Self {
        Self::of(SIZE, features)
    }

    /// With an image of `size` bytes and a driver that has `features`.
    fn of(size: u64, features: u64) -> Self {
        Self::prepared(size, features, |_| ())
    }

    /// The same; `prepare` is called with the export before the thread uses it.
    pub(super) fn prepared(size: u64, features: u64, prepare: impl FnOnce(&Shared)) -> Self {
        let driver: Rc<RefCell<Driver>> = Rc::default();
        let (context, engine) = parts_of(size, Config::default(), || {
            let transfers = AioThreadQueue::new(64).unwrap();
            CommandQueue::new(transfers, &driver)
        });
        let descriptors = tempfile::tempfile().unwrap();
        descriptors.set_len(64 << 10).unwrap();
        let character_device = OwnedFd::from(descriptors.try_clone().unwrap());
        let device =
            Arc::new(UblkDevice::simulated(character_device, (DEPTH, MAX_IO_BYTES), features));
        let removed: Arc<AtomicU32> = Arc::default();
        let counted = removed.clone();
        let on_removed = Box::new(move || _ = counted.fetch_add(1, Ordering::Relaxed));
        let mut thread = EventLoop::new(&context, engine, context.frontends()).unwrap();
        let (started, begun) = channel();
        prepare(&thread.shared);
        let used = registered(&thread).shared().begin_use().unwrap();
        let start = UblkStart { device: device.clone(), number: 0, used, on_removed, started };
        context.channels.ublk.start(start);
        thread.wake_up();
        begun.recv().unwrap().unwrap();
        Self { thread, device, driver, descriptors, removed }
    }

    /// Takes the only command of `tag` out of the ring.
    fn take(&mut self, tag: u16) -> (Token, Command) {
        let commands = &mut self.driver.borrow_mut().commands;
        let all: Vec<_> = commands.extract_if(.., |(_, command)| command.tag == tag).collect();
        assert_eq!(all.len(), 1, "commands of tag {tag}");
        all[0]
    }

    /// The driver has a request for `tag`. Returns the address of its data.
    pub(super) fn request(&mut self, tag: u16, op: u32, sectors: u32, start: u64) -> u64 {
        let (token, command) = self.take(tag);
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..4].copy_from_slice(&op.to_ne_bytes());
        bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
        bytes[8..16].copy_from_slice(&start.to_ne_bytes());
        self.descriptors.write_all_at(&bytes, u64::from(tag) * 24).unwrap();
        self.driver.borrow_mut().ended.push((token, 0));
        command.address
    }

    /// Runs the thread until `tag` is answered, and returns the result.
    pub(super) fn answer(&mut self, tag: u16) -> i32 {
        loop {
            self.iterate();
            let driver = self.driver.borrow();
            if let Some((_, command)) = driver.commands.iter().find(|(_, other)| other.tag == tag) {
                assert_eq!(command.op, COMMIT_AND_FETCH_REQ);
                return command.result;
            }
        }
    }

    fn iterate(&mut self) {
        self.thread.poll().unwrap();
        self.thread.run_once().unwrap();
    }

    /// The driver ends every command: no requests will come.
    fn abort_all(&mut self) {
        let mut driver = self.driver.borrow_mut();
        let Driver { commands, ended, .. } = &mut *driver;
        ended.extend(commands.drain(..).map(|(token, _)| (token, ABORTED)));
    }
}

/// The data at an address that the frontend has given to the driver.
fn data(address: u64, len: usize) -> &'static mut [u8] {
    let base = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the buffer of a tag lives until its thread ends, is as long as the longest request, and
    // is the driver's while the test uses it.
    unsafe { std::slice::from_raw_parts_mut(base, len) }
}

#[test]
fn each_tag_gets_an_aligned_buffer_of_its_own() {
    let scene = Scene::new();
    let driver = scene.driver.borrow();
    let mut fetched: Vec<_> = driver.commands.iter().map(|(_, command)| *command).collect();
    assert!(fetched.iter().all(|command| command.op == FETCH_REQ && command.result == 0));
    let tags: Vec<_> = fetched.iter().map(|command| command.tag).collect();
    assert_eq!(tags, (0..DEPTH).collect::<Vec<_>>());
    fetched.sort_by_key(|command| command.address);
    assert!(fetched.iter().all(|command| command.address % 4096 == 0 && command.address > 0));
    let apart = |pair: &[Command]| pair[1].address - pair[0].address >= u64::from(MAX_IO_BYTES);
    assert!(fetched.windows(2).all(apart));
}

#[test]
fn what_is_written_is_read_and_each_operation_has_its_result() {
    let mut scene = Scene::new();
    let address = scene.request(1, u32::from(OP_WRITE) | IO_FUA, 16, 8);
    data(address, 8192).fill(5);
    assert_eq!(scene.answer(1), 8192);
    let address = scene.request(0, u32::from(OP_READ), 32, 0);
    assert_eq!(scene.answer(0), 16384);
    let read = data(address, 16384);
    for (range, byte) in [(0..4096, 7), (4096..12288, 5), (12288..16384, 7)] {
        assert!(read[range.clone()].iter().all(|&b| b == byte), "{range:?}");
    }
    for (op, sectors, result) in [
        (OP_FLUSH, 0, 0),
        (OP_WRITE_ZEROES, 16, 0),
        (OP_READ, 16, 8192),
        (OP_DISCARD, 16, 0),
        // Zone operations and others that no parameter allows.
        (10, 8, -libc::EOPNOTSUPP),
    ] {
        let address = scene.request(1, u32::from(op), sectors, 8);
        assert_eq!(scene.answer(1), result, "operation {op}");
        if op == OP_READ {
            assert!(data(address, 8192).iter().all(|&byte| byte == 0), "zeroed");
        }
    }
}

#[test]
fn what_a_node_changes_is_in_the_dirty_bitmap() {
    let mut scene = Scene::new();
    add_bitmap(&scene.thread);
    for (op, dirty) in
        [(OP_READ, 0), (OP_WRITE, 1), (OP_FLUSH, 1), (OP_WRITE_ZEROES, 2), (OP_DISCARD, 3)]
    {
        scene.request(1, u32::from(op), 8, dirty * 8);
        scene.answer(1);
        assert_eq!(dirty_blocks(&scene.thread), dirty, "operation {op}");
    }
}

#[test]
fn a_request_past_the_end_and_a_refused_write_are_answered_with_their_errno() {
    let mut scene = Scene::new();
    scene.request(0, u32::from(OP_READ), 8, SIZE >> 9);
    assert_eq!(scene.answer(0), -libc::EINVAL);
    scene.request(0, u32::from(OP_WRITE), 16, (SIZE >> 9) - 8);
    assert_eq!(scene.answer(0), -libc::ENOSPC);
    let address = scene.request(0, u32::from(OP_WRITE), 8, 0);
    data(address, 4).copy_from_slice(&FORBIDDEN);
    assert_eq!(scene.answer(0), -libc::EPERM);
    // The tag goes on.
    scene.request(0, u32::from(OP_READ), 8, 0);
    assert_eq!(scene.answer(0), 4096);
}

#[test]
fn all_tags_are_served_at_once_and_each_gets_its_own_data() {
    let mut scene = Scene::new();
    let write = |scene: &mut Scene, tag: u16| {
        let address = scene.request(tag, u32::from(OP_WRITE), 8, u64::from(tag) * 8);
        data(address, 4096).fill(tag as u8 + 100);
    };
    (0..DEPTH).for_each(|tag| write(&mut scene, tag));
    (0..DEPTH).for_each(|tag| assert_eq!(scene.answer(tag), 4096));
    let addresses: Vec<_> = (0..DEPTH)
        .map(|tag| scene.request(tag, u32::from(OP_READ), 8, u64::from(tag) * 8))
        .collect();
    for (tag, address) in addresses.into_iter().enumerate() {
        assert_eq!(scene.answer(tag as u16), 4096);
        assert!(data(address, 4096).iter().all(|&byte| byte == tag as u8 + 100), "tag {tag}");
    }
}

#[test]
fn a_stopping_thread_serves_until_the_driver_has_ended_every_command() {
    let mut scene = Scene::new();
    scene.thread.shared.stop();
    scene.thread.frontend.begin_shutdown(&mut scene.thread.context);
    // The kernel writes what it has cached while the device is being stopped.
    scene.request(3, u32::from(OP_WRITE), 8, 64);
    assert_eq!(scene.answer(3), 4096);
    assert_eq!(scene.thread.context.members(), 1);
    scene.abort_all();
    scene.thread.run().unwrap();
    assert_eq!(scene.thread.context.members(), 0);
    assert_eq!(scene.removed.load(Ordering::Relaxed), 1, "this server has not stopped the device");
}

#[test]
fn commands_that_an_earlier_queue_has_left_in_the_ring_do_not_end_those_of_the_next_one() {
    let mut scene = Scene::new();
    scene.device.leave_for_test();
    scene.thread.wake_up();
    scene.iterate();
    scene.iterate();
    assert_eq!(scene.thread.context.members(), 0, "it has left");
    let left: Vec<_> = scene.driver.borrow_mut().commands.drain(..).collect();
    scene.device.begin_again();
    let (started, begun) = channel();
    let used = registered(&scene.thread).shared().begin_use().unwrap();
    let (device, on_removed) = (scene.device.clone(), Box::new(|| {}));
    let start = UblkStart { device, number: 0, used, on_removed, started };
    scene.thread.shared.channels[0].ublk.start(start);
    scene.thread.wake_up();
    begun.recv().unwrap().unwrap();
    scene.driver.borrow_mut().ended.extend(left.iter().map(|(token, _)| (*token, ABORTED)));
    scene.iterate();
    assert_eq!(scene.thread.context.members(), 1);
    scene.request(3, u32::from(OP_READ), 8, 0);
    assert_eq!(scene.answer(3), 4096);
}

/// The driver may register memory until then.
#[test]
fn numbers_of_registered_buffers_are_given_back_with_the_last_command_of_a_queue_that_has_left() {
    for (outcome, released) in [(ABORTED, &[FIRST_NUMBER][..]), (0, &[])] {
        let mut scene = Scene::with_features(F_ZERO_COPY);
        scene.device.leave_for_test();
        scene.thread.wake_up();
        scene.iterate();
        scene.iterate();
        assert_eq!(scene.thread.context.members(), 0, "it has left");
        let mut left: Vec<_> = scene.driver.borrow_mut().commands.drain(..).collect();
        let (last, _) = left.pop().unwrap();
        scene.driver.borrow_mut().ended.extend(left.iter().map(|(token, _)| (*token, ABORTED)));
        scene.iterate();
        assert!(scene.driver.borrow().released.is_empty());
        // A command that ends with a request has its memory registered.
        scene.driver.borrow_mut().ended.push((last, outcome));
        scene.iterate();
        assert_eq!(scene.driver.borrow().released, released, "the last one ended with {outcome}");
    }
}

#[test]
fn numbers_of_registered_buffers_are_kept_for_requests_that_a_queue_has_not_answered() {
    let mut scene = Scene::with_features(F_ZERO_COPY);
    scene.request(2, u32::from(OP_READ), 8, 0);
    scene.thread.poll().unwrap();
    scene.thread.take_events();
    // The request is taken, and left to the next server.
    scene.device.leave_for_test();
    scene.thread.wake_up();
    scene.iterate();
    scene.iterate();
    assert_eq!(scene.thread.context.members(), 0, "it has left");
    scene.abort_all();
    scene.iterate();
    assert!(scene.driver.borrow().released.is_empty());
}

#[test]
fn a_queue_that_ends_or_cannot_begin_gives_its_numbers_of_registered_buffers_back() {
    let mut scene = Scene::with_features(F_ZERO_COPY);
    scene.abort_all();
    scene.iterate();
    assert_eq!(scene.driver.borrow().released, [FIRST_NUMBER]);
    // A file without room for the descriptors of its requests cannot be mapped.
    let (started, begun) = channel();
    let file = std::fs::File::open("/dev/null").unwrap();
    let device = Arc::new(UblkDevice::simulated(file.into(), (DEPTH, MAX_IO_BYTES), F_ZERO_COPY));
    let used = registered(&scene.thread).shared().begin_use().unwrap();
    let start = UblkStart { device, number: 0, used, on_removed: Box::new(|| {}), started };
    scene.thread.shared.channels[0].ublk.start(start);
    scene.thread.wake_up();
    assert!(begun.recv().unwrap().is_err());
    assert_eq!(scene.driver.borrow().released, [FIRST_NUMBER; 2]);
}

#[test]
fn a_device_that_is_left_answers_what_is_under_way_and_takes_no_more() {
    let mut scene = Scene::new();
    scene.request(2, u32::from(OP_WRITE), 8, 64);
    scene.thread.poll().unwrap();
    scene.thread.take_events();
    scene.thread.service_interactive();
    assert_eq!(scene.thread.context.engine.in_flight(), 1);
    scene.device.leave_for_test();
    scene.thread.frontend.on_wake(&mut scene.thread.context);
    scene.request(3, u32::from(OP_WRITE), 8, 64);
    scene.thread.shared.stop();
    scene.thread.run().unwrap();
    let (_, answered) = scene.take(2);
    assert_eq!((answered.op, answered.result), (COMMIT_AND_FETCH_REQ, 4096));
    let driver = scene.driver.borrow();
    assert!(driver.commands.iter().all(|(_, command)| command.tag != 3), "tag 3 was answered");
    assert_eq!((scene.thread.context.members(), scene.removed.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn registered_data_are_not_copied_and_a_request_that_must_wait_is_done_with_a_copy() {
    let mut scene = Scene::with_features(F_ZERO_COPY);
    assert!(scene.driver.borrow().commands.iter().all(|(_, command)| command.address == 0));
    for refuses in [false, true] {
        scene.driver.borrow_mut().refuses = refuses;
        let byte = 20 + u8::from(refuses);
        let start = 16 + 16 * u64::from(refuses);
        // Equal data in the memory and behind the character device, which is how the driver has it.
        scene.driver.borrow_mut().memory[2][..8192].fill(byte);
        scene.descriptors.write_all_at(&[byte; 8192], data_position(0, 2)).unwrap();
        scene.request(2, u32::from(OP_WRITE), 16, start);
        assert_eq!(scene.answer(2), 8192);
        scene.request(3, u32::from(OP_READ), 16, start);
        assert_eq!(scene.answer(3), 8192);
        let mut read = scene.driver.borrow().memory[3][..8192].to_vec();
        if refuses {
            scene.descriptors.read_exact_at(&mut read, data_position(0, 3)).unwrap();
        }
        assert!(read.iter().all(|&read| read == byte), "refused: {refuses}");
    }
    assert_eq!(scene.driver.borrow().direct, 2);
    // The next request of the tag is tried without a copy again, and one that cannot be is not.
    scene.driver.borrow_mut().refuses = false;
    scene.request(3, u32::from(OP_READ), 16, 0);
    assert_eq!(scene.answer(3), 8192);
    assert_eq!(scene.driver.borrow().direct, 3);
    scene.request(3, u32::from(OP_READ) | IO_NEED_REG_BUF, 16, 0);
    assert_eq!(scene.answer(3), 8192);
    scene.request(3, u32::from(OP_WRITE), 8, (2 * SIZE) >> 9);
    assert_eq!(scene.answer(3), -libc::ENOSPC);
    assert_eq!(scene.driver.borrow().direct, 3);
}

#[test]
fn a_queue_over_the_limit_of_its_device_waits_and_its_changes_can_be_refused() {
    let mut scene = Scene::new();
    let day = TokenBucket::MAX_REFILL_TIME;
    let bucket = TokenBucket { size: 1, one_time_burst: 0, refill_time: day };
    let limits = Limits { requests: None, bytes: Some(bucket) };
    registered(&scene.thread).limits.set_of_clients(limits);
    scene.thread.review_exports();
    scene.request(0, u32::from(OP_READ), 8, 0);
    assert_eq!(scene.answer(0), 4096);
    scene.request(1, u32::from(OP_READ), 8, 0);
    (0..5).for_each(|_| scene.iterate());
    let is_answered = scene.driver.borrow().commands.iter().any(|(_, command)| command.tag == 1);
    assert!(!is_answered, "the limit does not hold");
    registered(&scene.thread).limits.set_of_clients(Limits::default());
    scene.thread.review_exports();
    assert_eq!(scene.answer(1), 4096);
    for (read_only, result) in [(true, -libc::EPERM), (false, 4096)] {
        registered(&scene.thread).export().set_read_only(read_only).unwrap();
        scene.request(2, u32::from(OP_WRITE), 8, 64);
        assert_eq!(scene.answer(2), result);
        scene.request(2, u32::from(OP_READ), 8, 64);
        assert_eq!(scene.answer(2), 4096);
    }
    let totals = registered(&scene.thread).statistics.totals(FrontendKind::Ublk);
    assert_eq!(totals.errnos, [(libc::EPERM, 1)]);
}

#[test]
fn the_last_sector_of_an_image_that_ends_in_it_is_padded_with_zeros() {
    // The image has 300 bytes of its last sector.
    let (size, last) = (SIZE - 212, (SIZE >> 9) - 1);
    for features in [0, F_ZERO_COPY] {
        let mut scene = Scene::of(size, features);
        let read = |scene: &mut Scene, sectors: u32, start: u64| {
            let address = scene.request(0, u32::from(OP_READ), sectors, start);
            let len = sectors as usize * 512;
            assert_eq!(scene.answer(0), len as i32);
            let mut bytes = vec![1; len];
            match features {
                0 => bytes.copy_from_slice(data(address, len)),
                _ => scene.descriptors.read_exact_at(&mut bytes, data_position(0, 0)).unwrap(),
            }
            bytes
        };
        let mut expected = vec![7; 1024];
        expected[812..].fill(0);
        // The driver's memory has something else before.
        scene.descriptors.write_all_at(&[3; 4096], data_position(0, 0)).unwrap();
        assert_eq!(read(&mut scene, 2, last - 1), expected);
        scene.descriptors.write_all_at(&[9; 512], data_position(0, 1)).unwrap();
        let address = scene.request(1, u32::from(OP_WRITE), 1, last);
        if features == 0 {
            data(address, 512).fill(9);
        }
        assert_eq!(scene.answer(1), 512);
        expected[512..812].fill(9);
        assert_eq!(read(&mut scene, 2, last - 1), expected);
        assert_eq!(
            registered(&scene.thread).export().disk().refresh(),
            Ok(size),
            "nothing is written behind the end"
        );
        for (op, result) in [(OP_READ, -libc::EINVAL), (OP_WRITE, -libc::ENOSPC)] {
            scene.request(0, u32::from(op), 2, last);
            assert_eq!(scene.answer(0), result);
        }
        for op in [OP_WRITE_ZEROES, OP_DISCARD] {
            scene.request(0, u32::from(op), 1, last);
            assert_eq!(scene.answer(0), 0);
        }
        assert_eq!(read(&mut scene, 1, last), [0; 512]);
    }
}
