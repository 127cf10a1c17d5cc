//! The report as one page: no network, no script, light and dark.
//!
//! Invariant: the page contains everything that it shows; text from outside is escaped.

use crate::ablation::ablation_report::EngineReport;
use crate::ablation::chart::{class_of, gains, latencies};
use crate::ablation::result_table::{Metric, Row, Table};
use crate::ablation::text::{factor, short};
use crate::page::{begin, escaped};

/// The page.
pub(crate) fn page(report: &EngineReport) -> String {
    let mut html = begin("nowait bench", &report.heading());
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

/// The gains shown on the card of a table: of its last variant, or of this engine over all others.
fn main_gains(table: &Table) -> Vec<f64> {
    let last = table.variants.len().saturating_sub(1);
    let of = |row: &Row| match table.gain {
        Metric::OverFirst => vec![table.gain(row, last)],
        Metric::FirstOver => (1..=last).map(|n| table.gain(row, n)).collect(),
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
            _ if table.gain == Metric::FirstOver => "this engine ÷ each other".to_owned(),
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
    let mut reported = Vec::new();
    for (variant, cell) in table.rows.iter().flat_map(|row| table.variants.iter().zip(&row.cells)) {
        let line = cell.problem.as_ref().map(|problem| format!("{variant}: {problem}"));
        if let Some(line) = line.filter(|line| !reported.contains(line)) {
            reported.push(line);
        }
    }
    reported.iter().map(|line| format!("<p class=warn>{}</p>\n", escaped(line))).collect()
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
    use super::*;
    use crate::ablation::result_table::examples::{broken, cell, table};

    #[test]
    fn the_reason_of_a_failure_is_shown_and_escaped() {
        let html = section(&table(&["off", "on"], vec![cell([1.0; 3]), broken()]), 0);
        assert!(html.contains("on: not &lt;here&gt;") && !html.contains("<here>"), "{html}");
    }

    #[test]
    fn a_card_shows_the_gain_of_the_last_variant() {
        let cells = vec![cell([100.0; 3]), cell([10.0; 3]), cell([300.0; 3])];
        assert!(card(&table(&["a", "b", "c"], cells), 0).contains("<b class=up>3.00×</b>"));
    }
}
