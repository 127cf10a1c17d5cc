//! The HTML frame of reports: no network, no script, light and dark.
//!
//! Invariant: a page contains everything that it shows; text from outside is escaped.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

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
.bar { min-width: 10rem; } .bar i { display: block; height: .7rem; background: var(--theirs); }
.ours .bar i { background: var(--up); } .ours td { font-weight: 600; }
td, th { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } td.word, th.word { text-align: left; }
";

/// Creates the file before the measurement, so that an invalid path is reported immediately.
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

/// The beginning of a page, which `</html>` ends, with a paragraph for each line of `heading`.
pub(crate) fn begin(title: &str, heading: &str) -> String {
    let title = escaped(title);
    let mut html = format!(
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style>\n<h1>{title}</h1>\n"
    );
    for line in heading.lines() {
        html += &format!("<p>{}</p>\n", escaped(line));
    }
    html
}

/// Escapes text for HTML and SVG.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_page_is_only_replaced_with_permission() {
        let directory = tempfile::TempDir::new().expect("a temporary directory");
        let path = directory.path().join("report.html");
        std::fs::write(&path, "old").expect("a file");
        let refused = create(&path, false).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|text| text.contains("is there already")));
        assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), Some("old"));
        assert!(create(&path, true).is_ok());
    }
}
