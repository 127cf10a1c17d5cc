//! A single fault is reported to the request that it concerns, and affects no other request.

use nowait_sim::fault_matrix::Matrix;
use nowait_sim::run::keep_panics;
use nowait_sim::trace;

fn assert_no_failure(matrix: Matrix) {
    keep_panics();
    let found = matrix.run(2, || {});
    drop(std::panic::take_hook());
    let words = found.map(|(plan, failure)| format!("{}# {}", trace::write(&plan), failure.what));
    assert_eq!(words, None);
}

#[test]
fn an_errno_at_each_of_the_first_200_operations_of_20_seeds_is_handled_correctly() {
    assert_no_failure(Matrix { seeds: 20, faults: 1, ..Matrix::ALL });
}

#[test]
#[ignore = "100,000 runs; `nowait-sim errnos` says how far it is"]
fn each_errno_at_each_of_the_first_200_operations_of_50_seeds_is_handled_correctly() {
    assert_no_failure(Matrix::ALL);
}
