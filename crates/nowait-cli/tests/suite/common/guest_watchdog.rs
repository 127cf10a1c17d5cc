//! A watchdog for virtual machines.
//!
//! Invariant: a machine on a busy host is left alone for as long as it writes to its console or is given a processor;
//! one that does neither for [`SILENCE`] is killed.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nowait_testkit::Running;

use super::Scratch;

/// How long a machine may be silent without work.
const SILENCE: Duration = Duration::from_secs(120);
/// The processor time that counts as work within [`SILENCE`]. An idle machine uses half of it; one that has work is
/// given more by a host with a load of 50.
const WORK: Duration = Duration::from_secs(4);

/// Runs `machine` until it powers off. Returns its console output.
///
/// # Panics
/// It exits with another status than 0, or is stuck; the message has its console and the emulator's messages.
pub(super) fn powered_off(machine: &mut Command) -> String {
    let scratch = Scratch::new();
    let [console, messages] = ["console", "messages"].map(|name| scratch.join(name));
    let files = [&console, &messages].map(|path| File::create(path).expect("a file"));
    let [stdout, stderr] = files.map(Stdio::from);
    let mut machine = Running::spawn(machine.stdin(Stdio::null()).stdout(stdout).stderr(stderr));
    let text = |path| String::from_utf8_lossy(&fs::read(path).expect("a file")).into_owned();
    let said = || text(&console) + &text(&messages);
    let mut activity = Activity::default();
    let begin = Instant::now();
    loop {
        if let Some(status) = machine.0.try_wait().expect("a child") {
            assert!(status.success(), "the machine: {status}\n{}", said());
            return text(&console);
        }
        let written = fs::metadata(&console).expect("a file").len();
        let stuck = activity.is_stuck(begin.elapsed(), written, processor_time(machine.0.id()));
        assert!(!stuck, "the machine is stuck after\n{}", said());
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processor time that process `pid`, a child that was not waited for, has used.
fn processor_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a child");
    // proc_pid_stat(5): the state is after the name in brackets, utime and stime are 11 and 12 fields further.
    let (_, fields) = stat.rsplit_once(") ").expect("a name in brackets");
    let ticks =
        fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().expect("a number"));
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis(ticks.sum::<u64>() * 1000 / per_second)
}

/// When a machine has last done something.
#[derive(Default)]
struct Activity {
    since: Duration,
    written: u64,
    used: Duration,
}

impl Activity {
    /// Whether it has done nothing for [`SILENCE`], at time `now`, with `written` bytes on its console and `used` processor
    /// time since it was started.
    fn is_stuck(&mut self, now: Duration, written: u64, used: Duration) -> bool {
        if written != self.written || used - self.used >= WORK {
            *self = Self { since: now, written, used };
        }
        now - self.since >= SILENCE
    }
}

#[test]
fn only_a_guest_that_is_silent_and_idle_is_stuck() {
    let seconds = Duration::from_secs;
    let mut activity = Activity::default();
    assert!(!activity.is_stuck(seconds(119), 0, seconds(3)));
    assert!(activity.is_stuck(seconds(120), 0, seconds(3)), "idle");
    assert!(!activity.is_stuck(seconds(121), 1, seconds(3)), "it has written");
    assert!(!activity.is_stuck(seconds(240), 1, seconds(4)));
    assert!(!activity.is_stuck(seconds(242), 1, seconds(7)), "it has worked");
    assert!(activity.is_stuck(seconds(362), 1, seconds(7)));
}

#[test]
fn a_guest_that_fails_has_its_console_in_the_message() {
    let run = || {
        powered_off(
            Command::new("sh").args(["-c", "echo on the console; echo a message >&2; exit 3"]),
        )
    };
    let panic = std::panic::catch_unwind(run).expect_err("a failed machine");
    let message = panic.downcast_ref::<String>().expect("a message");
    for part in ["exit status: 3", "on the console", "a message"] {
        assert!(message.contains(part), "no '{part}': {message}");
    }
}
