//! The program that a profile names for its credentials (`credential_process`).
//!
//! Invariant: it is run without a shell and for a bounded time, and what is read of it is bounded. Nothing of its standard
//! output, which has secrets, is in a log or an error; its standard error is, in one line.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use chrono::{DateTime, Utc};
use nowait_image::{os_message, plain};
use object_store::aws::AwsCredential;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde_json::Value;

use crate::credential_output::{CREDENTIAL_OUTPUT_BYTES, CredentialOutput, RunCredentialProcess};
use crate::object::secret_text::is_plain;

/// How long the program may run.
const RUN_TIME: Duration = Duration::from_secs(60);
/// Bytes of its standard error that are kept, and characters of them that are told.
const MESSAGE_BYTES: usize = 4096;
const MESSAGE_CHARACTERS: usize = 300;
/// Variables of the environment that are for this process alone: those that begin so.
const OWN_VARIABLES: [&str; 4] = ["NOWAIT_UPGRADE", "NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_"];

static RUN: OnceLock<RunCredentialProcess> = OnceLock::new();
/// The only command line that is run, if there is only one.
static ONLY: OnceLock<String> = OnceLock::new();

/// From now on no other program of a profile is run than that of the command line `command`; none if it is empty. Only the
/// first call counts.
pub fn run_only_credential_process(command: &str) {
    let _ = ONLY.set(command.to_owned());
}

/// From now on the programs of profiles are run by `run`, in a process that may start none itself. Only the first call
/// counts.
pub fn run_credential_processes_by(run: RunCredentialProcess) {
    let _ = RUN.set(run);
}

/// Runs the program of the command line `command`, here or in the process that does it for this one. Waits until it has exited,
/// at most 60 s.
pub(super) fn run(command: &str) -> CredentialOutput {
    if ONLY.get().is_some_and(|only| only != command) {
        return CredentialOutput::failed("has changed since this server was started (restart it)");
    }
    match RUN.get() {
        Some(run) => run(command),
        None => run_credential_process(command, None),
    }
}

/// Runs the program of the command line `command`. Waits until it has exited, at most 60 s. With an `owner` it is ended,
/// with all processes of its group, when the other end of that socket is closed.
#[must_use]
pub fn run_credential_process(command: &str, owner: Option<BorrowedFd<'_>>) -> CredentialOutput {
    run_within(command, owner, RUN_TIME)
}

fn run_within(command: &str, owner: Option<BorrowedFd<'_>>, time: Duration) -> CredentialOutput {
    let mut printed = [Vec::new(), Vec::new()];
    let failed = |error: io::Error| format!("cannot be started: {}", os_message(&error));
    let output = words(command).map_err(str::to_owned).and_then(|words| {
        let child = start(&words, owner.is_some()).map_err(failed)?;
        let program = Program { child, owner, deadline: Instant::now() + time };
        program.run(&mut printed)
    });
    let [stdout, stderr] = printed;
    let messages = String::from_utf8_lossy(&stderr);
    let messages = plain(messages.trim()).chars().take(MESSAGE_CHARACTERS).collect();
    CredentialOutput { output: output.map(|()| stdout), messages }
}

/// The words of a command line, as a shell splits it.
///
/// # Errors
/// The end of a sentence about the program.
fn words(command: &str) -> Result<Vec<String>, &'static str> {
    let words = shlex::split(command).filter(|_| !command.contains('\0'));
    match words.ok_or("has a command line with a quote that does not end")? {
        words if words.first().is_none_or(String::is_empty) => Err("has no name"),
        words => Ok(words),
    }
}

/// The program of a command line: a path, or a name that is looked for in `PATH`; `None`: it has none.
#[must_use]
pub fn credential_program(command: &str) -> Option<String> {
    words(command).ok()?.into_iter().next()
}

fn start(words: &[String], in_group: bool) -> io::Result<Child> {
    let (program, arguments) = words.split_first().ok_or(ErrorKind::NotFound)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for (name, _) in std::env::vars_os() {
        if OWN_VARIABLES.iter().any(|own| name.to_string_lossy().starts_with(own)) {
            command.env_remove(name);
        }
    }
    if in_group {
        // Signals from a terminal are for the server, with which the program exits.
        command.process_group(0);
    }
    command.spawn()
}

/// A program that runs.
struct Program<'a> {
    child: Child,
    owner: Option<BorrowedFd<'a>>,
    deadline: Instant,
}

impl Program<'_> {
    /// Appends its standard output and its standard error to `printed` until it has exited.
    ///
    /// # Errors
    /// The end of a sentence about the program: it does not end in time, has failed or prints too much.
    fn run(mut self, printed: &mut [Vec<u8>; 2]) -> Result<(), String> {
        let ended = self.read_to_end(printed);
        if ended.is_err() {
            self.kill();
        }
        // One that was killed has exited; another one has exited before.
        let status = self.child.wait();
        ended?;
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(has_failed(status)),
            Err(error) => Err(format!("cannot be waited for: {}", os_message(&error))),
        }
    }

    fn read_to_end(&mut self, printed: &mut [Vec<u8>; 2]) -> Result<(), String> {
        let unusable = |error: Errno| format!("cannot be watched: {}", os_message(&error.into()));
        let pid = Pid::from_child(&self.child);
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(unusable)?;
        let [stdout, stderr] = printed;
        let mut stdout = Pipe::new(self.child.stdout.take(), stdout, CREDENTIAL_OUTPUT_BYTES + 1);
        let mut stderr = Pipe::new(self.child.stderr.take(), stderr, MESSAGE_BYTES);
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            let mut events = vec![PollFd::new(&process, PollFlags::IN)];
            events.extend(self.owner.as_ref().map(|it| PollFd::new(it, PollFlags::empty())));
            let watched = events.len();
            let pipes = [&stdout, &stderr].into_iter().filter_map(|pipe| pipe.stream.as_ref());
            events.extend(pipes.map(|stream| PollFd::new(stream, PollFlags::IN)));
            let count = match poll(&mut events, Some(&left)) {
                Err(Errno::INTR) => continue,
                count => count.map_err(unusable)?,
            };
            let [has_ended, is_left] = [0, 1]
                .map(|n| n < watched && events.get(n).is_some_and(|it| !it.revents().is_empty()));
            drop(events);
            if is_left {
                return Err("was ended with the server".into());
            }
            if count == 0 {
                return Err(format!("has not exited within {} s", RUN_TIME.as_secs()));
            }
            // All that it has printed is in the pipes when it has exited.
            stdout.read(has_ended);
            stderr.read(has_ended);
            if stdout.bytes.len() > CREDENTIAL_OUTPUT_BYTES {
                return Err(format!("prints more than {} KiB", CREDENTIAL_OUTPUT_BYTES >> 10));
            }
            if has_ended {
                return Ok(());
            }
        }
    }

    fn kill(&mut self) {
        // It may have exited by itself.
        if self.owner.is_some() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
        let _ = self.child.kill();
    }
}

fn has_failed(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, signal) => format!("was killed by signal {}", signal.unwrap_or_default()),
    }
}

/// Bytes from a pipe.
struct Pipe<'a> {
    /// `None` once it has ended.
    stream: Option<File>,
    bytes: &'a mut Vec<u8>,
    /// Maximum bytes that are kept.
    most: usize,
}

impl<'a> Pipe<'a> {
    fn new(stream: Option<impl Into<OwnedFd>>, bytes: &'a mut Vec<u8>, most: usize) -> Self {
        let stream = stream.map(|stream| File::from(stream.into()));
        // It fails for no open pipe.
        let _ = stream.as_ref().map(|stream| fcntl_setfl(stream, OFlags::NONBLOCK));
        Self { stream, bytes, most }
    }

    /// Reads a part of what is there, or `all` of it that is kept.
    fn read(&mut self, all: bool) {
        let mut part = [0; 8 << 10];
        while let Some(stream) = &mut self.stream {
            match stream.read(&mut part) {
                Ok(len @ 1..) => {
                    let kept = len.min(self.most - self.bytes.len());
                    self.bytes.extend_from_slice(part.get(..kept).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => self.stream = None,
            }
            if !all || self.bytes.len() == self.most {
                return;
            }
        }
    }
}

/// The credentials in the `output` of a program, and when they expire, if they do.
///
/// # Errors
/// The end of a sentence about the program.
pub(super) fn parse(output: &[u8]) -> Result<(AwsCredential, Option<SystemTime>), &'static str> {
    let given: Value = serde_json::from_slice(output).map_err(|_| "prints no JSON")?;
    if given["Version"] != 1 {
        return Err("prints something else than JSON with a \"Version\" of 1");
    }
    let text = |name: &str| given[name].as_str().filter(|it| !it.is_empty()).map(str::to_owned);
    let (Some(key_id), Some(secret_key)) = (text("AccessKeyId"), text("SecretAccessKey")) else {
        return Err("prints no AccessKeyId or no SecretAccessKey");
    };
    let token = text("SessionToken");
    if ![Some(&key_id), Some(&secret_key), token.as_ref()]
        .into_iter()
        .flatten()
        .all(|it| is_plain(it))
    {
        return Err("prints credentials with characters that they cannot have");
    }
    let end = match &given["Expiration"] {
        Value::Null => None,
        end => {
            let end = end.as_str().and_then(|end| end.trim().parse::<DateTime<Utc>>().ok());
            let end = end.and_then(|end| u64::try_from(end.timestamp()).ok());
            let end = end.and_then(|s| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(s)));
            Some(end.ok_or("prints an Expiration that is none (as 2026-01-01T00:00:00Z)")?)
        }
    };
    Ok((AwsCredential { key_id, secret_key, token }, end))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::thread;

    use super::*;

    fn shell(script: &str) -> CredentialOutput {
        run_credential_process(&format!("sh -c '{script}'"), None)
    }

    fn output(of: CredentialOutput) -> Result<String, String> {
        of.output.map(|it| String::from_utf8(it).unwrap())
    }

    #[test]
    fn a_command_line_is_split_as_by_a_shell_and_not_run_by_one() {
        for (command, expected) in [
            ("/bin/p --a  b\tc", &["/bin/p", "--a", "b", "c"][..]),
            (r#""/opt/my tools/p" 'a "b' "c 'd""#, &["/opt/my tools/p", "a \"b", "c 'd"]),
            (r#"p a\ b "c\"d" 'e\f' "" g""h"#, &["p", "a b", "c\"d", "e\\f", "", "gh"]),
            ("p $HOME ~ *; | > `x` a#b", &["p", "$HOME", "~", "*;", "|", ">", "`x`", "a#b"]),
            ("p a # a comment", &["p", "a"]),
        ] {
            assert_eq!(words(command).unwrap(), expected, "{command}");
        }
        for command in ["p 'a", "p \"a", "p a\\", "p \0"] {
            assert!(words(command).unwrap_err().contains("quote"), "{command}");
        }
        for command in ["", "  ", "# p", "'' a"] {
            assert_eq!(words(command), Err("has no name"), "{command}");
        }
        assert_eq!(
            output(run_credential_process("echo $HOME ';' a", None)).unwrap(),
            "$HOME ; a\n"
        );
        assert_eq!(credential_program("'/a b' c").as_deref(), Some("/a b"));
    }

    #[test]
    fn a_program_has_so_much_output_and_time_and_its_messages_are_one_line() {
        let most = CREDENTIAL_OUTPUT_BYTES;
        assert_eq!(output(shell(&format!("head -c {most} /dev/zero"))).unwrap().len(), most);
        let more = output(shell(&format!("head -c {} /dev/zero", most + 1)));
        assert_eq!(more.unwrap_err(), "prints more than 64 KiB");
        assert_eq!(output(shell("yes")).unwrap_err(), "prints more than 64 KiB");
        let told = shell("printf \"a\\033[2J\\nb\" >&2; echo secret; exit 3");
        assert_eq!(told.output, Err("exited with status 3".into()));
        assert_eq!(told.messages, r"a\u{1b}[2J\nb");
        let long = shell("yes abc | head -c 1000000 >&2");
        assert_eq!((output(long), MESSAGE_CHARACTERS), (Ok(String::new()), 300));
        assert_eq!(shell("yes | head -c 1000000 >&2").messages.len(), MESSAGE_CHARACTERS);
        assert_eq!(output(shell("kill -9 $$")).unwrap_err(), "was killed by signal 9");
        let hangs = run_within("sleep 1000", None, Duration::from_millis(50));
        assert!(hangs.output.unwrap_err().starts_with("has not exited within"));
        let absent = output(run_credential_process("/none/such a", None)).unwrap_err();
        assert_eq!(absent, "cannot be started: No such file or directory");
    }

    #[test]
    fn a_program_that_has_ended_is_not_waited_for_because_of_what_it_has_started() {
        assert_eq!(output(shell("sleep 3 & echo it")).unwrap(), "it\n");
    }

    #[test]
    fn all_processes_of_a_program_end_with_the_other_end_of_its_owner() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let (read, mut write) = std::os::unix::net::UnixStream::pair().unwrap();
        let run = thread::spawn(move || {
            let command = "sh -c 'sleep 1000 >&2 & echo it; sleep 1000 >&2'";
            let ended = run_credential_process(command, Some(far.as_fd()));
            io::Write::write_all(&mut write, b"x").unwrap();
            ended
        });
        drop(near);
        let (mut read, mut end) = (read, [0]);
        read.read_exact(&mut end).unwrap();
        assert_eq!(run.join().unwrap().output, Err("was ended with the server".into()));
    }

    #[test]
    fn only_json_of_version_1_with_keys_is_credentials() {
        let right = r#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"b/c+","SessionToken":"d=",
                        "Expiration":"2026-01-01T01:00:00+01:00","Other":[]}"#;
        let (credential, end) = parse(right.as_bytes()).unwrap();
        assert_eq!((&*credential.key_id, &*credential.secret_key), ("A", "b/c+"));
        assert_eq!(credential.token.as_deref(), Some("d="));
        let midnight = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        assert_eq!(end, Some(midnight));
        let least = br#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"B","Expiration":null}"#;
        let (credential, end) = parse(least).unwrap();
        assert_eq!((credential.token, end), (None, None));
        for (from, to, why) in [
            ("{", "", "prints no JSON"),
            ("\"Version\":1", "\"Version\":2", "\"Version\" of 1"),
            ("\"Version\":1", "\"Version\":\"1\"", "\"Version\" of 1"),
            ("\"AccessKeyId\":\"A\"", "\"AccessKeyId\":\"\"", "no AccessKeyId"),
            ("SecretAccessKey", "secretAccessKey", "no SecretAccessKey"),
            ("d=", "d\\n", "characters"),
            ("b/c+", "\u{e9}", "characters"),
            ("2026-01-01T01", "soon", "an Expiration that is none"),
            ("2026", "1900", "an Expiration that is none"),
        ] {
            let told = parse(right.replacen(from, to, 1).as_bytes()).unwrap_err();
            assert!(told.contains(why), "{to}: {told}");
        }
        for wrong in ["", "[]", "null", "1", "{}"] {
            assert!(parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
