//! The methods of HTTP that requests have.

/// Action of a request on the resource that its path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Get,
    Post,
    Patch,
    /// With this query, if it is not empty.
    Delete(&'static str),
}
