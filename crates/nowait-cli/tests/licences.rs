//! Checks that the licences of all dependencies allow distribution of nowait under MIT or
//! Apache-2.0.
//!
//! Invariant: a dependency whose licence is not in the list below fails the test. The test runs
//! `cargo metadata` without a network; advisories need one and are not checked here.

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

#[test]
fn every_dependency_may_be_distributed_with_nowait() {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo, which runs this");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON from cargo");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 20, "these are not all");
    for package in packages {
        let licence = package["license"].as_str().unwrap_or_default();
        assert_eq!(is_allowed(licence), Some(true), "{}: '{licence}'", package["name"]);
    }
}
