//! x
pub(super) mod journal;
