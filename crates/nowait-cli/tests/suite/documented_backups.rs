//! The commands of docs/backup.md, run as they are printed by a user who has no other server.
//!
//! Invariant: each script stops at its first command that fails, and what is restored is compared with the disk.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nowait_testkit::{Running, require_tool, tool, wait_until};

use crate::common::disk_with_bitmaps::has_qemu;
use crate::common::{Finished, KIB, MIB, NOWAIT, Scratch, Server, accepted, text};

/// The beginning of each script. `serve` stops the server before, and returns when the next one serves.
const PRELUDE: &str = r#"
set -e
nowait() { "$NOWAIT" "$@"; }
stop() { [ -z "$server" ] || { kill "$server"; wait "$server"; server=; }; }
trap stop EXIT
serve() {
    stop
    : >ready
    "$NOWAIT" serve "$@" >ready &
    server=$!
    until grep -q serving ready; do kill -0 "$server"; sleep 0.02; done
}
"#;

/// A block of commands in docs/backup.md, from the line that begins with `first` on.
fn block(first: &str) -> String {
    let document = include_str!("../../../../docs/backup.md");
    let at = document.find(&format!("\n{first}"));
    let at = at.unwrap_or_else(|| panic!("no line begins with {first:?}"));
    let (commands, _) = document[at..].split_once("\n```").expect("the end of the block");
    with_servers(commands.lines())
}

/// The examples that `--help` of a command prints, without the words above them.
fn examples(command: &[&str]) -> String {
    let help = accepted(&[command, &["--help"]].concat());
    let (_, examples) = help.split_once("\nExamples:\n").expect("examples");
    let (examples, _) = examples.split_once("\nExit status:").expect("their end");
    with_servers(examples.lines().map(str::trim).filter(|line| !line.ends_with(':')))
}

/// Commands as they are, but each server is awaited.
fn with_servers<'a>(commands: impl Iterator<Item = &'a str>) -> String {
    let served = |line: &str| match line.strip_prefix("nowait serve ") {
        Some(rest) => format!("serve {}\n", rest.split(['&', '#']).next().unwrap_or_default()),
        None => format!("{line}\n"),
    };
    commands.map(served).collect()
}

/// The directory of a user, and what stands for the paths of the document there.
struct User {
    home: Scratch,
    paths: Vec<(&'static str, String)>,
}

impl User {
    fn new(places: &[(&'static str, &str)]) -> Self {
        let home = Scratch::new();
        let own = [("/tmp/nbd", "nbd")];
        let paths =
            own.iter().chain(places).map(|(from, to)| (*from, text(&home.join(to)).to_owned()));
        let paths = paths.collect();
        Self { home, paths }
    }

    /// The script, to be run with bash.
    fn script(&self, script: &str) -> Command {
        let mut commands = format!("{PRELUDE}{script}");
        for (from, to) in &self.paths {
            commands = commands.replace(from, to);
        }
        let mut shell = tool("bash");
        shell.args(["-c", &commands]).current_dir(self.home.path()).env("NOWAIT", NOWAIT);
        for variable in ["HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"] {
            shell.env(variable, self.home.path());
        }
        shell
    }

    fn runs(&self, script: &str) -> String {
        self.script(script).succeeds()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }

    /// A file whose blocks all differ.
    fn disk(&self, name: &str) -> PathBuf {
        self.home.random(name, 8 * MIB, name.len() as u64)
    }

    /// Compares disks, whatever their formats are.
    fn same(&self, one: &str, other: &str) {
        let disks = [one, other].map(|name| {
            let flat = self.path("flat");
            accepted(&["copy", text(&self.path(name)), text(&flat), "-O", "raw", "--force"]);
            fs::read(flat).expect("the disk")
        });
        assert!(disks[0] == disks[1], "{one} and {other} differ");
    }
}

#[test]
fn a_backup_of_a_raw_disk_is_made_by_the_commands_of_the_document() {
    nowait_testkit::needs!(require_tool("nbdcopy"));
    let user = User::new(&[]);
    user.disk("disk.img");
    user.runs(&block("nowait serve disk.img --allow-dir \"$PWD\" --nbd"));
    user.same("disk.img", "copy.img");
}

#[test]
fn increments_of_a_qcow2_disk_are_made_by_the_commands_of_the_document() {
    nowait_testkit::needs!(require_tool("nbdcopy"));
    let user = User::new(&[]);
    accepted(&["copy", text(&user.disk("full")), text(&user.path("disk.qcow2"))]);
    fs::write(user.path("changed"), [7; 100_000]).expect("a file");
    let first = block("nowait serve vm=disk.qcow2 --allow-dir");
    let change = "nbdcopy changed 'nbd+unix:///vm?socket=/tmp/nbd'\n";
    let later = block("nowait export backup start vm --bitmap monday");
    let said = user.runs(&[&first, change, &later].concat());
    user.same("disk.qcow2", "tuesday.qcow2");
    user.same("full", "full.img");
    assert!(said.contains("128 KiB (131072 bytes) data"), "{said}");
}

#[test]
fn what_differs_from_an_earlier_copy_is_copied_by_the_commands_of_the_document() {
    let user = User::new(&[]);
    let disk = user.disk("disk.img");
    fs::copy(&disk, user.path("full.img")).expect("an earlier copy");
    let mut changed = fs::read(&disk).expect("the disk");
    changed[..100_000].fill(7);
    fs::write(&disk, changed).expect("a change");
    let said = user.runs(&block("nowait copy disk.img tuesday.qcow2 --compare"));
    assert_eq!(said.matches("100 KiB (102400 bytes) data").count(), 2, "{said}");
    user.same("disk.img", "full.img");
    user.same("disk.img", "tuesday.qcow2");
}

#[test]
fn what_a_bitmap_has_noted_is_copied_by_the_commands_of_the_document() {
    nowait_testkit::needs!(["nbdcopy", "nbdinfo"].into_iter().all(require_tool));
    let user = User::new(&[]);
    user.disk("disk.img");
    fs::write(user.path("changed"), [7; 100_000]).expect("a file");
    let serve = "serve disk.img --nbd unix:/tmp/nbd\nURI='nbd+unix:///?socket=/tmp/nbd'\n";
    let first = block("nowait export bitmap add @0 monday");
    let next = block("nowait export bitmap add @0 tuesday");
    let listed = "nowait export bitmap list @0 --json\n";
    let script = [serve, &first, "nbdcopy changed \"$URI\"\n", &next, listed].concat();
    let said = user.runs(&script);
    assert!(said.contains("128 KiB (131072 bytes) data"), "{said}");
    assert!(
        said.trim_end().ends_with(
            r#"[{"name":"tuesday","granularity_bytes":65536,"enabled":true,"dirty_bytes":0}]"#
        ),
        "{said}"
    );
    user.same("disk.img", "tuesday.qcow2");
}

#[test]
fn two_disks_are_copied_by_the_commands_of_the_document() {
    let user = User::new(&[]);
    user.disk("root.img");
    accepted(&["copy", text(&user.disk("other")), text(&user.path("data.qcow2"))]);
    user.runs(&block("nowait serve root=root.img data="));
    user.same("root.img", "root-copy.qcow2");
    user.same("data.qcow2", "data-copy.qcow2");
}

#[test]
fn chains_are_made_and_restored_by_the_commands_of_the_document() {
    let user = User::new(&[("/dev/vdb", "vdb")]);
    user.disk("disk.img");
    accepted(&["copy", text(&user.disk("vm.img")), text(&user.path("vm.qcow2"))]);
    user.home.sparse("vdb", 8 * MIB);
    let unused = block("nowait backup disk.img backups");
    let serve = "serve vm=vm.qcow2 --allow-dir \"$PWD\" --nbd unix:/tmp/nbd\nnowait export bitmap add vm nightly\n";
    let in_use = block("nowait export backup start vm --bitmap nightly").repeat(3);
    let restore = block("nowait restore vm-backups new.qcow2");
    user.runs(&[&unused, serve, &in_use, &restore].concat());
    user.same("vdb", "disk.img");
    user.same("new.qcow2", "vm.img");
    user.same("earlier.img", "vm.img");
}

#[test]
fn bitmaps_are_stored_by_the_commands_of_the_document() {
    let user = User::new(&[("/dev/vg/vm", "vm.img"), ("/var/lib/nowait/bitmaps", "bitmaps")]);
    user.disk("disk.img");
    user.disk("vm.img");
    accepted(&["create", text(&user.path("disk.qcow2")), "8M"]);
    fs::create_dir(user.path("bitmaps")).expect("a directory");
    let listed = "nowait export bitmap list @0\n";
    let add = "nowait export bitmap add @0 monday\n";
    let qcow2 = block("nowait serve disk.qcow2");
    assert!(user.runs(&format!("{qcow2}{listed}")).contains("monday"));
    let raw = block("nowait serve disk.img --allow-dir \"$PWD\" &");
    let (adjacent, elsewhere) = raw.trim().split_once('\n').expect("two servers");
    let said = user.runs(&[adjacent, "\n", add, elsewhere, "\n", add, listed].concat());
    assert!(said.trim_end().ends_with("yes"), "it is stored: {said}");
    assert!(user.path("disk.img.bitmaps.qcow2").exists());
    assert_eq!(fs::read_dir(user.path("bitmaps")).expect("a directory").count(), 1);
}

#[test]
fn a_disk_moves_by_the_commands_of_the_document() {
    let mut user = User::new(&[("/old/", "old/"), ("/new/", "new/")]);
    let elsewhere = Scratch::new();
    let target = elsewhere.sparse("target.img", 8 * MIB);
    let server = Server::start(&target, &[]);
    for place in ["old", "new"] {
        fs::create_dir(user.path(place)).expect("a directory");
    }
    user.paths.push((" /new ", format!(" {} ", text(&user.path("new")))));
    for uri in ["nbd://storage.example/vm", "nbd://storage.example/"] {
        user.paths.push((uri, server.uri().to_owned()));
    }
    fs::rename(user.disk("vm.img"), user.path("old/vm.img")).expect("a file to rename");
    let commands = block("nowait serve vm=/old/vm.img");
    // The last move is complete, or is cancelled.
    let (all, cancel) = commands.trim_end().rsplit_once('\n').expect("a last command");
    let said = user.runs(&format!("{all}\nif {cancel}\nthen :; fi\n"));
    assert!(said.contains("moving to nbd+unix:"), "{said}");
    user.same("old/vm.img", "new/vm.qcow2");
    server.stop();
}

#[test]
fn the_examples_of_backups_and_moves_do_what_they_say() {
    let user = User::new(&[]);
    user.disk("disk.img");
    let said = user.runs(&examples(&["export", "backup", "start"]));
    assert!(said.contains("point 1, whole"), "{said}");
    user.same("disk.img", "copy.img");
    accepted(&["restore", text(&user.path("points")), text(&user.path("restored"))]);
    user.same("disk.img", "restored");
    // The other server of the example is in the test of the document.
    let moves = examples(&["export", "move"]);
    let here: Vec<&str> = moves.lines().take(2).collect();
    assert!(here[1].contains("export move vm vm.qcow2"), "{moves}");
    user.runs(&here.join("\n"));
    user.same("disk.img", "vm.qcow2");
}

#[test]
fn a_disk_is_replicated_by_the_commands_of_the_document() {
    let mut user = User::new(&[]);
    let elsewhere = Scratch::new();
    let server = Server::start(&elsewhere.sparse("replica.img", 8 * MIB), &[]);
    user.paths.push(("nbd://10.0.0.2/", server.uri().to_owned()));
    let disk = user.disk("vm.img");
    let commands = block("nowait serve replica.img");
    let (_other_host, commands) = commands.trim_start().split_once('\n').expect("commands");
    let (begin, stop) = commands.trim_end().rsplit_once('\n').expect("a last command");
    let is_whole = "until nowait export replicate vm --json | grep -q '\"consistent\":true'; do sleep 0.02; done\n";
    user.runs(&[begin, "\n", is_whole, stop].concat());
    let mut client = server.connect();
    let copied = client.read(0, 8 * MIB as u32).expect("the replica");
    assert!(copied == fs::read(disk).expect("the disk"));
    server.stop();
}

/// QEMU's server of the disk `source.qcow2` in `user`'s directory, in the way of Proxmox: `device` is the disk as of now, of
/// which only what bitmap `b` says is readable if there is one, and `guest` the disk itself.
fn qemu_with_a_backup(user: &User, has_bitmap: bool) -> Running {
    let socket = user.path("nbd");
    for earlier in [&socket, &user.path("fleecing")] {
        let _ = fs::remove_file(earlier);
    }
    user.home.sparse("fleecing", 8 * MIB);
    let bitmap = |text| if has_bitmap { text } else { "" };
    let node = |driver: &str, name: &str, rest: &str| {
        ["--blockdev".to_owned(), format!("driver={driver},node-name={name},{rest}")]
    };
    let mut command = Command::new("qemu-storage-daemon");
    let copies =
        format!("file=source,target=fleecing{}", bitmap(",bitmap.node=source,bitmap.name=b"));
    let offered = bitmap(",bitmaps.0.node=source,bitmaps.0.name=b");
    command
        .args(node("file", "image", "filename=source.qcow2"))
        .args(node("qcow2", "source", "file=image"))
        .args(node("file", "fleecing", "filename=fleecing"))
        .args(node("copy-before-write", "copies", &copies))
        .args(node("snapshot-access", "instant", "file=copies"))
        .args(["--nbd-server", "addr.type=unix,addr.path=nbd"])
        .args(["--export", &format!("nbd,id=a,node-name=instant,name=device,writable=on{offered}")])
        .args(["--export", "nbd,id=b,node-name=copies,name=guest,writable=on"]);
    let running = Running::start(command.current_dir(user.home.path()).stdout(Stdio::null()));
    wait_until("QEMU's exports", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    running
}

#[test]
fn a_backup_in_the_way_of_proxmox_is_made_by_the_commands_of_the_document() {
    nowait_testkit::needs!(has_qemu() && require_tool("qemu-storage-daemon"));
    let user = User::new(&[]);
    let source = user.path("source.qcow2");
    accepted(&["copy", text(&user.disk("disk.img")), text(&source)]);
    let commands = block("nowait backup \"nbd+unix:///$DEVICE");
    let lines: Vec<&str> = commands.trim().lines().collect();
    assert_eq!(lines.len(), 3);
    let given =
        "DEVICE=device NBD_PATH=$PWD/nbd BITMAP=b CHAIN=$PWD/chain IMAGE=$PWD/restored.img\n";
    let mut server = qemu_with_a_backup(&user, false);
    user.runs(&[given, lines[0]].concat());
    server.end();
    tool("qemu-img").args(["bitmap", "--add", text(&source), "b"]).succeeds();
    let io = |target: &str, commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", *command]);
        tool("qemu-io").args(commands).arg(target).succeeds();
    };
    io(text(&source), &["write -P 3 1M 100k", "write -z 5M 64k"]);
    tool("qemu-img").args(["bitmap", "--disable", text(&source), "b"]).succeeds();
    fs::copy(&source, user.path("before.qcow2")).expect("a copy");
    let mut server = qemu_with_a_backup(&user, true);
    // The machine's writes from now on are in no point.
    let guest = format!("nbd+unix:///guest?socket={}", text(&user.path("nbd")));
    io(&guest, &["write -P 4 1M 64k", "write -P 4 7M 64k"]);
    let said = user.runs(&[given, lines[1], "\n", lines[2]].concat());
    assert!(said.contains("point 2, changes since point 1"), "{said}");
    server.end();
    user.same("restored.img", "before.qcow2");
}

/// Incus's part in the commands of the document: bitmaps in an image whose data file is the volume, and QEMU's server
/// of both for one connection. The image names a data file that does not exist, as that of Incus.
const INCUS: &str = r#"
both=driver=qcow2,file.filename=metadata.qcow2,data-file.driver=file,data-file.filename=volume
incus() {
    case "$3" in
    nbd)
        bitmaps=$(qemu-img info --image-opts "$both" | sed -n 's/^ *name: /--bitmap=/p')
        exec qemu-nbd --image-opts "$both" --socket="$PWD/nbd" --shared=1 $bitmaps;;
    bitmap)
        case "$4" in
        create) qemu-img bitmap --add --image-opts "$both" "$7";;
        delete) wait "$!"; qemu-img bitmap --remove --image-opts "$both" "$7";;
        esac;;
    esac
}
write() { qemu-io -c "write -P $1 $2" --image-opts "$both" >/dev/null; }
POOL=pool VM=vm ADDRESS=unused CHAIN=$PWD/chain
qemu-img create -q -f raw gone 8M
qemu-img create -q -f qcow2 -o data_file=gone,data_file_raw=on,preallocation=metadata metadata.qcow2 8M
rm gone
"#;

#[test]
fn a_backup_in_the_way_of_incus_is_made_by_the_commands_of_the_document() {
    nowait_testkit::needs!(has_qemu());
    let user = User::new(&[]);
    user.disk("volume");
    // A socket in the place of an address, of which two tests cannot have the same; Incus waits for its client, too.
    let uri = format!("nbd+unix:///?socket={}", text(&user.path("nbd")));
    let commands = block("incus storage volume bitmap create").replace("nbd://$ADDRESS/", &uri);
    let commands = commands
        .replace("\nnowait backup", "\nuntil [ -S nbd ]; do sleep 0.02; done\nnowait backup");
    let next = commands.replace("monday", "wednesday");
    let next = next.replace("tuesday", "monday").replace("wednesday", "tuesday");
    let first = "qemu-img bitmap --add --image-opts \"$both\" monday\nwrite 1 '1M 64k'\n";
    let change = "write 2 '2M 100k'\ncp volume second\nrm -f nbd\n";
    let said = user.runs(&[INCUS, first, &commands, change, &next].concat());
    assert!(said.contains("point 2, changes since point 1"), "{said}");
    let written = (100 * KIB).next_multiple_of(64 * KIB);
    assert!(said.contains(&format!("({written} bytes) in blocks of its own")), "{said}");
    let restored = user.path("restored");
    accepted(&["restore", text(&user.path("chain")), text(&restored), "-O", "raw"]);
    assert!(fs::read(restored).expect("it") == fs::read(user.path("second")).expect("the volume"));
}

#[test]
fn the_volume_and_the_bitmaps_of_a_stopped_machine_of_incus_are_served_by_a_link() {
    nowait_testkit::needs!(has_qemu() && require_tool("nbdcopy"));
    let user = User::new(&[]);
    user.disk("volume");
    fs::write(user.path("changed"), [7; 100_000]).expect("a file");
    let add = "qemu-img bitmap --add --image-opts \"$both\" monday\n";
    let serve = "serve metadata.qcow2 --data-file volume --nbd unix:/tmp/nbd\n";
    user.script(&[INCUS, add, serve].concat()).fails();
    let uri = "'nbd+unix:///?socket=/tmp/nbd'";
    let change = format!("nbdcopy changed {uri}\nnowait export bitmap list @0\nstop\n");
    let look = "qemu-img bitmap --disable --image-opts \"$both\" monday\n";
    let said = user.runs(&[INCUS, add, "ln -s volume gone\n", serve, &change, look].concat());
    assert!(said.contains("monday") && said.contains("128 KiB"), "{said}");
    let changed = fs::read(user.path("volume")).expect("the volume");
    assert!(changed[..100_000].iter().all(|byte| *byte == 7));
}
