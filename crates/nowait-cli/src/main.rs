//! The program `nowait`.
//!
//! Invariant: it does nothing but to run the library.

use nowait_daemon::process;

fn main() {
    process::set_up();
    process::end(nowait_cli::run());
}
