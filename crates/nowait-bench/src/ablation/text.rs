//! A table as text: two variants side by side, more of them one below the other.
//!
//! Invariant: every variant that could not be measured is named with the reason.

use std::fmt;

use crate::ablation::result_table::{Cell, Row, Table};

/// Tables with more variants than this have one line for each variant.
const COLUMNS_MAX: usize = 2;
const LINE_CHARS: usize = 100;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n== {}: {}, {} ==", self.what.name(), self.title, self.unit.name())?;
        if !self.note.is_empty() {
            f.write_str(&wrapped(&self.note))?;
        }
        let lines = if self.variants.len() <= COLUMNS_MAX { beside(self) } else { below(self) };
        f.write_str(&aligned(&lines))?;
        let mut reported = Vec::new();
        for (variant, cell) in self.rows.iter().flat_map(|row| self.variants.iter().zip(&row.cells))
        {
            if let Some(problem) = &cell.problem
                && !reported.contains(&(variant, problem))
            {
                writeln!(f, "{variant}: {problem}")?;
                reported.push((variant, problem));
            }
        }
        Ok(())
    }
}

fn beside(table: &Table) -> Vec<Vec<String>> {
    let timed = table.rows.iter().flat_map(|row| &row.cells).any(|cell| cell.latency().is_some());
    let mut titles = vec![String::new()];
    for variant in &table.variants {
        titles.extend([variant.clone(), "low–high".to_owned()]);
        if timed {
            titles.push("p99 µs".to_owned());
        }
    }
    titles.extend(["gain".to_owned(), "source".to_owned()]);
    let mut lines = vec![titles];
    for row in &table.rows {
        let mut line = vec![row.title.clone()];
        for cell in &row.cells {
            line.extend(figures(table, cell));
            if timed {
                line.push(cell.latency().map_or("–".to_owned(), |it| short(it.p99_us)));
            }
        }
        line.extend([gain(table, row, 1), source(row)]);
        lines.push(line);
    }
    lines
}

fn below(table: &Table) -> Vec<Vec<String>> {
    let titles = ["", "", table.unit.name(), "low–high", "p50 µs", "p99 µs", "gain", "source"];
    let mut lines = vec![titles.map(str::to_owned).to_vec()];
    for row in &table.rows {
        for (n, (variant, cell)) in table.variants.iter().zip(&row.cells).enumerate() {
            let first = |text: String| if n == 0 { text } else { String::new() };
            let mut line = vec![first(row.title.clone()), variant.clone()];
            line.extend(figures(table, cell));
            let latency = cell.latency();
            line.push(latency.map_or("–".to_owned(), |it| short(it.p50_us)));
            line.push(latency.map_or("–".to_owned(), |it| short(it.p99_us)));
            line.extend([gain(table, row, n), first(source(row))]);
            lines.push(line);
        }
    }
    lines
}

fn figures(table: &Table, cell: &Cell) -> [String; 2] {
    table.figure(cell).map_or(["–", "–"].map(str::to_owned), |figure| {
        [short(figure.median), format!("{}–{}", short(figure.min), short(figure.max))]
    })
}

fn gain(table: &Table, row: &Row, variant: usize) -> String {
    table.gain(row, variant).map_or_else(String::new, factor)
}

fn source(row: &Row) -> String {
    row.source.map_or("", |source| source.words).to_owned()
}

/// Wraps `text` to lines of at most `LINE_CHARS`, unless a word is longer.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    let mut used = 0;
    for word in text.split(' ') {
        let chars = word.chars().count();
        let separator = match used {
            0 => "",
            _ if used + 1 + chars > LINE_CHARS => {
                used = 0;
                "\n"
            }
            _ => " ",
        };
        used += chars + usize::from(separator == " ");
        lines.push_str(separator);
        lines.push_str(word);
    }
    lines + "\n"
}

/// A gain in the form `1.16×`.
pub(crate) fn factor(gain: f64) -> String {
    if gain < 10.0 { format!("{gain:.2}×") } else { format!("{gain:.0}×") }
}

/// A figure with at least three digits.
pub(crate) fn short(figure: f64) -> String {
    match figure {
        ..10.0 => format!("{figure:.2}"),
        10.0..100.0 => format!("{figure:.1}"),
        100.0..1e5 => format!("{figure:.0}"),
        1e5..1e7 => format!("{:.0}K", figure / 1e3),
        _ => format!("{:.1}M", figure / 1e6),
    }
}

/// Aligns the columns: text to the left, figures to the right.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| lines.iter().filter_map(move |line| line.get(column));
    let widths: Vec<usize> = (0..columns)
        .map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    let untitled = |column: usize| lines.first().is_some_and(|line| line[column].is_empty());
    let mut text = String::new();
    for line in lines {
        let start = text.len();
        for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
            if column > 0 {
                text.push_str("  ");
            }
            if untitled(column) || column + 1 == columns {
                text.push_str(&format!("{cell:<width$}"));
            } else {
                text.push_str(&format!("{cell:>width$}"));
            }
        }
        text.truncate(start + text[start..].trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ablation::result_table::examples::{broken, cell, table};

    #[test]
    fn two_variants_are_shown_side_by_side_with_gain_and_source() {
        let text = table(&["off", "on"], vec![cell([100.0; 3]), cell([116.0; 3])]).to_string();
        let line = text.lines().find(|line| line.starts_with("poll, depth 1")).unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = ["poll,", "depth", "1", "100", "100–100", "40.0"];
        assert_eq!(words[..6], expected, "{text}");
        assert_eq!(words[6..], ["116", "116–116", "40.0", "1.16×", "+16", "%"], "{text}");
        assert!(text.contains("\na note\n"), "{text}");
    }

    #[test]
    fn a_variant_that_could_not_be_measured_is_named_with_the_reason() {
        let cells = vec![cell([100.0; 3]), cell([50.0; 3]), broken()];
        let text = table(&["a", "b", "c"], cells).to_string();
        assert!(text.contains("\nc: not <here>\n"), "{text}");
        assert!(text.lines().any(|line| line.contains(" b ") && line.ends_with("0.50×")), "{text}");
    }

    #[test]
    fn a_note_is_wrapped_between_words() {
        let note = ["word"; 50].join(" ");
        let lines = wrapped(&note);
        assert!(lines.lines().count() == 3 && lines.lines().all(|line| line.len() <= LINE_CHARS));
        assert_eq!(lines.replace('\n', " ").trim_end(), note);
    }

    #[test]
    fn figures_keep_three_digits() {
        let figures = [1.234, 12.34, 123.4, 12345.0, 123_456.0, 12_345_678.0];
        assert_eq!(figures.map(short), ["1.23", "12.3", "123", "12345", "123K", "12.3M"]);
    }
}
