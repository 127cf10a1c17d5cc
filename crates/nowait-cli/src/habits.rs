//! Options and commands of similar programs, and what does it here.
//!
//! Invariant: each advice works: its command lines of nowait, which stand in quotes, are valid.

/// Options that nowait has under another name, or not at all: the command ("" for any), their names
/// elsewhere, and the advice. A quoted option goes to the command.
pub(crate) const OPTIONS: &[(&str, &[&str], &str)] = &[
    ("serve", &["-c", "--connect"], "serve it on a socket, then: nbd-client -unix SOCKET DEVICE"),
    ("serve", &["-d", "--disconnect"], "nbd-client -d DEVICE"),
    ("serve", &["-L", "--list"], "nbdinfo --list URI"),
    (
        "serve",
        &["-n", "--nocache"],
        "'--direct on' is past the page cache, '--direct off' through it",
    ),
    ("serve", &["--aio"], "take '--queue uring' or '--queue threads'"),
    ("serve", &["--tls-creds", "--object"], "take '--tls-certs DIR'"),
    ("serve", &["--tls-authz"], "take '--tls-certs DIR --tls-verify-peer'"),
    (
        "serve",
        &["-s", "--snapshot"],
        "make an overlay, 'nowait create OVERLAY.qcow2 --backing IMAGE', and serve that",
    ),
    ("serve", &["-l", "--load-snapshot"], "name it as IMAGE@NAME, and take '--read-only'"),
    ("serve", &["-P", "--partition", "-o", "--offset"], "a disk is served whole"),
    ("serve", &["-B"], "take '--bitmap NAME' for a new one; those of an image are served with it"),
    (
        "serve",
        &["--discard", "--detect-zeroes"],
        "a discard always gives space back, and zeros are written as they come",
    ),
    ("serve", &["-U", "--unix"], "take '--socket PATH', or '--nbd unix:PATH'"),
    ("serve", &["-i", "--ipaddr"], "take '--bind HOST', or '--nbd tcp:HOST:PORT'"),
    ("serve", &["--listen"], "take '--nbd tcp:HOST:PORT', or '--nbd unix:PATH'"),
    ("serve", &["--image-opts"], "give the path or the URI, and the format: '--format raw'"),
    ("info", &["--image-opts"], "give the path or the URI, and the format: '--format raw'"),
    ("map", &["--image-opts"], "give the path or the URI, and the format: '--format raw'"),
    ("check", &["--image-opts"], "give the path or the URI, and the format: '--format raw'"),
    ("resize", &["--image-opts"], "give the path, and the format: '--format raw'"),
    ("commit", &["--image-opts"], "give the path, and the format: '--format qcow2'"),
    (
        "copy",
        &["--image-opts", "--target-image-opts"],
        "give the path or the URI, and the formats: '--from-format raw', '--to-format raw'",
    ),
    ("check", &["-r"], "take '--repair'"),
    ("create", &["-o"], "take '--cluster-size 64K', '--preallocation falloc' or '--backing FILE'"),
    ("create", &["-s", "--size"], "the size is the second argument: 'nowait create IMAGE 10G'"),
    (
        "resize",
        &["-s", "--size"],
        "the size is the second argument: 'nowait resize IMAGE 10G', or '+1G' for more",
    ),
    ("info", &["--backing-chain"], "IMAGE names its backing image: run the command on that"),
    ("info", &["-U", "--force-share"], "leave it out: IMAGE is only looked at, and may be in use"),
    (
        "copy",
        &["-U", "--force-share"],
        "copy what is in use out of its server: 'nowait copy nbd://HOST/EXPORT TO'",
    ),
    (
        "",
        &["-U", "--force-share"],
        "an image in use would change under it; ask its server: 'nowait map nbd://HOST/EXPORT'",
    ),
    ("copy", &["-n"], "leave it out: an export is written as it is, a block device with '--force'"),
    ("copy", &["-S"], "take '--sparse 4K', or '--sparse 0' to keep zeros as data"),
    ("copy", &["-p"], "progress is shown on a terminal, unless there is '--no-progress'"),
    ("copy", &["-q", "--quiet"], "take '--no-progress'"),
    ("copy", &["-c"], "take '-O qcow2 --compress'"),
    ("copy", &["-m"], "take '--requests 16'"),
    ("copy", &["-t", "-T"], "a copy always goes past the page cache where it can"),
    ("copy", &["-o"], "take '-O qcow2 --cluster-size 64K'"),
    ("", &["--output"], "take '--json'"),
    ("", &["-v", "--verbose"], "only 'nowait serve -v' has it; the version: 'nowait --version'"),
];

/// Whole commands of other tools, with ours.
pub(crate) const COMMANDS: &[(&[&str], &str)] = &[
    (&["convert", "cp", "dd"], "'nowait copy FROM TO'"),
    (&["server", "start", "run"], "'nowait serve IMAGE'"),
    (
        &["stop", "kill", "quit"],
        "kill PID, which 'nowait status' shows: the server flushes the images and exits",
    ),
    (&["list", "ls", "ps"], "'nowait status' shows servers, 'nowait export list' exports"),
    (&["add"], "'nowait export add NAME IMAGE' adds one to a running server"),
    (&["remove", "rm", "delete"], "'nowait export remove NAME' ends one of a running server"),
    (&["limit"], "'nowait export limit NAME --limit-iops 1000'"),
    (&["version"], "'nowait --version'"),
    (&["mount", "attach", "connect"], "'nowait serve IMAGE --ublk' makes a block device of it"),
    (
        &["snapshot"],
        "'nowait export snapshot NAME IMAGE' makes one of an export; of other images qemu-img does",
    ),
    (
        &["bitmap"],
        "'nowait export bitmap add EXPORT NAME' of a running server; for other images qemu-img has it",
    ),
    (&["amend", "compare", "measure", "rebase"], "qemu-img has it"),
];

/// QEMU's words for `--cache`, and what does it here.
const CACHE_WORDS: [(&str, &str); 5] = [
    ("none", "past the page cache is '--direct on'"),
    ("writeback", "through the page cache is '--direct off'"),
    (
        "writethrough",
        "through the page cache is '--direct off'; data is durable when a client flushes",
    ),
    ("directsync", "past the page cache is '--direct on'; data is durable when a client flushes"),
    ("unsafe", "through the page cache is '--direct off'; flushes of clients are never left out"),
];

/// The advice for one of QEMU's words for `--cache`, which is the directory of a cache here.
pub(crate) fn cache_word(word: &str) -> Option<String> {
    let (_, advice) = CACHE_WORDS.into_iter().find(|(known, _)| *known == word)?;
    Some(format!(
        "here it is a directory for blocks of objects; {advice} (./{word} is a directory)"
    ))
}
