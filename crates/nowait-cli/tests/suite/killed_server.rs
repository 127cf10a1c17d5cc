//! A server of a qcow2 overlay is killed repeatedly while clients write to it.
//!
//! Invariant: every sector holds the number of its write; requests in flight share no sector, so
//! that for each sector the oldest and the newest allowed write are known.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nowait_image::{Chain, ChainOptions, ChainReader, Format};

use crate::common::{Finished, MIB, Scratch, Server, require_tool, tool};
use nowait_testkit::nbd::{Client, Command};
use nowait_testkit::{Random, seed};

const DISK_BYTES: u64 = 24 * MIB;
const SECTOR_BYTES: u64 = 512;
const SECTORS: usize = (DISK_BYTES / SECTOR_BYTES) as usize;
const KILLS: u32 = 50;
/// The longest time until a server is killed, in milliseconds.
const LIFE_MS: u64 = 60;
const IN_FLIGHT: usize = 12;
/// The exit status of qemu-img check for leaked clusters without corruptions.
const LEAKS: i32 = 3;

/// The model: for each sector, the number of its write.
struct Disk {
    random: Random,
    writes: u32,
    /// The newest write that is certainly durable.
    kept: Vec<u32>,
    /// The newest answered write.
    answered: Vec<u32>,
    /// The newest sent write.
    sent: Vec<u32>,
}

/// A command in flight.
enum Flight {
    Write {
        sectors: Range<usize>,
        number: u32,
        fua: bool,
    },
    /// With the writes that were answered when the flush was sent.
    Flush {
        answered: Vec<u32>,
    },
}

/// The content of a sector after the write with this number; 0 is the backing file's content.
fn stamp(sector: usize, number: u32) -> [u8; SECTOR_BYTES as usize] {
    let mut bytes = [0; SECTOR_BYTES as usize];
    for index in 0..SECTOR_BYTES as usize / 8 {
        let word = u64::from(number) << 32 | (sector as u64 * 64 + index as u64);
        bytes[index * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The contents of `sectors` after that write.
fn stamps(sectors: Range<usize>, number: u32) -> Vec<u8> {
    sectors.map(|sector| stamp(sector, number)).collect::<Vec<_>>().concat()
}

impl Disk {
    fn new(seed: u64) -> Self {
        let none = vec![0; SECTORS];
        let (answered, sent) = (none.clone(), none.clone());
        Self { random: Random::from_seed(seed), writes: 0, kept: none, answered, sent }
    }

    /// A write that overlaps none of `flights`, or a flush.
    fn next(&mut self, flights: &HashMap<u64, Flight>) -> Option<(Command, Flight)> {
        if self.random.chance(8) {
            return Some((Command::Flush, Flight::Flush { answered: self.answered.clone() }));
        }
        let most = if self.random.chance(10) { 512 } else { 24 };
        let len = 1 + self.random.below(most) as usize;
        let start = self.random.below((SECTORS - len) as u64) as usize;
        let start = if self.random.chance(60) { start / 8 * 8 } else { start };
        let sectors = start..start + len;
        let busy = flights.values().any(|flight| match flight {
            Flight::Write { sectors: other, .. } => {
                other.start < sectors.end && sectors.start < other.end
            }
            Flight::Flush { .. } => false,
        });
        if busy {
            return None;
        }
        self.writes += 1;
        let number = self.writes;
        self.sent[sectors.clone()].fill(number);
        let data = stamps(sectors.clone(), number);
        let fua = self.random.chance(15);
        let offset = sectors.start as u64 * SECTOR_BYTES;
        Some((Command::Write { offset, data, fua }, Flight::Write { sectors, number, fua }))
    }

    fn answered(&mut self, flight: Flight) {
        match flight {
            Flight::Write { sectors, number, fua } => {
                self.answered[sectors.clone()].fill(number);
                if fua {
                    self.kept[sectors].fill(number);
                }
            }
            Flight::Flush { answered } => {
                let pairs = self.kept.iter_mut().zip(answered);
                pairs.for_each(|(kept, answered)| *kept = answered.max(*kept));
            }
        }
    }

    /// Writes until the server is killed.
    fn write(&mut self, mut client: Client) {
        let mut flights = HashMap::new();
        loop {
            while flights.len() < IN_FLIGHT {
                let Some((command, flight)) = self.next(&flights) else { break };
                match client.send(&command) {
                    Ok(cookie) => flights.insert(cookie, flight),
                    Err(_) => return,
                };
            }
            let Ok((cookie, answer)) = client.receive() else { return };
            answer.expect("a write that succeeds");
            self.answered(flights.remove(&cookie).expect("an answer to a request in flight"));
        }
    }

    /// Compares with the image's content, from which the next server starts.
    fn compare(&mut self, bytes: &[u8]) {
        for (sector, bytes) in bytes.chunks_exact(SECTOR_BYTES as usize).enumerate() {
            let number = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            let (least, most) = (self.kept[sector], self.sent[sector]);
            assert!(
                (least..=most).contains(&number),
                "sector {sector} is from write {number}, is to be from {least} to {most}"
            );
            let whole = bytes == stamp(sector, number);
            assert!(whole, "sector {sector} is not as write {number} left it");
            for numbers in [&mut self.kept, &mut self.answered, &mut self.sent] {
                numbers[sector] = number;
            }
        }
    }
}

fn contents(image: &Path) -> Vec<u8> {
    let options = ChainOptions { format: Some(Format::Qcow2), ..ChainOptions::default() };
    let chain = Chain::open(image, &options).expect("an image that can be opened");
    let mut bytes = vec![0; DISK_BYTES as usize];
    let reader = ChainReader::new(chain.layers()).expect("an image that can be read");
    reader.read_at(0, &mut bytes).expect("the whole disk");
    bytes
}

#[test]
fn a_killed_server_leaves_no_corruption_and_all_flushed_data() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let (base, image) = (scratch.join("base.img"), scratch.join("disk.qcow2"));
    let below = stamps(0..SECTORS, 0);
    fs::write(&base, &below).expect("a backing file");
    // Small clusters, so that tables of all kinds are allocated often; but large enough that writes
    // often cover a cluster only in part, whose rest is copied.
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=8192", "-F", "raw", "-b"];
    tool("qemu-img").args(create).args([&base, &image]).succeeds();
    let mut disk = Disk::new(seed());
    for kill in 0..KILLS {
        let server = Server::start(&image, &["--queues", "2"]);
        let client = server.connect();
        let life = Duration::from_millis(disk.random.below(LIFE_MS));
        let writer = thread::spawn(move || {
            disk.write(client);
            disk
        });
        thread::sleep(life);
        drop(server);
        disk = writer.join().expect("a writer without objections");
        let check = tool("qemu-img").args(["check", "-q"]).arg(&image).output().expect("a check");
        let printed = String::from_utf8_lossy(&check.stderr);
        let status = check.status.code();
        assert!(status == Some(0) || status == Some(LEAKS), "after {kill} kills: {printed}");
        disk.compare(&contents(&image));
    }
    assert!(disk.writes > KILLS, "{} writes were made", disk.writes);
    assert!(fs::read(&base).expect("the backing file") == below, "the backing file was changed");
}
