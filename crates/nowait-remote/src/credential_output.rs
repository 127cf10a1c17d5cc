//! Output of the program that a profile names for its credentials, in every build.
//!
//! Invariant: the standard output, which has secrets, is in no message.

/// Maximum bytes of a command line in a profile.
pub const CREDENTIAL_COMMAND_BYTES: usize = 4096;
/// Maximum bytes of its standard output.
pub const CREDENTIAL_OUTPUT_BYTES: usize = 64 << 10;

/// Output of a program that has exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialOutput {
    /// Its standard output, or the end of a sentence about the program that says why there is none.
    pub output: Result<Vec<u8>, String>,
    /// The beginning of its standard error, as one line without control characters.
    pub messages: String,
}

impl CredentialOutput {
    /// Output of a program that was not run, with the end of a sentence about it.
    #[must_use]
    pub fn failed(why: &str) -> Self {
        Self { output: Err(why.to_owned()), messages: String::new() }
    }
}

/// Has another process run the program of a command line.
pub type RunCredentialProcess = Box<dyn Fn(&str) -> CredentialOutput + Send + Sync>;
