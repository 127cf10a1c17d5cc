//! A table as text: two variants side by side, more of them one below the other.
//!
//! Invariant: every variant that could not be measured is named with the reason.

use crate::ablation::gain_table::{Cell, Row, Table, latency};
use crate::table::{MinMedianMax, aligned, strings};

/// Tables with more variants than this have one line for each variant.
const COLUMNS_MAX: usize = 2;
const LINE_CHARS: usize = 100;

/// The table as text.
pub(crate) fn text(table: &Table<'_>) -> String {
    let (what, unit) = (table.what.name(), table.unit.name());
    let mut text = format!("\n== {what}: {}, {unit} ==\n{}", table.title, wrapped(&table.note));
    let is_narrow = table.variants().len() <= COLUMNS_MAX;
    text += &aligned(&if is_narrow { beside(table) } else { below(table) });
    text.extend(table.reasons().iter().map(|line| format!("{line}\n")));
    text
}

fn beside(table: &Table<'_>) -> Vec<Vec<String>> {
    let is_timed = table.rows.iter().flat_map(|row| &row.cells).any(|it| latency(it).is_some());
    let mut titles = vec![String::new()];
    for variant in table.variants() {
        titles.extend(strings([variant, "low–high"]));
        titles.extend(is_timed.then(|| "p99 µs".to_owned()));
        titles.push("CPU ns".to_owned());
    }
    titles.extend(strings(["gain", "source"]));
    let mut lines = vec![titles];
    for row in &table.rows {
        let mut line = vec![row.title.clone()];
        for cell in &row.cells {
            line.extend(figures(table, cell));
            line.extend(is_timed.then(|| percentile(cell, 2)));
            line.push(cpu(cell));
        }
        line.extend([gain(table, row, 1), source(row)]);
        lines.push(line);
    }
    lines
}

fn below(table: &Table<'_>) -> Vec<Vec<String>> {
    let unit = table.unit.name();
    let mut lines = vec![strings(["", "", unit, "low–high", "p50 µs", "p99 µs"])];
    lines[0].extend(strings(["CPU ns", "gain", "source"]));
    for row in &table.rows {
        for (n, cell) in row.cells.iter().enumerate() {
            let first = |text: String| if n == 0 { text } else { String::new() };
            let mut line = vec![first(row.title.clone()), cell.key.name.clone()];
            line.extend(figures(table, cell));
            line.extend([percentile(cell, 0), percentile(cell, 2), cpu(cell)]);
            line.extend([gain(table, row, n), first(source(row))]);
            lines.push(line);
        }
    }
    lines
}

fn figures(table: &Table<'_>, cell: &Cell<'_>) -> Vec<String> {
    table.figure(cell).map_or_else(
        || strings(["–", "–"]),
        |it| vec![short(it.median), format!("{}–{}", short(it.min), short(it.max))],
    )
}

fn percentile(cell: &Cell<'_>, n: usize) -> String {
    latency(cell).map_or_else(|| "–".to_owned(), |latency| short(latency[n]))
}

/// The processor time for a request.
pub(crate) fn cpu(cell: &Cell<'_>) -> String {
    let figure = MinMedianMax::of(&cell.samples, |sample| sample.cpu_ns);
    figure.map_or_else(|| "–".to_owned(), |it| short(it.median))
}

fn gain(table: &Table<'_>, row: &Row<'_>, variant: usize) -> String {
    table.gain(row, variant).map_or_else(String::new, factor)
}

fn source(row: &Row<'_>) -> String {
    row.source.map_or("", |source| source.words).to_owned()
}

/// Wraps `text` to lines of at most `LINE_CHARS`, unless a word is longer.
fn wrapped(text: &str) -> String {
    let (mut lines, mut used) = (String::new(), 0);
    for word in text.split(' ') {
        let chars = word.chars().count();
        let fits = used + 1 + chars <= LINE_CHARS;
        if used > 0 {
            lines.push(if fits { ' ' } else { '\n' });
        }
        used = if fits && used > 0 { used + 1 + chars } else { chars };
        lines += word;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ablation::gain_table::examples::table;

    #[test]
    fn two_variants_are_shown_side_by_side_with_gain_and_source() {
        let text = text(&table(&[("off", Some([100.0; 3])), ("on", Some([116.0; 3]))]));
        let line =
            text.lines().find(|line| line.starts_with("Engine, depth 1")).unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = ["Engine,", "depth", "1", "100", "100–100", "40.0", "10.0M"];
        assert_eq!(words[..7], expected, "{text}");
        let on = ["116", "116–116", "40.0", "8621K", "1.16×", "+16", "%"];
        assert_eq!(words[7..], on, "{text}");
        assert!(text.contains("\na note\n"), "{text}");
    }

    #[test]
    fn a_variant_that_could_not_be_measured_is_named_with_the_reason() {
        let text = text(&table(&[("a", Some([100.0; 3])), ("b", Some([50.0; 3])), ("c", None)]));
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
