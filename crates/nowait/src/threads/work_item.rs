//! A job of a thread pool: whose it is, and which jobs are better run together.

/// A job of the pool.
pub(crate) trait WorkItem: Send + 'static {
    /// The number of the client that the job is for; clients take turns.
    fn client(&self) -> u64;

    /// Whether one thread runs `next`, which the same client has pushed next, together with `run`,
    /// which is not empty.
    fn joins(_run: &[Self], _next: &Self) -> bool
    where
        Self: Sized,
    {
        false
    }
}
