//! The interface of fuzz targets.
//!
//! Invariant: the verdict of a target depends only on the bytes.

/// Checks an input. The error is the finding, in one line.
pub type Check = Box<dyn FnMut(&[u8]) -> Result<(), String>>;

/// A fuzz target: a check of bytes, with its initial inputs and limits.
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    /// The subject of the fuzzing, in one line.
    pub about: &'static str,
    /// Prepares the target.
    ///
    /// # Errors
    /// What is missing on this host.
    pub prepare: fn() -> Result<Check, String>,
    /// The initial inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Byte strings with a meaning in the format.
    pub words: &'static [&'static [u8]],
    /// The longest input in bytes.
    pub longest: usize,
    /// The most memory that one input may take, in bytes.
    pub memory: usize,
}
