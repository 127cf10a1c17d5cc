//! Clients that other files do not cover: FUSE, nbd-client, Go, plain Python; and the table of all
//! clients.
//!
//! Invariant: each test compares with bytes that were not transferred by the server; the table
//! names existing tests.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nowait_testkit::{Running, wait_for_exit, wait_until};
use rustix::fs::{Access, access};

use crate::common::{
    Finished, MIB, PYTHON, Scratch, Server, export, require_fuse, require_tool, tool,
};

const BLOCK_BYTES: usize = 4096;

/// A disk as a file, by nbdfuse; unmounted when it is dropped.
struct Mounted {
    process: Running,
    directory: PathBuf,
}

impl Mounted {
    fn new(scratch: &Scratch, uri: &str) -> Self {
        let directory = scratch.join("mounted");
        fs::create_dir(&directory).expect("a directory");
        let mut command = Command::new("nbdfuse");
        let process = Running::start(command.arg(directory.join("disk")).arg(uri));
        let mounted = Self { process, directory };
        wait_until("a mount by nbdfuse", || mounted.file().exists());
        mounted
    }

    fn file(&self) -> PathBuf {
        self.directory.join("disk")
    }

    fn unmount(&mut self) -> bool {
        tool("fusermount3").arg("-u").arg(&self.directory).output().is_ok()
            && wait_for_exit(&mut self.process.0).success()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.process.end();
        let _ = Command::new("fusermount3").arg("-uqz").arg(&self.directory).output();
    }
}

#[test]
fn nbdfuse_mounts_the_disk_as_a_file_that_is_read_and_written() {
    nowait_testkit::needs!(
        require_tool("nbdfuse") && require_tool("fusermount3") && require_fuse()
    );
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 2 * MIB, 5);
    let mut expected = fs::read(&image).expect("the image");
    let server = Server::start(&image, "");
    let mut mounted = Mounted::new(&scratch, &server.uri());
    assert!(fs::read(mounted.file()).expect("a file") == expected, "other bytes through FUSE");

    let file = File::options().write(true).open(mounted.file()).expect("a file to write to");
    let data = vec![0x5a; 100_000];
    file.write_all_at(&data, 4321).expect("a write");
    file.sync_all().expect("a flush");
    drop(file);
    expected[4321..104_321].copy_from_slice(&data);
    assert!(fs::read(mounted.file()).expect("a file") == expected, "not as it was written");
    assert!(mounted.unmount(), "nbdfuse ends badly");
    server.stop();
    assert!(fs::read(&image).expect("the image") == expected, "other bytes in the image");
}

#[test]
fn nbd_client_lists_the_exports_with_their_descriptions() {
    nowait_testkit::needs!(require_tool("nbd-client"));
    let scratch = Scratch::new();
    let (root, data) = (scratch.sparse("root.img", MIB), scratch.sparse("data.img", MIB));
    let options = format!("nbd = ['tcp:127.0.0.1:0']{}", export("data", &data));
    let server = Server::start(&root, &options);
    let printed = [
        tool("nbd-client").args(["-l", "127.0.0.1", "-p", &server.port()]).succeeds(),
        tool("nbd-client").args(["-l", "-u"]).arg(server.socket()).succeeds(),
    ];
    for printed in printed {
        let lines: Vec<_> = printed.lines().filter(|line| line.contains(": ")).collect();
        let expected = [": root.img", "data: data.img"];
        assert_eq!(lines[lines.len() - 2..], expected, "{printed}");
    }
    server.stop();
}

/// The path of a client's source.
fn client(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

#[test]
fn a_client_in_plain_python_is_served_with_every_option_to_choose_an_export() {
    nowait_testkit::needs!(require_tool(PYTHON));
    let scratch = Scratch::new();
    let size = MIB + 77;
    let image = scratch.sparse("disk.img", size);
    let server = Server::start(&image, "");
    let mut python = tool(PYTHON);
    python.arg(client("client.py")).arg(server.socket()).arg(size.to_string()).succeeds();
    server.stop();
    assert_eq!(&fs::read(&image).expect("the image")[1001..1013], b"plain python");
}

#[test]
fn a_client_in_go_shares_one_connection_between_goroutines() {
    nowait_testkit::needs!(require_tool("go"));
    let scratch = Scratch::new();
    let program = scratch.join("client");
    // The build cache is kept between runs, unless another user owns it.
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-build");
    let may_keep = fs::create_dir_all(&kept).is_ok() && access(&kept, Access::WRITE_OK).is_ok();
    let cache = if may_keep { kept } else { scratch.join("go-build") };
    tool("go")
        .env("GOCACHE", cache)
        .envs([("GO111MODULE", "off"), ("GOTOOLCHAIN", "local"), ("CGO_ENABLED", "0")])
        .args(["build", "-o"])
        .arg(&program)
        .arg(client("client.go"))
        .succeeds();
    let image = scratch.sparse("disk.img", 4 * MIB);
    let server = Server::start(&image, "nbd = ['tcp:127.0.0.1:0']");
    tool(&program).arg(format!("127.0.0.1:{}", server.port())).succeeds();
    server.stop();
    for (number, block) in (0u64..).zip(fs::read(&image).expect("the image").chunks(BLOCK_BYTES)) {
        assert!(block == number.to_be_bytes().repeat(BLOCK_BYTES / 8), "block {number}");
    }
}

#[test]
fn the_table_of_clients_names_existing_tests() {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = fs::read_to_string(crate_directory.join("../../docs/interop.md")).expect("a table");
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let mut tests = 0;
    for row in rows.skip(1) {
        let named: Vec<_> = row.split('`').filter_map(|word| word.split_once("::")).collect();
        assert!(!named.is_empty(), "no test in: {row}");
        for (module, test) in named {
            let suites = ["tests/suite", "../nowait-cli/tests/suite"];
            let sources =
                suites.map(|it| crate_directory.join(it).join(module).with_extension("rs"));
            let source: String =
                sources.iter().filter_map(|it| fs::read_to_string(it).ok()).collect();
            assert!(source.contains(&format!("#[test]\nfn {test}()")), "no test {module}::{test}");
            tests += 1;
        }
    }
    assert!(tests >= 20, "only {tests} tests are named");
}
