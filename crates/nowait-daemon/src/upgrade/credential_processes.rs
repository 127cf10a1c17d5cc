//! The program that gives credentials (`credential_process`) for a confined server, which starts no program.
//!
//! A request is a packet with the command line of the program, and its reply one with what the program has printed.
//!
//! Invariant: the launcher runs no other command line than the one that was found before the server was confined, once at a
//! time and with a pause between two runs, however many requests a server sends. The program ends with the server.

use std::env;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use nowait_remote::{
    CREDENTIAL_COMMAND_BYTES, CREDENTIAL_OUTPUT_BYTES, CredentialOutput, credential_command,
    credential_program, run_only_credential_process,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use crate::config::ServeConfig;
use crate::error::CliError;

/// The variable of the environment with the command line, empty for none. A program that takes over runs no other one.
const COMMAND: &str = "NOWAIT_UPGRADE_CREDENTIAL_PROCESS";
/// The pause after each reply of the launcher.
const PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Maximum bytes of the messages of a program in a reply.
const MESSAGE_BYTES: usize = 8 << 10;
/// Maximum bytes of a reply: its first byte, the length of the messages, these, and the output.
const REPLY_BYTES: usize = 3 + MESSAGE_BYTES + CREDENTIAL_OUTPUT_BYTES;
/// The first byte of a reply with the output of a program, and of one with a reason.
const PRINTED: u8 = 1;
const FAILED: u8 = 0;

/// The command line of the program that gives credentials to the server of `config`, if it is confined and has one. From now on
/// no other one is run: a profile that is written meanwhile changes nothing.
///
/// # Errors
/// It is another one than when the server was started that this one takes over from; the server could change the program.
pub(crate) fn command_of(config: &ServeConfig) -> Result<Option<String>, CliError> {
    if config.sandbox.mode().is_none() {
        return Ok(None);
    }
    let command = config.names_objects().then(credential_command).flatten();
    let is_other = |known: String| known != command.as_deref().unwrap_or_default();
    if env::var(COMMAND).is_ok_and(is_other) {
        return Err(CliError::new(
            "the program of the profile (credential_process) has changed since this server was started (restart it)",
        ));
    }
    run_only_credential_process(command.as_deref().unwrap_or_default());
    let program = command.as_deref().and_then(credential_program);
    let path = env::var_os("PATH").unwrap_or_default();
    let places =
        program.map(|program| places_of(&program, &env::split_paths(&path).collect::<Vec<_>>()));
    match places.iter().flatten().find(|place| config.may_change(place)) {
        Some(place) => Err(CliError::at(
            place,
            "the program of the profile (credential_process) is or would be in a directory whose files this server \
             may change (move it, or start the server with --sandbox off)",
        )),
        None => Ok(command),
    }
}

/// The variable for the launcher, from which the programs that it starts have it; `None` if this process has it already.
pub(crate) fn variable(command: Option<&str>) -> Option<(String, String)> {
    let is_new = env::var_os(COMMAND).is_none();
    is_new.then(|| (COMMAND.to_owned(), command.unwrap_or_default().to_owned()))
}

/// The places at which `program` is looked for, of a name those in the directories of `path` up to the first that has it.
fn places_of(program: &str, path: &[PathBuf]) -> Vec<PathBuf> {
    if program.contains('/') {
        return vec![program.into()];
    }
    let mut places: Vec<_> = path.iter().map(|directory| directory.join(program)).collect();
    let found = places.iter().position(|place| place.is_file());
    places.truncate(found.map_or(places.len(), |found| found + 1));
    places
}

/// The server's side.
pub(crate) struct CredentialClient(Mutex<Option<OwnedFd>>);

impl CredentialClient {
    /// The server's side, and the socket of the launcher.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub(crate) fn new() -> Result<(Self, OwnedFd), Errno> {
        let flags = SocketFlags::CLOEXEC;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(Mutex::new(Some(near))), far))
    }

    /// Has the program of `command` run. Waits until it has ended.
    pub(crate) fn ask(&self, command: &str) -> CredentialOutput {
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reply = vec![0; REPLY_BYTES];
        let len = socket.as_ref().and_then(|socket| {
            send(socket, command.as_bytes(), SendFlags::NOSIGNAL).ok()?;
            retry_on_intr(|| recv(socket, &mut reply, RecvFlags::empty())).ok()
        });
        let read = len.and_then(|(len, _)| decoded(reply.get(..len)?));
        read.unwrap_or_else(|| {
            // A late reply would be taken for that to another request.
            *socket = None;
            CredentialOutput::failed(
                "is not run any more: the process that does it has exited (restart the server)",
            )
        })
    }
}

/// Replies to the requests of `socket`, until the server closes its side. The program that is run is that of `command`.
pub(crate) fn answer(socket: &OwnedFd, command: &str) {
    let run = |command: &str| nowait_remote::run_credential_process(command, Some(socket.as_fd()));
    let mut request = [0; CREDENTIAL_COMMAND_BYTES + 1];
    while let Ok((len @ 1.., _)) = retry_on_intr(|| recv(socket, &mut request, RecvFlags::empty()))
    {
        let reply = reply(request.get(..len).unwrap_or_default(), command, run);
        if send(socket, &reply, SendFlags::NOSIGNAL).is_err() {
            return;
        }
        // It ends early when the server closes its side.
        let _ = poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&PAUSE));
    }
}

/// The reply to `request`, which is to `run` the program of `command`.
pub(crate) fn reply(
    request: &[u8],
    command: &str,
    run: impl FnOnce(&str) -> CredentialOutput,
) -> Vec<u8> {
    encoded(&match request == command.as_bytes() && !command.is_empty() {
        true => run(command),
        false => CredentialOutput::failed("has changed since this server was started (restart it)"),
    })
}

fn encoded(ran: &CredentialOutput) -> Vec<u8> {
    let messages = ran.messages.as_bytes();
    let messages = messages.get(..MESSAGE_BYTES).unwrap_or(messages);
    let (first, rest) = match &ran.output {
        Ok(output) => (PRINTED, output.as_slice()),
        Err(why) => (FAILED, why.as_bytes()),
    };
    let rest = rest.get(..CREDENTIAL_OUTPUT_BYTES).unwrap_or(rest);
    let length = u16::try_from(messages.len()).unwrap_or_default();
    [&[first][..], &length.to_le_bytes(), messages, rest].concat()
}

fn decoded(reply: &[u8]) -> Option<CredentialOutput> {
    let (&[first, low, high], rest) = reply.split_first_chunk()?;
    let (messages, rest) = rest.split_at_checked(u16::from_le_bytes([low, high]).into())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = if first == PRINTED { Ok(rest.to_owned()) } else { Err(text(rest)) };
    Some(CredentialOutput { output, messages: text(messages) })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread;

    use nowait_testkit::Scratch;

    use super::*;
    use crate::config::changed_places::is_below;

    fn printed(text: &str) -> CredentialOutput {
        CredentialOutput { output: Ok(text.into()), messages: String::new() }
    }

    #[test]
    fn the_launcher_runs_the_program_that_was_found_and_no_other_one() {
        let (client, far) = CredentialClient::new().unwrap();
        let command = "sh -c 'echo it; echo told >&2'";
        let launcher = thread::spawn(move || answer(&far, command));
        let told = CredentialOutput { output: Ok(b"it\n".into()), messages: "told".into() };
        assert_eq!(client.ask(command), told);
        for other in ["sh -c 'echo it; echo told >&2' ", "sh", "/bin/true", &"x".repeat(1 << 16)] {
            assert!(
                client.ask(other).output.unwrap_err().starts_with("has changed since"),
                "{other}"
            );
        }
        drop(client);
        launcher.join().unwrap();
        for request in ["", "sh"] {
            let ran = decoded(&reply(request.as_bytes(), "", |_| panic!("run"))).unwrap();
            assert!(ran.output.unwrap_err().starts_with("has changed since"));
        }
    }

    #[test]
    fn a_launcher_that_has_ended_is_told_of() {
        let (client, far) = CredentialClient::new().unwrap();
        drop(far);
        for _ in 0..2 {
            assert!(client.ask("a").output.unwrap_err().contains("has exited"));
        }
    }

    #[test]
    fn a_reply_has_all_that_a_program_may_print_and_no_more() {
        let most = CredentialOutput {
            output: Ok(vec![7; CREDENTIAL_OUTPUT_BYTES]),
            messages: "m".repeat(MESSAGE_BYTES),
        };
        assert_eq!(decoded(&encoded(&most)), Some(most.clone()));
        let more = CredentialOutput {
            output: Ok(vec![7; CREDENTIAL_OUTPUT_BYTES + 1]),
            messages: "m".repeat(MESSAGE_BYTES + 1),
        };
        assert_eq!(decoded(&encoded(&more)), Some(most));
        assert_eq!(
            decoded(&encoded(&CredentialOutput::failed("why"))),
            Some(CredentialOutput::failed("why"))
        );
        for reply in [&[][..], &[1, 0], &[1, 1, 0], &[1, 0xff, 0xff, b'x']] {
            assert_eq!(decoded(reply), None);
        }
        assert_eq!(decoded(&[1, 0, 0]), Some(printed("")));
    }

    #[test]
    fn a_program_that_the_server_could_change_is_found_by_its_path_its_links_and_its_name() {
        let scratch = Scratch::new();
        let [own, bin, given] = ["own", "bin", "given"].map(|it| scratch.join(it));
        for directory in [&own, &bin, &given] {
            fs::create_dir(directory).unwrap();
        }
        fs::write(bin.join("p"), "").unwrap();
        fs::write(given.join("q"), "").unwrap();
        std::os::unix::fs::symlink("../given/q", bin.join("link")).unwrap();
        std::os::unix::fs::symlink("given", scratch.join("also")).unwrap();
        let is_changed = |program: &str, path: &[&PathBuf]| {
            let program = program.replace("DIR", &scratch.path().to_string_lossy());
            let path: Vec<_> = path.iter().copied().cloned().collect();
            places_of(&program, &path).iter().any(|place| is_below(place, &[&given]))
        };
        for program in
            ["DIR/given/q", "DIR/given/none", "DIR/bin/link", "DIR/also/q", "DIR/own/../given/q"]
        {
            assert!(is_changed(program, &[]), "{program}");
        }
        for program in ["DIR/bin/p", "DIR/none/p"] {
            assert!(!is_changed(program, &[&given]), "{program}");
        }
        // One of this name there would be run instead.
        assert!(is_changed("p", &[&own, &given, &bin]));
        assert!(!is_changed("p", &[&own, &bin, &given]));
        assert!(is_changed("none", &[&own, &bin, &given]));
    }
}
