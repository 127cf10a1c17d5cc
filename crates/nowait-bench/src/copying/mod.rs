//! Copying disks: nowait compared with qemu-img and nbdcopy, route by route.
//!
//! Invariant: on one route all copiers copy the same bytes, one at a time. All files are in a
//! temporary directory, which is removed afterwards. nowait is compared with copiers that flush,
//! because part of the processor time of the others is spent later by the kernel.

mod copy_case;
pub(crate) mod timed;
mod copy_run;

use std::io::Write;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bench::Bench;
use crate::error::Error;
use crate::machine::Machine;
use crate::other_programs::is_installed;
use crate::report::{Entry, Report, Reporter};
use crate::table::{aligned, ratio, strings};
use crate::test_file::temporary_directory;
use copy_case::{CONTENTS, COPIERS, Content, Copier, NOWAIT, ROUTES, Route};
use copy_run::{CopyRun, CopySample};

const MIB: u64 = 1 << 20;

/// Copies disks on every route.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let (args, nowait) = (&bench.args, bench.nowait()?);
    let mut reporter = Reporter::begin(bench, out);
    let directory = temporary_directory(args.directory.clone())
        .map_err(Error::system("making a directory for the files (name one with --directory)"))?;
    let scratch = TempDir::with_prefix("nowait-bench-")
        .map_err(Error::system("making a directory for sockets"))?;
    let missing: Vec<&str> =
        ["qemu-img", "nbdcopy"].into_iter().filter(|it| !is_installed(it)).collect();
    let copiers = |route: Route| -> Vec<Copier> {
        let is_there = |copier: &Copier| !missing.iter().any(|it| copier.name.starts_with(it));
        let takes = COPIERS.into_iter().filter(|copier| copier.takes(route) && is_there(copier));
        takes.collect()
    };
    let machine = Machine::this()?;
    let mut heading = format!(
        "{}\n{} rounds, in turns; nothing of the source is in the page cache when a copy \
         begins; the server is nowait's, past the page cache\n\
         * not flushed: what it wrote is on storage some time after it has ended\n",
        machine.line(),
        args.rounds
    );
    heading.extend(missing.iter().map(|name| format!("{name}: not installed\n")));
    let count: usize = ROUTES.into_iter().map(|route| copiers(route).len()).sum();
    reporter.heading(&heading, count * CONTENTS.len())?;
    'contents: for content in CONTENTS {
        let bytes = content.factor * args.size() / MIB * MIB;
        let (directory, scratch) = (directory.path(), scratch.path());
        let copy_run = CopyRun { directory, scratch, nowait, bytes };
        copy_run.prepare(content).map_err(Error::system("making the disks to copy"))?;
        for route in ROUTES {
            let name = |copier: &Copier| format!("{}: {}", route.name, copier.name);
            let failure = |copier: &Copier, problem: &str| {
                let line = format!("{} failed, {}: {problem}", copier.name, route.name);
                (line.clone(), line.into())
            };
            let measure = |copier: &Copier| copy_run.run(*copier, route);
            let Some(rows) = reporter.compare(copiers(route), name, measure, failure) else {
                break 'contents;
            };
            let table = CopyTable { content, route, bytes, rows };
            reporter.table(&table.text(), table.to_json())?;
        }
    }
    let head = json!({ "machine": machine.to_json(), "not_installed": missing });
    reporter.end(head, "tables")
}

type Row = Entry<Copier, CopySample>;

/// All copiers on one route.
struct CopyTable {
    content: Content,
    route: Route,
    bytes: u64,
    rows: Vec<Row>,
}

impl CopyTable {
    /// The figure of nowait divided by the lowest figure of the other copiers that flush: below 1,
    /// nowait is better.
    fn to_best(&self, figure: fn(&CopySample) -> f64) -> Option<(&'static str, f64)> {
        let nowait = self.rows.iter().find(|row| row.key.name == NOWAIT)?.median(figure);
        let others = self.rows.iter().filter(|row| row.key.name != NOWAIT && row.key.flushes);
        let with = others.map(|row| (row.key.name, row.median(figure)));
        let (name, best) = with.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        Some((name, ratio(nowait, best)))
    }

    fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let of = |figure: fn(&CopySample) -> f64| row.of(figure).to_json();
            json!({
                "copier": row.key.name,
                "flushes": row.key.flushes,
                "ended_s": of(|sample| sample.ended_s),
                "stored_s": of(|sample| sample.stored_s),
                "copier_cpu_s": of(|sample| sample.copier_cpu_s),
                "server_cpu_s": server_cpu(row).map(|_| of(|it| it.server_cpu_s.unwrap_or(0.0))),
                "machine_cpu_s": of(|sample| sample.machine_cpu_s),
                "taken_mib": of(|sample| sample.taken_mib),
            })
        };
        let to_best = |figure| {
            self.to_best(figure).map(|(peer, ratio)| json!({ "peer": peer, "ratio": ratio }))
        };
        json!({
            "content": self.content.name,
            "route": self.route.name,
            "bytes": self.bytes,
            "copiers": self.rows.iter().map(row).collect::<Vec<_>>(),
            "nowait_to_best_peer": {
                "stored": to_best(|sample| sample.stored_s),
                "cpu": to_best(CopySample::cpu_s),
            },
        })
    }

    fn text(&self) -> String {
        let mut titles = strings(["", "ended s", "on storage s", "lowest–highest", "CPU s"]);
        titles.extend(strings(["server CPU s", "machine CPU s", "takes MiB"]));
        let mut lines = vec![titles];
        for row in &self.rows {
            let stored = row.of(|sample| sample.stored_s);
            let star = if row.key.flushes { "" } else { " *" };
            lines.push(vec![
                format!("{}{star}", row.key.name),
                format!("{:.3}", row.median(|sample| sample.ended_s)),
                format!("{:.3}", stored.median),
                format!("{:.3}–{:.3}", stored.min, stored.max),
                format!("{:.3}", row.median(|sample| sample.copier_cpu_s)),
                server_cpu(row).map_or_else(|| "–".to_owned(), |seconds| format!("{seconds:.3}")),
                format!("{:.2}", row.median(|sample| sample.machine_cpu_s)),
                format!("{:.0}", row.median(|sample| sample.taken_mib)),
            ]);
        }
        let (route, content, mib) = (self.route.name, self.content.name, self.bytes >> 20);
        let mut text = format!("\n{route}, {content}, {mib} MiB\n{}", aligned(&lines));
        let stored = self.to_best(|sample| sample.stored_s);
        if let Some(((by_time, time), (by_cpu, cpu))) = stored.zip(self.to_best(CopySample::cpu_s))
        {
            text += &format!(
                "nowait ÷ best: on storage {time:.2} ({by_time}), CPU {cpu:.2} ({by_cpu})\n"
            );
        }
        text
    }
}

/// The processor time of the server, if the route has one.
fn server_cpu(row: &Row) -> Option<f64> {
    let is_served = row.samples.iter().any(|sample| sample.server_cpu_s.is_some());
    is_served.then(|| row.median(|sample| sample.server_cpu_s.unwrap_or(0.0)))
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
        let row = |copier: usize, samples| Entry { samples, ..Entry::new(COPIERS[copier]) };
        let rows = vec![
            row(0, vec![sample(1.0)]),
            row(1, vec![sample(8.0)]),
            row(4, nbdcopy),
            row(5, vec![sample(0.1)]),
        ];
        let table = CopyTable { content: CONTENTS[0], route: ROUTES[3], bytes: 1 << 20, rows };
        let json = table.to_json();
        let best = &json["nowait_to_best_peer"];
        assert_eq!(best["stored"], json!({ "peer": "nbdcopy --flush", "ratio": 0.5 }));
        assert_eq!(best["cpu"], json!({ "peer": COPIERS[1].name, "ratio": 0.125 }));
        let text = table.text();
        assert!(text.contains("file to NBD, full, 1 MiB") && text.contains("nbdcopy *"), "{text}");
        assert!(text.contains("on storage 0.50 (nbdcopy --flush), CPU 0.12 (qemu-img"), "{text}");
    }
}
