//! A job of a thread pool: whose it is, and which jobs are better run together.

use crate::types::weight::DEFAULT_WEIGHT;
#[cfg(doc)]
use crate::types::weight::WEIGHTS;

/// A job of the pool.
pub(crate) trait WorkItem: Send + 'static {
    /// The number of the device that the job is for; devices take turns.
    fn device(&self) -> u64 {
        0
    }

    /// The number of the client, of this device, that the job is for; the clients of a device take
    /// turns.
    fn client(&self) -> u64;

    /// The share of the job's device in the turns, as compared with other devices: one of [`WEIGHTS`], and
    /// what is outside is taken as the nearer bound. The last pushed job of a device counts.
    fn weight(&self) -> u32 {
        DEFAULT_WEIGHT
    }

    /// Whether one thread runs `next`, which the same client has pushed next, together with `run`,
    /// which is not empty.
    fn joins(_run: &[Self], _next: &Self) -> bool
    where
        Self: Sized,
    {
        false
    }
}
