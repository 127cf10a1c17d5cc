//! An object of a folder as it was read, and the condition on which one is put, in every build.
//!
//! Invariant: the version is that of the bytes.

/// An object that was read, with its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredObject<V> {
    /// All of it.
    pub bytes: Vec<u8>,
    /// Its version.
    pub version: V,
    /// The second since 1970 in which it was put, by the clock of the store; 0 if that is unknown.
    pub seconds: i64,
}

/// The condition on which an object is put; `V` is the name of a version. A store that knows no conditions is asked before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition<V> {
    /// None.
    Always,
    /// There is no such object.
    Absent,
    /// There is this version of it.
    Same(V),
}
