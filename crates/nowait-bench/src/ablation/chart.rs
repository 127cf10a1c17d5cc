//! Charts as inline SVG: gains as bars from 1× on, latency percentiles as dots on a line.
//!
//! Invariant: both axes are logarithmic, so a doubling and a halving have the same length.

use crate::ablation::gain_table::{Latency, Metric, Row, Table, latency};
use crate::ablation::text::{factor, short};
use crate::page::escaped;

const WIDTH: f64 = 560.0;
const LABEL_WIDTH: f64 = 200.0;
/// The longest text that fits into `LABEL_WIDTH`.
const LABEL_CHARS: usize = 30;
const VALUE_WIDTH: f64 = 92.0;
const LINE_HEIGHT: f64 = 19.0;
const HEAD_HEIGHT: f64 = 20.0;
const BAR_HEIGHT: f64 = 11.0;
const GAP: f64 = 6.0;
/// The minimum distance between labels of the axis.
const TICK_DISTANCE: f64 = 38.0;

/// Maps figures to horizontal positions between the labels and the values.
struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    /// The scale for the figures above 0; `None` if there are none.
    fn over(figures: impl Iterator<Item = f64>) -> Option<Scale> {
        let (low, high) = figures
            .filter(|figure| *figure > 0.0 && figure.is_finite())
            .fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), it| (low.min(it), high.max(it)));
        (high > 0.0).then_some(Scale { low: low / 1.05, high: high * 1.05 })
    }

    fn x(&self, figure: f64) -> f64 {
        let part = (figure / self.low).ln() / (self.high / self.low).ln();
        LABEL_WIDTH + part.clamp(0.0, 1.0) * (WIDTH - LABEL_WIDTH - VALUE_WIDTH)
    }

    /// The grid lines and their labels at round figures.
    fn ticks(&self, height: f64, name: impl Fn(f64) -> String) -> String {
        let fine: &[f64] = if self.high / self.low < 4.0 {
            &[1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
        } else if self.high / self.low < 100.0 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        // 1 comes first, so its label is never dropped for lack of room.
        let all = (-3..9).flat_map(|power| fine.iter().map(move |step| step * 10f64.powi(power)));
        let (mut svg, mut taken) = (String::new(), Vec::new());
        for figure in std::iter::once(1.0).chain(all) {
            let x = self.x(figure);
            let near = taken.iter().any(|other: &f64| (other - x).abs() < TICK_DISTANCE);
            if figure < self.low || figure > self.high || near {
                continue;
            }
            taken.push(x);
            let label = name(figure);
            svg += &format!(
                "<line class=grid x1={x:.1} x2={x:.1} y1={HEAD_HEIGHT} y2={height:.1} />\
                 <text class=tick x={x:.1} y=12 text-anchor=middle>{label}</text>"
            );
        }
        svg
    }
}

/// One line of a chart.
struct Line<'a> {
    row: &'a Row<'a>,
    variant: usize,
    label: &'a str,
    y: f64,
}

/// The lines of a chart, the titles above groups of them, and its height.
struct Layout<'a> {
    lines: Vec<Line<'a>>,
    titles: String,
    height: f64,
}

impl<'a> Layout<'a> {
    /// One line for each cell that `drawn` accepts. If rows have several such cells, or long titles,
    /// the title of each row is above its lines.
    fn of(table: &'a Table<'a>, drawn: impl Fn(&Row<'_>, usize) -> bool) -> Layout<'a> {
        let drawn =
            |row: &Row<'_>| (0..row.cells.len()).filter(|&n| drawn(row, n)).collect::<Vec<_>>();
        let is_group =
            |row: &Row<'_>| drawn(row).len() > 1 || row.title.chars().count() > LABEL_CHARS;
        let grouped = table.rows.iter().any(is_group);
        let mut layout = Layout { lines: Vec::new(), titles: String::new(), height: HEAD_HEIGHT };
        for row in &table.rows {
            let variants = drawn(row);
            if variants.is_empty() {
                continue;
            }
            layout.height += GAP;
            if grouped {
                let (y, title) = (layout.next() + 4.0, escaped(&row.title));
                layout.titles += &format!("<text class=title x=0 y={y:.1}>{title}</text>");
            }
            for variant in variants {
                let name = row.cells.get(variant).map_or("", |cell| cell.key.name.as_str());
                let label = if grouped { name } else { &row.title };
                let y = layout.next();
                layout.lines.push(Line { row, variant, label, y });
            }
        }
        layout
    }

    /// The vertical centre of the next line.
    fn next(&mut self) -> f64 {
        self.height += LINE_HEIGHT;
        self.height - LINE_HEIGHT / 2.0
    }
}

fn label(text: &str, y: f64) -> String {
    let (x, y, text) = (LABEL_WIDTH - 10.0, y + 4.0, escaped(text));
    format!("<text x={x} y={y:.1} text-anchor=end>{text}</text>")
}

fn value(text: &str, y: f64) -> String {
    let (x, y) = (WIDTH, y + 4.0);
    format!("<text class=value x={x} y={y:.1} text-anchor=end>{text}</text>")
}

fn svg(name: &str, height: f64, content: &str) -> String {
    let name = escaped(name);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=img aria-label=\"{name}\">{content}</svg>"
    )
}

/// Bars of the gains, with a mark at the gain that the source reports; `None` if there are no
/// gains.
pub(crate) fn gains(table: &Table<'_>) -> Option<String> {
    let Layout { lines, titles, height } =
        Layout::of(table, |row, variant| table.gain(row, variant).is_some());
    let sources = lines.iter().filter_map(|line| line.row.source?.factor);
    let figures = lines.iter().filter_map(|line| table.gain(line.row, line.variant));
    let scale = Scale::over(figures.chain(sources).chain([0.9, 1.0, 1.1]))?;
    if lines.is_empty() {
        return None;
    }
    let mut content = scale.ticks(height, |figure| format!("{}×", round(figure))) + &titles;
    let one = scale.x(1.0);
    for line in &lines {
        let Some(gain) = table.gain(line.row, line.variant) else { continue };
        let end = scale.x(gain);
        let (x, width) = (one.min(end), (end - one).abs().max(1.0));
        let class = class_of(gain);
        let y = line.y - BAR_HEIGHT / 2.0;
        content += &format!(
            "<rect class={class} x={x:.1} y={y:.1} width={width:.1} height={BAR_HEIGHT} rx=2 />"
        );
        // The source reports the gain of the complete mechanism.
        let whole = line.variant + 1 == line.row.cells.len();
        if let Some(mark) = line.row.source.and_then(|source| source.factor).filter(|_| whole) {
            let x = scale.x(mark);
            let (top, bottom) = (line.y - 8.0, line.y + 8.0);
            content +=
                &format!("<line class=mark x1={x:.1} x2={x:.1} y1={top:.1} y2={bottom:.1} />");
        }
        content += &label(line.label, line.y);
        content += &value(&factor(gain), line.y);
    }
    content +=
        &format!("<line class=one x1={one:.1} x2={one:.1} y1={HEAD_HEIGHT} y2={height:.1} />");
    Some(svg(&format!("gains: {}", table.title), height, &content))
}

/// Dots at the percentiles; `None` if no latencies were measured.
pub(crate) fn latencies(table: &Table<'_>) -> Option<String> {
    let latency = |row: &Row<'_>, variant: usize| latency(row.cells.get(variant)?);
    let Layout { lines, titles, height } =
        Layout::of(table, |row, variant| latency(row, variant).is_some());
    let of = |line: &Line<'_>| latency(line.row, line.variant);
    let scale = Scale::over(lines.iter().filter_map(of).flatten())?;
    let mut content = scale.ticks(height, |figure| format!("{} µs", round(figure))) + &titles;
    for line in &lines {
        let Some(latency) = of(line) else { continue };
        // This engine, or the mechanism switched on, is highlighted.
        let ours = (table.gain == Metric::FirstOver) == (line.variant == 0);
        content += &dots(&scale, &latency, line.y, if ours { "ours" } else { "theirs" });
        content += &label(line.label, line.y);
        let text = format!("{} / {}", short(latency[0]), short(latency[2]));
        content += &value(&text, line.y);
    }
    Some(svg(&format!("latency percentiles: {}", table.title), height, &content))
}

fn dots(scale: &Scale, latency: &Latency, y: f64, class: &str) -> String {
    let (from, to) = (scale.x(latency[0]), scale.x(latency[3]));
    let mut svg = format!(
        "<g class={class}><line class=range x1={from:.1} x2={to:.1} y1={y:.1} y2={y:.1} />"
    );
    for (figure, radius) in latency.iter().zip([4.5, 3.6, 2.8, 2.0]) {
        let x = scale.x(*figure);
        svg += &format!("<circle cx={x:.1} cy={y:.1} r={radius} />");
    }
    svg + "</g>"
}

/// Removes the rounding error of floating-point arithmetic from a round figure.
fn round(figure: f64) -> f64 {
    (figure * 1000.0).round() / 1000.0
}

/// The CSS class of a gain: gains and losses differ in colour, and a gain of about 1 has none.
pub(crate) fn class_of(gain: f64) -> &'static str {
    match gain {
        ..0.97 => "down",
        0.97..1.03 => "even",
        _ => "up",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ablation::gain_table::examples::table;

    #[test]
    fn a_gain_is_a_bar_to_the_right_of_1_and_a_loss_one_to_the_left() {
        let of = |iops: f64| Some([iops; 3]);
        let variants = [("a", of(100.0)), ("b", of(200.0)), ("c", of(50.0)), ("d", None)];
        let svg = gains(&table(&variants)).unwrap_or_default();
        assert_eq!(svg.matches("<rect class=up").count(), 1, "{svg}");
        assert_eq!(svg.matches("<rect class=down").count(), 1, "{svg}");
        assert!(svg.contains(">2.00×<") && svg.contains(">0.50×<"), "{svg}");
    }

    #[test]
    fn each_measured_variant_has_a_dot_for_each_percentile() {
        let svg = latencies(&table(&[("a", Some([100.0; 3])), ("b", None)])).unwrap_or_default();
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }

    #[test]
    fn a_title_that_is_too_long_for_a_label_stands_above_its_line() {
        let mut table = table(&[("a", Some([100.0; 3])), ("b", Some([200.0; 3]))]);
        let titles =
            |table: &_| gains(table).unwrap_or_default().matches("<text class=title").count();
        assert_eq!(titles(&table), 0);
        table.rows[0].title = "r".repeat(LABEL_CHARS + 1);
        assert_eq!(titles(&table), 1);
    }

    #[test]
    fn a_table_without_figures_has_no_chart() {
        let table = table(&[("a", None), ("b", None)]);
        assert!(gains(&table).is_none() && latencies(&table).is_none());
    }
}
