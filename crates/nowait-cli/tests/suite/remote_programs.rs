//! Objects of S3 servers, with the credentials that a profile's program gives (`credential_process`).
//!
//! Invariant: no secret that a program prints is in a log or an error.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Finished, Random, Scratch, seed, wait_until};

use crate::common::{MIB, NOWAIT, Server, refusal_under, text, tool};
use crate::remote_objects::SECRET;

const URL: &str = "s3://bucket/base.img";
/// An `Expiration` that no test lives to see.
const LATE: &str = "2099-01-01T00:00:00Z";

/// A store, and a profile whose program does what the test says.
struct Site {
    scratch: Scratch,
    store: WebServer,
    object: Vec<u8>,
    home: String,
}

impl Site {
    fn new() -> Self {
        let object = Random::from_seed(seed()).bytes(3 * MIB as usize);
        let store = WebServer::start(object.clone(), "/bucket/base.img");
        let scratch = Scratch::new();
        for directory in [".aws", "bin", "runs"] {
            fs::create_dir(scratch.join(directory)).expect("a directory");
        }
        let home = format!("HOME={}", text(scratch.path()));
        let site = Self { scratch, store, object, home };
        let dir = text(site.scratch.path());
        // The first run does what `1` says, the second one what `2` says.
        let script = format!(
            "#!/bin/sh\ncd {dir}/runs || exit 9\nn=$(($(ls | grep -c parent) + 1))\n\
             cat /proc/$PPID/comm >parent.$n\n. ./$n\n"
        );
        fs::write(site.program(), script).expect("a file");
        fs::set_permissions(site.program(), fs::Permissions::from_mode(0o700)).expect("a file");
        site.has_program(&format!("\"{}\" 'of work'", text(&site.program())));
        site
    }

    fn program(&self) -> std::path::PathBuf {
        self.scratch.join("bin/give me")
    }

    fn has_program(&self, command: &str) {
        let root = self.store.root();
        let config = format!(
            "[profile work]\nregion = local\nendpoint_url = {root}\ncredential_process = {command}\n"
        );
        let path = self.scratch.join(".aws/config");
        fs::write(path.with_extension("new"), config).expect("a file");
        fs::rename(path.with_extension("new"), path).expect("a file");
    }

    /// Run `n` of the program executes `script`.
    fn does(&self, n: usize, script: &str) {
        fs::write(self.scratch.join("runs").join(n.to_string()), script).expect("a file");
    }

    /// Run `n` of the program gives `key`, until `end`.
    fn gives(&self, n: usize, key: &str, end: &str) {
        self.does(n, &format!("cat <<EOF\n{}\nEOF\n", printed(key, end)));
    }

    /// The names of the processes that have run the program.
    fn parents(&self) -> Vec<String> {
        let names = (1..).map_while(|n| {
            fs::read_to_string(self.scratch.join("runs").join(format!("parent.{n}"))).ok()
        });
        // A file that its program is writing now may be empty yet.
        names.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
    }

    fn accepts(&self, key: &str) {
        let (key, secret, region) = (key.into(), SECRET.into(), "local".into());
        self.store.script().signer = Some(Signer::Aws { key, secret, region });
    }

    fn environment(&self) -> [&str; 3] {
        ["env", &self.home, "AWS_PROFILE=work"]
    }

    fn serve(&self, more: &[&str]) -> Server {
        let options = [&["--read-only"], more].concat();
        Server::start_under(&self.environment(), Path::new(URL), &options)
    }
}

/// Output of a program that gives `key` until `end`.
fn printed(key: &str, end: &str) -> String {
    format!(
        r#"{{"Version": 1, "AccessKeyId": "{key}", "SecretAccessKey": "{SECRET}",
            "SessionToken": "of-a-session", "Expiration": "{end}"}}"#
    )
}

/// A script's `Expiration` in so many seconds.
fn in_seconds(seconds: u64) -> String {
    format!("$(date -u -d '+{seconds} seconds' +%Y-%m-%dT%H:%M:%SZ)")
}

fn has_secret(text: &str) -> bool {
    text.contains(SECRET) || text.contains("of-a-session")
}

#[test]
fn a_confined_server_has_its_program_give_credentials_again_and_again() {
    let site = Site::new();
    for n in 1..=200 {
        site.gives(n, &format!("KEY{n}-"), &in_seconds(3));
    }
    site.accepts("KEY1-");
    let server = site.serve(&[]);
    let mut client = server.connect();
    assert!(client.read(0, 4096).expect("a read") == site.object[..4096]);
    for n in 1..=2 {
        let expired = "<Error><Code>ExpiredToken</Code></Error>";
        let before = site.parents().len();
        site.store.script().always = Some(Lie::Status(400, "", expired));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_until("a new key", || {
                    let mut script = site.store.script();
                    let sent = script.requests.last().and_then(|it| it.header("authorization"));
                    let key = sent.and_then(|it| it.split_once("KEY")?.1.split('-').next());
                    let key = key.and_then(|key| key.parse::<usize>().ok()).unwrap_or(0);
                    let is_new = key > before;
                    if is_new {
                        // A later one may be sent meanwhile.
                        script.always = None;
                        script.signer = None;
                    }
                    is_new
                });
            });
            let data = client.read(n * MIB, 4096).unwrap_or_else(|_| panic!("{}", server.log()));
            assert!(data == site.object[(n * MIB) as usize..][..4096]);
        });
    }
    // A program that is ended with the server may find no parent.
    let (log, parents) = (server.log(), site.parents());
    server.stop();
    assert!(parents.len() >= 3 && parents[0] == "nowait", "{parents:?}");
    assert!(parents[1..].iter().all(|name| name == "nowait-launcher"), "{parents:?}");
    assert!(!has_secret(&log), "{log}");
    let script = site.store.script();
    let session = script.requests.last().and_then(|it| it.header("x-amz-security-token"));
    assert_eq!(session, Some("of-a-session"));
}

#[test]
fn a_program_that_gives_no_credentials_is_one_line_that_says_why() {
    let site = Site::new();
    let right = printed("KEY", LATE);
    for (script, words) in [
        (
            format!("echo '{right}'; printf 'it is\\nlocked\\033[2J' >&2; exit 3"),
            r"exited with status 3: it is\nlocked\u{1b}[2J",
        ),
        (format!("echo '{right} {SECRET}'"), "prints no JSON"),
        (format!("echo '{}'", right.replace("1,", "2,")), "\"Version\" of 1"),
        (format!("echo '{}'", right.replace("KEY", "")), "prints no AccessKeyId"),
        (format!("echo '{}'", printed("KEY", SECRET)), "an Expiration that is none"),
        (format!("echo '{right}'; yes {SECRET}"), "prints more than 64 KiB"),
        (format!("echo '{}'", printed("KEY", "2001-01-01T00:00:00Z")), "expired already"),
        (format!("kill -9 $$; echo {SECRET}"), "was killed by signal 9"),
    ] {
        site.does(site.parents().len() + 1, &script);
        let refused = refusal_under(&site.environment(), &["info", URL]);
        refused.says(&["the program of the profile 'work' (credential_process)", words]);
        assert!(!has_secret(&refused.error), "{}", refused.error);
    }
    for (command, words) in [
        ("/none/such", "cannot be started: No such file or directory"),
        ("sh -c 'exit", "a quote that does not end"),
        ("''", "has no name"),
    ] {
        site.has_program(command);
        refusal_under(&site.environment(), &["info", URL]).says(&[words]);
    }
    assert!(site.store.script().requests.is_empty(), "nothing was asked");
    let config = site.scratch.join(".aws/config");
    fs::set_permissions(&config, fs::Permissions::from_mode(0o666)).expect("a file");
    let says = ["every user may write it", "chmod o-w"];
    refusal_under(&site.environment(), &["info", URL]).says(&says);
}

#[test]
fn a_copy_and_an_offline_command_run_the_program_themselves_once_for_all_images() {
    let site = Site::new();
    (1..=3).for_each(|n| site.gives(n, "KEY", LATE));
    site.accepts("KEY");
    let copy = site.scratch.join("copy.img");
    let environment = &site.environment()[1..];
    tool("env").args(environment).args([NOWAIT, "info", URL]).succeeds();
    tool("env").args(environment).args([NOWAIT, "copy", URL, text(&copy)]).succeeds();
    assert!(fs::read(&copy).expect("a copy") == site.object);
    assert_eq!(site.parents().len(), 2);
    let more = format!("more={URL}");
    let server = site.serve(&[&more]);
    assert!(server.connect().read(0, 4096).expect("a read") == site.object[..4096]);
    server.stop();
    assert_eq!(site.parents(), ["nowait"; 3]);
}

#[test]
fn a_program_that_fails_for_a_while_costs_a_confined_server_no_error() {
    let site = Site::new();
    site.gives(1, "OLD", &in_seconds(2));
    site.does(2, &format!("echo {SECRET}; echo 'it is locked' >&2; exit 1"));
    site.does(3, &format!("yes {SECRET}"));
    site.gives(4, "NEW", "2001-01-01T00:00:00Z");
    site.gives(5, "NEW", LATE);
    site.accepts("OLD");
    let server = site.serve(&["--reconnect", "60"]);
    let mut client = server.connect();
    assert!(client.read(0, 4096).expect("a read") == site.object[..4096]);
    let later = SystemTime::now() + Duration::from_secs(2);
    wait_until("the end of the credentials", || SystemTime::now() > later);
    site.accepts("NEW");
    let data = client.read(MIB, 4096).unwrap_or_else(|_| panic!("{}", server.log()));
    assert!(data == site.object[MIB as usize..][..4096]);
    let log = server.log();
    server.stop();
    assert_eq!(site.parents().len(), 5);
    assert!(log.contains("exited with status 1: it is locked"), "{log}");
    assert!(!has_secret(&log), "{log}");
}

#[test]
fn a_program_that_hangs_holds_up_no_read_and_ends_with_the_server() {
    let site = Site::new();
    site.gives(1, "KEY", &in_seconds(12));
    site.does(2, "sleep 1000 & echo $$ $! >hangs.new; mv hangs.new hangs; sleep 1000");
    site.accepts("KEY");
    let server = site.serve(&[]);
    let half = SystemTime::now() + Duration::from_secs(6);
    wait_until("half of their life", || SystemTime::now() > half);
    let mut client = server.connect();
    assert!(client.read(MIB, 4096).expect("a read") == site.object[MIB as usize..][..4096]);
    let hangs = site.scratch.join("runs/hangs");
    wait_until("the program", || hangs.exists());
    assert!(client.read(0, 4096).expect("a read") == site.object[..4096]);
    drop(client);
    server.stop();
    let pids = fs::read_to_string(hangs).expect("its processes");
    for pid in pids.split_whitespace() {
        wait_until("its end", || {
            // It may wait for a parent that has none of its own.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        });
    }
}

#[test]
fn a_confined_server_runs_no_other_program_than_the_one_it_was_started_with() {
    let site = Site::new();
    (1..=4).for_each(|n| site.gives(n, "KEY", LATE));
    site.accepts("KEY");
    let own = site.scratch.sparse("own.img", MIB);
    let socket = site.scratch.join("control");
    let control = format!("unix:{}", text(&socket));
    let options = ["--control", &control, "--allow-uri", "s3://bucket/"];
    let server = Server::start_under(&site.environment(), &own, &options);
    let add = |name: &str| {
        let mut command = tool(NOWAIT);
        command.args(["export", "add", name, URL, "--read-only", "--control", text(&socket)]);
        command
    };
    site.has_program(&format!("touch {}", text(&site.scratch.join("made"))));
    let refused = add("other").fails();
    assert!(refused.contains("has changed since this server was started"), "{refused}");
    assert!(!site.scratch.join("made").exists());
    site.has_program(&format!("\"{}\" 'of work'", text(&site.program())));
    add("same").succeeds();
    server.stop();
    assert_eq!(site.parents(), ["nowait-launcher"]);
    let mut known = site.environment().to_vec();
    known.push("NOWAIT_UPGRADE_CREDENTIAL_PROCESS=/bin/other");
    refusal_under(&known, &["serve", URL, "--read-only"]).says(&["has changed since"]);
    for option in ["--allow-dir", "--cache"] {
        let bin = site.scratch.join("bin");
        fs::set_permissions(&bin, fs::Permissions::from_mode(0o700)).expect("a directory");
        let arguments = ["serve", URL, "--read-only", option, text(&bin)];
        let says = ["give me", "whose files this server may change"];
        refusal_under(&site.environment(), &arguments).says(&says);
    }
}
