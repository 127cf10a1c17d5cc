//! The contract (docs/contract.md), rule by rule, through every queue with each switch off.
//!
//! Invariant: a test is named by its rule and what it proves of it; each rule of the page is either
//! in a test's name or in the table of those that cannot be tested here, with the reason.
//! Knows: the public face of the engine. One file for each group of the page, and one that goes
//! through all transfers for what one fault does to the others.

mod deny;
mod queue;
mod rig;

/// Makes functions tests, and keeps their names for the list of what is tested.
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
mod faults;

use std::collections::BTreeSet;

/// The page itself, so that no rule is forgotten when one is added.
const PAGE: &str = include_str!("../../../../docs/contract.md");

/// Rules without a test here, and why.
const EXPLAINED: [(u32, &str); 9] = [
    (1, "a position is unsigned on the faces that there are, so none is negative"),
    (9, "flags are a set of constants: no unknown one can be made, and no two contradict"),
    (26, "APPEND is not offered: a device has a fixed size"),
    (27, "ATOMIC is not offered"),
    (30, "SYNC is not offered"),
    (50, "what is advertised is the matter of a door"),
    (53, "no resize is offered: a device has the size that it was opened with"),
    (55, "what a client is answered is the matter of a door; see the tests of the servers"),
    (56, "what a reply holds is the matter of a door; see the tests of the servers"),
];

/// Parts of tested rules without a test here, and why.
const IN_PART: [(u32, &str); 9] = [
    (2, "no handle is write-only, and NBD's EPERM is the matter of a door"),
    (5, "the C face is not there"),
    (8, "a file-size limit holds for the whole process and would fail other tests"),
    (15, "BLKSSZGET and the probe are for systems that do not answer by statx(2)"),
    (22, "memory that is not there breaks the promise that a submitter makes"),
    (23, "a device never grows, so that no size moves"),
    (28, "that data survives a loss of power takes one; what left the page cache is looked at"),
    (43, "the order of steps that leave no trace is not seen from here"),
    (49, "as for C28"),
];

/// The number in a test's name.
fn rule_of(name: &str) -> u32 {
    name[1..3].parse().expect("a name that begins with c and two digits")
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
    assert_eq!(rules.len(), 56, "the rules of the page");
    assert_eq!(&tested | &explained, rules);
    assert!(tested.is_disjoint(&explained), "a rule that is tested needs no excuse");
    assert!(IN_PART.iter().all(|(rule, _)| tested.contains(rule)));
}
