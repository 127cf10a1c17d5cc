//! Tests that the driver finds failures: a target with three bugs.

use std::path::Path;

use nowait_fuzz::{Limit, Plan, Target, replay, run};

/// A parser with three bugs.
static WRONG: Target = Target {
    name: "wrong",
    about: "what must be found",
    prepare: || {
        Ok(Box::new(|bytes| {
            let Some(at) = bytes.windows(5).position(|window| window == b"MAGIC") else {
                return Ok(());
            };
            match bytes.get(at + 5) {
                Some(0xff) => panic!("no such number"),
                Some(0) => drop(std::hint::black_box(vec![1u8; 2 << 20])),
                Some(&other) if other < 20 => return Err("less than twenty".into()),
                _ => {}
            }
            Ok(())
        }))
    },
    seeds: || vec![vec![50; 300]],
    words: &[b"MAGIC"],
    longest: 1000,
    memory: 1 << 20,
};

#[test]
fn panics_wrong_results_and_memory_use_are_found_minimized_and_replayed() {
    let mut found = Vec::new();
    for seed in 0..300 {
        let findings = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let limit = Limit::Inputs(1_000_000);
        let plan = Plan { target: &WRONG, seed, limit, corpus: None, findings, keep: None };
        let (wrong, path) = run(&plan).unwrap().finding.unwrap();
        let input = std::fs::read(&path).unwrap();
        assert_eq!(input.len(), 6, "{input:?}: {wrong}");
        assert_eq!(replay(&WRONG, &path).unwrap().as_ref(), Some(&wrong));
        std::fs::remove_file(path).unwrap();
        let kind = ["no such number", "bytes of memory", "less than twenty"]
            .into_iter()
            .position(|kind| wrong.contains(kind))
            .expect("one of the three");
        found.push(kind);
        if [0, 1, 2].iter().all(|kind| found.contains(kind)) {
            return;
        }
    }
    panic!("only {found:?}");
}
