//! Many exports in one server: what each of them needs at rest and with a client, and what their start costs.
//!
//! Invariant: the figures are those of the kernel, and differences to a server of one export.

use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::say_skipped;

use crate::common::{KIB, MIB, Scratch, Server, refusal_under, require_tool};

/// Bounds for an export of a raw image (docs/operating.md, "Memory" and "Descriptors").
const DESCRIPTORS: usize = 2;
const BYTES: u64 = 64 * KIB;

/// The most descriptors of an export with a client: its connection, and a queue's own where there is no ring.
const DESCRIPTORS_WITH_CLIENT: usize = 4;
/// Serving threads, and the most threads that neither serve nor work for the storage.
const THREADS: usize = 2;
const OTHER_THREADS: usize = 6;

/// Descriptors, memory and threads of a server of `exports` images beside the first one, and the processor time in
/// milliseconds that it has needed until it serves.
fn needs(exports: usize) -> (usize, u64, usize, u64) {
    let scratch = Scratch::new();
    let first = scratch.sparse("first.img", MIB);
    let image = |n| format!("e{n}={}", scratch.sparse(&format!("{n}.img"), MIB).display());
    let more: Vec<String> = (0..exports).map(image).collect();
    let mut more: Vec<&str> = more.iter().map(String::as_str).collect();
    more.extend(["--threads", "2"]);
    let server = Server::start(&first, &more);
    let stat = server.proc("stat");
    let (_, fields) = stat.rsplit_once(')').expect("the name of the program");
    let ticks = |n: usize| fields.split_whitespace().nth(n).and_then(|n| n.parse::<u64>().ok());
    let ticks = ticks(11).zip(ticks(12)).map(|(user, system)| user + system);
    let milliseconds = ticks.expect("its times") * 1000 / rustix::param::clock_ticks_per_second();
    let needs =
        (server.descriptors(), server.memory("RssAnon"), server.threads().len(), milliseconds);
    server.stop();
    needs
}

fn check(exports: usize) {
    let (descriptors, bytes, threads, _) = needs(0);
    let (all_descriptors, all_bytes, all_threads, milliseconds) = needs(exports);
    let each = (all_descriptors - descriptors) as f64 / exports as f64;
    let bytes = all_bytes.saturating_sub(bytes) / exports as u64;
    println!(
        "{exports} exports: {milliseconds} ms of a processor until they are served; \
         {each:.1} descriptors and {bytes} bytes for each"
    );
    assert!(all_descriptors - descriptors <= DESCRIPTORS * exports, "{each} descriptors for each");
    assert!(bytes <= BYTES, "{bytes} bytes for each");
    // Workers may run, of which there are few.
    assert!(all_threads <= threads + 32, "{all_threads} threads");
}

#[test]
fn an_export_of_1000_needs_two_descriptors_64_kib_and_no_thread_at_most() {
    check(1000);
}

#[test]
#[ignore = "needs 20,100 descriptors; prints the processor time of a start: cargo test -p nowait-cli --test suite -- --ignored 10000 --nocapture"]
fn an_export_of_10000_needs_two_descriptors_64_kib_and_no_thread_at_most() {
    const EXPORTS: usize = 10_000;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let most = limit.map_or(EXPORTS, |limit| (limit as usize).saturating_sub(100) / DESCRIPTORS);
    if most < EXPORTS {
        say_skipped(&format!("{EXPORTS} exports: the limit of descriptors is enough for {most}"));
    }
    check(most.min(EXPORTS));
}

/// A server of `exports` images, each with a client.
struct Served {
    server: Server,
    clients: Vec<Client>,
    _scratch: Scratch,
}

impl Served {
    fn start(exports: usize, queue: &[&str]) -> Self {
        let scratch = Scratch::new();
        let first = scratch.sparse("e0.img", MIB);
        let image = |n| format!("e{n}={}", scratch.sparse(&format!("e{n}.img"), MIB).display());
        let more: Vec<String> = (1..exports).map(image).collect();
        let threads = THREADS.to_string();
        let mut options: Vec<&str> = more.iter().map(String::as_str).collect();
        options.extend(["--threads", &threads]);
        options.extend(queue);
        let server = Server::start(&first, &options);
        let name = |n| if n == 0 { String::new() } else { format!("e{n}") };
        let connect = |n| Client::connect_to(&server.socket(), &name(n), Mode::Structured);
        let clients = (0..exports).map(|n| connect(n).expect("a connection")).collect();
        Self { server, clients, _scratch: scratch }
    }

    /// Each client reads a block, one after the other.
    fn read_in_turns(&mut self) {
        for client in &mut self.clients {
            assert_eq!(client.read(0, 4096).as_deref(), Ok(&[0; 4096][..]));
        }
    }

    /// Each client has a read in flight at the same time.
    fn read_together(&mut self) {
        for client in &mut self.clients {
            client.send(&Command::Read { offset: 4096, len: 4096 }).expect("a request");
        }
        for client in &mut self.clients {
            client.receive().expect("an answer").1.expect("a block");
        }
    }

    /// Its locked and pinned memory in bytes.
    fn locked(&self) -> u64 {
        self.server.memory("VmLck") + self.server.memory("VmPin")
    }
}

#[test]
fn an_export_of_200_with_a_client_needs_four_descriptors_64_kib_no_thread_and_no_locked_memory() {
    const EXPORTS: usize = 200;
    for queue in [&[][..], &["--queue", "threads"]] {
        let mut one = Served::start(1, queue);
        one.read_in_turns();
        let mut all = Served::start(EXPORTS, queue);
        all.read_in_turns();
        assert_eq!(all.locked(), one.locked(), "{queue:?}: locked memory");
        all.read_together();
        let descriptors = all.server.descriptors() - one.server.descriptors();
        let bytes = all.server.memory("RssAnon").saturating_sub(one.server.memory("RssAnon"));
        let (more, threads) = (EXPORTS as u64 - 1, all.server.threads());
        println!("{queue:?}: {descriptors} descriptors, {} bytes each, {threads:?}", bytes / more);
        assert!(descriptors <= DESCRIPTORS_WITH_CLIENT * (EXPORTS - 1), "{descriptors}");
        assert!(bytes <= BYTES * more, "{queue:?}: {} bytes for each", bytes / more);
        let others = threads.iter().filter(|name| *name != "nowait-worker").count();
        assert!(others <= THREADS + OTHER_THREADS, "{queue:?}: {threads:?}");
        drop((one.clients, all.clients));
        one.server.stop();
        all.server.stop();
    }
}

/// With room for the images, but for none of them twice, they are served.
#[test]
fn exports_that_need_more_descriptors_than_the_limit_are_refused_before_an_image_is_opened() {
    const EXPORTS: usize = 100;
    nowait_testkit::needs!(require_tool("prlimit"));
    let scratch = Scratch::new();
    let socket = format!("unix:{}", scratch.join("socket").display());
    let image = |n| format!("e{n}={}", scratch.join(&format!("{n}.img")).display());
    let images: Vec<String> = (0..EXPORTS).map(image).collect();
    let images: Vec<&str> = images.iter().map(String::as_str).collect();
    let fixed = ["--threads", "2", "--control", "off"];
    let serve = [&["serve", "--nbd", &socket][..], &fixed, &images].concat();
    // None of them is there, which is not what is told.
    let refused = refusal_under(&["prlimit", "--nofile=217"], &serve);
    assert_eq!(refused.code, 66);
    assert_eq!(refused.error.lines().count(), 1, "{}", refused.error);
    refused.says(&["100 exports need 218 descriptors", "is 217 (", "LimitNOFILE=1242 in a unit)"]);
    (1..EXPORTS).for_each(|n| drop(scratch.sparse(&format!("{n}.img"), MIB)));
    let first = scratch.sparse("0.img", MIB);
    let limit = format!("--nofile={}", EXPORTS * DESCRIPTORS + 50);
    let more = [&fixed[..], &images[1..]].concat();
    Server::start_under(&["prlimit", &limit], &first, &more).stop();
}
