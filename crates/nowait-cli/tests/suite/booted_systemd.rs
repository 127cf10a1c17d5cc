//! The shipped units under a systemd that was booted, in a container with the programs of this system, or of a newer one.
//!
//! Invariant: nothing of it is visible outside of the container, and it ends with the test.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use nowait_testkit::{Finished, require_tool, say_skipped, skip, tool};
use rustix::process::geteuid;

use crate::common::{NOWAIT, Scratch, made_by_script, text};

/// Boots the container `$1` with the programs of `$2`, in a mount namespace that has what systemd-nspawn expects of its host.
const BOOT: &str = r#"
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd || exit 2
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit 2
exec systemd-nspawn --quiet --directory="$1" --bind-ro="$2:/usr" --boot --register=no --keep-unit --console=pipe
"#;

/// Runs in the container, and writes down what happens.
const CHECK: &str = r#"
say() { echo "$1: $(shift; "$@" 2>&1 | tr '\n' ' ')"; }
mkdir -p /var/lib/nowait/vm1
/test/nowait create /var/lib/nowait/vm1/disk.img 10M
systemctl start nowait@vm1.socket
say size nbdinfo --size 'nbd+unix:///?socket=/run/nowait/vm1.sock'
say status /test/nowait status
say exports /test/nowait export list --json
say upgrade /test/nowait upgrade
say reload systemctl reload nowait@vm1.service
say active systemctl is-active nowait@vm1.service
say after /test/nowait status
say main systemctl show --property=MainPID --value nowait@vm1.service
say servers pidof nowait
systemctl stop nowait@vm1.service
mkdir -p /etc/nowait
for options in --no-such-option '--tls-certs /nonexistent' --io-flusher; do
    echo "OPTIONS=$options" >/etc/nowait/vm1.conf
    say refused timeout 20 nbdinfo --size 'nbd+unix:///?socket=/run/nowait/vm1.sock'
    say socket systemctl is-active nowait@vm1.socket
done
rm /etc/nowait/vm1.conf
# The failed start before may be disconnecting clients yet.
for n in 1 2 3 4 5 6 7 8 9 10; do
    nbdinfo --size 'nbd+unix:///?socket=/run/nowait/vm1.sock' >/dev/null 2>&1 && break
    sleep 1
done
say again nbdinfo --size 'nbd+unix:///?socket=/run/nowait/vm1.sock'
"#;

const UNIT_OF_CHECK: &str = "
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh /test/check
ExecStopPost=systemctl poweroff --force
StandardOutput=file:/test/out
";

/// A root directory whose programs are those of `system`.
fn root(root: &Path, system: &Path) {
    let units = root.join("etc/systemd/system");
    for directory in ["etc/systemd/system/multi-user.target.wants", "var/lib", "run", "tmp"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    for directory in ["proc", "sys", "dev", "usr", "root", "test"] {
        fs::create_dir(root.join(directory)).expect("a directory");
    }
    for directory in ["bin", "sbin", "lib", "lib64"] {
        symlink(Path::new("usr").join(directory), root.join(directory)).expect("a link");
    }
    for file in ["passwd", "group", "nsswitch.conf", "ld.so.cache"] {
        fs::copy(system.join("etc").join(file), root.join("etc").join(file)).expect("a file");
    }
    fs::copy(system.join("usr/lib/os-release"), root.join("etc/os-release")).expect("a file");
    fs::write(root.join("etc/machine-id"), "").expect("a file");
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    for name in ["nowait@.service", "nowait@.socket"] {
        let unit = fs::read_to_string(contrib.join(name)).expect("a unit");
        let unit = unit.replace("/usr/local/bin/nowait", "/test/nowait");
        fs::write(units.join(name), unit).expect("a unit");
    }
    fs::write(units.join("check.service"), UNIT_OF_CHECK).expect("a unit");
    symlink("../check.service", units.join("multi-user.target.wants/check.service"))
        .expect("a link");
    symlink("/usr/lib/systemd/system/multi-user.target", units.join("default.target"))
        .expect("a link");
    fs::write(root.join("test/check"), CHECK).expect("a script");
    tool("cp").arg(NOWAIT).arg(root.join("test/nowait")).succeeds();
}

#[test]
fn the_units_serve_and_are_operated_under_a_booted_systemd() {
    if require_tool("nbdinfo") {
        serve_and_operate(Path::new("/"));
    }
}

#[test]
fn the_units_serve_and_are_operated_under_a_newer_systemd() {
    let system = made_by_script("NOWAIT_SYSTEMD_DIR", "nowait-systemd");
    let why = || format!("no system in {} (scripts/newer-systemd makes it)", system.display());
    if system.join("usr/bin/nbdinfo").is_file() || skip(&why()) {
        serve_and_operate(&system);
    }
}

/// Boots the programs of `system`.
fn serve_and_operate(system: &Path) {
    if !geteuid().is_root() {
        return say_skipped("needs root");
    }
    nowait_testkit::needs!(require_tool("systemd-nspawn"));
    let scratch = Scratch::new();
    root(scratch.path(), system);
    let booted = tool("unshare")
        .args(["--mount", "sh", "-c", BOOT, "sh", text(scratch.path()), text(&system.join("usr"))])
        .stdin(std::process::Stdio::null())
        .output()
        .expect("unshare");
    let out = fs::read_to_string(scratch.join("test/out")).unwrap_or_default();
    if out.is_empty() {
        let _ = skip(&format!(
            "systemd does not boot in a container here: {}",
            String::from_utf8_lossy(&booted.stderr)
        ));
        return;
    }
    let all = |name: &str| {
        let lines = out.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        lines.map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    let one = |name: &str| match &all(name)[..] {
        [line] => line.clone(),
        _ => panic!("no {name} in:\n{out}"),
    };
    assert_eq!((one("size"), one("again")), ("10485760".into(), "10485760".into()), "{out}");
    assert!(one("status").contains("/run/nowait/vm1/control-"), "{out}");
    assert!(
        one("exports").contains(r#""name": "vm1""#) || one("exports").contains(r#""name":"vm1""#),
        "{out}"
    );
    assert!(one("upgrade").contains("serves as process"), "{out}");
    assert_eq!((one("reload"), one("active")), (String::new(), "active".into()), "{out}");
    // systemd and the commands know the new process, and only servers have the name.
    assert!(one("after").starts_with(&format!("server {},", one("main"))), "{out}");
    assert_eq!(one("servers"), one("main"), "{out}");
    assert_eq!(all("socket"), ["active"; 3], "{out}");
    assert!(all("refused").iter().all(|said| said.contains("disconnected")), "{out}");
}
