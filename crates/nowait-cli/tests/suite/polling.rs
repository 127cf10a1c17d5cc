//! `nowait serve --poll` on devices with polled queues, and on others.
//!
//! Invariant: the server runs in a guest, because devices with polled queues are available only
//! there: null_blk, which completes no polled request that is not polled for, and the NVMe device
//! that QEMU emulates, whose interrupts the guest counts.

use std::path::Path;

use crate::common::{Guest, Kernel, MIB, Scratch};

/// Bytes of every device, and of the data that is copied there and back.
const DEVICE_BYTES: u64 = 16 * MIB;

/// Serves each device, with and without `--poll`, and copies data into it.
const GUEST_INIT: &str = r#"
mount -t proc none /proc
mount -t sysfs none /sys
load configfs; load null_blk nr_devices=0
mount -t configfs none /sys/kernel/config
device() {
    cd /sys/kernel/config/nullb && mkdir $1 && cd $1
    echo 16 >size && echo 1 >memory_backed && echo 512 >blocksize && echo $2 >poll_queues
    echo 2 >queue_mode && echo 1 >power
    cd /
}
device nullb0 1; device nullb1 0
requests() { set -- $(cat /sys/block/$1/stat) && echo $(($1 + $5)); }
interrupts() { sum=0; for n in $(awk '/nvme0q[1-9]/ { print $2 }' /proc/interrupts); do sum=$((sum + n)); done; echo $sum; }
serve() {
    device=$1; shift
    /test/nowait serve /dev/$device "$@" --verbose --nbd unix:/tmp/sock >/dev/null 2>/tmp/log &
    pid=$!
    for n in $(seq 600); do [ -S /tmp/sock ] && break; sleep 0.05; done
}
copy() { /test/nowait copy /test/random 'nbd+unix:///?socket=/tmp/sock' --verify >/dev/null && echo "guest: copied to $1"; }
states() { for task in /proc/$pid/task/*; do awk '/^State/ { print $2 }' $task/status; done | sort -u | tr -d '\n'; }
stop() { kill -TERM $pid && wait $pid && echo "guest: stopped $1"; }

serve nullb0 --poll && copy "null_blk"
# It may not have noticed yet that its client has gone.
for n in $(seq 100); do [ "$(states)" = S ] && break; sleep 0.1; done
echo "guest: states of an idle server: $(states)"
stop "null_blk"
serve nullb1 --poll; wait $pid; echo "guest: without polled queues: $? $(cat /tmp/log)"
for poll in --poll ""; do
    serve nvme0n1 $poll; before="$(requests nvme0n1) $(interrupts)"
    copy nvme$poll
    echo "guest: nvme$poll $before $(requests nvme0n1) $(interrupts)"
    stop nvme$poll
done
echo "guest: done"
poweroff -f
"#;

#[test]
fn serve_poll_takes_no_interrupts_of_nvme_and_refuses_what_cannot_be_polled() {
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let disk = scratch.sparse("nvme.img", DEVICE_BYTES);
    let drive = format!("file={},format=raw,if=none,id=nvme", disk.display());
    let arguments = ["-drive", &drive, "-device", "nvme,drive=nvme,serial=nowait"];
    let program = Path::new(env!("CARGO_BIN_EXE_nowait"));
    let console = guest.run(GUEST_INIT, &[program], &arguments);
    for line in [
        "copied to null_blk",
        "states of an idle server: S\r",
        "stopped null_blk",
        "without polled queues: 1 nowait: /dev/nullb1: it cannot be polled: its device has no queues \
         for polling",
        "copied to nvme--poll",
        "stopped nvme--poll",
        "copied to nvme",
        "done",
    ] {
        assert!(console.contains(&format!("guest: {line}")), "not '{line}': {console}");
    }
    let [polled, by_interrupt] = ["nvme--poll", "nvme"].map(|way| counts_of(&console, way));
    println!("requests and interrupts: polled {polled:?}, else {by_interrupt:?}");
    // The server's start and stop make a few requests of their own: probes and syncs.
    assert!(polled.requests > 100 && polled.interrupts * 10 < polled.requests, "{polled:?}");
    assert!(by_interrupt.interrupts > 3 * polled.interrupts, "{by_interrupt:?}, {polled:?}");
}

/// The requests and the interrupts of a device while data was copied.
#[derive(Debug)]
struct Counts {
    requests: u64,
    interrupts: u64,
}

/// The counts in the line `guest: WAY REQUESTS INTERRUPTS REQUESTS INTERRUPTS`, before and after.
fn counts_of(console: &str, way: &str) -> Counts {
    let start = format!("guest: {way} ");
    let line = console.lines().find_map(|line| line.strip_prefix(&start)).expect("the counts");
    let counts: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [requests, interrupts, more_requests, more_interrupts] = counts[..] else {
        panic!("not four counts: {line}");
    };
    let (requests, interrupts) = (more_requests - requests, more_interrupts - interrupts);
    Counts { requests, interrupts }
}
