//! `docs/limits.md`: the constants that bound the bytes, connections, memory and time of strangers.
//!
//! Invariant: a limit is declared in one place, whose documentation has a line `Beyond it: …`; the
//! document lists these lines, and `NOWAIT_WRITE_DOCS=1` writes it.

use std::fs;
use std::path::{Path, PathBuf};

use nowait_testkit::written_docs::assert_file;

/// Sections of the document with the folders of their limits; a file is in the first that fits.
const SECTIONS: [(&str, &[&str]); 10] = [
    ("Clients of NBD", &["nowait-server/src/nbd/", "nowait-nbd/src/constants.rs"]),
    ("Virtual machines", &["nowait-server/src/vhost_user/"]),
    ("Local block devices (ublk)", &["nowait-server/src/ublk/"]),
    ("The control interface", &["nowait-control/", "nowait-daemon/src/control/"]),
    ("The server", &["nowait-server/"]),
    ("Configuration, start, stop and upgrade", &["nowait-daemon/"]),
    ("Other servers and stores", &["nowait-nbd/", "nowait-remote/"]),
    ("Images", &["nowait-image/"]),
    ("Backups", &["nowait-backup/"]),
    ("The engine and its files", &["nowait/"]),
];
/// Crates whose limits all bound strangers.
const STRANGERS: [&str; 7] = [
    "nowait-server",
    "nowait-nbd",
    "nowait-control",
    "nowait-remote",
    "nowait-daemon",
    "nowait-image",
    "nowait-backup",
];
/// Constants of these crates that are named as limits and have no line in the document; fewer is better.
const UNLISTED: usize = 0;

const HEAD: &str = "# Limits

What strangers send, take and make the server wait for is bounded. This file lists the constants; how they work together is
in [operating.md](operating.md#limits) and the [threat model](threat-model.md), what a qcow2 image may have in
[qcow2.md](qcow2.md#bounds). It is made from the source: `NOWAIT_WRITE_DOCS=1 cargo test -p nowait --test limits` writes it.
";

/// A constant.
struct Limit {
    /// Its file, below `crates`.
    file: String,
    name: String,
    /// The expression.
    value: String,
    text: String,
    beyond: Option<String>,
}

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn sources_below(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources_below(&path, files);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
}

/// The constants of a file, without those of its tests.
fn limits_of(file: &str, source: &str) -> Vec<Limit> {
    let shipped = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let (mut limits, mut doc) = (Vec::new(), Vec::new());
    let mut lines = shipped.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if let Some(text) = line.strip_prefix("///") {
            doc.push(text.trim());
            continue;
        }
        let item = line.split_once("const ").filter(|(before, _)| {
            let before = before.trim();
            before.is_empty()
                || before.starts_with("pub") && !before.contains(['(', ' '])
                || before.ends_with(')')
        });
        if let Some((name, rest)) = item.and_then(|(_, rest)| rest.split_once(": "))
            && name
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
        {
            let mut rest = rest.to_owned();
            while !rest.contains(';') {
                let Some(line) = lines.next() else { break };
                rest = format!("{rest} {line}");
            }
            let value =
                rest.split_once('=').map_or("", |(_, value)| value.trim().trim_end_matches(';'));
            limits.push(limit(file, name, value, &doc));
        }
        doc.clear();
    }
    limits
}

fn limit(file: &str, name: &str, value: &str, doc: &[&str]) -> Limit {
    let at = doc.iter().position(|line| line.starts_with("Beyond it: ")).unwrap_or(doc.len());
    let (text, beyond) = doc.split_at(at);
    let sentence =
        |lines: &[&str]| lines.join(" ").trim().trim_end_matches('.').replace('|', "\\|");
    Limit {
        file: file.to_owned(),
        name: name.to_owned(),
        value: value.to_owned(),
        text: sentence(text).replace(['[', ']'], "").replace(", in bytes", ""),
        beyond: (!beyond.is_empty()).then(|| sentence(beyond)["Beyond it: ".len()..].to_owned()),
    }
}

/// The value of an expression of numbers, names, `<<`, `+`, `-`, `*` and parentheses.
fn number(expression: &str, named: &dyn Fn(&str) -> Option<u64>) -> Option<u64> {
    let expression = expression.trim();
    let expression = expression.strip_suffix(" as u64").unwrap_or(expression).trim();
    for operator in ["<<", "+", "-", "*"] {
        if let Some(at) = outside_parentheses(expression, operator) {
            let left = number(&expression[..at], named)?;
            let right = number(&expression[at + operator.len()..], named)?;
            return match operator {
                "<<" => left.checked_shl(u32::try_from(right).ok()?),
                "-" => left.checked_sub(right),
                "+" => left.checked_add(right),
                _ => left.checked_mul(right),
            };
        }
    }
    if let Some(inner) = expression.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        return number(inner, named);
    }
    let digits = expression.replace('_', "");
    let value = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => digits.parse().ok(),
    };
    value.or_else(|| named(expression.rsplit("::").next()?))
}

/// The last place of `operator` that no parenthesis is around.
fn outside_parentheses(expression: &str, operator: &str) -> Option<usize> {
    let depth = |at: usize| {
        let before = &expression[..at];
        before.matches('(').count() as i64 - before.matches(')').count() as i64
    };
    expression.rmatch_indices(operator).map(|(at, _)| at).find(|&at| depth(at) == 0)
}

/// The value for people: bytes and times with their units, others as they are.
fn shown(name: &str, value: &str, named: &dyn Fn(&str) -> Option<u64>) -> String {
    for (call, unit) in [("Duration::from_secs(", "s"), ("Duration::from_millis(", "ms")] {
        let inner = value.strip_prefix(call).and_then(|rest| rest.strip_suffix(')'));
        if let Some(count) = inner.and_then(|inner| number(inner, named)) {
            return format!("{count} {unit}");
        }
    }
    if value == "i64::MAX as u64" {
        return "8 EiB less one".to_owned();
    }
    let Some(count) = number(value, named) else { return format!("`{value}`") };
    if !["BYTES", "MEMORY", "MOST_DATA", "MIN_BLOCK"].into_iter().any(|part| name.contains(part)) {
        return count.to_string();
    }
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = |&(shift, _): &(u32, &str)| count >= 1 << shift && count.is_multiple_of(1 << shift);
    match units.into_iter().find(fits) {
        Some((shift, unit)) => format!("{} {unit}", count >> shift),
        None => format!("{count} bytes"),
    }
}

fn all_limits() -> Vec<Limit> {
    let (crates, mut files) = (crates(), Vec::new());
    for name in STRANGERS.into_iter().chain(["nowait"]) {
        sources_below(&crates.join(name).join("src"), &mut files);
    }
    files.sort();
    let mut limits = Vec::new();
    for path in files {
        let file = path.strip_prefix(&crates).unwrap().to_string_lossy().into_owned();
        limits.append(&mut limits_of(&file, &fs::read_to_string(&path).unwrap()));
    }
    limits
}

/// The values of the constants of `file` and, where it has none of a name, of the others.
fn named<'a>(all: &'a [Limit], file: &'a str) -> impl Fn(&str) -> Option<u64> + 'a {
    move |name| {
        let known = all.iter().filter(|other| other.name == name);
        let own = known.clone().find(|other| other.file == file);
        let found = own.or_else(|| known.clone().next())?;
        number(&found.value, &named(all, file))
    }
}

fn section_of(file: &str) -> &'static str {
    let fits = |(_, places): &(&str, &[&str])| places.iter().any(|place| file.starts_with(place));
    SECTIONS.into_iter().find(fits).map(|(title, _)| title).expect("a crate has a section")
}

#[test]
fn the_document_lists_every_limit() {
    let limits = all_limits();
    let mut text = HEAD.to_owned();
    for (title, _) in SECTIONS {
        text.push_str(&format!(
            "\n## {title}\n\n| limit | value | beyond it | source |\n|---|---|---|---|\n"
        ));
        for limit in limits.iter().filter(|limit| section_of(&limit.file) == title) {
            let Some(beyond) = &limit.beyond else { continue };
            let Limit { file, name, value, text: limit, .. } = limit;
            let value = shown(name, value, &named(&limits, file));
            text.push_str(&format!("| {limit} | {value} | {beyond} | `{file}`, `{name}` |\n"));
        }
    }
    assert!(limits.iter().filter(|limit| limit.beyond.is_some()).count() > 100);
    assert_file(&crates().join("../docs/limits.md"), &text);
}

#[test]
fn a_constant_that_is_named_as_a_limit_is_listed() {
    let is_limit = |limit: &&Limit| {
        let Limit { file, name, .. } = limit;
        let is_test = ["/tests", "fuzz.rs", "sim"].into_iter().any(|part| file.contains(part));
        let is_named = name.starts_with("MAX_") || name.ends_with("_TIMEOUT") || name == "TIMEOUT";
        let bounds = STRANGERS.into_iter().any(|name| file.starts_with(&format!("{name}/")));
        is_named && bounds && !is_test
    };
    let all = all_limits();
    let unlisted = all.iter().filter(is_limit).filter(|limit| limit.beyond.is_none());
    let unlisted: Vec<_> =
        unlisted.map(|limit| format!("{}: {}", limit.file, limit.name)).collect();
    let found = unlisted.len();
    let why =
        "a limit has a line \"Beyond it: …\" in its documentation; fewer than UNLISTED lower it";
    assert_eq!(found, UNLISTED, "{why}:\n{}", unlisted.join("\n"));
}

#[test]
fn values_have_their_units() {
    let source = "/// The most bytes.\n/// Beyond it: `EIO`.\npub(crate) const MAX_BYTES: u64 = 3 << 20;\n\
                  const OTHER: Duration =\n    Duration::from_millis(1_500);\n";
    let limits = limits_of("nowait/src/a.rs", source);
    let shown_here =
        |name: &str, value: &str| shown(name, value, &named(&limits, "nowait/src/a.rs"));
    let told =
        limits.iter().map(|it| (&*it.text, shown_here(&it.name, &it.value), it.beyond.as_deref()));
    let told: Vec<_> = told.collect();
    let expected =
        [("The most bytes", "3 MiB".into(), Some("`EIO`")), ("", "1500 ms".into(), None)];
    assert_eq!(told, expected);
    assert_eq!(shown_here("MAX_PARTS", "(1 + 2) * 3 - MAX_BYTES as u64 * 0 + 4"), "13");
    assert_eq!(shown_here("MAX_ITEMS", "1 << 10"), "1024");
    assert_eq!(shown_here("MAX_BYTES", "1000"), "1000 bytes");
    assert_eq!(shown_here("MAX_BYTES", "A + B"), "`A + B`");
}
