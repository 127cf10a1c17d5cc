//! The tables of the NBD servers as an HTML page.
//!
//! Invariant: its figures are the same as in the text.

use crate::comparison::{Comparison, figure_titles};
use crate::page::{begin, escaped};
use crate::report::Report;
use crate::server::ServerKind;

/// The page.
pub(crate) fn page(report: &Report) -> String {
    let mut html = begin("nowait bench peers", &report.heading());
    if report.interrupted {
        html += "<p class=warn>Stopped before the end: some tables are missing.</p>\n";
    }
    for failure in &report.failures {
        html += &format!("<p class=warn>{}</p>\n", escaped(&failure.problem));
    }
    let mut terms = None;
    for comparison in &report.comparisons {
        if terms.replace(comparison.terms) != Some(comparison.terms) {
            let heading = report.heading_of_table(comparison.terms);
            html += &format!("<h2>{}</h2>\n", escaped(&comparison.terms.to_string()));
            for line in heading.lines().filter(|line| !line.is_empty()).skip(1) {
                html += &format!("<p>{}</p>\n", escaped(line));
            }
        }
        html += &section(comparison);
    }
    html + "</html>\n"
}

/// The section of one workload: a bar for the requests per second of each server, and all figures.
fn section(comparison: &Comparison) -> String {
    let title = escaped(&comparison.workload.to_string());
    let mut html = format!("<section><h2>{title}</h2>\n<div class=scroll><table>\n<tr>");
    let titles = ["server".to_owned(), String::new()].into_iter();
    for title in titles.chain(figure_titles(&comparison.workload)) {
        html += &format!("<th>{}</th>", escaped(&title));
    }
    html += "<th>nowait ÷ it</th></tr>\n";
    let most =
        comparison.rows.iter().map(|row| row.iops().median).fold(f64::MIN_POSITIVE, f64::max);
    for row in &comparison.rows {
        let ours = if row.server == ServerKind::Nowait { " class=ours" } else { "" };
        let percent = 100.0 * row.iops().median / most;
        let mut cells = comparison.cells(row).into_iter();
        let name = cells.next().unwrap_or_default();
        html += &format!("<tr{ours}><td class=word>{}</td>", escaped(&name));
        html += &format!("<td class=bar><i style=\"width:{percent:.0}%\"></i></td>");
        for cell in cells {
            html += &format!("<td>{}</td>", escaped(&cell));
        }
        html += "</tr>\n";
    }
    html + "</table></div></section>\n"
}
