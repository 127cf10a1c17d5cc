//! One thing that goes wrong is told to whom it concerns, and harms nobody else.

use nowait_sim::matrix::Matrix;
use nowait_sim::run::keep_panics;
use nowait_sim::trace;

fn is_well(matrix: Matrix) {
    keep_panics();
    let found = matrix.run(2, || {});
    drop(std::panic::take_hook());
    let words = found.map(|(plan, failure)| format!("{}# {}", trace::write(&plan), failure.what));
    assert_eq!(words, None);
}

#[test]
fn an_errno_at_each_of_the_first_200_operations_of_20_seeds_is_answered_as_it_may_be() {
    is_well(Matrix { seeds: 20, faults: 1, ..Matrix::ALL });
}

#[test]
#[ignore = "100,000 runs; `nowait-sim errnos` says how far it is"]
fn each_errno_at_each_of_the_first_200_operations_of_50_seeds_is_answered_as_it_may_be() {
    is_well(Matrix::ALL);
}
