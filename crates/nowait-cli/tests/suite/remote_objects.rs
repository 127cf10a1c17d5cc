//! Images that are objects of an S3 server or files of a web server.
//!
//! Invariant: the S3 server of these tests answers only what is signed as it has to be.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Random, say_skipped, seed, wait_until};
use serde_json::Value;

use crate::common::{
    Finished, MIB, NOWAIT, Scratch, Server, accepted, refusal, refusal_under, text, tool,
};
use crate::log_messages::await_line;
use crate::storage_faults::private_mounts;

pub(crate) const KEY: &str = "AKIDEXAMPLE";
pub(crate) const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";

fn bytes(len: u64) -> Vec<u8> {
    Random::from_seed(seed()).bytes(len as usize)
}

fn signer(region: &str) -> Signer {
    Signer::Aws { key: KEY.into(), secret: SECRET.into(), region: region.into() }
}

/// An S3 server, and the command prefix with what the environment has to say of it.
fn s3(object: Vec<u8>, secret: &str) -> (WebServer, Vec<String>) {
    let server = WebServer::start(object, "/bucket/a%20dir/base.img");
    server.script().signer = Some(signer(""));
    let environment = [
        format!("AWS_ENDPOINT_URL={}", server.root()),
        format!("AWS_ACCESS_KEY_ID={KEY}"),
        format!("AWS_SECRET_ACCESS_KEY={secret}"),
        "AWS_REGION=us-east-1".into(),
    ];
    (server, ["env".into()].into_iter().chain(environment).collect())
}

const URL: &str = "s3://bucket/a dir/base.img";

#[test]
fn an_object_of_an_s3_server_is_served_by_a_confined_server_and_only_read() {
    let object = bytes(3 * MIB);
    let (store, environment) = s3(object.clone(), SECRET);
    let environment: Vec<_> = environment.iter().map(String::as_str).collect();
    let server = Server::start_under(&environment, URL.as_ref(), &["--read-only"]);
    let mut client = server.connect();
    assert!(client.read(0, 3 * MIB as u32).unwrap() == object);
    server.stop();
    assert_eq!(store.script().unsigned, 0);
    let refused = refusal_under(&environment, &["serve", URL]);
    assert!(refused.error.contains("--read-only"), "{}", refused.error);
}

#[test]
fn a_version_that_is_named_is_read_whatever_the_object_is_now() {
    let (old, new) = (bytes(2 * MIB), bytes(3 * MIB));
    let (store, environment) = s3(new, SECRET);
    store.script().versions = vec![("versionId=a.1-_".into(), old.clone())];
    let environment: Vec<_> = environment.iter().map(String::as_str).collect();
    let url = format!("{URL}?versionId=a.1-_");
    let server = Server::start_under(&environment, url.as_ref(), &["--read-only"]);
    let mut client = server.connect();
    assert!(client.read(0, MIB as u32).unwrap()[..] == old[..1 << 20]);
    {
        let mut script = store.script();
        (script.tag, script.object) = ("\"3\"".into(), vec![0; 4096]);
    }
    assert!(client.read(MIB, MIB as u32).unwrap()[..] == old[1 << 20..]);
    server.stop();
    assert_eq!(store.script().unsigned, 0);
    let info = [&environment[..], &[NOWAIT, "info", "--json", &url]].concat();
    let info: Value = serde_json::from_str(&tool(info[0]).args(&info[1..]).succeeds()).unwrap();
    assert!(info["object_version"].as_str().unwrap().ends_with(" a.1-_"), "{info}");
    let none = format!("{URL}?versionId=none");
    refusal_under(&environment, &["info", &none]).says(&["no such object (404", &none]);
    let other = format!("{URL}?partNumber=1");
    refusal_under(&environment, &["info", &other]).says(&["only a version", "?versionId=ID"]);
    store.script().ignores_queries = true;
    let refused = refusal_under(&environment, &["info", &url]);
    refused.says(&["answers with another version than the one that was named"]);
}

#[test]
fn an_overlay_on_an_object_is_written_to_and_the_url_opened_only_by_leave() {
    let object = bytes(4 * MIB);
    let store = WebServer::start(object.clone(), "/base.img");
    let scratch = Scratch::new();
    let overlay = scratch.join("overlay.qcow2");
    let url = store.url();
    let path = overlay.to_str().unwrap();
    accepted(&["create", path, "--backing", &url, "--backing-format", "raw"]);
    let refused = refusal(&["serve", path]);
    assert!(refused.error.contains(&format!("--backing {url}")), "{}", refused.error);
    let server = Server::start(&overlay, &["--backing", &url]);
    let mut client = server.connect();
    let mut model = object.clone();
    let mut random = Random::from_seed(seed());
    for _ in 0..30 {
        let pos = random.below(4 * MIB - 70_000);
        let len = 1 + random.below(70_000) as usize;
        let data = random.bytes(len);
        model[pos as usize..pos as usize + data.len()].copy_from_slice(&data);
        client.write(pos, &data).unwrap();
    }
    assert!(client.read(0, 4 * MIB as u32).unwrap() == model);
    server.stop();
    let server = Server::start(&overlay, &["--backing", &url]);
    assert!(server.connect().read(0, 4 * MIB as u32).unwrap() == model);
    server.stop();
    assert!(store.script().object == object, "the object is only read");
    let copy = scratch.join("copy.img");
    let paths = [&overlay, &copy].map(|path| path.to_str().unwrap());
    accepted(&["copy", "--backing", &url, paths[0], paths[1]]);
    assert!(fs::read(&copy).unwrap() == model);
}

#[test]
fn an_overlay_is_served_on_no_other_version_of_its_object_than_that_it_was_made_on() {
    let store = WebServer::start(bytes(MIB), "/base.img");
    let (scratch, url) = (Scratch::new(), store.url());
    let [made, other] = ["made.qcow2", "other.qcow2"].map(|name| scratch.join(name));
    accepted(&["create", text(&made), "--backing", &url, "--backing-format", "raw"]);
    // Made by another program: it gets the version when it is written to first.
    accepted(&["create", text(&other), "--backing", &url, "--backing-format", "raw"]);
    let unmark = || rustix::fs::removexattr(&other, "user.nowait.base-version");
    if unmark().is_err() {
        return say_skipped("no extended attributes here");
    }
    Server::start(&other, &["--backing", &url, "--read-only"]).stop();
    let serves = |image: &Path| ["serve", text(image), "--backing", &url].map(str::to_owned);
    {
        let mut script = store.script();
        (script.object, script.tag) = (bytes(MIB), "\"2\"".into());
    }
    Server::start(&other, &["--backing", &url]).stop();
    let before = fs::read(&made).unwrap();
    for command in [serves(&made), ["check", text(&made), "--backing", &url].map(str::to_owned)] {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let refused = refusal(&command);
        refused.says(&["another version", "now", "then", "setfattr -x user.nowait.base-version"]);
    }
    assert!(fs::read(&made).unwrap() == before);
    {
        store.script().tag = "\"3\"".into();
    }
    let refused = refusal(&["serve", text(&other), "--backing", &url]);
    refused.says(&["another version"]);
    // The remedy that the line names.
    unmark().unwrap();
    Server::start(&other, &["--backing", &url]).stop();
}

#[test]
fn a_qcow2_image_of_a_web_server_is_shown_checked_and_copied() {
    let scratch = Scratch::new();
    let (raw, image) = (scratch.join("disk.img"), scratch.join("disk.qcow2"));
    let disk = bytes(2 * MIB);
    fs::write(&raw, &disk).unwrap();
    let [from, to] = [&raw, &image].map(|path| path.to_str().unwrap());
    accepted(&["copy", "-O", "qcow2", from, to]);
    let store = WebServer::start(fs::read(&image).unwrap(), "/disk.qcow2");
    let url = store.url();
    let info: Value =
        serde_json::from_str(&accepted(&["info", "--json", "-f", "qcow2", &url])).unwrap();
    assert_eq!(info["kind"], "object");
    assert_eq!(info["virtual-size"], 2 * MIB);
    assert!(accepted(&["info", &url]).contains("web server"));
    accepted(&["check", "-f", "qcow2", &url]);
    let map = accepted(&["map", "--json", "-f", "qcow2", &url]);
    assert_eq!(
        serde_json::from_str::<Value>(&map).unwrap(),
        serde_json::from_str::<Value>(&accepted(&["map", "--json", to])).unwrap()
    );
    fs::remove_file(&raw).unwrap();
    accepted(&["copy", "-f", "qcow2", &url, from]);
    assert!(fs::read(&raw).unwrap() == disk);
}

#[test]
fn what_is_wrong_with_a_store_is_one_line_without_a_secret() {
    let (store, environment) = s3(bytes(1000), "another secret");
    let environment: Vec<_> = environment.iter().map(String::as_str).collect();
    let refused = refusal_under(&environment, &["info", URL]);
    assert!(refused.error.contains("(403 SignatureDoesNotMatch)"), "{}", refused.error);
    assert!(!refused.error.contains("another secret") && !refused.error.contains(KEY));
    assert_eq!(refused.error.trim_end().lines().count(), 1, "{}", refused.error);
    drop(store);
    for (url, why) in [
        ("https://u:p@host/a", "would be in logs"),
        ("https://host/a?sig=1", "would be in logs"),
        ("https://host/../a", "'..'"),
        ("s3://bucket", "names no file"),
    ] {
        let refused = refusal(&["info", url]);
        assert!(refused.error.contains(why), "{}", refused.error);
    }
}

#[test]
fn a_bucket_of_another_region_is_refused_with_the_region_that_opens_it() {
    let (store, environment) = s3(bytes(1000), SECRET);
    let mut environment: Vec<_> = environment.iter().map(String::as_str).collect();
    store.script().signer = Some(signer("eu-west-1"));
    let refused = refusal_under(&environment, &["info", URL]);
    refused.says(&["another region (400 AuthorizationHeaderMalformed; AWS_REGION=eu-west-1)"]);
    // A server of another region of S3 answers so.
    let header = "x-amz-bucket-region: eu-west-1\r\n";
    let body = "<Error><Code>PermanentRedirect</Code></Error>";
    store.script().lies.push_back(Lie::Status(301, header, body));
    let refused = refusal_under(&environment, &["info", URL]);
    refused.says(&["another region (301 PermanentRedirect; AWS_REGION=eu-west-1)"]);
    environment.push("AWS_REGION=eu-west-1");
    tool("env").args(&environment[1..]).args([NOWAIT, "info", URL]).succeeds();
}

fn metrics(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    metrics
}

#[test]
fn a_confined_server_fills_a_cache_that_the_next_one_reads_instead_of_the_store() {
    let object = bytes(3 * MIB);
    let store = WebServer::start(object.clone(), "/base.img");
    let scratch = Scratch::new();
    let [cache, record] = ["cache", "boot"].map(|name| scratch.join(name));
    let cache_size = format!("{},size=64M", cache.display());
    let url = store.url();
    let socket = scratch.join("control");
    let control = format!("unix:{}", socket.display());
    let serve = |more: &[&str]| {
        let common = ["--read-only", "--cache", &cache_size, "--control", &control];
        Server::start(url.as_ref(), &[&common[..], more].concat())
    };
    let has = |name: &str, count: u64| {
        let line = format!("nowait_store_{name}{{url=\"{url}\"}} {count}");
        metrics(&socket).lines().any(|other| other == line)
    };
    let server = serve(&["--record", record.to_str().unwrap()]);
    assert!(server.connect().read(0, 3 * MIB as u32).unwrap() == object);
    wait_until("the cache", || has("stored_total", 48));
    server.stop();
    let lines = fs::read_to_string(&record).unwrap();
    assert_eq!(lines.lines().count(), 48);
    let asked = store.asked_bytes();
    let server = serve(&["--prefetch", record.to_str().unwrap()]);
    assert!(server.connect().read(0, 3 * MIB as u32).unwrap() == object);
    for (name, count) in [("misses_total", 0), ("corrupt_total", 0), ("fetched_bytes_total", 0)] {
        assert!(has(name, count), "{name}: {}", metrics(&socket));
    }
    server.stop();
    assert_eq!(store.asked_bytes(), asked + 1);
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o755)).unwrap();
    let refused = refusal(&["serve", &url, "--read-only", "--cache", cache.to_str().unwrap()]);
    assert!(refused.error.contains("chmod 700"), "{}", refused.error);
    let refused = refusal(&["serve", &url, "--read-only", "--prefetch", record.to_str().unwrap()]);
    assert!(refused.error.contains("--cache"), "{}", refused.error);
}

#[test]
fn a_full_cache_is_logged_once_and_the_server_goes_on_without_it() {
    let Some(flags) = private_mounts() else { return };
    let object = bytes(3 * MIB);
    let store = WebServer::start(object.clone(), "/base.img");
    let scratch = Scratch::new();
    let cache = scratch.join("cache");
    fs::create_dir(&cache).unwrap();
    const SMALL: &str = r#"mount -t tmpfs -o size=1m,mode=700 none "$0" && exec "$@""#;
    let wrapper = [&["unshare"], flags, &["--", "sh", "-c", SMALL, text(&cache)]].concat();
    let url = store.url();
    let extra = ["--read-only", "--cache", text(&cache)];
    let server = Server::start_under(&wrapper, url.as_ref(), &extra);
    let mut client = server.connect();
    for _ in 0..2 {
        for part in 0..12 {
            let at = part * (256 << 10);
            let data = client.read(at as u64, 256 << 10).unwrap();
            assert!(data == object[at..at + (256 << 10)], "{at}");
        }
    }
    let line = await_line(&server, "the cache cannot be written");
    assert!(line.contains("No space left on device"), "{line}");
    assert_eq!(server.log().matches("the cache cannot be written").count(), 1);
    server.stop();
}

#[test]
fn faults_that_pass_have_few_lines_however_many_they_are() {
    let object = bytes(8 * MIB);
    let store = WebServer::start(object.clone(), "/disk.img");
    let server = Server::start(Path::new(&store.url()), &["--read-only", "--verbose"]);
    let mut client = server.connect();
    for n in (0..60).rev() {
        // Once an error, then the answer.
        store.script().lies = [Lie::Status(500, "", "")].into();
        let pos = n * 128 * 1024;
        assert!(client.read(pos, 4096).unwrap() == object[pos as usize..][..4096]);
    }
    let log = server.log();
    let asking = log.matches("asking again").count();
    assert!((3..10).contains(&asking), "{log}");
    assert_eq!(log.matches("it answers again").count(), asking, "{log}");
    // Nor has a library lines for each request.
    assert!(log.lines().count() < 30, "{log}");
    server.stop();
}

/// From now on `server` redirects to `other`.
fn redirects(server: &WebServer, other: &WebServer) {
    let location: &str = Box::leak(format!("location: {}\r\n", other.url()).into_boxed_str());
    server.script().always = Some(Lie::Status(302, location, ""));
}

#[test]
fn a_redirect_to_another_port_is_followed_by_a_confined_server_and_a_later_one_elsewhere_told_of() {
    let object = bytes(3 * MIB);
    let [first, known, other] = [(); 3].map(|()| WebServer::start(object.clone(), "/disk.img"));
    redirects(&first, &known);
    let options = ["--read-only", "--reconnect", "1"];
    let server = Server::start(Path::new(&first.url()), &options);
    let mut client = server.connect();
    for n in 0..2 {
        // The connection that there was ends.
        known.script().lies.push_back(Lie::HangUp);
        let data = client.read(n * MIB, 4096).unwrap_or_else(|_| panic!("{}", server.log()));
        assert!(data == object[(n * MIB) as usize..][..4096]);
    }
    redirects(&first, &other);
    let is_read = client.read(2 * MIB, 4096).is_ok();
    let root = other.root();
    let (_, port) = root.rsplit_once(':').unwrap();
    if is_read {
        return say_skipped("no landlock of ports in this kernel");
    }
    await_line(&server, &format!("redirects to port {port}, which the sandbox does not allow"));
    assert!(!server.log().contains("Permission denied"), "{}", server.log());
    redirects(&first, &known);
    assert!(client.read(2 * MIB, 4096).unwrap() == object[2 * MIB as usize..][..4096]);
    server.stop();
}

#[test]
fn an_image_whose_server_redirects_to_a_port_that_is_not_allowed_is_not_added() {
    let [first, other] = [(); 2].map(|()| WebServer::start(bytes(MIB), "/disk.img"));
    redirects(&first, &other);
    let scratch = Scratch::new();
    let socket = scratch.join("control");
    let (control, url) = (format!("unix:{}", text(&socket)), first.url());
    let own = scratch.sparse("own.img", MIB);
    let server = Server::start(&own, &["--control", &control, "--allow-uri", &url]);
    let add = ["export", "add", "other", &url, "--read-only", "--control", text(&socket)];
    let output = tool(NOWAIT).args(add).output().unwrap();
    if output.status.success() {
        return say_skipped("no landlock of ports in this kernel");
    }
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("which the sandbox does not allow"), "{error}");
    server.stop();
}

#[test]
fn blocks_of_all_objects_have_one_limit_of_memory() {
    const OBJECT: u64 = 24 * MIB;
    const LIMIT: u64 = 32 * MIB;
    let object = bytes(OBJECT);
    let stores: Vec<_> = (0..12).map(|_| WebServer::start(object.clone(), "/disk.img")).collect();
    let scratch = Scratch::new();
    let [socket, control] = ["nbd", "control"].map(|name| scratch.join(name));
    let [listen, control_at] = [&socket, &control].map(|path| format!("unix:{}", text(path)));
    let images = stores.iter().enumerate().map(|(n, store)| format!("i{n}={}", store.url()));
    let options = ["--nbd", &listen, "--control", &control_at, "--remote-memory", "32M"];
    let mut arguments: Vec<String> = vec!["serve".into(), "--read-only".into()];
    arguments.extend(images.chain(options.map(str::to_owned)));
    let server = Server::start_by(&[], &arguments);
    let value = |name: &str| -> u64 {
        let text = metrics(&control);
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.trim().parse().expect("a number")
    };
    assert_eq!(value("nowait_block_memory_limit_bytes "), LIMIT);
    let before = server.memory("RssAnon");
    let mut read = 0;
    for n in 0..stores.len() {
        let mut client =
            Client::connect_to(&socket, &format!("i{n}"), Mode::Structured).expect("a server");
        for pos in (0..OBJECT).step_by(MIB as usize) {
            assert!(
                client.read(pos, MIB as u32).unwrap() == object[pos as usize..][..MIB as usize]
            );
        }
        read += OBJECT;
        let kept = value("nowait_block_memory_bytes ");
        assert!(kept <= LIMIT && kept >= LIMIT.min(read) / 2, "{kept} of {read}");
    }
    let grown = server.memory("RssAnon").saturating_sub(before);
    println!("{} MiB after {} MiB were read", grown / MIB, read / MIB);
    assert!(grown < 2 * LIMIT, "{} MiB", grown / MIB);
    server.stop();
}
