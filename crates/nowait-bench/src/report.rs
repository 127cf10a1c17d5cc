//! The complete report of a comparison of NBD servers, as text and as JSON: machine, file, results
//! and failures.
//!
//! Invariant: the parts that are printed during the measurement add up to the output of `Display`.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs};

use serde_json::{Value, json};

use crate::address::Address;
use crate::comparison::Comparison;
use crate::cpus::Placement;
use crate::error::Error;
use crate::server::{ServerFiles, ServerKind};
use crate::session;
use crate::test_file::{Access, Format, Target};
use crate::workload::{Caching, Conditions, Transport, Workload};

/// The port that the command lines in a report show.
const EXAMPLE_PORT: u16 = 10809;

/// The machine that was measured.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The release of the running kernel.
    pub kernel: String,
    /// The model name of the processor; empty if unknown.
    pub processor: String,
    /// The processor numbers of client and server; `None` if both share the processors.
    pub pinned: Option<(usize, usize)>,
}

impl Machine {
    pub(crate) fn this(placement: Placement) -> Result<Machine, Error> {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")
            .map_err(Error::system("reading /proc/sys/kernel/osrelease"))?;
        let cpuinfo =
            fs::read_to_string("/proc/cpuinfo").map_err(Error::system("reading /proc/cpuinfo"))?;
        let processor = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map(|(_, name)| name.trim().to_owned());
        let pinned = match placement {
            Placement::Apart { client, server } => Some((client, server)),
            Placement::Shared => None,
        };
        Ok(Machine {
            kernel: kernel.trim().to_owned(),
            processor: processor.unwrap_or_default(),
            pinned,
        })
    }

    /// As a line of text, with the line break.
    pub(crate) fn line(&self) -> String {
        let placement = match self.pinned {
            Some((client, server)) => format!("client on CPU {client}, server on CPU {server}"),
            None => "only one CPU, so client and server share it".to_owned(),
        };
        format!("Linux {}, {}; {placement}\n", self.kernel, self.processor)
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "kernel": self.kernel,
            "processor": self.processor,
            "client_cpu": self.pinned.map(|(client, _)| client),
            "server_cpu": self.pinned.map(|(_, server)| server),
        })
    }
}

/// The file that was measured.
#[derive(Clone, Debug)]
pub struct MeasuredFile {
    /// Absolute path.
    pub path: PathBuf,
    /// The bytes of it that were used.
    pub bytes: u64,
    /// Whether it was created for the measurement and removed afterwards.
    pub temporary: bool,
    /// Whether writes were measured too.
    pub written: bool,
}

impl MeasuredFile {
    pub(crate) fn of(target: &Target) -> MeasuredFile {
        MeasuredFile {
            path: target.path.clone(),
            bytes: target.bytes,
            temporary: target.was_made(),
            written: target.access == Access::ReadWrite,
        }
    }
}

/// A server that could not be measured to the end; it is left out of the rest of its table.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The server that failed.
    pub server: ServerKind,
    /// The workload that it failed at.
    pub workload: Workload,
    /// The table that it failed in.
    pub terms: Conditions,
    /// Its last message, or the failure.
    pub problem: String,
}

/// The complete report. `Display` formats the text, `Value::from(&report)` the JSON object.
#[derive(Clone, Debug)]
pub struct Report {
    /// The machine that was measured.
    pub machine: Machine,
    /// The file that was measured.
    pub file: MeasuredFile,
    /// The servers and the version that each reports.
    pub versions: Vec<(ServerKind, String)>,
    /// Requested servers that are not installed.
    pub missing: Vec<ServerKind>,
    /// Measured time of one server in one round.
    pub duration: Duration,
    /// Rounds of each comparison.
    pub rounds: u32,
    /// Concurrent connections.
    pub connections: usize,
    /// The finished comparisons, in the order of measuring: table by table, workload by workload.
    pub comparisons: Vec<Comparison>,
    /// The failures.
    pub failures: Vec<Failure>,
    /// Whether the measurement was cancelled before the end.
    pub interrupted: bool,
}

impl Report {
    /// The lines before the first table.
    pub(crate) fn heading(&self) -> String {
        let mut text = self.machine.line();
        let origin =
            if self.file.temporary { ", made for this and removed afterwards" } else { "" };
        text += &format!("{}: {} MiB{origin}\n", self.file.path.display(), self.file.bytes >> 20);
        if !self.file.written {
            text += "only reads: the file may not be overwritten (--overwrite allows it)\n";
        }
        text += &format!(
            "{} rounds of {} s for each server, in turns; {} connection(s)\n",
            self.rounds,
            self.duration.as_secs_f64(),
            self.connections
        );
        for (_, version) in &self.versions {
            text += &format!("{version}\n");
        }
        for server in &self.missing {
            text += &format!("{}: not installed\n", server.name());
        }
        text
    }

    /// The lines before the first workload of a table: how the servers are started.
    pub(crate) fn heading_of_table(&self, terms: Conditions) -> String {
        let mut text = format!("\n== {terms} ==\n");
        for (server, _) in &self.versions {
            text += &format!("{}\n", self.command_line(*server, terms));
        }
        if terms.transport == Transport::Tls {
            text += &format!("negotiated: {} (the client offers nothing else)\n", session::SUITE);
        }
        if self.versions.iter().any(|(server, _)| !server.can(terms.caching)) {
            text += "* through the page cache, dropping pages after use: it has no direct I/O, and is not \
                     counted as a peer in this table\n";
        }
        if terms.caching == Caching::PageCache {
            text += "writing back to storage is done by the kernel and is not in the servers' CPU time\n";
        }
        text
    }

    fn command_line(&self, server: ServerKind, terms: Conditions) -> String {
        let access = if self.file.written { Access::ReadWrite } else { Access::ReadOnly };
        let [file, certificates] = ["FILE", "DIR"].map(Path::new);
        let address = match terms.transport {
            Transport::Tcp => Address::Loopback(EXAMPLE_PORT),
            Transport::Plain | Transport::Tls => Address::Unix("SOCKET".into()),
        };
        let server_files =
            ServerFiles { file, format: Format::Raw, address: &address, certificates };
        let arguments = server.arguments(terms, access, server_files);
        let arguments: Vec<_> =
            arguments.iter().map(|argument| argument.to_string_lossy()).collect();
        format!("{} {}", server.name(), arguments.join(" "))
    }

    /// The lines after the last table.
    pub(crate) fn ending(&self) -> String {
        let mut text = String::new();
        for failure in &self.failures {
            text += &format!(
                "\n{} failed at {}, {}: {}\n",
                failure.server.name(),
                failure.workload,
                failure.terms,
                failure.problem
            );
        }
        if self.interrupted {
            text += "\nstopped before the end\n";
        }
        text
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.heading())?;
        let mut table = None;
        for comparison in &self.comparisons {
            if table.replace(comparison.terms) != Some(comparison.terms) {
                f.write_str(&self.heading_of_table(comparison.terms))?;
            }
            comparison.fmt(f)?;
        }
        f.write_str(&self.ending())
    }
}

impl From<&Report> for Value {
    fn from(report: &Report) -> Value {
        let server = |(kind, version): &(ServerKind, String)| json!({ "name": kind.name(), "version": version });
        let failure = |failure: &Failure| {
            json!({
                "server": failure.server.name(),
                "workload": failure.workload.to_string(),
                "caching": failure.terms.caching.name(),
                "transport": failure.terms.transport.name(),
                "problem": failure.problem,
            })
        };
        json!({
            "machine": report.machine.to_json(),
            "file": {
                "path": report.file.path.to_string_lossy(),
                "bytes": report.file.bytes,
                "temporary": report.file.temporary,
                "written": report.file.written,
            },
            "servers": report.versions.iter().map(server).collect::<Vec<_>>(),
            "not_installed": report.missing.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
            "seconds": report.duration.as_secs_f64(),
            "rounds": report.rounds,
            "connections": report.connections,
            "comparisons": report.comparisons.iter().map(Comparison::to_json).collect::<Vec<_>>(),
            "failures": report.failures.iter().map(failure).collect::<Vec<_>>(),
            "interrupted": report.interrupted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comparison::examples::comparison;

    fn report() -> Report {
        Report {
            machine: Machine { kernel: "6.18".into(), processor: "any".into(), pinned: None },
            file: MeasuredFile {
                path: "/image".into(),
                bytes: 64 << 20,
                temporary: false,
                written: false,
            },
            versions: vec![
                (ServerKind::Nowait, "nowait 1".into()),
                (ServerKind::Nbdkit, "nbdkit 1".into()),
            ],
            missing: vec![ServerKind::QemuStorageDaemon],
            duration: Duration::from_secs(1),
            rounds: 3,
            connections: 1,
            comparisons: vec![comparison()],
            failures: Vec::new(),
            interrupted: true,
        }
    }

    #[test]
    fn the_text_names_failures_with_the_reason() {
        let text = report().to_string();
        for part in [
            "share it",
            "only reads",
            "qemu-storage-daemon: not installed",
            "* through",
            "stopped before",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }

    #[test]
    fn only_a_table_over_tls_names_the_cipher_suite() {
        for terms in Conditions::ALL {
            let is_named = report().heading_of_table(terms).contains("negotiated: TLS 1.3 with");
            assert_eq!(is_named, terms.transport == Transport::Tls, "{terms}");
        }
    }

    #[test]
    fn the_json_object_has_the_figures_of_the_text() {
        let json = Value::from(&report());
        let comparison = &json["comparisons"][0];
        assert_eq!(comparison["depth"], 1);
        assert_eq!(
            comparison["servers"][0]["iops"],
            json!({ "median": 2000.0, "min": 1000.0, "max": 3000.0 })
        );
        assert_eq!(comparison["servers"][2]["comparable"], false);
        assert_eq!(comparison["nowait_to_best_peer"]["iops_ratio"], 2.0);
        assert_eq!(json["not_installed"], json!(["qemu-storage-daemon"]));
        assert_eq!(json["machine"]["client_cpu"], Value::Null);
        assert_eq!(json["interrupted"], true);
    }
}
