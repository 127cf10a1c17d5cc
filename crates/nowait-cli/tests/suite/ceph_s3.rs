//! Objects of a real S3 server: that of the Ceph cluster of these tests.
//!
//! Invariant: no test runs while another one takes the cluster's OSD away.

use std::fs;
use std::path::Path;
use std::sync::{OnceLock, PoisonError, RwLockReadGuard};

use nowait_testkit::{Finished, Random, Scratch, seed};

use crate::ceph::{OSD, cluster, script};
use crate::common::{MIB, NOWAIT, Server, refusal_under, require_tool, text, tool};
use crate::remote_objects::{KEY, SECRET};

/// NBD's EIO.
const EIO: u32 = 5;

/// The S3 server of the cluster.
struct S3 {
    root: String,
    _osd: RwLockReadGuard<'static, ()>,
}

/// The S3 server, which the first test starts; `None` where a test is skipped.
fn s3() -> Option<S3> {
    static ROOT: OnceLock<String> = OnceLock::new();
    if !["radosgw", "radosgw-admin", "curl"].into_iter().all(require_tool) {
        return None;
    }
    let cluster = cluster()?;
    let osd = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let start = || tool(script()).arg("rgw").arg(&cluster.directory).succeeds().trim_end().into();
    Some(S3 { root: ROOT.get_or_init(start).clone(), _osd: osd })
}

impl S3 {
    /// Makes a PUT request with curl's own signature; `path` is that of the URL.
    fn put(&self, path: &str, more: &[&str]) {
        tool("curl")
            .args(["-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3"])
            .args(["--user", &format!("{KEY}:{SECRET}")])
            .args(["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "-X", "PUT"])
            .args(more)
            .arg(format!("{}/{path}", self.root))
            .succeeds();
    }

    fn make_bucket(&self, name: &str) {
        self.put(name, &[]);
    }

    fn put_file(&self, path: &str, file: &Path) {
        self.put(path, &["-T", text(file)]);
    }

    fn put_bytes(&self, path: &str, data: &[u8]) {
        let scratch = Scratch::new();
        let file = scratch.join("object");
        fs::write(&file, data).expect("a file");
        self.put_file(path, &file);
    }

    /// The command prefix with what the environment has to say.
    fn environment(&self, key: &str, secret: &str) -> Vec<String> {
        let root = &self.root;
        vec![
            "env".into(),
            format!("AWS_ENDPOINT_URL={root}"),
            format!("AWS_ACCESS_KEY_ID={key}"),
            format!("AWS_SECRET_ACCESS_KEY={secret}"),
            "AWS_REGION=us-east-1".into(),
        ]
    }

    fn serve(&self, url: &str, more: &[&str]) -> Server {
        let environment = self.environment(KEY, SECRET);
        let environment: Vec<_> = environment.iter().map(String::as_str).collect();
        Server::start_under(&environment, Path::new(url), &[&["--read-only"], more].concat())
    }

    fn run(&self, arguments: &[&str]) -> String {
        let environment = self.environment(KEY, SECRET);
        tool("env").args(&environment[1..]).arg(NOWAIT).args(arguments).succeeds()
    }

    /// Asks for the object at `url`, which is refused in one line that has `words`, and no secret.
    fn refuses(&self, [key, secret]: [&str; 2], url: &str, words: &str) {
        let environment = self.environment(key, secret);
        let environment: Vec<_> = environment.iter().map(String::as_str).collect();
        let refused = refusal_under(&environment, &["info", url]);
        refused.says(&[words]);
        assert!(!refused.error.contains(secret), "{}", refused.error);
    }
}

fn bytes(len: u64) -> Vec<u8> {
    Random::from_seed(seed()).bytes(len as usize)
}

#[test]
fn raw_and_qcow2_objects_of_a_real_s3_server_are_served_and_copied() {
    let Some(s3) = s3() else { return };
    let scratch = Scratch::new();
    let [raw, image, copy] = ["raw", "image", "copy"].map(|name| scratch.join(name));
    let object = bytes(9 * MIB + 512);
    fs::write(&raw, &object).expect("a file");
    s3.run(&["copy", "-O", "qcow2", text(&raw), text(&image)]);
    s3.make_bucket("images");
    s3.put_file("images/a%20dir/b%20%2B%25.img", &raw);
    s3.put_file("images/disk.qcow2", &image);
    for (url, format) in
        [("s3://images/a dir/b +%.img", "raw"), ("s3://images/disk.qcow2", "qcow2")]
    {
        let server = s3.serve(url, &["--format", format]);
        assert!(server.connect().read(0, 9 * MIB as u32).expect("a read")[..] == object[..9 << 20]);
        server.stop();
        s3.run(&["copy", "-f", format, url, text(&copy)]);
        assert!(fs::read(&copy).expect("a copy") == object, "{url}");
        fs::remove_file(&copy).expect("a copy");
    }
    s3.run(&["check", "-f", "qcow2", "s3://images/disk.qcow2"]);
}

#[test]
fn a_disk_is_uploaded_to_a_real_s3_server_and_replaced_only_with_force() {
    let Some(s3) = s3() else { return };
    let scratch = Scratch::new();
    let [raw, copy] = ["raw", "copy"].map(|name| scratch.join(name));
    let object = bytes(17 * MIB + 512);
    fs::write(&raw, &object).expect("a file");
    s3.make_bucket("uploads");
    let url = "s3://uploads/a dir/b +%.img";
    s3.run(&["copy", text(&raw), url, "--verify"]);
    s3.run(&["copy", url, text(&copy)]);
    assert!(fs::read(&copy).expect("a copy") == object);
    let environment = s3.environment(KEY, SECRET);
    let environment: Vec<_> = environment.iter().map(String::as_str).collect();
    refusal_under(&environment, &["copy", text(&raw), url]).says(&["already", "--force"]);
    let none = "s3://no-uploads/disk.img";
    refusal_under(&environment, &["copy", text(&raw), none]).says(&["no such bucket (404"]);
    fs::write(&raw, &object[..1 << 20]).expect("a file");
    s3.run(&["copy", text(&raw), url, "--force", "--verify"]);
}

#[test]
fn what_a_real_s3_server_refuses_is_one_line_with_its_code() {
    let Some(s3) = s3() else { return };
    s3.make_bucket("refusals");
    s3.put_bytes("refusals/disk.img", &bytes(MIB));
    let url = "s3://refusals/disk.img";
    s3.refuses([KEY, "another"], url, "refuses access (403 SignatureDoesNotMatch)");
    s3.refuses(["NOBODY", SECRET], url, "refuses access (403 InvalidAccessKeyId)");
    let good = [KEY, SECRET];
    s3.refuses(good, "s3://refusals/none", "no such object (404 NoSuchKey)");
    s3.refuses(good, "s3://none/disk.img", "no such bucket (404 NoSuchBucket)");
    s3.put_bytes("refusals/empty.img", &[]);
    s3.refuses(good, "s3://refusals/empty.img", "no bytes");
    s3.put("refusals/a/../b.img", &["--path-as-is", "-d", "x"]);
    s3.refuses(good, "s3://refusals/a/../b.img", "'..'");
}

#[test]
fn an_object_that_a_real_s3_server_replaces_is_an_error_and_never_a_mixture() {
    let Some(s3) = s3() else { return };
    let object = bytes(8 * MIB);
    s3.make_bucket("replaced");
    s3.put_bytes("replaced/disk.img", &object);
    let server = s3.serve("s3://replaced/disk.img", &[]);
    let mut client = server.connect();
    assert!(client.read(0, 100_000).expect("a read") == object[..100_000]);
    s3.put_bytes("replaced/disk.img", &vec![7; object.len()]);
    assert_eq!(client.read(4 * MIB, 100_000).expect_err("another object"), EIO);
    assert_eq!(client.read(0, 100_000).expect_err("what is in memory is of the first"), EIO);
    assert!(
        server.log().contains("the object has changed since it was opened"),
        "{}",
        server.log()
    );
    server.stop();
    let server = s3.serve("s3://replaced/disk.img", &[]);
    assert!(server.connect().read(4 * MIB, 100_000).expect("a read") == [7; 100_000]);
    server.stop();
}
