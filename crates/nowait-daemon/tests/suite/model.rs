//! Random commands on three connections simultaneously, compared with an array of bytes.
//!
//! Invariant: connections own regions that share no byte, but whose borders share blocks; within a
//! region, requests in flight share no byte either. So every byte has one correct value at any
//! time.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::thread;

use crate::common::{Finished, KIB, MIB, Scratch, Server, VARIANTS, require_tool, tool};
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::{Random, seed};

/// Not a multiple of a sector, so that the last block is partial.
const IMAGE_BYTES: u64 = 8 * MIB + 1234;
/// The starts of the regions of all connections but the first; unaligned.
const BORDERS: [u64; 2] = [2_796_611, 5_592_827];
/// A multiple of 512, as QEMU requires of qcow2 images.
const QCOW2_BYTES: u64 = 8 * MIB + 1536;
const BATCHES: u64 = 200;
/// The limit of requests in flight on one connection; all together they fit the socket's buffers.
const BATCH: usize = 16;
const BLOCK_BYTES: u64 = 4096;
/// A window so small that requests in flight share blocks.
const DENSE_WINDOW_BYTES: usize = 6000;

/// One connection, its region of the image and the expected content.
struct Player {
    client: Client,
    random: Random,
    base: u64,
    model: Vec<u8>,
}

/// The parameters of one batch.
struct Plan {
    /// In bytes from the region's start.
    window: Range<usize>,
    /// The longest request in bytes, before alignment.
    most: u64,
    /// The limit of requests; those that overlap an earlier one are left out.
    count: usize,
}

impl Player {
    /// Chooses the next batch: anywhere in the region, or within a few blocks of it (then most
    /// often at a border, where the neighbour does the same), or one long request.
    fn plan(&mut self) -> Plan {
        let region = self.model.len();
        match self.random.below(100) {
            0..40 => Plan { window: 0..region, most: 12 * KIB, count: BATCH },
            40..95 => {
                let start = match self.random.below(3) {
                    0 => 0,
                    1 => region - DENSE_WINDOW_BYTES,
                    _ => self.below(region - DENSE_WINDOW_BYTES),
                };
                Plan { window: start..start + DENSE_WINDOW_BYTES, most: 700, count: BATCH }
            }
            _ => Plan { window: 0..region, most: MIB, count: 1 },
        }
    }

    /// A range in the plan's window, in bytes from the region's start; a quarter of them is
    /// block-aligned in the image where the window's end allows it.
    fn range(&mut self, plan: &Plan) -> Range<usize> {
        let mut start = plan.window.start + self.below(plan.window.len());
        let mut len = 1 + self.random.below(plan.most);
        if self.random.chance(25) {
            let aligned = (self.base + start as u64).next_multiple_of(BLOCK_BYTES) - self.base;
            let aligned = usize::try_from(aligned).expect("fits usize");
            start = if aligned < plan.window.end { aligned } else { start };
            len = len.next_multiple_of(BLOCK_BYTES);
        }
        let end = start + usize::try_from(len).expect("fits usize");
        start..end.min(plan.window.end)
    }

    /// A number in `0..bound`.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).expect("fits usize")
    }

    /// A command over `range`.
    fn command(&mut self, range: &Range<usize>) -> Command {
        let offset = self.base + range.start as u64;
        let len = u32::try_from(range.len()).expect("a short range");
        match self.random.below(100) {
            0..35 => Command::Read { offset, len },
            35..80 => Command::Write {
                offset,
                data: self.random.bytes(range.len()),
                fua: self.random.chance(10),
            },
            80..92 => Command::Zero { offset, len, keep: self.random.chance(50) },
            _ => Command::Trim { offset, len },
        }
    }

    /// Sends a batch of commands that share no byte, sometimes with a flush; checks every answer.
    fn play(&mut self) {
        let plan = self.plan();
        let mut taken: Vec<Range<usize>> = Vec::new();
        let mut sent = HashMap::new();
        for _ in 0..plan.count {
            let range = self.range(&plan);
            if taken.iter().any(|other| other.start < range.end && range.start < other.end) {
                continue;
            }
            let command = self.command(&range);
            let cookie = self.client.send(&command).expect("a server that takes requests");
            taken.push(range.clone());
            sent.insert(cookie, (command, range));
        }
        if self.random.chance(10) {
            let cookie = self.client.send(&Command::Flush).expect("a server that takes requests");
            sent.insert(cookie, (Command::Flush, 0..0));
        }
        self.collect(sent);
    }

    /// Receives the answers to all sent commands and checks them.
    fn collect(&mut self, mut sent: HashMap<u64, (Command, Range<usize>)>) {
        let mut trimmed = Vec::new();
        while !sent.is_empty() {
            let (cookie, answer) = self.client.receive().expect("an answer");
            let (command, range) = sent.remove(&cookie).expect("an answer to a request in flight");
            let bytes =
                answer.unwrap_or_else(|error| panic!("{} failed with {error}", brief(&command)));
            match command {
                Command::Read { .. } => self.compare(&bytes, &range),
                Command::Write { data, .. } => self.model[range].copy_from_slice(&data),
                Command::Zero { .. } => self.model[range].fill(0),
                Command::Trim { .. } => trimmed.push(range),
                Command::Flush => {}
            }
        }
        trimmed.into_iter().for_each(|range| self.update_trimmed(range));
    }

    /// C52: a trimmed byte is unchanged or zero, and does not change any more after it was read.
    fn update_trimmed(&mut self, range: Range<usize>) {
        let len = u32::try_from(range.len()).expect("a short range");
        let bytes = self
            .client
            .read(self.base + range.start as u64, len)
            .expect("a read of a trimmed range");
        let known = &mut self.model[range];
        let stray = bytes.iter().zip(known.iter()).position(|(now, then)| now != then && *now != 0);
        assert_eq!(stray, None, "a trimmed byte is neither old nor zero");
        known.copy_from_slice(&bytes);
    }

    /// Checks bytes read from `range`.
    fn compare(&self, bytes: &[u8], range: &Range<usize>) {
        let wrong =
            bytes.iter().zip(&self.model[range.clone()]).position(|(now, right)| now != right);
        if let Some(index) = wrong {
            let (now, right) = (bytes[index], self.model[range.start + index]);
            let at = self.base + (range.start + index) as u64;
            panic!(
                "byte {at} reads {now:#04x}, is to be {right:#04x}; the read began at {}",
                self.base + range.start as u64
            );
        }
    }
}

/// A command without its payload.
fn brief(command: &Command) -> String {
    match command {
        Command::Write { offset, data, fua } => {
            format!("write of {} at {offset}, fua {fua}", data.len())
        }
        other => format!("{other:?}"),
    }
}

/// Runs all connections simultaneously; returns the expected content of the image.
fn play_all(server: &Server, start: &[u8], seed: u64) -> Vec<u8> {
    let borders = [0, BORDERS[0], BORDERS[1], start.len() as u64];
    // All message formats; the contract is the same.
    let modes = [Mode::Structured, Mode::Simple, Mode::Extended];
    let players: Vec<_> = borders
        .windows(2)
        .zip(1..)
        .zip(modes)
        .map(|((borders, number), mode)| {
            let client = Client::connect(&server.socket(), mode).expect("a connection");
            let random = Random::from_seed(seed.wrapping_mul(3).wrapping_add(number));
            let region = |border: u64| usize::try_from(border).expect("fits usize");
            let model = start[region(borders[0])..region(borders[1])].to_vec();
            let mut player = Player { client, random, base: borders[0], model };
            thread::spawn(move || {
                (0..BATCHES).for_each(|_| player.play());
                player.model
            })
        })
        .collect();
    players
        .into_iter()
        .flat_map(|player| player.join().expect("a player without objections"))
        .collect()
}

/// Runs on a server of `image` started with `variant`; returns the expected content of the disk.
fn played(image: &Path, variant: &str, start: &[u8], seed: u64) -> Vec<u8> {
    println!("{}: {variant}", image.display());
    let server = Server::start(image, variant);
    let model = play_all(&server, start, seed);

    let mut client = server.connect();
    let size = start.len() as u64;
    assert_eq!(client.size, size);
    let whole = u32::try_from(size).expect("a small image");
    let seen = client.read(0, whole).expect("the whole image");
    assert!(seen == model, "byte {:?} differs over the wire", first_difference(&seen, &model));
    client.call(&Command::Flush).expect("a flush");
    drop(client);
    server.stop();
    model
}

/// One complete run on a raw image.
fn game(variant: &str, seed: u64) {
    let scratch = Scratch::new();
    let image = scratch.dotted("disk.img", IMAGE_BYTES, 30_000, 200_000);
    let size = fs::metadata(&image).expect("the image").len();
    let start = fs::read(&image).expect("the image");
    let model = played(&image, variant, &start, seed);
    let kept = fs::read(&image).expect("the image");
    assert_eq!(kept.len() as u64, size, "the image's size changed");
    assert!(kept == model, "byte {:?} differs in the image", first_difference(&kept, &model));
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    one.iter().zip(other).position(|(left, right)| left != right)
}

/// The backing file of a qcow2 image.
#[derive(Clone, Copy, Debug)]
enum Below {
    Nothing,
    Raw,
    Qcow2,
}

fn qemu_img(arguments: &[&str], scratch: &Scratch) {
    tool("qemu-img").current_dir(scratch.path()).args(arguments).succeeds();
}

/// The content of the disk in `disk.qcow2`, read by QEMU.
fn converted(scratch: &Scratch) -> Vec<u8> {
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", "all.raw"], scratch);
    fs::read(scratch.join("all.raw")).expect("a converted image")
}

/// One complete run on a qcow2 image.
fn qcow2_game(below: Below, variant: &str, seed: u64) {
    let scratch = Scratch::new();
    // The backing file is shorter than the disk, and ends within a block.
    scratch.dotted("base.img", IMAGE_BYTES - MIB, 30_000, 200_000);
    let size = QCOW2_BYTES.to_string();
    let create = ["create", "-q", "-f", "qcow2", "disk.qcow2", &size];
    match below {
        Below::Nothing => qemu_img(&create, &scratch),
        Below::Raw => qemu_img(&[&create[..], &["-b", "base.img", "-F", "raw"]].concat(), &scratch),
        Below::Qcow2 => {
            let pack = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4096"];
            qemu_img(&[&pack[..], &["base.img", "base.qcow2"]].concat(), &scratch);
            fs::rename(scratch.join("base.qcow2"), scratch.join("base.img")).expect("own files");
            qemu_img(&[&create[..], &["-b", "base.img", "-F", "qcow2"]].concat(), &scratch);
        }
    }
    let start = converted(&scratch);
    let base = fs::read(scratch.join("base.img")).expect("the backing file");
    let model = played(&scratch.join("disk.qcow2"), variant, &start, seed);
    qemu_img(&["check", "-q", "disk.qcow2"], &scratch);
    let kept = converted(&scratch);
    assert!(kept == model, "byte {:?} differs in the image", first_difference(&kept, &model));
    let same = fs::read(scratch.join("base.img")).expect("the backing file") == base;
    assert!(same, "the backing file was changed");
}

#[test]
fn three_connections_always_read_what_they_last_wrote_in_every_variant() {
    let seed = seed();
    for variant in VARIANTS {
        game(variant, seed);
    }
}

#[test]
fn the_same_holds_for_qcow2_images_without_and_with_raw_and_qcow2_backing_files() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let seed = seed();
    let kinds = [Below::Nothing, Below::Raw, Below::Qcow2];
    for (variant, below) in VARIANTS.into_iter().zip(kinds.into_iter().cycle()) {
        qcow2_game(below, variant, seed);
    }
}
