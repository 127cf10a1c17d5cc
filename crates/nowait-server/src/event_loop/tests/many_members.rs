//! A thread with many more members than slots: 1,000 exports with 20 clients each, every one of which has the next
//! request when the one before is answered.
//!
//! Invariant: a client is a member without a descriptor; which of them is served, and when, is up to the shipped event
//! loop.

use nowait::Completion;

use crate::event_loop::tests::*;
use crate::frontend_kind::FrontendKind;
use crate::member::Member;

const EXPORTS: u64 = 1000;
/// Clients of each export.
const CLIENTS: usize = 20;
/// Requests of each client, on average.
const REQUESTS: usize = 8;

/// A client.
#[derive(Default)]
struct ClosedLoop {
    member: Member,
    is_waiting: bool,
    answered: u32,
}

/// The clients, by their numbers.
struct ClosedLoops(Vec<ClosedLoop>);

impl<Q: IoQueue> Frontend<Q> for ClosedLoops {
    fn on_wake(&mut self, _: &mut LoopContext<Q>) {}

    fn on_event(&mut self, _: &mut LoopContext<Q>, _: Token, _: i32) {}

    fn kind(&self, _: usize) -> FrontendKind {
        FrontendKind::Nbd
    }

    fn member(&mut self, member: usize) -> Option<&mut Member> {
        self.0.get_mut(member).map(|client| &mut client.member)
    }

    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let client = &mut self.0[member];
        if std::mem::replace(&mut client.is_waiting, true) {
            return 0;
        }
        let range = ByteRange::new(0, BLOCK as u64);
        let io = Request { op: Op::Read, flags: Flags::NONE, range };
        let has_slot = context.has_free_slot(client.member.served());
        let Some(buffer) = has_slot.then(|| context.buffer(&client.member, range)).flatten() else {
            client.is_waiting = false;
            context.block(member, &mut client.member);
            return 0;
        };
        client.member.quantum.read(range.len);
        assert!(context.submit_buffer(client.member.served(), member, 0, (io, buffer)).is_ok());
        client.member.quantum.bytes_moved()
    }

    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        _: u32,
        completion: Completion,
    ) {
        assert_eq!(result(&completion), Ok(()));
        let client = &mut self.0[member];
        (client.is_waiting, client.answered) = (false, client.answered + 1);
        context.schedule(member, &mut client.member);
    }

    fn begin_shutdown(&mut self, _: &mut LoopContext<Q>) {}
}

#[test]
fn of_20000_clients_none_is_answered_three_times_as_often_as_the_median() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE).unwrap();
    let disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
    let export = |n: u64| AnyExport::new(Export::new(disk.clone(), n.to_string(), String::new()));
    let config = Config::default();
    let context =
        ThreadContext::simulated((0..EXPORTS).map(export), config, Options::SPLIT_BYTES).unwrap();
    let engine = Engine::new(Null::new().unwrap(), nowait::WorkerPool::new(1), config).unwrap();
    let clients = (0..EXPORTS as usize * CLIENTS).map(|_| ClosedLoop::default()).collect();
    let mut thread = EventLoop::new(&context, engine, ClosedLoops(clients)).unwrap();
    // The clients of an export come one after the other.
    let EventLoop { frontend: ClosedLoops(clients), context, shared, .. } = &mut thread;
    let members = shared.registry.all().into_iter().zip(clients.chunks_mut(CLIENTS));
    for (at, (export, clients)) in members.enumerate() {
        for (client, number) in clients.iter_mut().zip(at * CLIENTS..) {
            let used = export.shared().begin_use().unwrap();
            context.add_member();
            context.use_export(&mut client.member, used).unwrap();
            context.schedule(number, &mut client.member);
        }
    }
    let all = EXPORTS as usize * CLIENTS;
    let answered = |thread: &EventLoop<ClosedLoops, Null>| {
        thread.frontend.0.iter().map(|client| client.answered as usize).sum::<usize>()
    };
    let mut most_blocked = 0;
    while answered(&thread) < all * REQUESTS {
        thread.poll().unwrap();
        thread.run_once().unwrap();
        most_blocked = most_blocked.max(thread.context.blocked.len());
    }
    let mut counts: Vec<_> = thread.frontend.0.iter().map(|client| client.answered).collect();
    counts.sort_unstable();
    let (least, median, most) = (counts[0], counts[all / 2], counts[all - 1]);
    assert!(most < 3 * median && 3 * least > median, "{least}, {median} and {most} answers");
    assert!(most_blocked > all / 2, "{most_blocked} clients have waited for slots");
}
