//! Checks that the licences of all dependencies allow distribution of nowait under MIT or
//! Apache-2.0.
//!
//! Invariant: a dependency whose licence is not in the list below fails the test. The tests run
//! `cargo metadata`, those for the workspace without a network; advisories need one and are not checked here.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Licences that require no more than attribution.
const ALLOWED: [&str; 8] =
    ["0BSD", "Apache-2.0", "BSD-3-Clause", "ISC", "MIT", "Unicode-3.0", "Unlicense", "Zlib"];

/// Whether an SPDX expression, or one with the older `/` for `OR`, can be satisfied by allowed
/// licences. `None` where it is not such an expression.
fn is_allowed(expression: &str) -> Option<bool> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let result = any_of(&mut words)?;
    words.next().is_none().then_some(result)
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>) -> Option<bool> {
    let mut result = all_of(words)?;
    while words.next_if_eq(&"OR").is_some() {
        result |= all_of(words)?;
    }
    Some(result)
}

fn all_of(words: &mut Words<'_>) -> Option<bool> {
    let mut result = one(words)?;
    while words.next_if_eq(&"AND").is_some() {
        result &= one(words)?;
    }
    Some(result)
}

fn one(words: &mut Words<'_>) -> Option<bool> {
    let name = words.next()?;
    if name == "(" {
        let inner = any_of(words)?;
        return words.next_if_eq(&")").map(|_| inner);
    }
    let mut result = ALLOWED.contains(&name);
    // An exception only grants further permissions; still, only known exceptions are accepted.
    if words.next_if_eq(&"WITH").is_some() {
        result &= words.next()? == "LLVM-exception";
    }
    Some(result)
}

#[test]
fn an_expression_is_satisfied_only_by_allowed_licences() {
    let expressions = [
        ("MIT", Some(true)),
        ("GPL-3.0", Some(false)),
        ("MIT/Apache-2.0", Some(true)),
        ("MIT OR GPL-3.0", Some(true)),
        ("MIT AND GPL-3.0", Some(false)),
        ("(MIT OR GPL-2.0) AND Unicode-3.0", Some(true)),
        ("GPL-2.0 OR MIT AND GPL-3.0", Some(false)),
        ("Apache-2.0 WITH LLVM-exception", Some(true)),
        ("Apache-2.0 WITH another-exception", Some(false)),
        ("", None),
        ("MIT OR", None),
        ("(MIT", None),
        ("MIT Apache-2.0", None),
    ];
    for (expression, wanted) in expressions {
        assert_eq!(is_allowed(expression), wanted, "{expression}");
    }
}

/// The packages of the workspace in `directory`, from the root of the tree. Without a network `None` where they were not
/// downloaded.
fn packages(directory: &str, offline: bool) -> Option<Vec<Value>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--locked", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .args(offline.then_some("--offline"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(directory))
        .output()
        .expect("cargo, which runs this");
    if !output.status.success() {
        println!("{}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON from cargo");
    metadata["packages"].as_array().cloned()
}

/// Fails for packages whose licences are not allowed; each of `others` has to be there.
fn check(packages: &[Value], others: &[(&str, &str)]) {
    assert!(packages.len() > 20, "these are not all");
    let text = |package: &Value, name: &str| package[name].as_str().unwrap_or_default().to_owned();
    let mut found = Vec::new();
    for package in packages {
        let (name, licence) = (text(package, "name"), text(package, "license"));
        match others.iter().find(|other| **other == (&*name, &*licence)) {
            Some(other) => found.push(*other),
            None => assert_eq!(is_allowed(&licence), Some(true), "{name}: '{licence}'"),
        }
    }
    assert_eq!(found, others);
}

#[test]
fn every_dependency_may_be_distributed_with_nowait() {
    check(&packages(".", true).expect("packages, of which this is made"), &[]);
}

/// The program that has other runtimes, for `nowait bench library`. It is built by those who measure, and not
/// distributed, so it may contain glommio's bitmaps, whose licence wants changes of its files to be published.
#[test]
fn every_dependency_of_the_program_with_other_runtimes_may_be_used() {
    let all_required = std::env::var("NOWAIT_REQUIRE_TOOLS").as_deref() == Ok("1");
    match packages("benches/runtimes", !all_required) {
        Some(packages) => check(&packages, &[("bitmaps", "MPL-2.0+")]),
        None => {
            nowait_testkit::skip("the crates of benches/runtimes were not downloaded");
        }
    }
}
