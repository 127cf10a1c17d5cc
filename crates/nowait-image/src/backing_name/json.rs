//! QEMU's description of a backing file by JSON: nested objects, or keys with dots in place of them.
//!
//! Invariant: each option has a meaning here, or is known to concern only how QEMU does its work.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::backing_name::nbd::Server;
use crate::backing_name::{ParsedName, Place};
use crate::file_name::plain_name;
use crate::formats::qcow2::header::MAX_NAME_BYTES;
use crate::formats::table::by_name;

/// The most objects in each other in a backing name of JSON.
/// Beyond it: the name is refused.
const MAX_DEPTH: usize = 4;

/// Options that change no byte that a guest reads (qapi/block-core.json).
const WITHOUT_EFFECT: [&str; 15] = [
    "aio",
    "auto-read-only",
    "cache.direct",
    "cache.no-flush",
    "detect-zeroes",
    "discard",
    "drop-cache",
    "force-share",
    "locking",
    "node-name",
    "open-timeout",
    "read-only",
    "reconnect-delay",
    "server.keep-alive",
    "server.numeric",
];

/// Parses the JSON of a name.
///
/// # Errors
/// The reason, in words to follow the name.
pub(super) fn parse(text: &str) -> Result<ParsedName, String> {
    if text.len() > MAX_NAME_BYTES as usize {
        return Err("is too long".into());
    }
    let object: Map<String, Value> =
        serde_json::from_str(text).map_err(|_| "is not a JSON object".to_owned())?;
    let mut options = Options::default();
    options.add("", &object, 1)?;
    let driver = options.0.get("driver").map(String::as_str);
    let format = driver.and_then(by_name);
    let format = match driver {
        Some(_) if format.is_some() => format,
        None if options.0.keys().any(|key| key.starts_with("file.")) => None,
        _ => return Ok(ParsedName { place: options.place()?, format: None }),
    };
    options.take("driver");
    let below = options.below("file.");
    options.end()?;
    Ok(ParsedName { place: below.place()?, format })
}

/// The options of a driver, with dots in their keys in place of objects.
#[derive(Default)]
struct Options(BTreeMap<String, String>);

impl Options {
    /// Adds those of `object`, with `prefix` before their keys.
    fn add(
        &mut self,
        prefix: &str,
        object: &Map<String, Value>,
        depth: usize,
    ) -> Result<(), String> {
        for (key, value) in object {
            let key = format!("{prefix}{key}");
            let value = match value {
                Value::Object(inner) if depth < MAX_DEPTH => {
                    self.add(&format!("{key}."), inner, depth + 1)?;
                    continue;
                }
                Value::String(text) => text.clone(),
                Value::Bool(_) | Value::Number(_) => value.to_string(),
                Value::Object(_) | Value::Array(_) | Value::Null => return Err(unsupported(&key)),
            };
            if self.0.insert(key.clone(), value).is_some() {
                return Err(format!("has the option '{key}' twice"));
            }
        }
        Ok(())
    }

    fn take(&mut self, key: &str) -> Option<String> {
        self.0.remove(key)
    }

    /// Takes those whose keys begin with `prefix`, without it.
    fn below(&mut self, prefix: &str) -> Self {
        let (mut below, all) = (Self::default(), std::mem::take(&mut self.0));
        for (key, value) in all {
            match key.strip_prefix(prefix) {
                Some(key) => below.0.insert(key.to_owned(), value),
                None => self.0.insert(key, value),
            };
        }
        below
    }

    /// Checks that none is left that has a meaning.
    fn end(&self) -> Result<(), String> {
        let left = self.0.keys().find(|key| !WITHOUT_EFFECT.contains(&key.as_str()));
        left.map_or(Ok(()), |key| Err(unsupported(key)))
    }

    /// The file or the export that the options of its driver describe.
    fn place(mut self) -> Result<Place, String> {
        let driver = self.take("driver");
        let place = match driver.as_deref() {
            Some("file" | "host_device") => {
                let name = self.filename()?;
                // The name of this driver has no protocol.
                let has_protocol = plain_name(name.as_ref()).is_none() || name.starts_with("file:");
                Place::File(if has_protocol { format!("./{name}") } else { name }.into())
            }
            Some("nbd") => self.nbd()?,
            Some(other) => return Err(format!("has the driver '{other}', which is not supported")),
            None => {
                let name = self.filename()?;
                if name.starts_with("json:") {
                    return Err("has a description in a description".into());
                }
                Place::parse(name.as_ref())?
            }
        };
        self.end()?;
        Ok(place)
    }

    fn filename(&mut self) -> Result<String, String> {
        let name = self.take("filename").unwrap_or_default();
        match name.is_empty() || name.contains('\0') {
            true => Err("names no file".into()),
            false => Ok(name),
        }
    }

    /// The export that the options of driver nbd describe.
    fn nbd(&mut self) -> Result<Place, String> {
        let mut either = |key: &str| self.take(&format!("server.{key}")).or_else(|| self.take(key));
        let (host, port, path) = (either("host"), either("port"), either("path"));
        let export = self.take("export").unwrap_or_default();
        let (server, kind) = match (&host, &path) {
            (Some(host), None) => {
                let port = port.as_deref().unwrap_or("10809");
                (Server::Tcp { host, port }, "inet")
            }
            (None, Some(path)) => (Server::Unix(path), "unix"),
            (Some(_), Some(_)) => return Err("names two servers".into()),
            (None, None) => {
                self.take("server.type");
                self.end()?;
                return Err("names no server".into());
            }
        };
        match self.take("server.type") {
            Some(told) if told != kind => Err(format!("has no server of type '{told}'")),
            _ => server.export(&export),
        }
    }
}

fn unsupported(key: &str) -> String {
    format!("has the option '{key}', which is not supported")
}
