//! `HIPRI` on a device with polled queues, and on others.
//!
//! Invariant: the engine is tested in a guest, where this program runs itself again, because
//! devices with polled queues are available only there. Such a device completes no request that is
//! not polled for.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, ByteRange, Config, Flags, IoBuffer, IoQueue, LinearMap,
    LocalAsyncFile, LocalDriver, Op, OpenOptions, Request, SingleDisk, Stats,
};

use crate::common::{Guest, KIB, Kernel, MIB, Scratch, path_of, skip};
use nowait_testkit::{Random, TestQueueKind, WaitForRequests};

/// The directories of the devices and files in the guest, named after the expected behaviour.
const POLLED: &str = "/test/polled";
const BY_INTERRUPT: &str = "/test/by-interrupt";

/// Creates the devices and files, and runs the test on them.
const GUEST_INIT: &str = r#"
mount -t proc none /proc
mount -t sysfs none /sys
load configfs; load null_blk nr_devices=0
for module in nls_cp437 nls_iso8859-1 fat vfat; do load $module; done
mount -t configfs none /sys/kernel/config
device() {
    cd /sys/kernel/config/nullb && mkdir $1 && cd $1
    echo 64 >size && echo 1 >memory_backed && echo 512 >blocksize && echo $2 >poll_queues
    echo $3 >irqmode && echo 100000 >completion_nsec && echo 2 >queue_mode && echo 1 >power
    cd /
}
# The last ones complete from a timer, so that nothing is ever done before it was waited for.
device nullb0 1 0; device nullb1 1 0; device nullb2 1 0; device nullb3 0 2
mkdir -p /test/polled /test/by-interrupt /ext /fat
/test/mkfs.ext4 -q /dev/nullb1 && mount -t ext4 /dev/nullb1 /ext
/test/mkfs.vfat /dev/nullb2 >/dev/null && mount -t vfat -o codepage=437,iocharset=iso8859-1 /dev/nullb2 /fat
for file in /ext/image /fat/image; do dd if=/dev/zero of=$file bs=1M count=8 2>/dev/null; done
sync
ln -s /dev/nullb0 /test/polled/device
ln -s /ext/image /test/polled/file
ln -s /dev/nullb3 /test/by-interrupt/device
# A file system that cannot poll, on a device that can.
ln -s /fat/image /test/by-interrupt/file
/test/suite --ignored --exact hipri::in_the_guest --nocapture --test-threads=1 && echo "guest: done"
poweroff -f
"#;

#[test]
fn c48_hipri_is_polled_where_the_device_can_and_served_by_interrupt_elsewhere() {
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let [ext4, vfat] = ["mkfs.ext4", "mkfs.vfat"].map(path_of);
    let (Some(ext4), Some(vfat)) = (ext4, vfat) else {
        skip("no mkfs.ext4 or no mkfs.vfat");
        return;
    };
    let scratch = Scratch::new();
    let suite = scratch.join("suite");
    fs::copy(std::env::current_exe().expect("this program"), &suite).expect("a copy");
    let console = guest.run(GUEST_INIT, &[&suite, &ext4, &vfat], &[]);
    assert!(console.contains("guest: done"), "{console}");
    for way in ["polled/device", "polled/file"] {
        assert!(console.contains(&format!("served on /test/{way}")), "not on {way}: {console}");
    }
    for way in ["polled/device", "polled/file", "by-interrupt/device", "by-interrupt/file"] {
        assert!(console.contains(&format!("served /test/{way}")), "not {way}: {console}");
    }
}

#[test]
#[ignore = "runs in the guest that the test before this one boots"]
fn in_the_guest() {
    for (directory, polled) in [(POLLED, true), (BY_INTERRUPT, false)] {
        for name in ["device", "file"] {
            let path = Path::new(directory).join(name);
            for kind in TestQueueKind::REAL {
                for simple in [true, false] {
                    let config = Config { simple, slots: 512, ..Config::default() };
                    let stats = serves(kind, &open(&path), config);
                    let polled = polled && kind == TestQueueKind::Uring;
                    assert_eq!(stats.polled > 0, polled, "{}: {stats:?}", path.display());
                }
            }
            println!("served {}", path.display());
            if polled {
                serves_when_polling_stops(&open(&path));
                serves_files(&path);
                println!("served on {}", path.display());
            }
        }
    }
}

fn open(path: &Path) -> Arc<BlockDevice<LinearMap>> {
    let disk = BlockDevice::open_mapped(path, OpenOptions::default()).expect("an image");
    assert!(disk.is_direct(), "{}", path.display());
    Arc::new(disk)
}

/// Writes and reads back, with all requests in flight together and every second one polled.
fn serves(kind: TestQueueKind, disk: &Arc<BlockDevice<LinearMap>>, config: Config) -> Stats {
    let mut engine = kind.engine(disk, 2, config).expect("a queue");
    let mut random = Random::from_seed(48);
    // More requests than a ring holds; longer than one request of the device; durable; unaligned.
    let small = |count: u64| (0..count).map(|n| (n * 4 * KIB, 4 * KIB)).collect::<Vec<_>>();
    let rounds = [
        (small(300), Flags::NONE),
        (vec![(MIB, 3 * MIB), (5 * MIB, 2 * MIB)], Flags::NONE),
        (small(64), Flags::DSYNC),
        (vec![(1001, 10_000), (2 * MIB + 5, 100 * KIB), (7, 90)], Flags::NONE),
    ];
    for (ranges, flags) in rounds {
        let ranges: Vec<_> = ranges.iter().map(|&(pos, len)| ByteRange::new(pos, len)).collect();
        let data: Vec<_> = ranges.iter().map(|range| random.bytes(range.len as usize)).collect();
        all_at_once(&mut engine, Op::Write, flags, &ranges, &data);
        all_at_once(&mut engine, Op::Read, Flags::NONE, &ranges, &data);
    }
    engine.stats()
}

/// The kernel refuses to poll a descriptor that uses the page cache (`EOPNOTSUPP`), as one whose
/// device has lost its polled queues. What was refused, and what comes later, is served all the
/// same.
fn serves_when_polling_stops(disk: &Arc<BlockDevice<LinearMap>>) {
    let kind = TestQueueKind::Uring;
    let mut engine = kind.engine(disk, 2, Config::default()).expect("a queue");
    let ranges: Vec<_> = (0..64).map(|n| ByteRange::new(n * 4 * KIB, 4 * KIB)).collect();
    let data = |byte| vec![vec![byte; 4 * KIB as usize]; ranges.len()];
    all_at_once(&mut engine, Op::Write, Flags::NONE, &ranges, &data(1));
    assert!(!engine.has_stopped_polling() && engine.stats().polled == 32);
    let fd = disk.fd().expect("a descriptor");
    let flags = rustix::fs::fcntl_getfl(fd).expect("its flags");
    rustix::fs::fcntl_setfl(fd, flags - rustix::fs::OFlags::DIRECT).expect("other flags");
    for byte in [2, 3] {
        all_at_once(&mut engine, Op::Write, Flags::NONE, &ranges, &data(byte));
        all_at_once(&mut engine, Op::Read, Flags::NONE, &ranges, &data(byte));
        assert!(engine.has_stopped_polling() && engine.stats().polled == 32);
    }
}

/// Each of the other APIs writes and reads back with `HIPRI`; two files on one thread, so that the
/// driver sleeps on their descriptors.
fn serves_files(path: &Path) {
    let options = OpenOptions::new().allow_mounted(true);
    let buffer = |byte| {
        let mut buffer = IoBuffer::zeroed(64 * KIB as usize).expect("memory");
        buffer.fill(byte);
        buffer
    };
    let driver = LocalDriver::new().expect("a driver");
    driver.block_on(async {
        let open = || LocalAsyncFile::open(path, options).expect("a file");
        let (file, other) = (open().with_flags(Flags::HIPRI), open());
        assert_eq!(file.write_at(buffer(5), MIB, Flags::NONE).await.0, Ok(64 * KIB as usize));
        let (read, bytes) = file.read_at(buffer(0), MIB).await;
        assert!(read == Ok(64 * KIB as usize) && bytes.iter().all(|&byte| byte == 5));
        assert_eq!(other.read_at(buffer(0), MIB).await.0, Ok(64 * KIB as usize));
        let file = AsyncFile::open(path, options).expect("a file").with_flags(Flags::HIPRI);
        assert_eq!(file.write_at(buffer(6), MIB, Flags::NONE).await.0, Ok(64 * KIB as usize));
        let (read, bytes) = file.read_at(buffer(0), MIB).await;
        assert!(read == Ok(64 * KIB as usize) && bytes.iter().all(|&byte| byte == 6));
    });
    let file = BlockingFile::open(path, options).expect("a file").with_flags(Flags::HIPRI);
    assert_eq!(file.write_at(&buffer(7), MIB, Flags::NONE), Ok(64 * KIB as usize));
    let mut back = buffer(0);
    assert_eq!(file.read_at(&mut back, MIB), Ok(64 * KIB as usize));
    assert!(back.iter().all(|&byte| byte == 7));
}

/// Submits a request for each range, writes of `data` or reads that must return it, and waits for
/// all.
fn all_at_once<Q: IoQueue>(
    engine: &mut SingleDisk<Q, LinearMap>,
    op: Op,
    flags: Flags,
    ranges: &[ByteRange],
    data: &[Vec<u8>],
) {
    for (tag, (&range, bytes)) in ranges.iter().zip(data).enumerate() {
        let mut buf = engine.buffer(range).expect("memory");
        if op == Op::Write {
            buf.copy_from_slice(bytes);
        }
        let flags = if tag % 2 == 0 { flags | Flags::HIPRI } else { flags };
        let taken = engine.submit(Request { op, flags, range }, buf, tag as u64);
        assert!(taken.is_ok(), "{op:?} {range:?} is refused");
    }
    for ended in engine.finish() {
        let (range, bytes) = (ended.io.range, &data[ended.tag as usize]);
        let done = ended.result().unwrap_or_else(|error| panic!("{op:?} {range:?}: {error}"));
        assert_eq!(done, range.len);
        let buf = ended.buf.expect("the buffer it came with");
        assert!(buf[..] == bytes[..], "{op:?} {range:?}: other data");
    }
}
