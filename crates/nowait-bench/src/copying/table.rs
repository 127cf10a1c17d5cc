//! The results of the copy benchmark, as text and as JSON.
//!
//! Invariant: text and JSON are made from the same samples; nowait is compared with copiers that
//! flush, because part of the processor time of the others is spent later by the kernel.

use std::fmt;

use serde_json::{Value, json};

use crate::comparison::{MinMedianMax, aligned, ratio};
use crate::copying::copy_case::{Content, Copier, CopyCase};
use crate::report::Machine;

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopySample {
    /// Seconds until the program had ended.
    pub ended_s: f64,
    /// Seconds until what it wrote was on storage.
    pub stored_s: f64,
    /// Seconds of processor time of the program.
    pub copier_cpu_s: f64,
    /// Seconds of processor time of the server, if the route has one.
    pub server_cpu_s: Option<f64>,
    /// Seconds of processor time of the whole machine until the written data was on storage. This
    /// includes later writeback by the kernel, and all other processes.
    pub machine_cpu_s: f64,
    /// MiB that the target occupies on its file system.
    pub taken_mib: f64,
}

impl CopySample {
    /// The processor time of the program and the server.
    fn cpu_s(&self) -> f64 {
        self.copier_cpu_s + self.server_cpu_s.unwrap_or(0.0)
    }
}

/// One copier on one route.
#[derive(Clone, Debug)]
pub struct CopyRow {
    /// The copier that was measured.
    pub copier: Copier,
    /// One sample for each round.
    pub samples: Vec<CopySample>,
}

impl CopyRow {
    fn of(&self, figure: impl Fn(&CopySample) -> f64) -> MinMedianMax {
        MinMedianMax::of(&self.samples, figure)
    }
}

/// All copiers on one route.
#[derive(Clone, Debug)]
pub struct CopyTable {
    /// The content of the disk.
    pub content: Content,
    /// The kinds of source and target.
    pub route: CopyCase,
    /// Bytes of the disk.
    pub bytes: u64,
    /// One row for each copier.
    pub rows: Vec<CopyRow>,
}

impl CopyTable {
    fn nowait(&self) -> Option<&CopyRow> {
        self.rows.iter().find(|row| row.copier == Copier::Nowait)
    }

    /// The figure of nowait divided by the lowest figure of the other copiers that flush: below 1,
    /// nowait is better.
    fn to_best(&self, figure: fn(&CopySample) -> f64) -> Option<(Copier, f64)> {
        let nowait = self.nowait()?.of(figure).median;
        let others =
            self.rows.iter().filter(|row| row.copier != Copier::Nowait && row.copier.flushes());
        let with = others.map(|row| (row.copier, row.of(figure).median));
        let (copier, best) = with.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        Some((copier, ratio(nowait, best)))
    }

    pub(crate) fn to_json(&self) -> Value {
        let row = |row: &CopyRow| {
            let of = |figure: fn(&CopySample) -> f64| row.of(figure).to_json();
            let has_server = row.samples.iter().any(|sample| sample.server_cpu_s.is_some());
            json!({
                "copier": row.copier.name(),
                "flushes": row.copier.flushes(),
                "ended_s": of(|sample| sample.ended_s),
                "stored_s": of(|sample| sample.stored_s),
                "copier_cpu_s": of(|sample| sample.copier_cpu_s),
                "server_cpu_s": has_server.then(|| of(|sample| sample.server_cpu_s.unwrap_or(0.0))),
                "machine_cpu_s": of(|sample| sample.machine_cpu_s),
                "taken_mib": of(|sample| sample.taken_mib),
            })
        };
        let to_best = |figure| {
            self.to_best(figure).map(|(peer, ratio)| json!({ "peer": peer.name(), "ratio": ratio }))
        };
        json!({
            "content": self.content.name(),
            "route": self.route.name(),
            "bytes": self.bytes,
            "copiers": self.rows.iter().map(row).collect::<Vec<_>>(),
            "nowait_to_best_peer": {
                "stored": to_best(|sample| sample.stored_s),
                "cpu": to_best(CopySample::cpu_s),
            },
        })
    }
}

impl fmt::Display for CopyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (route, content) = (self.route.name(), self.content.name());
        writeln!(f, "\n{route}, {content}, {} MiB", self.bytes >> 20)?;
        let titles = ["", "ended s", "on storage s", "lowest–highest", "CPU s", "server CPU s"];
        let titles = titles.into_iter().chain(["machine CPU s", "takes MiB"]).map(str::to_owned);
        let mut lines = vec![titles.collect::<Vec<_>>()];
        for row in &self.rows {
            let (ended, stored) = (row.of(|s| s.ended_s), row.of(|s| s.stored_s));
            let star = if row.copier.flushes() { "" } else { " *" };
            let served = row.samples.iter().any(|sample| sample.server_cpu_s.is_some());
            let server = row.of(|sample| sample.server_cpu_s.unwrap_or(0.0)).median;
            lines.push(vec![
                format!("{}{star}", row.copier.name()),
                format!("{:.3}", ended.median),
                format!("{:.3}", stored.median),
                format!("{:.3}–{:.3}", stored.min, stored.max),
                format!("{:.3}", row.of(|s| s.copier_cpu_s).median),
                if served { format!("{server:.3}") } else { "–".to_owned() },
                format!("{:.2}", row.of(|s| s.machine_cpu_s).median),
                format!("{:.0}", row.of(|s| s.taken_mib).median),
            ]);
        }
        f.write_str(&aligned(&lines))?;
        let stored = self.to_best(|sample| sample.stored_s);
        if let Some(((by_time, time), (by_cpu, cpu))) = stored.zip(self.to_best(CopySample::cpu_s))
        {
            let (by_time, by_cpu) = (by_time.name(), by_cpu.name());
            writeln!(
                f,
                "nowait ÷ best: on storage {time:.2} ({by_time}), CPU {cpu:.2} ({by_cpu})"
            )?;
        }
        Ok(())
    }
}

/// The complete report. `Display` formats the text, `Value::from(&report)` the JSON object.
#[derive(Clone, Debug)]
pub struct CopyReport {
    /// The machine that was measured.
    pub machine: Machine,
    /// Rounds of each table.
    pub rounds: u32,
    /// The finished tables, in the order of measuring.
    pub tables: Vec<CopyTable>,
    /// One line for each failure; a copier that failed is left out of its table.
    pub failures: Vec<String>,
    /// Programs that are not installed.
    pub missing: Vec<&'static str>,
    /// Whether the measurement was cancelled before the end.
    pub interrupted: bool,
}

impl CopyReport {
    pub(crate) fn heading(&self) -> String {
        let Machine { kernel, processor, .. } = &self.machine;
        let mut text = format!(
            "Linux {kernel}, {processor}\n{} rounds, in turns; nothing of the source is in the page cache \
             when a copy begins; the server is nowait's, past the page cache\n\
             * not flushed: what it wrote is on storage some time after it has ended\n",
            self.rounds
        );
        for missing in &self.missing {
            text += &format!("{missing}: not installed\n");
        }
        text
    }

    pub(crate) fn ending(&self) -> String {
        let mut text: String = self.failures.iter().map(|line| format!("\n{line}\n")).collect();
        if self.interrupted {
            text += "\nstopped before the end\n";
        }
        text
    }
}

impl fmt::Display for CopyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.heading())?;
        self.tables.iter().try_for_each(|table| table.fmt(f))?;
        f.write_str(&self.ending())
    }
}

impl From<&CopyReport> for Value {
    fn from(report: &CopyReport) -> Value {
        json!({
            "machine": { "kernel": report.machine.kernel, "processor": report.machine.processor },
            "rounds": report.rounds,
            "tables": report.tables.iter().map(CopyTable::to_json).collect::<Vec<_>>(),
            "failures": report.failures,
            "not_installed": report.missing,
            "interrupted": report.interrupted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seconds: f64) -> CopySample {
        CopySample {
            ended_s: seconds,
            stored_s: 2.0 * seconds,
            copier_cpu_s: seconds / 2.0,
            server_cpu_s: Some(seconds / 2.0),
            machine_cpu_s: seconds,
            taken_mib: 1.0,
        }
    }

    #[test]
    fn nowait_is_compared_with_the_best_of_the_others_by_each_figure() {
        let mut nbdcopy = vec![sample(4.0), sample(1.0), sample(2.0)];
        nbdcopy.iter_mut().for_each(|sample| sample.copier_cpu_s = 10.0);
        let rows = vec![
            CopyRow { copier: Copier::Nowait, samples: vec![sample(1.0)] },
            CopyRow { copier: Copier::QemuImgDirect, samples: vec![sample(8.0)] },
            CopyRow { copier: Copier::NbdcopyFlushed, samples: nbdcopy },
            CopyRow { copier: Copier::Nbdcopy, samples: vec![sample(0.1)] },
        ];
        let table =
            CopyTable { content: Content::Full, route: CopyCase::FileToNbd, bytes: 1 << 20, rows };
        let json = table.to_json();
        let best = &json["nowait_to_best_peer"];
        assert_eq!(best["stored"], json!({ "peer": "nbdcopy --flush", "ratio": 0.5 }));
        assert_eq!(best["cpu"], json!({ "peer": Copier::QemuImgDirect.name(), "ratio": 0.125 }));
        let text = table.to_string();
        assert!(text.contains("file to NBD, full, 1 MiB") && text.contains("nbdcopy *"), "{text}");
        assert!(text.contains("on storage 0.50 (nbdcopy --flush), CPU 0.12 (qemu-img"), "{text}");
    }
}
