//! The dirty bitmaps that are there from the start: `--bitmap [EXPORT=]NAME`.
//!
//! Invariant: after `check`, each has an export and a name of its own there.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use nowait_server::BitmapSpec;

use crate::config::export_spec::{ExportIndices, NamedExport};
use crate::size;

/// A bitmap of the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartBitmap {
    export: Option<String>,
    name: String,
}

impl fmt::Display for StartBitmap {
    /// The text from which it is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.export {
            Some(export) => write!(f, "{export}={}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl FromStr for StartBitmap {
    type Err = String;

    /// The part before the first `=` is the name of an export.
    fn from_str(text: &str) -> Result<Self, String> {
        let (export, name) = match text.split_once('=') {
            Some((export, name)) => (Some(export.to_owned()), name),
            None => (None, text),
        };
        Ok(Self { export, name: parse_name(name)? })
    }
}

impl StartBitmap {
    /// Its properties.
    pub fn spec(&self) -> BitmapSpec {
        BitmapSpec::new(self.name.clone())
    }

    /// The index of its export in `exports`; the first without a name. There is at least one.
    ///
    /// # Errors
    /// A message for the user: there is none of that name.
    pub fn export_of(&self, exports: &ExportIndices<'_>) -> Result<usize, String> {
        let Some(name) = &self.export else { return Ok(0) };
        exports.get(name).ok_or_else(|| format!("--bitmap {self}: no image has the name '{name}'"))
    }
}

/// Checks that there is an export among `exports` for each of `bitmaps`, and no second one of its name.
///
/// # Errors
/// A message for the user.
pub fn check(bitmaps: &[StartBitmap], exports: &[NamedExport]) -> Result<(), String> {
    let (exports, mut known) = (ExportIndices::of(exports), HashSet::new());
    for bitmap in bitmaps {
        if !known.insert((bitmap.export_of(&exports)?, &bitmap.name)) {
            return Err(format!("--bitmap {bitmap}: it is given twice"));
        }
    }
    Ok(())
}

/// The name of a bitmap.
///
/// # Errors
/// A message that says what a name is.
pub fn parse_name(text: &str) -> Result<String, String> {
    let spec = BitmapSpec::new(text.to_owned());
    spec.check().map_err(|error| error.to_string()).map(|()| spec.name)
}

/// Bytes of a granule.
///
/// # Errors
/// A message with the possible values.
pub fn parse_granularity(text: &str) -> Result<u64, String> {
    let granularity = size::parse(text)?;
    let spec = BitmapSpec { granularity, ..BitmapSpec::new("any".into()) };
    spec.check().map_err(|error| error.to_string()).map(|()| granularity)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(texts: &[&str]) -> Result<Vec<(usize, String)>, String> {
        let names = ["", "data"].map(str::to_owned);
        let exports = names.map(|name| NamedExport { name, image: "x".into() });
        let bitmaps = texts.iter().map(|text| text.parse());
        let bitmaps: Vec<StartBitmap> = bitmaps.collect::<Result<_, _>>()?;
        check(&bitmaps, &exports)?;
        let indices = ExportIndices::of(&exports);
        let found = |it: &StartBitmap| Ok((it.export_of(&indices)?, it.spec().name));
        bitmaps.iter().map(found).collect()
    }

    #[test]
    fn a_bitmap_of_the_start_is_that_of_an_export_and_there_once() {
        let found = checked(&["a", "data=a", "=b=c"]).unwrap();
        assert_eq!(found, [(0, "a".into()), (1, "a".into()), (0, "b=c".into())]);
        for (bad, why) in [
            (&["a", "=a"][..], "--bitmap =a: it is given twice"),
            (&["b=c"], "--bitmap b=c: no image has the name 'b'"),
            (&["data="], "the name of a bitmap has 1 to 1023 bytes and no control characters"),
        ] {
            assert_eq!(checked(bad).unwrap_err(), why);
        }
        assert_eq!(parse_granularity("4K"), Ok(4096));
        assert!(parse_granularity("3K").is_err() && parse_granularity("128M").is_err());
    }
}
