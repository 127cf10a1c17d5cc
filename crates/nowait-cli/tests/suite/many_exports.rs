//! Many exports in one server: what each of them needs at rest, and what their start costs.
//!
//! Invariant: the figures are those of the kernel, and differences to a server of one export.

use nowait_testkit::say_skipped;

use crate::common::{KIB, MIB, Scratch, Server, refusal_under, require_tool};

/// Bounds for an export of a raw image (docs/operating.md, "Memory" and "Descriptors").
const DESCRIPTORS: usize = 2;
const BYTES: u64 = 64 * KIB;

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
