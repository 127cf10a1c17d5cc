//! An idle server causes no I/O pressure (`/proc/pressure/io`): its threads wait for clients.
//!
//! Invariant: the figure is that of a control group in which only the server under test is.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nowait_testkit::{say_skipped, wait_until};

use crate::common::{MIB, Scratch, Server, text};

/// The command prefix that has a command run in the control group `$0`.
const IN_GROUP: &str = r#"echo 0 >"$0/cgroup.procs" && exec "$@""#;

/// A control group that is removed with its value, when its processes have ended.
struct Group(PathBuf);

impl Group {
    /// A control group below that of this process; `None` if the test cannot run here.
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the mounts");
        let is_unified = |line: &&str| line.split(' ').nth(2) == Some("cgroup2");
        let root = mounts.lines().find(is_unified).and_then(|line| line.split(' ').nth(1));
        let own = fs::read_to_string("/proc/self/cgroup").expect("the control groups");
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let (Some(root), Some(own)) = (root, own) else {
            say_skipped("no cgroup v2");
            return None;
        };
        let path = Path::new(root).join(own).join(format!("nowait-test-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&path) {
            say_skipped(&format!("no control group: {}: {error}", path.display()));
            return None;
        }
        let group = Self(path);
        match fs::read_to_string(group.0.join("io.pressure")) {
            Ok(_) => Some(group),
            Err(error) => {
                say_skipped(&format!("no pressure stall information: {error}"));
                None
            }
        }
    }

    /// The microseconds in which at least one thread waited for I/O.
    fn pressure(&self) -> u64 {
        let figures = fs::read_to_string(self.0.join("io.pressure")).expect("its pressure");
        let some = figures.lines().find_map(|line| line.strip_prefix("some "));
        let total = some.and_then(|some| some.rsplit_once("total=")).expect("a total");
        total.1.parse().expect("a number")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has ended leaves it a moment later.
        wait_until("the end of a control group", || fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn an_idle_server_is_no_pressure_on_io() {
    let Some(group) = Group::new() else { return };
    let scratch = Scratch::new();
    let wrapper = ["sh", "-c", IN_GROUP, text(&group.0)];
    let server = Server::start_under(&wrapper, &scratch.sparse("disk.img", MIB), &[]);
    let mut client = server.connect();
    client.write(0, &[1; 4096]).expect("a write");
    wait_until("a while without pressure", || {
        let before = group.pressure();
        thread::sleep(Duration::from_millis(300));
        group.pressure() == before
    });
    assert!(client.read(0, 4096).expect("a read") == [1; 4096]);
    drop(client);
    server.stop();
}
