//! A queue of a virtual machine on an event loop whose iterations the test runs: when its driver is
//! asked for kicks, and what a request costs.
//!
//! Invariant: one thread is driver and server in turn, so that every run does the same.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use nowait::AioThreadQueue;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use crate::event_loop::tests::request_cost::{check_cost, wanted};
use crate::event_loop::tests::*;
use crate::vhost_user::device_config::Features;
use crate::vhost_user::guest_memory::{GuestMemory, RegionAddress};
use crate::vhost_user::queue_channel::{
    DeviceState, ID_BYTES, QueueChannel, QueueCommand, QueueId, QueueStart,
};
use crate::vhost_user::vhost_frontend::VhostFrontend;
use crate::vhost_user::virtqueue::{RingAddresses, Virtqueue};

/// Descriptors of the queue: each is a request, by an indirect table.
const QUEUE: u16 = 128;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const TABLES: u64 = 0x4000;
const HEADERS: u64 = 0x8000;
const STATUSES: u64 = 0x9000;
const DATA: u64 = 0x10000;
const MEMORY: u64 = DATA + QUEUE as u64 * BLOCK as u64;
const EVENT_IDX: u64 = 1 << 29;
/// The flag of the available ring for no calls.
const NO_INTERRUPT: u16 = 1;
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
const INDIRECT: u16 = 4;

/// Instructions of one read at depth 1, and of one of 64 that are made together, at most; the
/// driver's are among them. With the profile `dist`.
const LIMITS: [(usize, u64); 2] = [(1, 4230), (64, 2000)];

/// An event loop with a queue, and its driver.
struct Machine<Q: IoQueue = Null> {
    thread: EventLoop<VhostFrontend, Q>,
    memory: Arc<GuestMemory>,
    kick: OwnedFd,
    call: OwnedFd,
    available: u16,
    told: u16,
}

impl Machine {
    fn new() -> Self {
        let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut machine = Self::with((kick, call), true);
        machine.iterate();
        machine.iterate();
        assert!(machine.is_asleep() && machine.is_called());
        machine
    }

    /// A queue that has started, with event indices or without.
    fn with(signals: (OwnedFd, OwnedFd), event_idx: bool) -> Self {
        Self::on(parts(Config::default(), || Null::new().unwrap()), signals, event_idx)
    }
}

impl<Q: IoQueue> Machine<Q> {
    /// A queue on these parts.
    fn on((context, engine): Parts<Q>, (kick, call): (OwnedFd, OwnedFd), event_idx: bool) -> Self {
        let channel = Arc::new(QueueChannel::new(context.thread().clone()));
        let frontend = VhostFrontend::new(channel.clone());
        let thread = EventLoop::new(&context, engine, frontend).unwrap();
        let used = registered(&thread).shared().begin_use().unwrap();
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, MEMORY).unwrap();
        let address = RegionAddress { guest: 0, len: MEMORY, user: 0, offset: 0 };
        let memory = Arc::new(GuestMemory::map([(address, file)]).unwrap());
        let addresses = RingAddresses {
            size: QUEUE,
            descriptors: GuestAddress(0),
            available: GuestAddress(AVAILABLE),
            used: GuestAddress(USED),
        };
        let start = QueueStart {
            id: QueueId(0),
            device: Arc::new(DeviceState::new([0; ID_BYTES], String::new())),
            features: Features(if event_idx { EVENT_IDX } else { 0 }),
            virtqueue: Virtqueue::new(addresses, (0, event_idx), memory.clone(), None, None)
                .unwrap(),
            kick: kick.try_clone().unwrap(),
            call: Some(call.try_clone().unwrap()),
            err: None,
        };
        channel.send(QueueCommand::Start(used, Box::new(start)));
        let machine = Self { thread, memory, kick, call, available: 0, told: 0 };
        (0..QUEUE).for_each(|head| machine.prepare(head));
        machine
    }

    /// Writes the descriptors of a read.
    fn prepare(&self, head: u16) {
        let n = u64::from(head);
        let table = TABLES + 48 * n;
        self.describe(16 * n, (table, 48), INDIRECT, 0);
        self.describe(table, (HEADERS + 16 * n, 16), NEXT, 1);
        self.describe(table + 16, (DATA + BLOCK as u64 * n, BLOCK as u32), NEXT | WRITABLE, 2);
        self.describe(table + 32, (STATUSES + n, 1), WRITABLE, 0);
    }

    fn describe(&self, at: u64, (address, len): (u64, u32), flags: u16, next: u16) {
        self.write(at, address);
        self.write(at + 8, len);
        self.write(at + 12, flags);
        self.write(at + 14, next);
    }

    fn write<T: vm_memory::ByteValued>(&self, at: u64, value: T) {
        self.memory.bytes().write_obj(value, GuestAddress(at)).unwrap();
    }

    fn load(&self, at: u64) -> u16 {
        self.memory.bytes().load(GuestAddress(at), Ordering::Acquire).unwrap()
    }

    fn used(&self) -> u16 {
        self.load(USED + 2)
    }

    /// Makes `count` reads available.
    fn offer(&mut self, count: u16) {
        for _ in 0..count {
            let slot = self.available % QUEUE;
            self.write(AVAILABLE + 4 + 2 * u64::from(slot), slot);
            self.available = self.available.wrapping_add(1);
        }
        let index = GuestAddress(AVAILABLE + 2);
        self.memory.bytes().store(self.available, index, Ordering::Release).unwrap();
    }

    /// Makes `count` reads available, and kicks if the server has asked for that. Returns whether
    /// it has.
    fn submit(&mut self, count: u16) -> bool {
        self.offer(count);
        let asked = self.load(USED + 4 + 8 * u64::from(QUEUE));
        let old = std::mem::replace(&mut self.told, self.available);
        let is_kick =
            self.available.wrapping_sub(asked).wrapping_sub(1) < self.available.wrapping_sub(old);
        if is_kick {
            self.kick();
        }
        is_kick
    }

    fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Has the server call for the next request that ends.
    fn await_call(&self) {
        self.write(AVAILABLE + 4 + 2 * u64::from(QUEUE), self.used());
    }

    /// Whether there was a call.
    fn is_called(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    /// How many kicks and calls there were, if one eventfd has both.
    fn take_signals(&self) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(&self.call, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    fn iterate(&mut self) {
        self.thread.poll().unwrap();
        self.thread.run_once().unwrap();
    }

    /// Goes to sleep, unless there is something to do. Returns whether the thread sleeps.
    fn is_asleep(&mut self) -> bool {
        !self.thread.has_work() && !self.thread.frontend.before_sleep(&mut self.thread.context)
    }

    fn has_arrived(&self) -> bool {
        Frontend::<Q>::has_arrived(&self.thread.frontend)
    }
}

#[test]
fn a_driver_is_asked_for_a_kick_when_the_thread_goes_to_sleep_and_not_while_it_is_awake() {
    let mut machine = Machine::new();
    assert!(machine.submit(1));
    machine.await_call();
    machine.iterate();
    machine.iterate();
    assert_eq!(machine.used(), 1);
    assert!(machine.is_called());
    for n in 2..10 {
        assert!(!machine.has_arrived());
        assert!(!machine.submit(1), "{n}");
        // A thread that polls sees it immediately; one that is busy in its next iteration.
        assert!(machine.has_arrived());
        machine.iterate();
        machine.iterate();
        assert_eq!(machine.used(), n);
    }
    assert!(machine.is_asleep());
    assert!(machine.submit(1));
}

#[test]
fn a_request_that_was_made_while_a_thread_goes_to_sleep_keeps_it_awake() {
    let mut machine = Machine::new();
    machine.submit(1);
    machine.iterate();
    machine.iterate();
    assert!(!machine.submit(1));
    assert!(!machine.is_asleep());
    machine.iterate();
    machine.iterate();
    assert_eq!(machine.used(), 2);
}

#[test]
fn the_last_sector_of_an_image_that_ends_in_it_is_padded_with_zeros() {
    // The image has 300 bytes of its last sector.
    let (size, last) = (SIZE - 212, (SIZE >> 9) - 1);
    let parts = parts_of(size, Config::default(), || AioThreadQueue::new(64).unwrap());
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let call = kick.try_clone().unwrap();
    let mut machine = Machine::on(parts, (kick, call), false);
    let (read, write) = (0_u32, 1_u32);
    let requests = [
        (read, last - 1, 1024, 0),
        (write, last, 512, 0),
        (read, last, 512, 0),
        (read, last, 1024, 1),
        (write, last + 1, 512, 1),
    ];
    for (head, (kind, sector, bytes, status)) in requests.into_iter().enumerate() {
        let n = head as u64;
        let (table, data) = (TABLES + 48 * n, DATA + u64::from(BLOCK as u32) * n);
        let flags = if kind == read { NEXT | WRITABLE } else { NEXT };
        machine.describe(table + 16, (data, bytes), flags, 2);
        machine.write(HEADERS + 16 * n, kind);
        machine.write(HEADERS + 16 * n + 8, sector);
        machine.memory.bytes().write_slice(&[5; 1024], GuestAddress(data)).unwrap();
        machine.offer(1);
        machine.kick();
        // A part of a block is written by a worker, to the image.
        while machine.used() == head as u16 {
            machine.iterate();
            std::thread::yield_now();
        }
        let found: u8 = machine.memory.bytes().read_obj(GuestAddress(STATUSES + n)).unwrap();
        assert_eq!((machine.used(), found), (head as u16 + 1, status), "request {head}");
    }
    let found = |head: u64, len: usize| {
        let mut found = vec![1; len];
        machine
            .memory
            .bytes()
            .read_slice(&mut found, GuestAddress(DATA + BLOCK as u64 * head))
            .unwrap();
        found
    };
    assert!(found(0, 1024) == [[7; 812].as_slice(), &[0; 212]].concat());
    assert!(found(2, 512) == [[5; 300].as_slice(), &[0; 212]].concat());
    assert_eq!(registered(&machine.thread).export().disk().refresh(), Ok(size));
}

#[test]
fn a_write_of_a_guest_is_in_the_dirty_bitmap_before_the_guest_sees_its_end() {
    let mut machine = Machine::new();
    add_bitmap(&machine.thread);
    let write = 1_u32;
    machine.write(HEADERS, write);
    machine.write(HEADERS + 8, 64_u64);
    machine.describe(TABLES + 16, (DATA, BLOCK as u32), NEXT, 2);
    for used in 1..=2 {
        machine.submit(1);
        while machine.used() < used {
            machine.iterate();
        }
        // The second one is a read.
        assert_eq!(dirty_blocks(&machine.thread), 1);
    }
}

/// A driver without event indices that has one eventfd for kicks and calls: each call is a kick.
#[test]
fn a_queue_whose_kicks_and_calls_are_one_eventfd_comes_to_rest() {
    for is_call_wanted in [true, false] {
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let call = kick.try_clone().unwrap();
        let mut machine = Machine::with((kick, call), false);
        machine.write(AVAILABLE, if is_call_wanted { 0 } else { NO_INTERRUPT });
        (0..10).for_each(|_| machine.iterate());
        // The call at the start of a queue.
        assert_eq!(machine.take_signals(), 1);
        for n in 1..4 {
            machine.offer(1);
            machine.kick();
            (0..20).for_each(|_| machine.iterate());
            assert_eq!(machine.used(), n);
            assert!(machine.is_asleep());
            assert_eq!(machine.take_signals(), 1 + u64::from(is_call_wanted), "request {n}");
        }
    }
}

/// Serves `count` reads, `depth` of them at a time, with a sleep and a call for each time.
fn serve(depth: usize, count: usize) {
    let mut machine = Machine::new();
    for _ in 0..count / depth {
        machine.await_call();
        machine.submit(depth as u16);
        while machine.used() != machine.available {
            machine.iterate();
        }
        while !machine.is_asleep() {
            machine.iterate();
        }
        assert!(machine.is_called());
    }
}

#[test]
#[ignore = "needs valgrind and optimisation: cargo test --profile dist -p nowait-server --lib"]
fn a_read_of_a_guest_costs_no_more_instructions_than_the_limit() {
    match wanted() {
        Some((depth, count)) => serve(depth, count),
        None => check_cost(
            "vhost_queue::a_read_of_a_guest_costs_no_more_instructions_than_the_limit",
            LIMITS,
        ),
    }
}
