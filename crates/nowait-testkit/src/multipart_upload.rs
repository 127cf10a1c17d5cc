//! Uploads in parts as S3 and Google's store take them: begun, sent in parts, completed or aborted; and
//! as Azure does, where a list of blocks makes the object.
//!
//! Invariant: the bytes of a part are those that its signed hash names; an object is made only of parts
//! of one upload whose tags the last request lists in order.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ring::digest;

use crate::web_request::Request;

/// The least bytes of a part that is not the last one.
const MIN_PART_BYTES: usize = 5 << 20;

/// The requests of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Begins an upload.
    Begin,
    /// Sends a part.
    Part,
    /// Makes the object.
    Complete,
    /// Drops the parts.
    Abort,
    /// In a bucket: lists objects.
    List,
    /// In a bucket: puts an object.
    Put,
    /// In a bucket: deletes an object.
    Delete,
}

impl Call {
    /// The call that `request` is, if it is one.
    pub(crate) fn of(request: &Request) -> Option<Self> {
        let query = request.query();
        let has = |name: &str| query.split('&').any(|it| it.split('=').next() == Some(name));
        match request.method.as_str() {
            "POST" if has("uploads") => Some(Self::Begin),
            "PUT" if has("partNumber") && has("uploadId") => Some(Self::Part),
            "POST" if has("uploadId") => Some(Self::Complete),
            "DELETE" if has("uploadId") => Some(Self::Abort),
            "PUT" if has("blockid") => Some(Self::Part),
            "PUT" if query == "comp=blocklist" => Some(Self::Complete),
            "GET" if has("list-type") => Some(Self::List),
            "PUT" => Some(Self::Put),
            "DELETE" => Some(Self::Delete),
            _ => None,
        }
    }

    /// Whether it is one of an upload.
    pub(crate) const fn is_of_upload(self) -> bool {
        matches!(self, Self::Begin | Self::Part | Self::Complete | Self::Abort)
    }
}

/// The uploads of a store.
#[derive(Debug, Default)]
pub struct Uploads {
    /// The parts of uploads that are neither completed nor aborted, by their number.
    pub open: BTreeMap<String, BTreeMap<usize, Vec<u8>>>,
    /// The blocks of Azure that are in no object, by their name in base64 as a URL has it.
    pub blocks: BTreeMap<String, Vec<u8>>,
    /// Conditional requests are answered that they are not implemented.
    pub knows_no_conditions: bool,
    /// Uploads that were begun.
    pub begun: usize,
    /// Uploads that were aborted.
    pub aborted: usize,
    /// Parts that have come, again and again if they came so.
    pub parts: usize,
}

/// The result of a call.
pub(crate) enum Outcome {
    /// This status, with headers, each with its line's end, and this body.
    Status(u16, String, String),
    /// The object, and the number of its parts.
    Completed(Vec<u8>, usize),
}

fn refused(status: u16, code: &str) -> Outcome {
    Outcome::Status(status, String::new(), format!("<Error><Code>{code}</Code></Error>"))
}

fn hash(data: &[u8]) -> String {
    let digest = digest::digest(&digest::SHA256, data);
    digest.as_ref().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

impl Uploads {
    /// Does what `request` asks for.
    pub(crate) fn answer(&mut self, call: Call, request: &Request) -> Outcome {
        let field = |name: &str| {
            let fields = request.query().split('&').filter_map(|it| it.split_once('='));
            fields.into_iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value)
        };
        let (id, number) = (field("uploadId"), field("partNumber").parse().unwrap_or(0));
        if call == Call::Begin {
            self.begun += 1;
            let id = format!("upload{}", self.begun);
            self.open.insert(id.clone(), BTreeMap::new());
            let body = format!(
                "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
            );
            return Outcome::Status(200, String::new(), body);
        }
        match field("blockid") {
            "" if request.query() == "comp=blocklist" => return self.join_blocks(&request.body),
            "" => {}
            block => {
                self.parts += 1;
                self.blocks.insert(block.to_owned(), request.body.clone());
                return Outcome::Status(201, String::new(), String::new());
            }
        }
        let Some(parts) = self.open.get_mut(id) else { return refused(404, "NoSuchUpload") };
        match call {
            Call::Part => {
                let hash = hash(&request.body);
                if request.header("x-amz-content-sha256").is_some_and(|it| it != hash) {
                    return refused(400, "XAmzContentSHA256Mismatch");
                }
                self.parts += 1;
                parts.insert(number, request.body.clone());
                Outcome::Status(200, format!("etag: \"{hash}\"\r\n"), String::new())
            }
            Call::Abort => {
                self.open.remove(id);
                self.aborted += 1;
                Outcome::Status(204, String::new(), String::new())
            }
            _ => self.complete(id, &request.body),
        }
    }

    /// Makes the object of Azure that `list` says.
    fn join_blocks(&mut self, list: &[u8]) -> Outcome {
        let list = String::from_utf8_lossy(list);
        let mut object = Vec::new();
        let names = list.split("<Uncommitted>").skip(1).filter_map(|it| it.split('<').next());
        let names: Vec<String> = names.map(|it| it.replace('=', "%3D")).collect();
        for name in &names {
            let Some(block) = self.blocks.remove(name) else {
                return refused(400, "InvalidBlockList");
            };
            object.extend(block);
        }
        Outcome::Completed(object, names.len())
    }

    fn complete(&mut self, id: &str, list: &[u8]) -> Outcome {
        let list = String::from_utf8_lossy(list);
        let Some(parts) = self.open.get(id) else { return refused(404, "NoSuchUpload") };
        let listed: Vec<_> = list.split("<Part>").skip(1).collect();
        if listed.is_empty() || listed.len() != parts.len() {
            return refused(400, "InvalidPart");
        }
        let mut object = Vec::new();
        for (place, (listed, (number, data))) in listed.iter().zip(parts).enumerate() {
            let is_last = place + 1 == parts.len();
            if *number != place + 1
                || !listed.contains(&format!("<PartNumber>{number}</PartNumber>"))
                || !listed.contains(&hash(data))
            {
                return refused(400, "InvalidPart");
            }
            if !is_last && data.len() < MIN_PART_BYTES {
                return refused(400, "EntityTooSmall");
            }
            object.extend_from_slice(data);
        }
        let count = parts.len();
        self.open.remove(id);
        Outcome::Completed(object, count)
    }
}
