//! The objects of a bucket, as S3 lists, puts, reads and deletes them.
//!
//! Invariant: a list is in the order of keys, in pages, and has every object with its prefix.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;

use crate::web_request::Request;

/// An object.
#[derive(Clone, Debug)]
pub struct BucketObject {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its entity tag.
    pub tag: String,
    /// When it was put, in seconds since 1970.
    pub seconds: u64,
}

impl BucketObject {
    fn time(&self) -> DateTime<chrono::Utc> {
        DateTime::from_timestamp(self.seconds as i64, 0).unwrap_or_default()
    }

    /// The date as HTTP has it.
    pub(crate) fn date(&self) -> String {
        self.time().format("%a, %d %b %Y %H:%M:%S GMT").to_string()
    }
}

/// A bucket.
#[derive(Debug)]
pub struct Bucket {
    /// The objects by their paths, with the bucket: `/bucket/folder/name`.
    pub objects: BTreeMap<String, BucketObject>,
    /// The most keys of a page of a list.
    pub page: usize,
    /// Objects that were put, by which their tags differ.
    pub puts: usize,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), page: 1000, puts: 0 }
    }
}

/// The answer to a request.
pub(crate) enum Found<'a> {
    /// A status, headers, each with its line's end, and a body.
    Status(u16, String, String),
    /// An object, of which a part may be asked for.
    Object(&'a BucketObject),
}

fn refused<'a>(status: u16, code: &str) -> Found<'a> {
    Found::Status(status, String::new(), format!("<Error><Code>{code}</Code></Error>"))
}

impl Bucket {
    /// Whether there is the object that `request` names.
    pub(crate) fn has(&self, request: &Request) -> bool {
        self.objects.contains_key(request.plain_path())
    }

    /// Puts the object that `request` names.
    pub(crate) fn insert(&mut self, request: &Request, tag: String, bytes: Vec<u8>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = now.map_or(0, |now| now.as_secs());
        let object = BucketObject { bytes, tag, seconds };
        self.objects.insert(request.plain_path().to_owned(), object);
    }

    /// Does what `request` asks for.
    pub(crate) fn answer(&mut self, request: &Request, knows_no_conditions: bool) -> Found<'_> {
        if request.query().contains("list-type=2") {
            return Found::Status(200, String::new(), self.list(request));
        }
        let path = request.plain_path();
        match request.method.as_str() {
            "PUT" => self.put(request, knows_no_conditions),
            "DELETE" => {
                self.objects.remove(path);
                Found::Status(204, String::new(), String::new())
            }
            _ => self.objects.get(path).map_or_else(|| refused(404, "NoSuchKey"), Found::Object),
        }
    }

    fn put(&mut self, request: &Request, knows_no_conditions: bool) -> Found<'_> {
        let there = self.objects.get(request.plain_path()).map(|object| object.tag.as_str());
        let [new, same] = ["if-none-match", "if-match"].map(|name| request.header(name));
        if knows_no_conditions && (new.is_some() || same.is_some()) {
            return refused(501, "NotImplemented");
        }
        if new.is_some() && there.is_some() || same.is_some() && same != there {
            return refused(412, "PreconditionFailed");
        }
        self.puts += 1;
        let tag = format!("\"put{}\"", self.puts);
        self.insert(request, tag.clone(), request.body.clone());
        Found::Status(200, format!("etag: {tag}\r\n"), String::new())
    }

    fn list(&self, request: &Request) -> String {
        let field = |name: &str| {
            let mut fields = request.query().split('&').filter_map(|it| it.split_once('='));
            let value = fields.find(|(key, _)| *key == name).map_or("", |(_, value)| value);
            value.replace("%2F", "/")
        };
        let bucket = format!("{}/", request.plain_path().trim_end_matches('/'));
        let (prefix, after) = (field("prefix"), field("continuation-token"));
        let keys = self
            .objects
            .iter()
            .filter_map(|(path, object)| Some((path.strip_prefix(bucket.as_str())?, object)));
        let mut keys =
            keys.filter(|(key, _)| key.starts_with(&prefix) && *key > after.as_str()).peekable();
        let mut text = String::from("<ListBucketResult>");
        let mut last = "";
        for (key, object) in keys.by_ref().take(self.page) {
            last = key;
            let date = object.time().format("%Y-%m-%dT%H:%M:%S.000Z");
            let (tag, size) = (object.tag.trim_matches('"'), object.bytes.len());
            let _ = write!(
                text,
                "<Contents><Key>{key}</Key><LastModified>{date}</LastModified><ETag>{tag}</ETag>\
                 <Size>{size}</Size></Contents>"
            );
        }
        if keys.peek().is_some() {
            let _ = write!(text, "<NextContinuationToken>{last}</NextContinuationToken>");
        }
        text + "</ListBucketResult>"
    }
}
