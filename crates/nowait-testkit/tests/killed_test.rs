//! A test program that is killed leaves no process behind.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use nowait_testkit::{ends_with_test, tool, wait_until};
use rustix::process::{Pid, test_kill_process};

const CHILD: &str = "NOWAIT_KILLED_TEST";
/// Longer than any test waits, and not for ever.
const LONG: &str = "600";

/// A test that is killed while two processes run that it started, one of them with a timeout.
fn killed() {
    let mut sleep = Command::new("sh");
    sleep.args(["-c", "echo $$; exec sleep \"$0\"", LONG]);
    let plain = ends_with_test(&mut sleep).spawn();
    let bounded = tool("sh").args(["-c", "echo $$; exec sleep \"$0\"", LONG]).spawn();
    std::thread::sleep(Duration::from_secs(60));
    drop((plain, bounded));
}

/// Whether the parent of `process` sleeps.
fn has_waiting_parent(process: Pid) -> bool {
    // The fields behind the name, which has an end of its own: the state and the parent (proc_pid_stat(5)).
    let stat = |pid: &str| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let field = |stat: &str, index| {
        let (_, behind) = stat.rsplit_once(") ")?;
        behind.split(' ').nth(index).map(str::to_owned)
    };
    let parent = field(&stat(&process.as_raw_nonzero().to_string()), 1);
    parent.and_then(|parent| field(&stat(&parent), 0)).as_deref() == Some("S")
}

#[test]
fn no_process_outlives_a_test_program_that_is_killed() {
    if std::env::var_os(CHILD).is_some() {
        return killed();
    }
    let program = std::env::current_exe().expect("this program");
    let name = "no_process_outlives_a_test_program_that_is_killed";
    let mut command = Command::new(program);
    command.args([name, "--exact", "--nocapture"]).env(CHILD, "1").stdout(Stdio::piped());
    let mut test = ends_with_test(&mut command).spawn().expect("this program");
    let lines = BufReader::new(test.stdout.take().expect("a pipe")).lines();
    let processes: Vec<Pid> = lines
        .map(|line| line.expect("a line"))
        .filter_map(|line| line.parse().ok().and_then(Pid::from_raw))
        .take(2)
        .collect();
    assert_eq!(processes.len(), 2, "two processes");
    // `timeout` passes no signal on before it has noted the number of its child, which may have run by then.
    wait_until("parents that wait", || processes.iter().all(|&pid| has_waiting_parent(pid)));
    test.kill().expect("a running program");
    test.wait().expect("its end");
    wait_until("the end of both", || processes.iter().all(|&pid| test_kill_process(pid).is_err()));
}
