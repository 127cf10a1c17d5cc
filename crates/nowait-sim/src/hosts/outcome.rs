//! Results of a simulation, as a row of a table and as JSON.

use serde::Serialize;

use super::parameters::Plan;

/// The outcome of a simulation. Times are seconds from the start of a host to the end of a boot.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// [`Plan::name`].
    pub plan: &'static str,
    /// Hosts.
    pub hosts: u32,
    /// Machines of all hosts.
    pub machines: u64,
    /// Requests that came to the store, those that it refused, and those that went wrong otherwise.
    pub store_requests: u64,
    /// Of these, those above its limit, which it answered with 503.
    pub store_refused: u64,
    /// Of these, those that ended with a fault or late because of one.
    pub store_faults: u64,
    /// Bytes that the store sent.
    pub store_bytes: u64,
    /// The most requests that came to the store in a second.
    pub peak_requests: u64,
    /// The most bytes that the store sent in a second.
    pub peak_bytes: u64,
    /// Machines that came up.
    pub boots: u64,
    /// The time of a boot that half of the machines do not exceed; `None`: no boot has ended.
    pub boot_p50: Option<f64>,
    /// Seconds that 95 of 100 stayed within.
    pub boot_p95: Option<f64>,
    /// Seconds that 99 of 100 stayed within.
    pub boot_p99: Option<f64>,
    /// The longest wait of a read, in seconds.
    pub longest_read: f64,
    /// Attempts after the first ones of their requests.
    pub retries: u64,
    /// Machines that did not come up because a read, or the start of their server, has failed.
    pub failed: u64,
    /// From the beginning to the end of the last boot, in seconds.
    pub seconds: f64,
}

impl Outcome {
    /// The titles of [`Self::row`].
    pub const TITLES: [&str; 13] = [
        "plan",
        "hosts",
        "requests",
        "refused",
        "GiB",
        "peak/s",
        "Gbit/s",
        "boot p50",
        "p95",
        "p99",
        "longest read",
        "retries",
        "failed",
    ];

    /// The figures as texts.
    pub fn row(&self) -> [String; 13] {
        let time = |time: Option<f64>| time.map_or("-".into(), |time| format!("{time:.1} s"));
        [
            self.plan.to_owned(),
            self.hosts.to_string(),
            self.store_requests.to_string(),
            self.store_refused.to_string(),
            format!("{:.1}", self.store_bytes as f64 / f64::from(1 << 30)),
            self.peak_requests.to_string(),
            format!("{:.1}", self.peak_bytes as f64 * 8e-9),
            time(self.boot_p50),
            time(self.boot_p95),
            time(self.boot_p99),
            time(Some(self.longest_read)),
            self.retries.to_string(),
            self.failed.to_string(),
        ]
    }

    /// The part of the store's requests that it answered, a second.
    pub fn answered_rate(&self) -> f64 {
        (self.store_requests - self.store_refused) as f64 / self.seconds.max(1e-9)
    }
}

/// Outcomes as a table, its columns side by side.
pub fn table(outcomes: &[Outcome]) -> String {
    let titles = Outcome::TITLES.map(str::to_owned);
    let rows: Vec<_> = std::iter::once(titles).chain(outcomes.iter().map(Outcome::row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..Outcome::TITLES.len()).map(width).collect();
    let longest_plan = Plan::ALL.iter().map(|plan| plan.name().len()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        let (plan, figures) = (&row[0], &row[1..]);
        text.push_str(&format!("{plan:longest_plan$}"));
        for (figure, width) in figures.iter().zip(widths.iter().skip(1)) {
            text.push_str(&format!("  {figure:>width$}"));
        }
        text.push('\n');
    }
    text
}
