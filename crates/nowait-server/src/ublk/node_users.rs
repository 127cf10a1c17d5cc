//! The users of a node: what is mounted from it, what is stacked on it, which processes have it
//! open.
//!
//! Invariant: nothing here changes the device; what cannot be read is left out.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The most users of a node that are named.
/// Beyond it: the others are counted.
const MAX_NAMED: usize = 4;
/// A user of which there is only the driver's word, for example in another mount namespace.
pub(crate) const INVISIBLE: &str = "something that is not visible from here";

/// Visible users of the node of device `id`, one text for each user.
pub(crate) fn visible(id: u32) -> Vec<String> {
    let node = format!("/dev/ublkb{id}");
    let mut users = mounts(&node);
    users.extend(stacked(id));
    users.extend(processes(&node));
    users
}

/// Users of the node of device `id`, one text for each user; empty if nothing does. For a moment the
/// node is claimed, so that a mount(8) would be refused: this is for a device that is to be stopped.
pub(crate) fn of(id: u32) -> Vec<String> {
    let node = format!("/dev/ublkb{id}");
    let mut users = visible(id);
    // A claim of another program says that it is in use.
    let claims = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&node);
    if users.is_empty() && claims.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
        users.push(INVISIBLE.into());
    }
    users
}

/// `users` in one line.
pub(crate) fn in_words(users: &[String]) -> String {
    let named = users.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
    match users.len().saturating_sub(MAX_NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Whether `device` is the node or one of its partitions.
fn is_node(device: &str, node: &str) -> bool {
    match device.strip_prefix(node) {
        Some("") => true,
        Some(rest) => rest.strip_prefix('p').is_some_and(is_number),
        None => false,
    }
}

fn is_number(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())
}

fn mounts(node: &str) -> Vec<String> {
    let lines = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mounted = lines.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let device = words.next().filter(|device| is_node(device, node))?;
        Some(format!("{device} is mounted on {}", words.next()?))
    });
    let swapped = swaps.lines().filter_map(|line| line.split_whitespace().next());
    let swapped = swapped.filter(|device| is_node(device, node));
    mounted.chain(swapped.map(|device| format!("{device} is swap space"))).collect()
}

/// Devices that stand on the node, as those of dm and md.
fn stacked(id: u32) -> Vec<String> {
    let Ok(holders) = fs::read_dir(format!("/sys/block/ublkb{id}/holders")) else {
        return Vec::new();
    };
    let names = holders.flatten().map(|holder| holder.file_name());
    names.map(|name| format!("/dev/{} stands on it", name.display())).collect()
}

/// Other processes that have the node open, as far as this one may see that.
fn processes(node: &str) -> Vec<String> {
    let own = std::process::id().to_string();
    let Ok(all) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = all.flatten().map(|entry| entry.file_name());
    let numbers = numbers.filter_map(|name| name.into_string().ok());
    let others = numbers.filter(|name| is_number(name) && *name != own);
    let users = others.filter(|number| has_open(&Path::new("/proc").join(number), node));
    users
        .map(|number| {
            let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
            format!("process {number} ({})", name.trim_end())
        })
        .collect()
}

fn has_open(process: &Path, node: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else { return false };
    let mut targets = descriptors.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    targets.any(|target| target.to_str().is_some_and(|target| is_node(target, node)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_partitions_and_no_other_node_is_one() {
        for (device, wanted) in [
            ("/dev/ublkb1", true),
            ("/dev/ublkb1p2", true),
            ("/dev/ublkb1p12", true),
            ("/dev/ublkb12", false),
            ("/dev/ublkb1p", false),
            ("/dev/ublkb1x1", false),
            ("/dev/ublkb", false),
        ] {
            assert_eq!(is_node(device, "/dev/ublkb1"), wanted, "{device}");
        }
    }

    #[test]
    fn of_many_users_some_are_named_and_all_are_counted() {
        let users: Vec<String> = (1..=6).map(|n| format!("process {n} (dd)")).collect();
        assert_eq!(in_words(&users[..1]), "process 1 (dd)");
        assert!(in_words(&users).ends_with("process 4 (dd) and 2 more"));
    }
}
