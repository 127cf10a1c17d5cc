//! Like `null_cost`, with one request for each poll: what a caller pays that waits for each request.

#[path = "null_cost/reads.rs"]
mod reads;
#[path = "null_cost/requests.rs"]
mod requests;

use std::process::ExitCode;

fn main() -> ExitCode {
    reads::reads::<1>()
}
