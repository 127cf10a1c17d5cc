//! The cost of the engine alone: reads of 4 KiB on a queue that does no I/O, of a caller that makes
//! nothing but these, with every byte mapped, and many for each poll.
//!
//! `null_cost REQUESTS simple|general`: run it under `valgrind --tool=callgrind` with two counts
//! and divide the difference of the instructions by the difference of the counts. The quotient is
//! the cost of one request, submission and completion.

#[path = "null_cost/reads.rs"]
mod reads;
#[path = "null_cost/requests.rs"]
mod requests;

use std::process::ExitCode;

fn main() -> ExitCode {
    reads::reads::<{ requests::LOADED }>()
}
