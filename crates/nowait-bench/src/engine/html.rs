//! The report as one page: no network, no script, light and dark.
//!
//! Invariant: the page holds everything that it shows; what stands in it from outside is escaped.
//! Knows: report, table, chart. Known by: engine.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use super::chart::{class_of, escaped, gains, latencies};
use super::report::EngineReport;
use super::table::{Gain, Row, Table};
use super::text::{factor, short};
use crate::error::Error;

const STYLE: &str = "
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1d2433; --soft: #667085;
  --line: #e3e6eb; --up: #1f7a5c; --down: #c2552d; --theirs: #8a94a6; --mark: #1d2433; }
@media (prefers-color-scheme: dark) { :root { --page: #12151b; --card: #1a1e26; --ink: #e6e9ef;
  --soft: #98a2b3; --line: #2c323d; --up: #46b58c; --down: #e8875f; --theirs: #8a94a6;
  --mark: #e6e9ef; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0; }
p { margin: .3rem 0; color: var(--soft); } .warn { color: var(--down); }
.glance { display: grid; gap: .6rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); }
.glance a, section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  color: inherit; text-decoration: none; padding: .6rem .8rem; }
.glance b { display: block; font-size: 1.5rem; line-height: 1.3; }
.glance b.up { color: var(--up); } .glance b.down { color: var(--down); }
.glance span { color: var(--soft); font-size: .85rem; display: block; }
section { margin: 1rem 0; padding: 1rem; }
.charts { display: grid; gap: 1rem 2rem; margin-top: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; font-size: 11.5px; } svg text { fill: var(--ink); }
svg .tick { fill: var(--soft); font-size: 10.5px; }
svg .value { font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); } .one { stroke: var(--soft); } .mark { stroke: var(--mark);
  stroke-width: 2; stroke-dasharray: 3 2; }
svg .title { fill: var(--soft); }
rect.even { fill: var(--theirs); } rect.up { fill: var(--up); } rect.down { fill: var(--down); }
.theirs circle { fill: var(--theirs); } .theirs .range { stroke: var(--theirs); }
.ours circle { fill: var(--up); } .ours .range { stroke: var(--up); }
.range { stroke-width: 2; opacity: .5; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } td.word, th.word { text-align: left; }
";

/// Makes the file before anything is measured, so that a bad name is not found out at the end.
pub(crate) fn create(path: &Path, overwrite: bool) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.write(true);
    match overwrite {
        true => options.create(true).truncate(true),
        false => options.create_new(true),
    };
    options.open(path).map_err(|error| {
        let problem = match error.kind() {
            io::ErrorKind::AlreadyExists => "is there already (--overwrite replaces it)".to_owned(),
            _ => format!("cannot be written: {error}"),
        };
        Error::File { path: path.to_owned(), problem }
    })
}

/// The page.
pub(crate) fn page(report: &EngineReport) -> String {
    let mut html = format!(
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width, initial-scale=1\">\
         <title>nowait bench</title><style>{STYLE}</style>\n<h1>nowait bench</h1>\n"
    );
    for line in report.heading().lines() {
        html += &format!("<p>{}</p>\n", escaped(line));
    }
    if report.interrupted {
        html += "<p class=warn>Stopped before the end: some tables are missing.</p>\n";
    }
    html += "<nav class=glance>\n";
    for (n, table) in report.tables.iter().enumerate() {
        html += &card(table, n);
    }
    html += "</nav>\n";
    for (n, table) in report.tables.iter().enumerate() {
        html += &section(table, n);
    }
    html + "</html>\n"
}

/// The gains that a table comes to: of its last variant, or of this engine over all others.
fn main_gains(table: &Table) -> Vec<f64> {
    let last = table.variants.len().saturating_sub(1);
    let of = |row: &Row| match table.gain {
        Gain::OverFirst => vec![table.gain(row, last)],
        Gain::FirstOver => (1..=last).map(|n| table.gain(row, n)).collect(),
    };
    let mut gains: Vec<f64> = table.rows.iter().flat_map(of).flatten().collect();
    gains.sort_by(f64::total_cmp);
    gains
}

fn card(table: &Table, n: usize) -> String {
    let gains = main_gains(table);
    let (what, title) = (table.what.name(), escaped(&table.title));
    let Some((low, high)) = gains.first().zip(gains.last()) else {
        return format!("<a href=\"#t{n}\"><span>{what}</span><b>–</b><span>{title}</span></a>\n");
    };
    let mean = (gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len() as f64).exp();
    let class = class_of(mean);
    format!(
        "<a href=\"#t{n}\"><span>{what}</span><b class={class}>{}</b>\
         <span>{} to {}</span><span>{title}</span></a>\n",
        factor(mean),
        factor(*low),
        factor(*high),
    )
}

fn section(table: &Table, n: usize) -> String {
    let (title, note) = (escaped(&table.title), escaped(&table.note));
    let mut html = format!("<section id=t{n}><h2>{title}</h2><p>{note}</p>\n<div class=charts>");
    if let Some(svg) = gains(table) {
        let name = match table.variants.len() {
            2 => table.gain_name(1),
            _ if table.gain == Gain::FirstOver => "this engine ÷ each other".to_owned(),
            _ => format!("each ÷ {}", table.variants.first().map_or("", String::as_str)),
        };
        let source = table.rows.iter().any(|row| row.source.is_some_and(|it| it.factor.is_some()));
        let mark = if source { "; dashed: the source's gain" } else { "" };
        html += &format!(
            "<figure><figcaption>Gain in {}: {}{mark}</figcaption>{svg}</figure>\n",
            table.unit.name(),
            escaped(&name)
        );
    }
    if let Some(svg) = latencies(table) {
        html += &format!(
            "<figure><figcaption>Latency: dots at p50, p90, p99, p99.9; figures p50 / p99 in \
             µs</figcaption>{svg}</figure>\n"
        );
    }
    html + "</div>\n" + &problems(table) + &figures(table) + "</section>\n"
}

fn problems(table: &Table) -> String {
    let mut said = Vec::new();
    for (variant, cell) in table.rows.iter().flat_map(|row| table.variants.iter().zip(&row.cells)) {
        let line = cell.problem.as_ref().map(|problem| format!("{variant}: {problem}"));
        if let Some(line) = line.filter(|line| !said.contains(line)) {
            said.push(line);
        }
    }
    said.iter().map(|line| format!("<p class=warn>{}</p>\n", escaped(line))).collect()
}

fn figures(table: &Table) -> String {
    let unit = table.unit.name();
    let mut html = format!(
        "<details><summary>Figures</summary><div class=scroll><table>\
         <tr><th class=word>row<th class=word>variant<th>{unit}<th>lowest<th>highest<th>p50 µs\
         <th>p90 µs<th>p99 µs<th>p99.9 µs<th>gain<th>source</tr>\n"
    );
    for row in &table.rows {
        for (n, (variant, cell)) in table.variants.iter().zip(&row.cells).enumerate() {
            let figure = table.figure(cell).map(|it| [it.median, it.min, it.max]);
            let latency = cell.latency().map(|it| it.all());
            let mut words: Vec<String> = Vec::new();
            words.extend(figure.map_or(["–"; 3].map(str::to_owned), |all| all.map(short)));
            words.extend(latency.map_or(["–"; 4].map(str::to_owned), |all| all.map(short)));
            words.push(table.gain(row, n).map_or_else(String::new, factor));
            words.push(row.source.map_or("", |source| source.words).to_owned());
            html += &format!(
                "<tr><td class=word>{}<td class=word>{}<td>{}</tr>\n",
                escaped(&row.title),
                escaped(variant),
                words.join("<td>")
            );
        }
    }
    html + "</table></div></details>\n"
}

#[cfg(test)]
mod tests {
    use super::super::table::examples::{broken, cell, table};
    use super::*;

    #[test]
    fn a_page_that_exists_is_only_replaced_with_leave() {
        let directory = tempfile::TempDir::new().expect("a temporary directory");
        let path = directory.path().join("report.html");
        std::fs::write(&path, "old").expect("a file");
        let refused = create(&path, false).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|text| text.contains("is there already")));
        assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), Some("old"));
        assert!(create(&path, true).is_ok());
    }

    #[test]
    fn the_reason_of_a_failure_is_shown_and_escaped() {
        let html = section(&table(&["off", "on"], vec![cell([1.0; 3]), broken()]), 0);
        assert!(html.contains("on: not &lt;here&gt;") && !html.contains("<here>"), "{html}");
    }

    #[test]
    fn a_card_tells_the_gain_of_the_last_variant() {
        let cells = vec![cell([100.0; 3]), cell([10.0; 3]), cell([300.0; 3])];
        assert!(card(&table(&["a", "b", "c"], cells), 0).contains("<b class=up>3.00×</b>"));
    }
}
