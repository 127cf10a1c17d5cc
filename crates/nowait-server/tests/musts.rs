//! Checks the table of what the NBD specification demands of a server against the tests it names.
//!
//! Invariant: every test named `nbd_must_` is in the table, and every test in the table exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// How the reason of a row without a test begins.
const REASONS: [&str; 2] = ["does not apply: ", "cannot be tested: "];

/// The names of all functions without arguments below `directory`, tests among them.
fn functions_below(directory: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            functions_below(&path, names);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let lines = text.lines().map(str::trim_start);
            let named = lines.filter_map(|line| line.strip_prefix("fn ")?.split_once("()"));
            names.extend(named.map(|(name, _)| name.to_owned()));
        }
    }
}

/// The test names in a cell.
fn tests_in(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2).filter(|word| !word.contains('.'))
}

#[test]
fn the_table_of_musts_names_existing_tests_and_all_nbd_must_tests() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut functions = BTreeSet::new();
    functions_below(&workspace.join("crates"), &mut functions);
    let table = fs::read_to_string(workspace.join("docs/nbd-musts.md")).unwrap();
    let mut named = BTreeSet::new();
    let mut rows = 0;
    for row in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [section, rule, shown] = cells[..] else { panic!("not three cells: {row}") };
        assert!(!section.is_empty() && !rule.is_empty(), "{row}");
        let has_reason = REASONS.iter().any(|reason| shown.starts_with(reason));
        let tests: Vec<_> = tests_in(shown).collect();
        assert_ne!(has_reason, !tests.is_empty(), "a test or a reason: {row}");
        for test in tests {
            assert!(functions.contains(test), "no test {test}");
            named.insert(test.to_owned());
        }
        rows += 1;
    }
    assert!(rows >= 100, "only {rows} rows");
    let musts = functions.iter().filter(|name| name.starts_with("nbd_must_"));
    let missing: Vec<_> = musts.filter(|name| !named.contains(*name)).collect();
    assert!(missing.is_empty(), "not in the table: {missing:?}");
}
