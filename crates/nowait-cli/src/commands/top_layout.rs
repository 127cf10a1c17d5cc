//! The lines that `nowait top` shows, as wide as the terminal.
//!
//! Invariant: columns that have no place are left out in a fixed order, the latencies before the
//! errors; a text of a client has no control characters.

use nowait_control::{
    BackupInfo, BucketLimit, ConnectionInfo, ExportInfo, LimitsInfo, Load, ServerInfo,
};
use nowait_daemon::error::plain;
use nowait_daemon::size::short;

use crate::commands::control::duration;

/// The longest line without a terminal, in characters.
pub(crate) const MAX_WIDTH: usize = 400;
/// The last line of the screen.
pub(crate) const KEYS: &str = "q quit   ? help";
/// The lines of the help.
pub(crate) const HELP: [&str; 16] = [
    "nowait top: what a server does, second by second",
    "",
    "REQUESTS/S  requests of all kinds",
    "READ MB/S   bytes that were read, in millions",
    "WRIT MB/S   bytes that were written, in millions",
    "ERRORS      requests that failed since the export was added",
    "P50 P99     latency that 50 % and 99 % of requests did not exceed",
    "FLIGHT      requests that are not answered yet",
    "CLIENTS     connections and queues",
    "LIMIT       what the export, and each client, may do in a second",
    "SIZE IMAGE  the disk, and where it is kept",
    "",
    "A narrow terminal has the first of these columns only.",
    "",
    "q, Ctrl-C   quit",
    "?, Esc      back",
];
/// The least that is shown of the place of an image, in characters.
const LEAST_IMAGE: usize = 12;

/// A server of a moment, and the load of its exports in the second before.
pub(crate) struct View<'a> {
    pub(crate) server: &'a ServerInfo,
    pub(crate) exports: &'a [ExportInfo],
    pub(crate) loads: &'a [Load],
    /// The parts of the requests that took each path of the engine, in percent.
    pub(crate) paths: &'a [(&'static str, f64)],
    pub(crate) connections: &'a [ConnectionInfo],
}

impl View<'_> {
    /// The lines of the screen, none longer than `width`.
    pub(crate) fn lines(&self, width: usize) -> Vec<String> {
        let ServerInfo { version, pid, uptime_seconds, connections, max_connections, .. } =
            self.server;
        let up = duration(*uptime_seconds as u64);
        let mut lines = vec![
            format!(
                "nowait {}, process {pid}, up {up}, {connections} of {max_connections} connections",
                plain(version)
            ),
            String::new(),
        ];
        lines.extend(self.table(width));
        lines.extend(self.exports.iter().flat_map(errors));
        lines.extend(self.exports.iter().filter_map(backup));
        let paths: Vec<_> =
            self.paths.iter().map(|(name, part)| format!("{name} {part:.1} %")).collect();
        if !paths.is_empty() {
            lines.extend([String::new(), format!("served by: {}", paths.join(", "))]);
        }
        lines.push(String::new());
        lines.push(format!(
            "{:>10} {:<11} {:<20} {:>12}  CLIENT",
            "CONNECTION", "FRONTEND", "EXPORT", "FOR"
        ));
        lines.extend(self.connections.iter().map(connection_row));
        lines.iter_mut().for_each(|line| *line = cut(line, width));
        lines
    }

    /// The exports, with as many of the columns as there is place for.
    fn table(&self, width: usize) -> Vec<String> {
        let limits: Vec<_> = self.exports.iter().map(limit).collect();
        let limit_width = limits.iter().map(|text| text.chars().count()).max().unwrap_or_default();
        // The first that has no place, and all after it, are left out.
        let mut columns = vec![
            ("REQUESTS/S", 10),
            ("READ MB/S", 9),
            ("WRIT MB/S", 9),
            ("ERRORS", 7),
            ("P50", 9),
            ("P99", 9),
            ("FLIGHT", 7),
            ("CLIENTS", 7),
            ("SIZE", 9),
        ];
        if limit_width > 0 {
            columns.insert(7, ("LIMIT", limit_width.max(5)));
        }
        let mut left = width.saturating_sub(20);
        let fits = |&&(_, wide): &&(&str, usize)| match left.checked_sub(wide + 1) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        };
        let chosen: Vec<_> = columns.iter().take_while(fits).collect();
        let has_image = chosen.len() == columns.len() && left >= LEAST_IMAGE + 2;
        let row = |name: &str, image: &str, cell: &dyn Fn(&str) -> String| {
            let mut line = format!("{:<20}", cut(name, 20));
            for (title, wide) in &chosen {
                line += &format!(" {:>wide$}", cell(title));
            }
            if has_image { line + "  " + image } else { line }
        };
        let mut lines = vec![row("EXPORT", "IMAGE", &|title| title.to_owned())];
        for ((export, load), limit) in self.exports.iter().zip(self.loads).zip(&limits) {
            let cell = |title: &str| match title {
                "LIMIT" => limit.clone(),
                "SIZE" => short(export.size_bytes),
                _ => figure(load, title),
            };
            lines.push(row(&name_of(export), &plain(&export.image), &cell));
        }
        if self.loads.len() > 1 {
            let all = Load::sum(self.loads);
            lines.push(row("all", "", &|title| figure(&all, title)));
        }
        lines
    }
}

/// Text of `load` in the column `title`.
fn figure(load: &Load, title: &str) -> String {
    match title {
        "REQUESTS/S" => format!("{:.0}", load.requests_per_second),
        "READ MB/S" => format!("{:.1}", load.read_bytes_per_second / 1e6),
        "WRIT MB/S" => format!("{:.1}", load.written_bytes_per_second / 1e6),
        "ERRORS" => load.errors.to_string(),
        "P50" => time(load.p50_seconds),
        "P99" => time(load.p99_seconds),
        "FLIGHT" => load.in_flight.to_string(),
        "CLIENTS" => load.members.to_string(),
        _ => String::new(),
    }
}

fn name_of(export: &ExportInfo) -> String {
    if export.name.is_empty() { format!("@{}", export.id) } else { plain(&export.name) }
}

/// The errors of an export, one line each.
fn errors(export: &ExportInfo) -> Vec<String> {
    let name = name_of(export);
    let all = export.frontends.iter().flat_map(|(frontend, it)| {
        it.errors.iter().map(move |error| (frontend, error)).filter(|(_, error)| error.requests > 0)
    });
    all.map(|(frontend, error)| {
        let (frontend, message) = (plain(frontend), plain(&error.message));
        format!("errors of {name}, {frontend}: {} {message}", error.requests)
    })
    .collect()
}

/// The backup of an export, if it has one.
fn backup(export: &ExportInfo) -> Option<String> {
    let BackupInfo { name, copied_bytes, failure, .. } = export.backup.as_ref()?;
    let (of, name, copied) = (name_of(export), plain(name), short(*copied_bytes));
    Some(match failure {
        None => format!("backup of {of}: {name}, {copied} copied to scratch"),
        Some(why) => format!("backup of {of}: {name} has failed: {}", plain(why)),
    })
}

/// The limits of an export, and those of each of its clients; empty without any.
fn limit(export: &ExportInfo) -> String {
    let all = limits(&export.limits).into_iter();
    let each = limits(&export.connection_limits).into_iter().map(|text| text + " each");
    all.chain(each).collect::<Vec<_>>().join(", ")
}

fn limits(limits: &LimitsInfo) -> Vec<String> {
    let rate = |bucket: BucketLimit| bucket.size as f64 * 1e3 / bucket.refill_time.max(1) as f64;
    let requests = limits.ops.map(|bucket| format!("{:.0}/s", rate(bucket)));
    let bytes = limits.bandwidth.map(|bucket| format!("{:.1} MB/s", rate(bucket) / 1e6));
    requests.into_iter().chain(bytes).collect()
}

fn connection_row(connection: &ConnectionInfo) -> String {
    let export = match connection.export.as_deref() {
        None => "(handshake)".into(),
        Some("") => "(default)".into(),
        Some(name) => cut(&plain(name), 20),
    };
    format!(
        "{:>10} {:<11} {export:<20} {:>12}  {}{}",
        connection.id,
        plain(&connection.frontend),
        duration(connection.age_seconds as u64),
        plain(&connection.peer),
        if connection.tls { ", TLS" } else { "" },
    )
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(seconds) if seconds < 1e-3 => format!("{:.0} us", seconds * 1e6),
        Some(seconds) if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

/// The first `width` characters of `text`.
pub(crate) fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nowait_control::{ErrnoInfo, FrontendInfo};

    fn export(limits: LimitsInfo) -> ExportInfo {
        ExportInfo {
            name: "a-name-that-is-longer-than-its-column".into(),
            image: "/srv/images/disk.img".into(),
            size_bytes: 8 << 20,
            limits,
            ..ExportInfo::default()
        }
    }

    fn lines(export: &ExportInfo, width: usize) -> Vec<String> {
        let load = Load {
            requests_per_second: 4205.0,
            errors: 3,
            p50_seconds: Some(128e-6),
            p99_seconds: Some(512e-6),
            ..Load::default()
        };
        let view = View {
            server: &ServerInfo::default(),
            exports: std::slice::from_ref(export),
            loads: &[load],
            paths: &[("simple", 100.0)],
            connections: &[],
        };
        let lines = view.lines(width);
        assert!(lines.iter().all(|line| line.chars().count() <= width), "{lines:#?}");
        lines
    }

    fn titles(export: &ExportInfo, width: usize) -> String {
        lines(export, width)[2].split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_narrow_terminal_has_the_errors_and_a_wider_one_the_latencies_after_them() {
        let export = export(LimitsInfo::default());
        let (narrow, usual) =
            ("EXPORT REQUESTS/S READ MB/S WRIT MB/S ERRORS", " P50 P99 FLIGHT CLIENTS SIZE IMAGE");
        assert_eq!(titles(&export, 40), "EXPORT REQUESTS/S");
        assert_eq!(titles(&export, 60), narrow);
        assert_eq!(titles(&export, 80), format!("{narrow} P50 P99"));
        assert_eq!(titles(&export, 120), format!("{narrow}{usual}"));
        assert_eq!(titles(&export, MAX_WIDTH), format!("{narrow}{usual}"));
        let row = &lines(&export, 80)[3];
        let end = "4205       0.0       0.0       3    128 us    512 us";
        assert!(row.starts_with("a-name-that-is-longe ") && row.ends_with(end), "{row}");
        assert!(lines(&export, 120)[3].ends_with("8 MiB  /srv/images/d"));
    }

    #[test]
    fn limits_have_a_column_where_there_are_any() {
        let ops = Some(BucketLimit { size: 200, one_time_burst: 0, refill_time: 100 });
        let bandwidth = Some(BucketLimit { size: 5_000_000, one_time_burst: 0, refill_time: 1000 });
        let mut export = export(LimitsInfo { ops, bandwidth: None });
        export.connection_limits = LimitsInfo { ops: None, bandwidth };
        assert!(titles(&export, 120).ends_with("P99 FLIGHT LIMIT CLIENTS"));
        assert!(lines(&export, 120)[3].ends_with(" 2000/s, 5.0 MB/s each       0"));
    }

    #[test]
    fn errors_are_told_in_words_without_control_characters() {
        let error = ErrnoInfo { errno: 5, message: "bad\x1b[2J".into(), requests: 3 };
        let nbd = FrontendInfo { errors: vec![error], ..FrontendInfo::default() };
        let mut export = export(LimitsInfo::default());
        export.frontends.insert("nbd".into(), nbd);
        let lines = lines(&export, 80);
        assert!(lines[4].starts_with("errors of a-name"), "{lines:#?}");
        assert!(lines[4].contains("nbd: 3 bad") && !lines[4].contains('\x1b'), "{lines:#?}");
    }

    #[test]
    fn a_backup_has_a_line_that_says_what_it_has_copied_or_why_it_has_failed() {
        let mut export = export(LimitsInfo::default());
        export.name = "vm".into();
        assert!(!lines(&export, 80).iter().any(|line| line.starts_with("backup")));
        let backup =
            BackupInfo { name: "vm.backup".into(), copied_bytes: 3 << 20, ..BackupInfo::default() };
        export.backup = Some(backup.clone());
        assert_eq!(lines(&export, 80)[4], "backup of vm: vm.backup, 3 MiB copied to scratch");
        export.backup = Some(BackupInfo { failure: Some("its scratch\n".into()), ..backup });
        assert_eq!(lines(&export, 80)[4], "backup of vm: vm.backup has failed: its scratch\\n");
    }

    #[test]
    fn the_help_fits_the_smallest_terminal_that_has_the_errors() {
        assert!(HELP.iter().all(|line| line.len() <= 70) && HELP.len() < 24);
    }
}
