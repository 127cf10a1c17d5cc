//! Dirty bitmaps of a running server: added, changed and read by commands, by HTTP and by clients of NBD.
//!
//! Invariant: a model in the test knows what was changed; what the server tells is compared with it.

use std::sync::atomic::{AtomicBool, Ordering};

use nowait_testkit::nbd::{Client, Command, EINVAL, Mode, REQ_ONE, StatusClient};
use nowait_testkit::{Random, SetOnDrop, require_tool, seed, tool};
use serde_json::{Value, json};

use crate::common::{Finished, KIB, MIB, Scratch, Server, refusal, text};
use crate::control::Controlled;
use crate::upgrade::Upgraded;

/// The granularity of a bitmap without another one.
const USUAL: u64 = 64 * KIB;

/// The bitmaps of an export as JSON.
fn listed(it: &Controlled) -> Value {
    let text = it.nowait(&["export", "bitmap", "list", "", "--json"]).succeeds();
    serde_json::from_str(&text).expect("JSON")
}

fn bitmap(name: &str, granularity: u64, enabled: bool, dirty: u64) -> Value {
    json!({"name": name, "granularity_bytes": granularity, "enabled": enabled, "dirty_bytes": dirty})
}

/// Runs `nowait export bitmap ACTION "" …`.
fn change(it: &Controlled, action: &str, rest: &[&str]) {
    let said = it.nowait(&[&["export", "bitmap", action, ""], rest].concat()).succeeds();
    assert_eq!(said, "");
}

#[test]
fn bitmaps_are_added_listed_cleared_merged_disabled_and_removed_by_commands() {
    let it = Controlled::start();
    let mut client = it.server.connect();
    client.write(0, &[1; 4096]).expect("a write before there is a bitmap");
    assert_eq!(listed(&it), json!([]));
    change(&it, "add", &["a", "--temporary"]);
    change(&it, "add", &["b", "-g", "4K", "--disabled", "--temporary"]);
    client.write(MIB, &[1; 4096]).expect("a write");
    client.read(2 * MIB, 4096).expect("a read changes nothing");
    assert_eq!(listed(&it), json!([bitmap("a", USUAL, true, USUAL), bitmap("b", 4096, false, 0)]));
    change(&it, "enable", &["b"]);
    client.call(&Command::Trim { offset: 4 * MIB, len: 8192 }).expect("a discard");
    client.call(&Command::Zero { offset: 5 * MIB + 1, len: 1, keep: true }).expect("zeros");
    change(&it, "disable", &["a"]);
    client.write(6 * MIB, &[1; 512]).expect("a write");
    let all = [bitmap("a", USUAL, false, 3 * USUAL), bitmap("b", 4096, true, 4 * 4096)];
    assert_eq!(listed(&it), json!(all));
    let said = it.nowait(&["export", "bitmap", "list", ""]).succeeds();
    let lines: Vec<Vec<_>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["bitmap", "granularity", "dirty", "enabled", "stored"]);
    assert_eq!(lines[1], ["a", "64", "KiB", "192", "KiB", "no", "no"]);
    change(&it, "merge", &["a", "b"]);
    assert_eq!(listed(&it)[0], bitmap("a", USUAL, false, 4 * USUAL));
    change(&it, "clear", &["a"]);
    assert_eq!(listed(&it), json!([bitmap("a", USUAL, false, 0), all[1]]));
    change(&it, "remove", &["a"]);
    assert_eq!(listed(&it), json!([all[1]]));
    for (arguments, why) in [
        (&["clear", "", "a"][..], "there is no such bitmap"),
        (&["merge", "", "b", "a"], "there is no such bitmap"),
        (&["add", "", "b"], "there is a bitmap of that name"),
        (&["list", "other"], "there is no such export"),
    ] {
        let mut command = it.nowait(&[&["export", "bitmap"], arguments].concat());
        assert!(command.fails().contains(why), "{arguments:?}");
    }
    for arguments in [&["a\n"][..], &[""], &["c", "--granularity", "3K"]] {
        it.nowait(&[&["export", "bitmap", "add", ""], arguments].concat()).fails();
    }
    it.server.stop();
}

#[test]
fn bitmaps_are_changed_by_http_and_what_cannot_be_is_refused_in_one_line() {
    let it = Controlled::start();
    let all = "/v1/exports/@0/bitmaps";
    let a = bitmap("a/ü", 512, true, 0);
    let added = json!({"name": "a/ü", "granularity_bytes": 512});
    assert_eq!(it.json("POST", all, Some(added.clone()), 201), a);
    let path = format!("{all}/a%2F%C3%BC");
    it.server.connect().write(4096, &[1; 512]).expect("a write");
    assert_eq!(it.json("GET", all, None, 200), json!([bitmap("a/ü", 512, true, 512)]));
    let off = it.json("PATCH", &path, Some(json!({"enabled": false})), 200);
    assert_eq!(off, bitmap("a/ü", 512, false, 512));
    it.json("POST", all, Some(json!({"name": "b", "enabled": false})), 201);
    let merge = Some(json!({"sources": ["a/ü"]}));
    let merged = it.json("POST", &format!("{all}/b/merge"), merge, 200);
    assert_eq!(merged, bitmap("b", USUAL, false, USUAL));
    it.json("POST", &format!("{path}/clear"), None, 204);
    for (method, path, body, status) in [
        ("POST", all, Some(added), 409),
        ("POST", all, Some(json!({"name": ""})), 400),
        ("POST", all, Some(json!({"name": "x".repeat(1024)})), 400),
        ("POST", all, Some(json!({"name": "c", "granularity_bytes": 100})), 400),
        ("POST", all, Some(json!({"name": "c", "more": 1})), 400),
        ("POST", &format!("{all}/b/merge"), Some(json!({"sources": ["none"]})), 404),
        ("PATCH", &format!("{all}/none"), Some(json!({"enabled": true})), 404),
        ("DELETE", &format!("{all}/%ff"), None, 400),
        ("GET", "/v1/exports/none/bitmaps", None, 404),
    ] {
        it.refusal(method, path, body, status);
    }
    it.json("DELETE", &path, None, 204);
    for number in 0..31 {
        it.json("POST", all, Some(json!({"name": number.to_string()})), 201);
    }
    let why = it.refusal("POST", all, Some(json!({"name": "one more"})), 409);
    assert_eq!(why, "an export has at most 32 bitmaps");
    it.server.stop();
}

#[test]
fn a_bitmap_of_the_start_has_every_change_from_the_first_on() {
    let scratch = Scratch::new();
    let images = ["a.img", "b.img"].map(|name| scratch.sparse(name, 8 * MIB));
    let named = format!("two={}", images[1].display());
    let arguments = [&named, "--bitmap", "x", "--bitmap", "two=y", "--bitmap", "=z=1"];
    let server = Server::start(&images[0], &arguments);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    let queries = ["qemu:dirty-bitmap:x", "qemu:dirty-bitmap:y", "qemu:dirty-bitmap:z=1"];
    let mut client = StatusClient::connect(&server.socket(), "", Mode::Extended, &queries);
    assert_eq!(client.contexts().len(), 2);
    for name in ["x", "z=1"] {
        let dirty = client.dirty(name, 8 * MIB, USUAL, 0);
        let ones: Vec<_> = (0..dirty.len()).filter(|at| dirty[*at]).collect();
        assert_eq!(ones, [16]);
    }
    let mut other = StatusClient::connect(&server.socket(), "two", Mode::Extended, &queries);
    assert_eq!(other.contexts().values().collect::<Vec<_>>(), [queries[1]]);
    assert!(!other.dirty("y", 8 * MIB, USUAL, 0).contains(&true));
    server.stop();
    for (bitmap, why) in
        [("three=x", "no image has the name 'three'"), ("a\n", "control characters")]
    {
        let refused = refusal(&["serve", text(&images[0]), "--bitmap", bitmap]);
        assert!(refused.error.contains(why), "{}", refused.error);
    }
}

/// The state of a model of bitmaps: whether each granule is dirty.
struct Model {
    name: &'static str,
    granularity: u64,
    is_enabled: bool,
    granules: Vec<bool>,
}

impl Model {
    fn mark(&mut self, offset: u64, len: u64) {
        let range = offset / self.granularity..(offset + len).div_ceil(self.granularity);
        if self.is_enabled {
            self.granules[range.start as usize..range.end as usize].fill(true);
        }
    }

    /// Units of `unit` bytes, of which a granule has several, or the other way around.
    fn merge(&mut self, other: &Self) {
        for (at, _) in other.granules.iter().enumerate().filter(|(_, dirty)| **dirty) {
            let at = at as u64 * other.granularity;
            let (from, to) =
                (at / self.granularity, (at + other.granularity).div_ceil(self.granularity));
            let to = (to as usize).min(self.granules.len());
            self.granules[from as usize..to].fill(true);
        }
    }

    fn resize(&mut self, size: u64) {
        self.granules.resize(size.div_ceil(self.granularity) as usize, false);
    }
}

/// A change by one of `clients` of a disk of `size` bytes.
fn random_change(random: &mut Random, clients: &mut [Client], size: u64) -> (u64, u64) {
    let most = [512, 20 * KIB, 300 * KIB][random.below(3) as usize];
    let len = 1 + random.below(most);
    let offset = random.below(size - len);
    let which = random.below(clients.len() as u64) as usize;
    let (data, short) = (vec![1; len as usize], len as u32);
    let command = match random.below(4) {
        0 => Command::Trim { offset, len: short },
        1 => Command::Zero { offset, len: short, keep: random.chance(50) },
        _ => Command::Write { offset, data, fua: random.chance(10) },
    };
    clients[which].call(&command).expect("a change");
    (offset, len)
}

fn compare(it: &Upgraded, models: &[Model], size: u64, random: &mut Random) {
    let names = models.iter().map(|model| format!("qemu:dirty-bitmap:{}", model.name));
    let names: Vec<_> =
        names.chain(["base:allocation".into(), "qemu:allocation-depth".into()]).collect();
    let queries: Vec<&str> = names.iter().map(|name| &**name).collect();
    for mode in Mode::CHUNKED {
        let mut client = StatusClient::connect(&it.socket(), "", mode, &queries);
        assert_eq!(client.contexts().len(), names.len());
        for model in models {
            let flags = if random.chance(30) { REQ_ONE } else { 0 };
            let told = client.dirty(model.name, size, model.granularity, flags);
            assert_eq!(told, model.granules, "{} in {mode:?}", model.name);
        }
    }
}

#[test]
fn bitmaps_are_those_of_a_model_through_changes_resizes_snapshots_and_upgrades() {
    let mut random = Random::from_seed(seed());
    for format in ["raw", "qcow2"] {
        let directory = Scratch::new();
        let allow = ["--allow-dir", text(directory.path())];
        let mut it = Upgraded::start(format, &allow);
        let mut size = 64 * MIB;
        let mut models = [("a", 512), ("b", 64 * KIB), ("c", MIB)].map(|(name, granularity)| {
            let size_of_one = granularity.to_string();
            let add = ["export", "bitmap", "add", "", name, "--granularity", &size_of_one];
            it.command(&add).succeeds();
            let granules = vec![false; (size / granularity) as usize];
            Model { name, granularity, is_enabled: true, granules }
        });
        let mut clients = vec![it.connect(), it.connect(), it.connect()];
        for step in 0..12 {
            for _ in 0..20 {
                let (offset, len) = random_change(&mut random, &mut clients, size);
                models.iter_mut().for_each(|model| model.mark(offset, len));
            }
            let which = random.below(3) as usize;
            let name = models[which].name;
            let change = |arguments: &[&str]| {
                it.command(&[&["export", "bitmap"], arguments].concat()).succeeds();
            };
            match step {
                0 | 1 => {
                    change(&["clear", "", name]);
                    models[which].granules.fill(false);
                }
                2 | 3 => {
                    models[which].is_enabled = !models[which].is_enabled;
                    change(&[
                        ["disable", "enable"][usize::from(models[which].is_enabled)],
                        "",
                        name,
                    ]);
                }
                4 | 5 => {
                    let other = (which + 1) % 3;
                    change(&["merge", "", name, models[other].name]);
                    let [one, other] = models.get_disjoint_mut([which, other]).expect("two");
                    one.merge(other);
                }
                6 | 8 => {
                    size = if step == 6 { 80 * MIB } else { 48 * MIB };
                    let new = size.to_string();
                    it.command(&["export", "resize", "", &new, "--shrink"]).succeeds();
                    models.iter_mut().for_each(|model| model.resize(size));
                }
                7 => {
                    let overlay = directory.join("overlay.qcow2");
                    it.command(&["export", "snapshot", "", text(&overlay)]).succeeds();
                }
                _ => drop(it.upgrade()),
            }
            compare(&it, &models, size, &mut random);
        }
    }
}

#[test]
fn a_client_goes_on_with_its_bitmaps_after_an_upgrade_and_gets_errors_of_one_that_was_removed() {
    let mut it = Upgraded::start("raw", &["--bitmap", "a", "--bitmap", "b"]);
    let queries = ["base:allocation", "qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b"];
    let connect =
        |queries: &[&str]| StatusClient::connect(&it.socket(), "", Mode::Extended, queries);
    let (mut both, mut second) = (connect(&queries), connect(&queries[2..]));
    it.connect().write(MIB, &[1; 512]).expect("a write");
    let before = both.status(0, 8 * MIB, 0).expect("a map");
    it.upgrade();
    assert_eq!(both.status(0, 8 * MIB, 0).expect("a map"), before);
    for again in [false, true] {
        if again {
            let said = it.command(&["export", "bitmap", "add", "", "a"]).succeeds();
            assert!(said.starts_with("in memory only"), "{said}");
        } else {
            it.command(&["export", "bitmap", "remove", "", "a"]).succeeds();
        }
        assert_eq!(both.status(0, 8 * MIB, 0), Err(EINVAL), "it has selected another bitmap");
        let map = second.status(0, 8 * MIB, 0).expect("a map");
        assert_eq!(map.values().next(), before.values().last());
        it.upgrade();
    }
    let [id] = [*both.contexts().keys().next().expect("a context")];
    assert_eq!(id, 1);
}

#[test]
fn a_read_only_export_has_bitmaps_that_stay_clean() {
    let scratch = Scratch::new();
    let arguments = ["--read-only", "--bitmap", "a"];
    let server = Server::start(&scratch.sparse("disk.img", 8 * MIB), &arguments);
    server.connect().write(0, &[1; 512]).expect_err("it is read-only");
    let queries = ["qemu:dirty-bitmap:a"];
    let mut client = StatusClient::connect(&server.socket(), "", Mode::Structured, &queries);
    assert!(!client.dirty("a", 8 * MIB, USUAL, REQ_ONE).contains(&true));
    server.stop();
}

#[test]
fn nbdinfo_and_qemu_img_read_a_bitmap() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", 8 * MIB), &["--bitmap", "täglich"]);
    let mut client = server.connect();
    client.write(MIB, &[1; 4096]).expect("a write");
    client.call(&Command::Trim { offset: 7 * MIB, len: MIB as u32 }).expect("a discard");
    let wanted = [
        (0, MIB, false),
        (MIB, USUAL, true),
        (MIB + USUAL, 6 * MIB - USUAL, false),
        (7 * MIB, MIB, true),
    ];
    if require_tool("nbdinfo") {
        let map =
            tool("nbdinfo").args(["--map=qemu:dirty-bitmap:täglich", server.uri()]).succeeds();
        let number = |word: &str| word.parse::<u64>().expect("a number");
        let line = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            (number(words[0]), number(words[1]), words[2] == "1")
        };
        assert_eq!(map.lines().map(line).collect::<Vec<_>>(), wanted);
        let listed = tool("nbdinfo").arg(server.uri()).succeeds();
        assert!(listed.contains("qemu:dirty-bitmap:täglich"), "{listed}");
    }
    if require_tool("qemu-img") {
        let socket = server.socket();
        let options = format!(
            "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:täglich",
            socket.display()
        );
        let map =
            tool("qemu-img").args(["map", "--output=json", "--image-opts", &options]).succeeds();
        let map: Value = serde_json::from_str(&map).expect("JSON");
        // QEMU shows what is dirty as a hole without data.
        let extent = |it: &Value| {
            let number = |key: &str| it[key].as_u64().expect("a number");
            (number("start"), number("length"), it["data"] == false)
        };
        let told: Vec<_> = map.as_array().expect("extents").iter().map(extent).collect();
        assert_eq!(told, wanted);
    }
    server.stop();
}

#[test]
fn a_map_has_at_most_4096_extents_of_all_bitmaps_and_extents_of_more_than_4_gib() {
    const SIZE: u64 = 9 << 40;
    let it = Controlled::start();
    let image = it.image("large.img", "9T");
    it.nowait(&["export", "add", "large", &image]).succeeds();
    for (name, granularity) in [("a", "64K"), ("b", "64K"), ("c", "64M")] {
        let add = ["export", "bitmap", "add", "large", name, "--granularity", granularity];
        it.nowait(&add).succeeds();
    }
    let mut writer =
        Client::connect_to(&it.server.socket(), "large", Mode::Structured).expect("a server");
    for n in 0..2100 {
        writer.call(&Command::Zero { offset: n * 2 * USUAL, len: 1, keep: false }).expect("zeros");
    }
    let name = |name: &str| format!("qemu:dirty-bitmap:{name}");
    let (a, b, c) = (name("a"), name("b"), name("c"));
    let connect = |queries: &[&str]| {
        StatusClient::connect(&it.server.socket(), "large", Mode::Extended, queries)
    };
    let lengths = |client: &mut StatusClient, offset: u64| -> Vec<usize> {
        let map = client.status(offset, SIZE - offset, 0).expect("a map");
        map.values().map(Vec::len).collect()
    };
    assert_eq!(lengths(&mut connect(&[&a]), 0), [4096]);
    assert_eq!(lengths(&mut connect(&[&a, &b]), 0), [2048, 2048]);
    // The rest of these, and of the disk; a search of bits ends after a tebibyte of the disk.
    assert_eq!(lengths(&mut connect(&[&a]), 4096 * USUAL), [104]);
    let map = connect(&[&c]).status(0, SIZE, 0).expect("a map");
    let dirty = (2100 * 2 * USUAL).next_multiple_of(64 * MIB);
    assert_eq!(map.values().next(), Some(&vec![(dirty, 1), (SIZE - dirty, 0)]));
    it.server.stop();
}

#[test]
fn bitmaps_that_qemu_has_stored_in_an_image_are_served_read_only_and_unchanged() {
    if !require_tool("qemu-img") || !require_tool("qemu-io") {
        return;
    }
    let directory = Scratch::new();
    let image = directory.join("disk.qcow2");
    let run = |program: &str, arguments: &[&str]| {
        tool(program).args(arguments).arg(text(&image)).succeeds();
    };
    tool("qemu-img").args(["create", "-q", "-f", "qcow2", text(&image), "64M"]).succeeds();
    let write = |command: &str| run("qemu-io", &["-f", "qcow2", "-c", command]);
    write("write 0 64k");
    let bitmap = |arguments: &[&str]| {
        tool("qemu-img").arg("bitmap").args(arguments).succeeds();
    };
    bitmap(&["--add", "-g", "4096", text(&image), "fine"]);
    bitmap(&["--add", text(&image), "usual"]);
    bitmap(&["--add", "-g", "128M", text(&image), "coarse"]);
    write("write 5M 1");
    bitmap(&["--add", text(&image), "clean"]);
    bitmap(&["--disable", text(&image), "usual"]);
    write("write 9M 8k");
    let before = std::fs::read(&image).expect("the image");
    let expected: [(&str, u64, &[u64]); 3] = [
        ("fine", 4096, &[5 * 256, 9 * 256, 9 * 256 + 1]),
        ("usual", USUAL, &[5 * 16]),
        ("clean", USUAL, &[9 * 16]),
    ];
    let check = |socket: &std::path::Path, name: &str| {
        let names = expected.map(|(name, ..)| format!("qemu:dirty-bitmap:{name}"));
        let queries: Vec<&str> = names.iter().map(|name| &**name).collect();
        let mut client = StatusClient::connect(socket, name, Mode::Structured, &queries);
        for (name, granularity, dirty) in expected {
            let told = client.dirty(name, 64 * MIB, granularity, 0);
            let told: Vec<_> = (0..told.len() as u64).filter(|at| told[*at as usize]).collect();
            assert_eq!(told, dirty, "{name}");
        }
    };
    let control = directory.join("control");
    let address = format!("unix:{}", control.display());
    let arguments = ["--read-only", "--control", &address];
    let server = Server::start(&image, &arguments);
    let why = "bitmap \"coarse\": it is lost: a granularity is a power of two from 512 to 64M";
    assert!(server.log().contains(why), "{}", server.log());
    let mut upgraded = Upgraded::of(server, &control, directory);
    check(&upgraded.socket(), "");
    upgraded.upgrade();
    check(&upgraded.socket(), "");
    assert!(std::fs::read(&image).expect("the image") == before);
}

/// Copies what the bitmap called `name` has noted from `reader` into `copy`.
fn copy_dirty(it: &Controlled, reader: &mut Client, name: &str, copy: &mut [u8]) {
    let query = format!("qemu:dirty-bitmap:{name}");
    let mut client = StatusClient::connect(&it.server.socket(), "", Mode::Extended, &[&query]);
    let unit = 4 * KIB;
    let dirty = client.dirty(name, copy.len() as u64, unit, 0);
    let units = copy.chunks_mut(unit as usize).zip(0..).zip(dirty);
    for ((part, number), _) in units.filter(|(_, is_dirty)| *is_dirty) {
        part.copy_from_slice(&reader.read(number * unit, unit as u32).expect("bytes"));
    }
}

/// Writers never stop while increments are copied; when they have stopped, one more makes the copy whole.
#[test]
fn no_change_is_lost_between_two_bitmaps_while_clients_write_on_all_threads() {
    let it = Controlled::start();
    let add = |name: &str| change(&it, "add", &[name, "--granularity", "4K", "--temporary"]);
    let is_over = AtomicBool::new(false);
    add("0");
    let mut reader = it.server.connect();
    let mut copy = reader.read(0, 8 * MIB as u32).expect("the disk");
    let (server, seed) = (&it.server, seed());
    std::thread::scope(|scope| {
        for number in 0..4 {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut random = Random::from_seed(seed + number);
                let mut client = server.connect();
                while !is_over.load(Ordering::Acquire) {
                    for _ in 0..8 {
                        let (offset, len) = (random.below(8 * MIB - 9000), 1 + random.below(9000));
                        let data = random.bytes(len as usize);
                        client
                            .send(&Command::Write { offset, data, fua: false })
                            .expect("a server");
                    }
                    for _ in 0..8 {
                        client.receive().expect("an answer").1.expect("a write");
                    }
                }
            });
        }
        let writing = SetOnDrop(&is_over);
        for round in 0..4 {
            let (old, new) = (round.to_string(), (round + 1).to_string());
            add(&new);
            change(&it, "disable", &[&old]);
            copy_dirty(&it, &mut reader, &old, &mut copy);
            change(&it, "remove", &[&old]);
        }
        drop(writing);
    });
    copy_dirty(&it, &mut reader, "4", &mut copy);
    assert!(copy == reader.read(0, 8 * MIB as u32).expect("the disk"));
    it.server.stop();
}
