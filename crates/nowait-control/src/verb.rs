//! The methods of HTTP that requests have.

/// What a request does with what its path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Get,
    Post,
    Patch,
    /// With this query, if it is not empty.
    Delete(&'static str),
}
