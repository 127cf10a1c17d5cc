//! A second frontend beside NBD, as a paravirtual device has it: requests in rings of memory, an
//! eventfd each way, and data in memory that belongs to the other side.
//!
//! Invariant: the event loop is the shipped one, on which the rings have the place of vhost-user.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use nowait::{AioThreadQueue, Completion, IoSegment};
use rustix::event::{EventfdFlags, eventfd};
use slab::Slab;

use crate::event_loop::tests::*;
use crate::frontend_kind::FrontendKind;
use crate::frontends::Frontends;
use crate::member::Member;

const QUANTUM: usize = 256 << 10;
/// Bytes of the memory that the data of a ring are in.
const MEMORY: usize = 4 << 20;

/// Memory aligned for direct I/O.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; BLOCK]);

/// A read of `len` bytes of the image at `pos` into the memory at each of `places` in turn.
struct RingRequest {
    id: u32,
    pos: u64,
    places: Vec<(usize, usize)>,
}

/// Memory that the two sides of a ring share.
struct Ring {
    available: VecDeque<RingRequest>,
    used: Vec<(u32, i32)>,
    memory: Vec<Page>,
    kick: OwnedFd,
    call: OwnedFd,
}

/// One ring of the frontend.
struct Queue {
    ring: Rc<RefCell<Ring>>,
    member: Member,
    in_flight: u32,
    /// Requests that have completed in this iteration.
    done: Vec<(u32, i32)>,
}

struct RingFrontend {
    queues: Slab<Queue>,
    /// The ids of the requests in the engine.
    in_flight: Slab<u32>,
    stopping: bool,
}

impl<Q: IoQueue> Frontend<Q> for RingFrontend {
    fn begin(&mut self, context: &mut LoopContext<Q>) -> Result<(), Error> {
        for (number, queue) in &self.queues {
            context.watch(queue.ring.borrow().kick.as_fd(), number as u64, Interest::Readable)?;
            context.add_member();
        }
        Ok(())
    }

    fn on_wake(&mut self, _: &mut LoopContext<Q>) {}

    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, _: i32) {
        let queue = &mut self.queues[token as usize];
        count(&queue.ring.borrow().kick);
        context.schedule(token as usize, &mut queue.member);
    }

    #[inline]
    fn kind(&self, _: usize) -> FrontendKind {
        FrontendKind::Ublk
    }

    fn member(&mut self, member: usize) -> Option<&mut Member> {
        self.queues.get_mut(member).map(|queue| &mut queue.member)
    }

    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let queue = &mut self.queues[member];
        while !self.stopping && !queue.ring.borrow().available.is_empty() {
            if queue.member.quantum.reads_exhausted() {
                context.schedule(member, &mut queue.member);
                break;
            }
            if !context.has_free_slot(queue.member.served()) {
                if queue.in_flight == 0 {
                    context.block(member, &mut queue.member);
                }
                break;
            }
            let mut ring = queue.ring.borrow_mut();
            let RingRequest { id, pos, places } = ring.available.pop_front().unwrap();
            let len = places.iter().map(|(_, len)| *len as u64).sum();
            assert!(places.iter().all(|(at, len)| at + len <= MEMORY) || len > SIZE);
            let range = match queue.member.served().unwrap().export.range(Op::Read, pos, len) {
                Ok(range) => range,
                Err(errno) => {
                    queue.done.push((id, errno));
                    continue;
                }
            };
            let io = Request { op: Op::Read, flags: Flags::ALL_OR_ERROR, range };
            let segment = |&(at, len): &(usize, usize)| IoSegment {
                base: ring.memory.as_mut_ptr().cast::<u8>().wrapping_add(at),
                len,
            };
            let segments: Vec<_> = places.iter().map(segment).collect();
            let key = self.in_flight.insert(id) as u32;
            let submitted =
                context.submit(queue.member.served(), member, key, |engine, device, tag| {
                    // SAFETY: each place is inside the memory, which lives as long as the frontend: the
                    // event loop drops its engine before. The other side reads it only after completion.
                    unsafe { engine.submit_user_memory(device, io, &segments, tag) }
                });
            assert!(submitted.is_ok());
            queue.member.quantum.read(len);
            queue.in_flight += 1;
        }
        queue.member.quantum.bytes_moved()
    }

    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    ) {
        let queue = &mut self.queues[member];
        queue.in_flight -= 1;
        queue
            .done
            .push((self.in_flight.remove(key as usize), result(&completion).err().unwrap_or(0)));
        context.schedule(member, &mut queue.member);
    }

    fn end_iteration(&mut self, context: &mut LoopContext<Q>) {
        let mut gone = Vec::new();
        for (number, queue) in &mut self.queues {
            let mut ring = queue.ring.borrow_mut();
            if !queue.done.is_empty() {
                ring.used.append(&mut queue.done);
                rustix::io::write(&ring.call, &1u64.to_ne_bytes()).unwrap();
            }
            if self.stopping && queue.in_flight == 0 {
                context.unwatch(ring.kick.as_fd(), number as u64);
                context.remove_member(&mut queue.member);
                gone.push(number);
            }
        }
        gone.into_iter().for_each(|number| drop(self.queues.remove(number)));
    }

    fn begin_shutdown(&mut self, _: &mut LoopContext<Q>) {
        self.stopping = true;
    }
}

/// The count of an eventfd since it was read last.
fn count(eventfd: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(eventfd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
}

/// A thread with NBD connections and rings, and the other sides of both.
struct Scene<Q: IoQueue> {
    thread: EventLoop<Frontends<NbdFrontend, RingFrontend>, Q>,
    rings: Vec<Rc<RefCell<Ring>>>,
    client: UnixStream,
}

impl<Q: IoQueue> Scene<Q> {
    /// One NBD connection in the transmission phase, and `rings` rings.
    fn new(rings: usize, config: Config, queue: impl FnOnce() -> Q) -> Self {
        let (context, engine) = parts(config, queue);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ring = |_| Ring {
            available: VecDeque::new(),
            used: Vec::new(),
            memory: vec![Page([0; BLOCK]); MEMORY / BLOCK],
            kick: eventfd(0, flags).unwrap(),
            call: eventfd(0, flags).unwrap(),
        };
        let rings: Vec<_> = (0..rings).map(ring).map(|ring| Rc::new(RefCell::new(ring))).collect();
        let queue = |ring: &Rc<RefCell<Ring>>| Queue {
            ring: ring.clone(),
            member: Member::default(),
            in_flight: 0,
            done: Vec::new(),
        };
        let queues = rings.iter().map(queue).enumerate().collect();
        let second = RingFrontend { queues, in_flight: Slab::new(), stopping: false };
        let (nbd, ublk) = (context.frontends().nbd, context.frontends().ublk);
        let all = Frontends { nbd, vhost: second, ublk };
        let mut thread = EventLoop::new(&context, engine, all).unwrap();
        let export = registered(&thread);
        for (_, queue) in &mut thread.frontend.vhost.queues {
            let used = export.shared().begin_use().unwrap();
            thread.context.use_export(&mut queue.member, used).unwrap();
        }
        let (near, client) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        client.set_nonblocking(true).unwrap();
        let permit = context.shared.limit.take().unwrap();
        let arrival = HandoffConnection::new(near.into(), TlsState::Off, permit);
        let used = Some(export.shared().begin_use().unwrap());
        let arrival = HandoffConnection { used, ..arrival };
        let EventLoop { frontend: Frontends { nbd, .. }, context, .. } = &mut thread;
        context.inside(FrontendKind::Nbd, |context| nbd.add(context, arrival));
        nbd.connections[0].session.phase = Phase::Transmission(TransmissionMode::default());
        nbd.connections[0].session.send_queue.clear();
        nbd.shared.handshakes.deadlines.end();
        let mut scene = Self { thread, rings, client };
        scene.iterate();
        scene
    }

    fn iterate(&mut self) {
        self.thread.poll().unwrap();
        self.thread.run_once().unwrap();
    }

    /// Makes requests available in a ring, and kicks it once.
    fn ask(&mut self, ring: usize, requests: impl IntoIterator<Item = RingRequest>) {
        let mut ring = self.rings[ring].borrow_mut();
        ring.available.extend(requests);
        rustix::io::write(&ring.kick, &1u64.to_ne_bytes()).unwrap();
    }

    fn received(&mut self) -> usize {
        let mut bytes = Vec::new();
        let _ = self.client.read_to_end(&mut bytes);
        bytes.len()
    }
}

fn null() -> Null {
    Null::new().unwrap()
}

/// A read of one piece to the start of the memory.
fn piece(id: u32, len: usize) -> RingRequest {
    RingRequest { id, pos: 0, places: vec![(0, len)] }
}

#[test]
fn a_client_is_answered_beside_rings_that_are_never_empty() {
    let mut scene = Scene::new(2, Config::default(), null);
    for ring in 0..2 {
        scene.ask(ring, (0..60).map(|id| piece(id, QUANTUM)));
    }
    // Moving much makes them bulk.
    scene.iterate();
    scene.iterate();
    let left = |scene: &Scene<Null>| -> usize {
        scene.rings.iter().map(|ring| ring.borrow().available.len()).sum()
    };
    for _ in 0..10 {
        let before = left(&scene);
        scene.client.write_all(&read(BLOCK)).unwrap();
        // This queue reports no events while it has completions.
        let token = scene.thread.frontend.nbd.connections[0].readable_token() << FrontendKind::BITS;
        scene.thread.events.push((FD_TOKEN | token, libc::POLLIN.into()));
        scene.iterate();
        assert_eq!(scene.received(), REPLY + BLOCK, "in the iteration of the request");
        assert_eq!(before - left(&scene), 1, "one quantum of both rings together");
    }
    let taken = [0, 1].map(|ring| 60 - scene.rings[ring].borrow().available.len());
    assert!(taken[0].abs_diff(taken[1]) <= 1, "they take turns: {taken:?}");
    while left(&scene) > 0 {
        scene.iterate();
    }
    scene.iterate();
    for ring in &scene.rings {
        let used = ring.borrow().used.iter().map(|(id, errno)| (*id, *errno)).collect::<Vec<_>>();
        assert_eq!(used, (0..60).map(|id| (id, 0)).collect::<Vec<_>>());
    }
}

#[test]
fn requests_with_equal_numbers_in_two_frontends_are_told_apart() {
    let mut scene = Scene::new(1, Config::default(), null);
    scene.client.write_all(&read(BLOCK)).unwrap();
    scene.ask(0, [piece(5, BLOCK), piece(6, SIZE as usize + 1)]);
    scene.iterate();
    assert_eq!(scene.received(), REPLY + BLOCK);
    // The second one is refused by the rule that NBD's requests have too.
    let mut used = scene.rings[0].borrow().used.clone();
    used.sort();
    assert_eq!(used, [(5, 0), (6, libc::EINVAL)]);
}

#[test]
fn the_other_side_is_called_once_for_all_requests_of_an_iteration() {
    let mut scene = Scene::new(1, Config::default(), null);
    scene.ask(0, (0..8).map(|id| piece(id, BLOCK)));
    scene.iterate();
    let ring = scene.rings[0].borrow();
    assert_eq!((ring.used.len(), count(&ring.call)), (8, 1));
}

#[test]
fn foreign_memory_is_not_taken_from_the_budget() {
    let mut scene = Scene::new(1, Config { buffer_bytes: 64 << 10, ..Config::default() }, null);
    scene.ask(0, [piece(0, MEMORY)]);
    scene.iterate();
    assert_eq!(scene.rings[0].borrow().used, [(0, 0)]);
    let EventLoop { frontend, context, .. } = &mut scene.thread;
    assert_eq!(frontend.vhost.queues[0].member.budget_used, 0);
    assert!(context.budget.admits(0, 16 << 10) && context.engine.in_flight() == 0);
}

#[test]
fn a_ring_without_a_free_slot_goes_on_when_another_frontend_has_released_one() {
    let mut scene = Scene::new(1, Config { slots: 1, ..Config::default() }, null);
    scene.client.write_all(&read(BLOCK)).unwrap();
    // Its service comes after that of the connection, which has the slot by then.
    let EventLoop { frontend, context, .. } = &mut scene.thread;
    let connection = &mut frontend.nbd.connections[0];
    connection.readable = true;
    context.inside(FrontendKind::Nbd, |context| context.schedule(0, &mut connection.member));
    context.inside(FrontendKind::VhostUser, |context| {
        context.schedule(0, &mut frontend.vhost.queues[0].member)
    });
    scene.rings[0].borrow_mut().available.extend([piece(0, BLOCK), piece(1, BLOCK)]);
    scene.thread.service_interactive();
    assert_eq!(scene.thread.context.blocked, [1], "the first number of the second frontend");
    while scene.rings[0].borrow().used.len() < 2 {
        scene.iterate();
    }
    assert_eq!(scene.received(), REPLY + BLOCK);
}

#[test]
fn a_stopping_thread_completes_what_is_in_flight_on_every_frontend_and_takes_no_more() {
    let queue = || AioThreadQueue::new(64).unwrap();
    let mut scene = Scene::new(2, Config::default(), queue);
    // Scattered over the memory: every other block.
    let scattered = |id: u32| RingRequest {
        id,
        pos: u64::from(id) * 65536,
        places: (0..8).map(|n| ((id as usize * 16 + n * 2) * BLOCK, BLOCK)).collect(),
    };
    scene.client.write_all(&read(BLOCK)).unwrap();
    for ring in 0..2 {
        scene.ask(ring, (0..8).map(scattered));
    }
    scene.thread.poll().unwrap();
    scene.thread.take_events();
    scene.thread.service_interactive();
    assert!(scene.thread.context.engine.in_flight() > 0, "nothing is in flight");
    scene.thread.shared.stop();
    scene.thread.frontend.begin_shutdown(&mut scene.thread.context);
    scene.ask(0, [piece(99, BLOCK)]);
    scene.thread.run().unwrap();
    assert_eq!(scene.received(), REPLY + BLOCK);
    for ring in &scene.rings {
        let ring = ring.borrow();
        let mut used = ring.used.clone();
        used.sort();
        assert_eq!(used, (0..8).map(|id| (id, 0)).collect::<Vec<_>>());
        for (n, block) in ring.memory.iter().enumerate() {
            let wanted = if n < 128 && n % 2 == 0 { 7 } else { 0 };
            assert!(block.0.iter().all(|byte| *byte == wanted), "block {n}");
        }
    }
}
