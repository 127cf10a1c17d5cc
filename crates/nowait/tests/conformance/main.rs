//! Tests of the contract (docs/contract.md), rule by rule, through every queue with each switch
//! off.
//!
//! Invariant: a test's name gives its rule and what it proves; each rule of the page is either in a
//! test's name or, with the reason, in the table of rules that cannot be tested here.

mod deny;
mod queue;
mod rig;
mod async_files;
mod files;

/// Makes functions tests, and keeps their names for the check that no rule is forgotten.
macro_rules! rules {
    ($($name:ident),+ $(,)?) => {
        pub(crate) const TESTED: &[&str] = &[$(stringify!($name)),+];

        mod tests {
            $(
                #[test]
                fn $name() {
                    super::$name();
                }
            )+
        }
    };
}

mod a_validation;
mod b_alignment;
mod c_reads;
mod d_writes;
mod e_nowait;
mod f_completion;
mod g_storage;
mod h_files;
mod i_log;
mod faults;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The page itself, so that a rule added there needs a test here.
const PAGE: &str = include_str!("../../../../docs/contract.md");

/// Rules without a test here, with the reason.
const EXPLAINED: [(u32, &str); 28] = [
    (9, "flags are a set of constants: no unknown one can be made, and no two contradict"),
    (27, "tests/suite/write_options.rs has it, on file systems that do and do not tear writes"),
    (50, "capabilities are advertised by a frontend, whose tests have it"),
    (53, "tests/suite/grow.rs has it; a disk is cut off by its frontend, whose tests have it"),
    (55, "replies to clients are a frontend's, whose tests have it"),
    (56, "the contents of replies are a frontend's, whose tests have it"),
    (74, "stored bitmaps are those of nowait-image, whose tests have it"),
    (75, "stored bitmaps are those of nowait-image, whose tests have it"),
    (76, "stored bitmaps are those of nowait-image, whose tests have it"),
    (77, "stored bitmaps are those of nowait-image, whose tests have it"),
    (78, "backups are the server's, whose tests have it"),
    (79, "backups are the server's, whose tests have it"),
    (80, "backups are the server's, whose tests have it"),
    (81, "tests/suite/read_ahead.rs has it"),
    (82, "tests/suite/read_ahead.rs has it"),
    (83, "tests/suite/read_ahead.rs has it"),
    (84, "tests/suite/stopped_requests.rs has it"),
    (85, "tests/fork.rs has it"),
    (86, "it is in deny.rs, whose tests forbid one call each"),
    (87, "tests/file_locks.rs has it"),
    (88, "tests/suite/priorities.rs and tests/suite/with_flags.rs have it"),
    (89, "tests/suite/stopped_requests.rs has it"),
    (90, "stored bitmaps are those of nowait-image; nowait-server has the test, tests/cooling.rs"),
    (92, "moves are the daemon's; nowait-cli has the test, tests/suite/moves_to_raw.rs"),
    (93, "bitmaps of raw disks are those of nowait-image, whose tests have it"),
    (94, "bitmaps of raw disks are those of nowait-image, whose tests have it"),
    (96, "moves are simulated by crates/nowait-sim, in mode move; tests/injected_bugs.rs has it"),
    (
        97,
        "crates/nowait-bench/src/isolation/held_disk.rs has it, whose file system can stop answering",
    ),
];

/// Parts of tested rules without a test here, with the reason.
const IN_PART: [(u32, &str); 10] = [
    (2, "no handle is write-only, and NBD's EPERM is a frontend's"),
    (5, "there is no C API"),
    (8, "a file-size limit holds for the whole process and would fail other tests"),
    (15, "BLKSSZGET and the probe are for systems that do not answer by statx(2)"),
    (22, "memory that does not exist breaks the promise of the caller"),
    (23, "a write that extends a file and fails after its data needs a file system that does"),
    (28, "a loss of power cannot be made here; only the dirty pages of the page cache are checked"),
    (43, "the order of steps without an observable effect cannot be checked from here"),
    (49, "as for C28"),
    (68, "losses of power are simulated by crates/nowait-sim, in mode log"),
];

/// The number of the rule in a test's name.
fn rule_of(name: &str) -> u32 {
    name[1..3].parse().expect("a name that begins with c and two digits")
}

/// Rules of a frontend, which other programs test, and the directories of those.
const OF_FRONTENDS: [u32; 6] = [50, 55, 56, 78, 79, 80];
const FRONTENDS: [&str; 4] = [
    "../nowait-server/tests/transmission",
    "../nowait-server/tests/backups",
    "../nowait-cli/tests/suite",
    "../nowait-daemon/tests/suite",
];

/// The rules in the names of tests in the files of `directory` and those below it.
fn rules_of_tests(directory: &Path, rules: &mut BTreeSet<u32>) {
    for entry in fs::read_dir(directory).expect("tests") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rules_of_tests(&path, rules);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
            let tests = lines.windows(2).filter(|pair| pair[0] == "#[test]");
            let names = tests.filter_map(|pair| pair[1].strip_prefix("fn c"));
            let ruled = names.filter(|name| name.get(2..3) == Some("_"));
            rules.extend(ruled.filter_map(|name| name[..2].parse::<u32>().ok()));
        }
    }
}

#[test]
fn every_rule_of_a_frontend_is_in_the_name_of_a_test_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tested = BTreeSet::new();
    FRONTENDS.iter().for_each(|it| rules_of_tests(&root.join(it), &mut tested));
    for rule in OF_FRONTENDS {
        assert!(EXPLAINED.iter().any(|(explained, _)| *explained == rule), "C{rule}");
        assert!(tested.contains(&rule), "no test of C{rule}");
    }
}

#[test]
fn every_rule_without_a_test_here_is_in_the_name_of_one_elsewhere() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut tested = BTreeSet::new();
    rules_of_tests(&crates, &mut tested);
    let untested: Vec<_> = EXPLAINED.iter().filter(|(rule, _)| !tested.contains(rule)).collect();
    assert!(untested.is_empty(), "{untested:?}");
}

#[test]
fn every_rule_is_tested_or_explained() {
    let groups = [
        a_validation::TESTED,
        b_alignment::TESTED,
        c_reads::TESTED,
        d_writes::TESTED,
        e_nowait::TESTED,
        f_completion::TESTED,
        g_storage::TESTED,
        h_files::TESTED,
        i_log::TESTED,
        faults::TESTED,
    ];
    let tested: BTreeSet<u32> = groups.concat().into_iter().map(rule_of).collect();
    let explained: BTreeSet<u32> = EXPLAINED.iter().map(|(rule, _)| *rule).collect();
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| C"));
    let rules: BTreeSet<u32> = rows.map(|row| row[..2].parse().expect("a number")).collect();
    for (rule, reason) in EXPLAINED {
        println!("C{rule:02} is not tested here: {reason}");
    }
    for (rule, reason) in IN_PART {
        println!("C{rule:02} is tested but for this: {reason}");
    }
    assert_eq!(rules.len(), 95, "the rules of the page");
    assert_eq!(&tested | &explained, rules);
    assert!(tested.is_disjoint(&explained), "a rule that is tested needs no excuse");
    assert!(IN_PART.iter().all(|(rule, _)| tested.contains(rule)));
}
