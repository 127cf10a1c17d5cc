//! Protects private keys in this process's memory.
//!
//! Invariant: before a private key is read, core dumps and ptrace(2) by other processes of the user
//! are disabled.

use rustix::process::{DumpableBehavior, Resource, getrlimit, set_dumpable_behavior, setrlimit};

/// Disables core dumps of this process. To be called before a key is read.
pub fn keep_in_memory() {
    // Both fail only where a sandbox forbids them; then the system's settings remain in force.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let limit = getrlimit(Resource::Core);
    let _ = setrlimit(Resource::Core, rustix::process::Rlimit { current: Some(0), ..limit });
}
