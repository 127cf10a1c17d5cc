//! The command line, which `nowait bench` passes on as it is, and its help.
//!
//! Invariant: parsed values are in range.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum, ValueHint};
use nowait_daemon::process::log;
use nowait_daemon::size;
use nowait_remote::Location;

use crate::server::ServerKind;
use crate::workload::{Caching, Transport};

/// A shorter copy ends too soon to be timed.
const COPIED_BYTES_MIN: u64 = 16 << 20;
/// The shortest and the longest request to a device.
const BLOCK_BYTES_MIN: u64 = 4 << 10;
const BLOCK_BYTES_MAX: u64 = 1 << 20;
/// The most bytes of all requests to a device that are in flight.
const IN_FLIGHT_BYTES_MAX: u64 = 1 << 30;
/// The default number of bytes to copy.
const COPIED_BYTES: u64 = 512 << 20;

/// Measure, on this host: this server and its copies beside others, the engine's mechanisms on
/// against off
///
/// Each figure is the median of several short measurements, interleaved with those of what it is compared to, so
/// that a machine that slows down slows down for all of them.
#[derive(Clone, Debug, Parser)]
#[command(name = "nowait-bench", bin_name = "nowait bench", version, after_help = AFTER_HELP)]
pub struct BenchArgs {
    /// Measurement to make
    #[arg(value_enum)]
    pub what: What,

    /// The file or block device to serve, at least 64M; without it a temporary one
    #[arg(long, value_name = "FILE", group = "place")]
    pub file: Option<PathBuf>,

    /// nowait: a local block device, as /dev/ublkb0, or an image behind a network, as rbd:POOL/IMAGE or
    /// nbd://HOST/EXPORT; several side by side, the first compared to the others. At least 64M, of which the first GiB is used
    #[arg(long, value_name = "DEVICE", group = "place", value_hint = ValueHint::FilePath)]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Location::parse(&text)))]
    pub device: Vec<Location>,

    /// Write over FILE or DEVICE: what is in it is lost. Without this only reads are measured on it. A device that is
    /// mounted or claimed is refused, and so is an image of a Ceph cluster that another client has locked; what else has a
    /// loop device's file or an export open is not known
    #[arg(long, requires = "place")]
    pub overwrite: bool,

    /// nowait --device: measure on devices whose storage was given back, too: reads of holes, writes that allocate
    #[arg(long, requires = "overwrite")]
    pub discard: bool,

    /// nowait --device: threads that make requests, 1 to 64
    #[arg(long, value_name = "N", requires = "device")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    #[arg(default_value_t = 12)]
    pub jobs: u16,

    /// nowait --device: requests of each thread in flight, 1 to 1024
    #[arg(long, value_name = "N", requires = "device")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    #[arg(default_value_t = 16)]
    pub depth: u16,

    /// nowait --device: bytes of a request, multiples of 4K up to 1M, with rows for each
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_block, requires = "device")]
    #[arg(default_value = "4K")]
    pub block_size: Vec<u64>,

    /// copy, library: a directory on the file system to measure, with four times --size of room; without it $TMPDIR, or
    /// /var/tmp
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,

    /// Bytes, 16M or more. copy: of the full disk, 512M without it; the sparse one has twice as many. library: of the
    /// one file, and of the thousand together, 256M without it
    #[arg(long, value_name = "SIZE", value_parser = parse_copied)]
    pub size: Option<u64>,

    /// library: the program that has the other runtimes, without it nowait-runtimes beside nowait or in target/release
    #[arg(long, value_name = "PROGRAM")]
    pub peers: Option<PathBuf>,

    /// all but copy: seconds for each server, row and round; 1 without it
    #[arg(long, value_name = "N", value_parser = parse_seconds)]
    pub seconds: Option<f64>,

    /// How often everything is measured
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// peers: connections simultaneously, each with a row's depth; 1 without it. With vhost-user: queues; a table of one and a
    /// table of two without it
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub connections: Option<u16>,

    /// peers, images: only these servers: nowait, qemu-nbd, qemu-storage-daemon, nbdkit
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        value_enum,
        hide_possible_values = true
    )]
    pub servers: Vec<ServerKind>,

    /// all but copy: only rows whose title contains TEXT, as in "random read" or "depth 64"
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,

    /// peers: only past the page cache (direct), or only through it (cached)
    #[arg(long, value_name = "HOW", value_enum)]
    pub caching: Option<Caching>,

    /// peers: only with bytes as they are (plain), only by TLS 1.3 (tls), or, which are left out otherwise: instead of
    /// Unix sockets by TCP on the loopback interface (tcp), or as disks of a virtual machine (vhost-user), raw and qcow2
    #[arg(long, value_name = "HOW", value_enum)]
    pub transport: Option<Transport>,

    /// Print one JSON object, for scripts
    #[arg(long)]
    pub json: bool,
}

impl BenchArgs {
    /// The command line of this process. The error is the exit status, where help was asked for and printed, or the
    /// command line is wrong and one line said so.
    pub fn of_this_process() -> Result<Self, u8> {
        let parsed = Self::try_parse().and_then(|args| match args.check() {
            Ok(()) => Ok(args),
            Err(why) => Err(Self::command().error(ErrorKind::ArgumentConflict, why)),
        });
        parsed.map_err(|error| {
            if !error.use_stderr() {
                return u8::from(error.print().is_err());
            }
            log::write_line(tracing::Level::ERROR, one_line(&error));
            2
        })
    }

    /// Bytes of the full disk that is copied.
    pub fn size(&self) -> u64 {
        self.size.unwrap_or(COPIED_BYTES)
    }

    /// The time of each measurement.
    pub fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(1.0))
    }

    /// Connections to each of the peers simultaneously, or queues.
    pub fn connections(&self) -> Option<usize> {
        self.connections.map(usize::from)
    }

    /// The servers to measure, in the order of the command line.
    pub fn servers(&self) -> Vec<ServerKind> {
        if self.servers.is_empty() { ServerKind::ALL.to_vec() } else { self.servers.clone() }
    }

    /// Checks that WHAT has the given options, and that they fit each other.
    ///
    /// # Errors
    /// A message for the user.
    pub fn check(&self) -> Result<(), String> {
        use What::{Backup, Copy, Images, Isolation, Library, Nowait, Peers};
        let what = self.what;
        let is = |allowed: &[What]| allowed.contains(&what);
        let of_tables = "all but copy, library, images, isolation and backup";
        let is_of_tables = !is(&[Copy, Library, Images, Isolation, Backup]);
        let options = [
            (self.directory.is_some(), is(&[Copy, Library]), "--directory", "copy and library"),
            (!self.device.is_empty(), is(&[Nowait]), "--device", "nowait"),
            (self.discard && self.device.is_empty(), false, "--discard", "nowait --device"),
            (self.size.is_some(), is(&[Copy, Library]), "--size", "copy and library"),
            (self.peers.is_some(), is(&[Library]), "--peers", "library"),
            (self.connections.is_some(), is(&[Peers]), "--connections", "peers"),
            (self.caching.is_some(), is(&[Peers]), "--caching", "peers"),
            (self.transport.is_some(), is(&[Peers]), "--transport", "peers"),
            (!self.servers.is_empty(), is(&[Peers, Images]), "--servers", "peers and images"),
            (self.only.is_some(), !is(&[Copy]), "--only", "all but copy"),
            (self.file.is_some(), is_of_tables, "--file", of_tables),
            (self.seconds.is_some(), !is(&[Copy]), "--seconds", "all but copy"),
        ];
        match options.into_iter().find(|(is_given, has, ..)| *is_given && !has) {
            Some((_, _, option, of)) => {
                let name = what.name();
                Err(format!("bench {name} has no {option}: it is an option of {of}"))
            }
            None => self.check_in_flight(),
        }
    }

    fn check_in_flight(&self) -> Result<(), String> {
        let in_flight = u64::from(self.jobs) * u64::from(self.depth);
        let fits = |bytes: &u64| in_flight * bytes <= IN_FLIGHT_BYTES_MAX;
        match self.block_size.iter().all(fits) {
            true => Ok(()),
            false => Err("--jobs times --depth times --block-size is more than 1 GiB".to_owned()),
        }
    }
}

/// Everything that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// NBD servers: nowait, qemu-nbd, qemu-storage-daemon and nbdkit, those that are installed
    Peers,
    /// Copies of disks: nowait copy, qemu-img convert and nbdcopy, those that are installed
    Copy,
    /// Files of the library and of other Rust runtimes: compio, glommio, monoio, tokio-uring, tokio's blocking threads
    Library,
    /// Image formats: raw, qcow2 and a chain of three, served by nowait and by QEMU's servers, on
    /// images of 128M that are made for it in $TMPDIR or /var/tmp
    Images,
    /// The latencies of one client, alone and beside others of the same server: with a disk that stops answering,
    /// one that takes 100 ms a request, one that fails every request, and a client that floods. The disks are on a
    /// FUSE file system
    Isolation,
    /// The cost of backups for the writers: dirty bitmaps in memory and stored, and old bytes that are copied before they are
    /// overwritten, each divided by the same server without; of nowait and qemu-storage-daemon, on images of 128M that
    /// are made for it in $TMPDIR or /var/tmp
    Backup,
    /// The engine's simple path on and off: 4K random
    Simple,
    /// Writes completed by the thread that reaps them, and by a detour over another
    Completion,
    /// Segments all together, and one after the other
    Vectored,
    /// Request slots from the engine's slab, and from the allocator
    Pool,
    /// Requests that touch in one transfer, and one by one
    Merge,
    /// Trying without waiting first, with and without hints; the engine beside the kernel's loop device,
    /// which takes root. With --device: block devices side by side
    Nowait,
    /// Writes made durable one by one, and together, where the file system syncs for each
    Durable,
    /// Records of the library's log, and one durable write for each
    Log,
    /// The engine on io_uring and on Linux AIO, the library's other interfaces, a bare io_uring loop and plain calls
    Engines,
    /// All of the engine's tables: all but peers, copy, library, images, isolation and backup
    All,
}

impl What {
    /// The tables of the engine, in the order in which they are measured.
    pub const TABLES: [Self; 9] = [
        Self::Simple,
        Self::Completion,
        Self::Vectored,
        Self::Pool,
        Self::Merge,
        Self::Nowait,
        Self::Durable,
        Self::Log,
        Self::Engines,
    ];

    /// Its name on the command line and in JSON.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The mistake, in one line.
fn one_line(error: &clap::Error) -> String {
    let all = error.render().to_string();
    let why = all.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
    let why: Vec<&str> = why.split_whitespace().collect();
    format!("{} (see 'nowait bench --help')", why.join(" "))
}

fn parse_copied(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes >= COPIED_BYTES_MIN => Ok(bytes),
        _ => Err("at least 16M".into()),
    }
}

fn parse_block(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes.is_multiple_of(BLOCK_BYTES_MIN) && bytes <= BLOCK_BYTES_MAX => Ok(bytes),
        _ => Err("a multiple of 4K up to 1M".into()),
    }
}

fn parse_seconds(text: &str) -> Result<f64, &'static str> {
    match text.parse() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number from 0.05 to 3600"),
    }
}

const AFTER_HELP: &str = "\
Examples:
  nowait bench peers                        NBD servers side by side, on a temporary file
  nowait bench copy --directory /mnt/fast   copies side by side, in a directory made there
  nowait bench library --only 'depth 32'    the library beside compio, glommio, monoio and others
  nowait bench images                       raw, qcow2 and a chain, past the page cache
  nowait bench isolation                    a client beside neighbours that misbehave
  nowait bench backup                       what dirty bitmaps and backups cost the writers
  nowait bench all                          each of the engine's mechanisms, on against off
  nowait bench peers --file /mnt/fast/scratch.img --overwrite --seconds 3
  nowait bench nowait --device /dev/ublkb0 --device /dev/loop0
                                            two devices, 4K reads by 12 jobs of depth 16
  nowait bench nowait --device rbd:rbd/vm1 --jobs 1 --depth 64
                                            an image of a Ceph cluster, only reads
  nowait bench nowait --device /dev/ublkb0 --overwrite --discard
                                            writes, too, also to a device without storage

Exit status:
  0   the tables are complete
  1   nothing could be measured, or not all of it that this host has
  2   wrong command line";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_do_not_apply_are_refused_instead_of_ignored() {
        let check = |line: &str| BenchArgs::try_parse_from(line.split(' ')).unwrap().check();
        for (line, why) in [
            ("nowait-bench copy --seconds 2", "all but copy"),
            ("nowait-bench images --file f", "all but copy, library, images, isolation and backup"),
            ("nowait-bench backup --file f", "all but copy, library, images, isolation and backup"),
            (
                "nowait-bench library --file f",
                "all but copy, library, images, isolation and backup",
            ),
            ("nowait-bench peers --size 16M", "an option of copy and library"),
            ("nowait-bench copy --peers p", "an option of library"),
            ("nowait-bench simple --caching direct", "an option of peers"),
            (
                "nowait-bench nowait --device /d --jobs 64 --depth 1024 --block-size 4K,1M",
                "more than 1 GiB",
            ),
        ] {
            let refused = check(line).unwrap_err();
            assert!(refused.contains(why), "{line}: {refused}");
        }
        assert_eq!(check("nowait-bench peers --connections 2 --seconds 2"), Ok(()));
    }

    #[test]
    fn a_wrong_command_line_is_one_line() {
        for line in [
            "nowait-bench",
            "nowait-bench x",
            "nowait-bench copy --size 1M",
            "nowait-bench copy --no",
            "nowait-bench peers --connections 65",
            "nowait-bench peers --rounds 0",
            "nowait-bench peers --seconds 0",
            "nowait-bench nowait --device /d --discard",
            "nowait-bench nowait --device /d --jobs 0",
            "nowait-bench nowait --device /d --depth 1025",
            "nowait-bench nowait --device /d --block-size 512",
        ] {
            let line = one_line(&BenchArgs::try_parse_from(line.split(' ')).unwrap_err());
            assert!(
                line.lines().count() == 1 && line.ends_with("(see 'nowait bench --help')"),
                "{line}"
            );
        }
        assert_eq!(
            BenchArgs::try_parse_from(["nowait-bench", "peers", "--servers", "qemu-nbd,nbdkit"])
                .unwrap()
                .servers,
            [ServerKind::QemuNbd, ServerKind::Nbdkit]
        );
    }
}
