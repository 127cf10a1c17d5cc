//! What can be fuzzed.
//!
//! Invariant: what a target says follows from the bytes.
//! Knows: nothing here. Known by: targets, run.

/// Looks at an input. What is wrong, in one line, is an error.
pub type Check = Box<dyn FnMut(&[u8]) -> Result<(), String>>;

/// A function of bytes, and what to begin with.
pub struct Target {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What is fuzzed, in one line.
    pub about: &'static str,
    /// Makes it ready.
    ///
    /// # Errors
    /// What is missing on this machine.
    pub prepare: fn() -> Result<Check, String>,
    /// Inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Bytes that mean something.
    pub words: &'static [&'static [u8]],
    /// The longest input in bytes.
    pub longest: usize,
    /// The most memory that one input may take, in bytes.
    pub memory: usize,
}
