//! A table as text: its rows, and the variants of each one below the other.
//!
//! Invariant: every variant that could not be measured is named with the reason.

use crate::ablation::gain_table::{Cell, Table, latency};
use crate::table::{MinMedianMax, aligned, strings};

const LINE_CHARS: usize = 100;

/// The table as text.
pub(crate) fn text(table: &Table<'_>) -> String {
    let (what, unit) = (table.what.name(), table.unit.name());
    let mut text = format!("\n== {what}: {}, {unit} ==\n{}", table.title, wrapped(&table.note));
    text += &aligned(&lines(table));
    text.extend(table.reasons().iter().map(|line| format!("{line}\n")));
    text
}

fn lines(table: &Table<'_>) -> Vec<Vec<String>> {
    let unit = table.unit.name();
    let mut lines = vec![strings(["", "", unit, "low–high", "p50 µs", "p99 µs"])];
    lines[0].extend(strings(["CPU ns", "gain", "source"]));
    for row in &table.rows {
        for (n, cell) in row.cells.iter().enumerate() {
            let first = |text: String| if n == 0 { text } else { String::new() };
            let mut line = vec![first(row.title.clone()), cell.key.name.clone()];
            line.extend(figures(table, cell));
            line.extend([percentile(cell, 0), percentile(cell, 2), cpu(cell)]);
            line.push(table.gain(row, n).map_or_else(String::new, factor));
            line.push(first(row.source.map_or("", |source| source.words).to_owned()));
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
fn cpu(cell: &Cell<'_>) -> String {
    let figure = MinMedianMax::of(&cell.samples, |sample| sample.cpu_ns);
    figure.map_or_else(|| "–".to_owned(), |it| short(it.median))
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
fn factor(gain: f64) -> String {
    if gain < 10.0 { format!("{gain:.2}×") } else { format!("{gain:.0}×") }
}

/// A figure with at least three digits.
fn short(figure: f64) -> String {
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
    fn each_variant_is_a_line_with_its_gain_and_the_first_has_the_source() {
        let text = text(&table(&[("off", Some([100.0; 3])), ("on", Some([116.0; 3]))]));
        let words = |name: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.contains(name)).unwrap_or_default();
            line.split_whitespace().map(str::to_owned).collect()
        };
        let off = "Engine, depth 1 off 100 100–100 10.0 40.0 10.0M +16 %";
        let on = "on 116 116–116 10.0 40.0 8621K 1.16×";
        assert_eq!((words(" off ").join(" "), words(" on ").join(" ")), (off.into(), on.into()));
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
