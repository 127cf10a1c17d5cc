//! Figures over the rounds, and lines of cells as aligned text.
//!
//! Invariant: text and JSON show the same summary of the same samples.

use serde_json::{Value, json};

/// A figure over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MinMedianMax {
    /// The middle round; with an even number of rounds the mean of the two in the middle.
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl MinMedianMax {
    /// The summary of one figure of the samples; `None` if there are none.
    pub(crate) fn of<T>(samples: &[T], figure: impl Fn(&T) -> f64) -> Option<MinMedianMax> {
        let mut sorted: Vec<f64> = samples.iter().map(figure).collect();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = sorted.first().zip(sorted.last())?;
        let middle = sorted.get((sorted.len() - 1) / 2..=sorted.len() / 2)?;
        Some(MinMedianMax { median: middle.iter().sum::<f64>() / middle.len() as f64, min, max })
    }

    pub(crate) fn to_json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

/// One figure divided by another; 0 where that is not possible.
pub(crate) fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

pub(crate) fn strings<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

/// Aligns the columns of `lines`, the first of which has the titles: words to the left, that is the
/// first column, those without a title and `source`; figures to the right.
pub(crate) fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let chars = |cell: &String| cell.chars().count();
    let width = |column| lines.iter().filter_map(|line| line.get(column)).map(chars).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let is_word = |column: usize| {
        let title = lines.first().and_then(|titles| titles.get(column));
        column == 0 || title.is_some_and(|title| title.is_empty() || title == "source")
    };
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if is_word(column) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_the_median_minimum_and_maximum_of_the_rounds() {
        let of = |figures: &[f64]| {
            MinMedianMax::of(figures, |figure| *figure).map(|it| [it.median, it.min, it.max])
        };
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some([2.0, 1.0, 3.0]));
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), Some([2.5, 1.0, 4.0]));
        assert_eq!(of(&[7.0]), Some([7.0, 7.0, 7.0]));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn columns_are_aligned_by_characters_and_words_to_the_left() {
        let lines = [strings(["a", "", "µs", "source"]), strings(["long", "b", "1", "5×"])];
        assert_eq!(aligned(&lines), "a        µs  source\nlong  b   1  5×\n");
    }
}
