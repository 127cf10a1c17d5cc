//! Results: the samples, their summary over the rounds, and the comparison of the servers.
//!
//! Invariant: text and JSON are made from the same samples.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::server::ServerKind;
use crate::workload::{Conditions, Direction, Order, Workload};

const MIB: f64 = 1_048_576.0;
/// From this busy time on, the client may limit the result.
const CLIENT_BUSY_LIMIT: f64 = 0.9;

/// One server, one workload, one round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Finished requests per second.
    pub iops: f64,
    /// Median latency in µs, from before the request is sent until its reply has been received.
    pub p50_us: f64,
    /// The latency that 1 % of the requests exceed, in µs.
    pub p99_us: f64,
    /// Processor time of the server's threads per request, in µs.
    pub server_cpu_us: f64,
    /// Resident memory of the server at the end, in MiB.
    pub server_rss_mib: f64,
    /// Part of the time that the client was not asleep, 0 to 1.
    pub client_busy: f64,
    /// The throughput of the background load, in MiB per second.
    pub beside_mib_s: Option<f64>,
}

/// A figure over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MinMedianMax {
    /// The middle round; with an even number of rounds the mean of the two in the middle.
    pub median: f64,
    /// The lowest round.
    pub min: f64,
    /// The highest round.
    pub max: f64,
}

impl MinMedianMax {
    /// The summary of one figure of the samples; zeros if there are none.
    pub fn of<T>(samples: &[T], figure: impl Fn(&T) -> f64) -> MinMedianMax {
        let mut sorted: Vec<f64> = samples.iter().map(figure).collect();
        sorted.sort_by(f64::total_cmp);
        let [Some(&min), Some(&max)] = [sorted.first(), sorted.last()] else {
            return MinMedianMax { median: 0.0, min: 0.0, max: 0.0 };
        };
        let middle = &sorted[(sorted.len() - 1) / 2..=sorted.len() / 2];
        MinMedianMax { median: middle.iter().sum::<f64>() / middle.len() as f64, min, max }
    }

    pub(crate) fn to_json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

/// One server in a comparison.
#[derive(Clone, Debug)]
pub struct Row {
    /// The server that was measured.
    pub server: ServerKind,
    /// One sample for each round.
    pub samples: Vec<Sample>,
}

impl Row {
    /// Requests per second over the rounds.
    pub fn iops(&self) -> MinMedianMax {
        MinMedianMax::of(&self.samples, |sample| sample.iops)
    }

    fn p99_us(&self) -> f64 {
        self.median(|sample| sample.p99_us)
    }

    fn median(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        MinMedianMax::of(&self.samples, figure).median
    }
}

/// All servers under one workload.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The workload of all servers.
    pub workload: Workload,
    /// The conditions of all servers.
    pub terms: Conditions,
    /// The rows in the order of measuring, without servers that failed.
    pub rows: Vec<Row>,
}

impl Comparison {
    /// The row of nowait.
    pub fn nowait(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.server == ServerKind::Nowait)
    }

    /// The other server with the most requests per second, or beside a flood with the lowest 99th
    /// percentile, among those that support the caching mode of this table ([`ServerKind::can`]).
    pub fn best_peer(&self) -> Option<&Row> {
        self.rows
            .iter()
            .filter(|row| row.server != ServerKind::Nowait && row.server.can(self.terms.caching))
            .max_by(|a, b| match self.workload.beside {
                None => a.iops().median.total_cmp(&b.iops().median),
                Some(_) => b.p99_us().total_cmp(&a.p99_us()),
            })
    }

    /// The cells of a server's line.
    pub(crate) fn cells(&self, row: &Row) -> Vec<String> {
        let star = if row.server.can(self.terms.caching) { "" } else { " *" };
        let mut cells = vec![format!("{}{star}", row.server.name())];
        cells.extend(figure_cells(&row.samples, &self.workload));
        if let Some(nowait) = self.nowait() {
            cells.push(format!("{:.2}", ratio(nowait.iops().median, row.iops().median)));
        }
        cells
    }

    pub(crate) fn to_json(&self) -> Value {
        let best = self.nowait().zip(self.best_peer()).map(|(nowait, peer)| {
            json!({
                "peer": peer.server.name(),
                "iops_ratio": ratio(nowait.iops().median, peer.iops().median),
                "p99_ratio": ratio(nowait.p99_us(), peer.p99_us()),
                "server_cpu_ratio": ratio(nowait.median(|s| s.server_cpu_us), peer.median(|s| s.server_cpu_us)),
            })
        });
        json!({
            "workload": self.workload.to_string(),
            "caching": self.terms.caching.name(),
            "transport": self.terms.transport.name(),
            "direction": match self.workload.direction { Direction::Read => "read", Direction::Write => "write" },
            "order": match self.workload.order { Order::Random => "random", Order::Sequential => "sequential" },
            "block_bytes": self.workload.block_bytes,
            "depth": self.workload.depth,
            "beside": self.workload.beside.map(|neighbour| neighbour.to_string()),
            "servers": self.rows.iter().map(|row| self.row_json(row)).collect::<Vec<_>>(),
            "nowait_to_best_peer": best,
        })
    }

    fn row_json(&self, row: &Row) -> Value {
        let mut object = figures_json(&row.samples, &self.workload);
        object.insert("server".to_owned(), row.server.name().into());
        object.insert("comparable".to_owned(), row.server.can(self.terms.caching).into());
        Value::Object(object)
    }
}

/// The titles of [`figure_cells`].
pub(crate) fn figure_titles(workload: &Workload) -> impl Iterator<Item = String> {
    let beside = workload.beside.map(|_| "beside MiB/s");
    ["IOPS", "lowest–highest", "MiB/s", "p50 µs", "p99 µs"]
        .into_iter()
        .chain(["CPU µs/request", "RSS MiB", "client busy"])
        .chain(beside)
        .map(str::to_owned)
}

/// The summary of the samples of `workload` as table cells.
pub(crate) fn figure_cells(samples: &[Sample], workload: &Workload) -> Vec<String> {
    let iops = MinMedianMax::of(samples, |sample| sample.iops);
    let median = |figure: fn(&Sample) -> f64| MinMedianMax::of(samples, figure).median;
    let mut cells = vec![
        format!("{:.0}", iops.median),
        format!("{:.0}–{:.0}", iops.min, iops.max),
        format!("{:.0}", iops.median * workload.block_bytes as f64 / MIB),
        format!("{:.1}", median(|sample| sample.p50_us)),
        format!("{:.1}", median(|sample| sample.p99_us)),
        format!("{:.2}", median(|sample| sample.server_cpu_us)),
        format!("{:.1}", median(|sample| sample.server_rss_mib)),
        format!("{:.0} %", 100.0 * median(|sample| sample.client_busy)),
    ];
    if workload.beside.is_some() {
        cells.push(format!("{:.0}", median(|sample| sample.beside_mib_s.unwrap_or(0.0))));
    }
    cells
}

/// The summary of the samples of `workload` as JSON.
pub(crate) fn figures_json(samples: &[Sample], workload: &Workload) -> Map<String, Value> {
    let of = |figure: fn(&Sample) -> f64| MinMedianMax::of(samples, figure).to_json();
    let beside = workload.beside.map(|_| of(|sample| sample.beside_mib_s.unwrap_or(0.0)));
    let figures = [
        ("iops", of(|sample| sample.iops)),
        ("p50_us", of(|sample| sample.p50_us)),
        ("p99_us", of(|sample| sample.p99_us)),
        ("server_cpu_us_per_request", of(|sample| sample.server_cpu_us)),
        ("server_rss_mib", of(|sample| sample.server_rss_mib)),
        ("client_busy", of(|sample| sample.client_busy)),
        ("beside_mib_s", beside.into()),
    ];
    figures.into_iter().map(|(name, figure)| (name.to_owned(), figure)).collect()
}

/// The table of one workload, and nowait compared with the best other server.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut titles = vec!["server".to_owned()];
        titles.extend(figure_titles(&self.workload));
        if self.nowait().is_some() {
            titles.push("nowait ÷ it".to_owned());
        }
        let mut lines = vec![titles];
        lines.extend(self.rows.iter().map(|row| self.cells(row)));
        writeln!(f, "\n{}, {}", self.workload, self.terms)?;
        f.write_str(&aligned(&lines))?;
        if let Some((nowait, peer)) = self.nowait().zip(self.best_peer()) {
            let cpu = |row: &Row| row.median(|sample| sample.server_cpu_us);
            writeln!(
                f,
                "nowait ÷ best peer ({}): IOPS {:.2}, p99 {:.2}, CPU per request {:.2}",
                peer.server.name(),
                ratio(nowait.iops().median, peer.iops().median),
                ratio(nowait.p99_us(), peer.p99_us()),
                ratio(cpu(nowait), cpu(peer)),
            )?;
        }
        for row in self
            .rows
            .iter()
            .filter(|row| row.median(|sample| sample.client_busy) > CLIENT_BUSY_LIMIT)
        {
            writeln!(f, "{}: the client may be the limit here, not the server", row.server.name())?;
        }
        Ok(())
    }
}

pub(crate) fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// Aligns the columns: the first to the left, the others to the right.
pub(crate) fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines
            .iter()
            .filter_map(|line| line.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            match column {
                0 => text.push_str(&format!("{cell:<width$}")),
                _ => text.push_str(&format!("  {cell:>width$}")),
            }
        }
        text.push('\n');
    }
    text
}

/// Samples for the tests of this file and of the report.
#[cfg(test)]
pub(crate) mod examples {
    use super::*;

    pub(crate) fn sample(iops: f64, server_cpu_us: f64) -> Sample {
        Sample {
            iops,
            p50_us: 10.0,
            p99_us: 20.0,
            server_cpu_us,
            server_rss_mib: 4.0,
            client_busy: 0.5,
            beside_mib_s: None,
        }
    }

    pub(crate) fn comparison() -> Comparison {
        let row = |server, iops: [f64; 3], cpu| Row {
            server,
            samples: iops.map(|iops| sample(iops, cpu)).to_vec(),
        };
        Comparison {
            workload: Workload::standard()[0],
            terms: Conditions::ALL[0],
            rows: vec![
                row(ServerKind::Nowait, [3000.0, 1000.0, 2000.0], 5.0),
                row(ServerKind::QemuNbd, [1000.0; 3], 10.0),
                row(ServerKind::Nbdkit, [9000.0; 3], 1.0),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::examples::{comparison, sample};
    use super::*;
    use crate::workload::Caching;

    #[test]
    fn a_spread_has_the_median_minimum_and_maximum_of_the_rounds() {
        let of = |iops: &[f64]| {
            let samples: Vec<Sample> = iops.iter().map(|&iops| sample(iops, 1.0)).collect();
            let spread = MinMedianMax::of(&samples, |sample| sample.iops);
            [spread.median, spread.min, spread.max]
        };
        assert_eq!(of(&[3.0, 1.0, 2.0]), [2.0, 1.0, 3.0]);
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), [2.5, 1.0, 4.0]);
        assert_eq!(of(&[7.0]), [7.0, 7.0, 7.0]);
        assert_eq!(of(&[]), [0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_server_without_direct_io_is_shown_but_is_not_the_best_peer_of_the_direct_table() {
        let mut comparison = comparison();
        assert_eq!(comparison.best_peer().map(|row| row.server), Some(ServerKind::QemuNbd));
        let text = comparison.to_string();
        assert!(text.contains("\nnbdkit * "), "{text}");
        assert!(
            text.contains(
                "nowait ÷ best peer (qemu-nbd): IOPS 2.00, p99 1.00, CPU per request 0.50"
            ),
            "{text}"
        );
        comparison.terms.caching = Caching::PageCache;
        assert_eq!(comparison.best_peer().map(|row| row.server), Some(ServerKind::Nbdkit));
    }

    #[test]
    fn columns_are_aligned_by_characters_not_bytes() {
        let lines =
            [vec!["a".to_owned(), "µs".to_owned()], vec!["long".to_owned(), "1".to_owned()]];
        assert_eq!(aligned(&lines), "a     µs\nlong   1\n");
    }
}
