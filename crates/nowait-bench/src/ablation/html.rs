//! A table as a part of the page: its gains at a glance, charts, and figures.
//!
//! Invariant: text from outside is escaped.

use crate::ablation::chart::{class_of, gains, latencies};
use crate::ablation::gain_table::{Metric, Row, Table, latency};
use crate::ablation::text::{cpu, factor, short};
use crate::page::escaped;
use crate::table::{html_cells, strings};

/// The gains shown on the card of a table: of its last variant, or of this engine over all others.
fn main_gains(table: &Table<'_>) -> Vec<f64> {
    let last = table.variants().len().saturating_sub(1);
    let of = |row: &Row<'_>| match table.gain {
        Metric::OverFirst => vec![table.gain(row, last)],
        Metric::FirstOver => (1..=last).map(|n| table.gain(row, n)).collect(),
    };
    let mut gains: Vec<f64> = table.rows.iter().flat_map(of).flatten().collect();
    gains.sort_by(f64::total_cmp);
    gains
}

/// The link to a table, with its gains.
pub(crate) fn card(table: &Table<'_>, n: usize) -> String {
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

/// The section of a table.
pub(crate) fn section(table: &Table<'_>, n: usize) -> String {
    let (title, note) = (escaped(&table.title), escaped(&table.note));
    let mut html = format!("<section id=t{n}><h2>{title}</h2><p>{note}</p>\n<div class=charts>");
    if let Some(svg) = gains(table) {
        let variants = table.variants();
        let name = match (variants.as_slice(), table.gain) {
            ([first, second], Metric::OverFirst) => format!("{second} ÷ {first}"),
            ([first, other], Metric::FirstOver) => format!("{first} ÷ {other}"),
            (all, Metric::FirstOver) => {
                format!("{} ÷ each other", all.first().unwrap_or(&""))
            }
            (all, Metric::OverFirst) => format!("each ÷ {}", all.first().unwrap_or(&"")),
        };
        let source = table.rows.iter().any(|row| row.source.is_some_and(|it| it.factor.is_some()));
        let mark = if source { "; dashed: the source's gain" } else { "" };
        let (unit, name) = (table.unit.name(), escaped(&name));
        html += &format!(
            "<figure><figcaption>Gain in {unit}: {name}{mark}</figcaption>{svg}</figure>\n"
        );
    }
    if let Some(svg) = latencies(table) {
        html += &format!(
            "<figure><figcaption>Latency: dots at p50, p90, p99, p99.9; figures p50 / p99 in \
             µs</figcaption>{svg}</figure>\n"
        );
    }
    html += "</div>\n";
    let warn = |line: &String| format!("<p class=warn>{}</p>\n", escaped(line));
    html.extend(table.reasons().iter().map(warn));
    html + &figures(table) + "</section>\n"
}

fn figures(table: &Table<'_>) -> String {
    let mut titles = strings(["row", "variant", table.unit.name(), "lowest", "highest", "p50 µs"]);
    titles.extend(strings(["p90 µs", "p99 µs", "p99.9 µs", "CPU ns", "gain", "source"]));
    let mut html = format!(
        "<details><summary>Figures</summary><div class=scroll><table><tr>{}</tr>\n",
        html_cells("th", 2, &titles)
    );
    for row in &table.rows {
        for (n, cell) in row.cells.iter().enumerate() {
            let mut words = vec![row.title.clone(), cell.key.name.clone()];
            let figure = table.figure(cell).map(|it| [it.median, it.min, it.max].map(short));
            words.extend(figure.unwrap_or(["–"; 3].map(str::to_owned)));
            words.extend(latency(cell).map_or(["–"; 4].map(str::to_owned), |all| all.map(short)));
            words.push(cpu(cell));
            words.push(table.gain(row, n).map_or_else(String::new, factor));
            words.push(row.source.map_or("", |source| source.words).to_owned());
            html += &format!("<tr>{}</tr>\n", html_cells("td", 2, &words));
        }
    }
    html + "</table></div></details>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ablation::gain_table::examples::table;

    #[test]
    fn the_reason_of_a_failure_is_shown_and_escaped() {
        let html = section(&table(&[("off", Some([1.0; 3])), ("on", None)]), 0);
        assert!(html.contains("on: not &lt;here&gt;") && !html.contains("<here>"), "{html}");
    }

    #[test]
    fn a_card_shows_the_gain_of_the_last_variant() {
        let of = |iops: f64| Some([iops; 3]);
        let variants = [("a", of(100.0)), ("b", of(10.0)), ("c", of(300.0))];
        assert!(card(&table(&variants), 0).contains("<b class=up>3.00×</b>"));
    }
}
