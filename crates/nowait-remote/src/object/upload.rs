//! The requests of one upload, each made again after transient faults.
//!
//! Invariant: the object is only touched by the last request, which names all parts; parts that were
//! sent are dropped by `abort`.

use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use object_store::multipart::{MultipartStore, PartId};
use object_store::{GetOptions, ObjectMeta, PutPayload};

use crate::object::attempts::{ANSWER_TIME, Answer, Attempts, late, within};
use crate::object::fault::{Failure, Fault, status_of};
use crate::object::http_client::Connector;
use crate::object::object_url::{ObjectUrl, Place};
use crate::object::store::{Object, Timeouts};
use crate::object::upload_client::UploadConnector;
use crate::object::upload_progress::PartProgress;

/// How long the last request is waited for, with which S3 may take minutes.
const COMPLETE_TIME: Duration = Duration::from_secs(300);
/// How long the first requests are made again at most.
const OPEN_TIME: Duration = Duration::from_secs(10);
/// How long the request that aborts an upload is made again.
const ABORT_TIME: Duration = Duration::from_secs(10);
/// How often it is looked at whether a part is late.
const TICK: Duration = Duration::from_secs(1);
/// The longest time for a part: that of a link as slow as [`PartProgress`] takes one.
const PART_TIME: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// The most bytes of the name that the store gives an upload or a part.
const NAME_BYTES: usize = 2048;

const EXISTS: &str = "there is such an object already (to overwrite it: --force)";

/// An upload that has begun.
pub(super) struct Upload {
    object: Object,
    id: String,
    replaces: bool,
    /// The object that had the name before.
    before: Option<ObjectMeta>,
    attempts: Attempts,
    /// Bytes of the parts that are sent at a time.
    bytes_at_once: u64,
    /// Bytes that all connections have sent.
    sent: Arc<AtomicU64>,
}

impl Upload {
    /// Begins an upload to `url` in parts of which `bytes_at_once` bytes are sent at a time.
    ///
    /// # Errors
    /// A message of one line: there is an object already and `replaces` is not set, or the store refuses.
    pub(super) async fn begin(
        url: &ObjectUrl,
        replaces: bool,
        retry: Duration,
        bytes_at_once: u64,
    ) -> Result<Self, String> {
        let timeouts = Timeouts { silence: ANSWER_TIME, all: COMPLETE_TIME, minimum_rate: 0 };
        let creates = !replaces && matches!(url.place, Place::S3(_));
        let inner = Connector::new(false, PART_TIME, None)?;
        let sent = inner.sent.clone();
        let object = Object::over(url, timeouts, UploadConnector { inner, creates })?;
        let mut upload = Self {
            object,
            id: String::new(),
            replaces,
            before: None,
            attempts: Attempts::new(retry.min(OPEN_TIME)),
            bytes_at_once,
            sent,
        };
        upload.store().map_err(|failure| failure.fault.text().to_owned())?;
        let text = |failure: Failure| format!("{}{}", failure.fault.text(), url.hint());
        upload.before = match upload.attempts.again(|| upload.head(Fault::at_open)).await {
            // Who may write may not always look.
            Err(Failure { status: Some(403), .. }) if replaces => None,
            found => found.map_err(text)?,
        };
        if upload.before.is_some() && !replaces {
            return Err(EXISTS.into());
        }
        let create = || async {
            let path = &upload.object.url().path;
            let id = within(ANSWER_TIME, upload.store()?.create_multipart(path)).await?;
            named(id)
        };
        upload.id = upload.attempts.again(create).await.map_err(text)?;
        upload.attempts.retry = retry;
        Ok(upload)
    }

    fn store(&self) -> Answer<&dyn MultipartStore> {
        let none = "a web server is only read (an object is written to s3://, gs:// or az://)";
        self.object.uploads().ok_or_else(|| Failure::refused(none))
    }

    /// The object that has the name now; `fault_of` says which errors may pass.
    async fn head(
        &self,
        fault_of: fn(&object_store::Error) -> Fault,
    ) -> Answer<Option<ObjectMeta>> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        let answer = self.object.store().get_opts(&self.object.url().path, options);
        match tokio::time::timeout(ANSWER_TIME, answer).await.map_err(|_| late(ANSWER_TIME))? {
            Ok(found) => Ok(Some(found.meta)),
            Err(error) if status_of(&error) == Some(404) => Ok(None),
            Err(error) => Err(Failure { fault: fault_of(&error), status: status_of(&error) }),
        }
    }

    /// The answer to `request`, which sends a part, or the fault that it is late.
    async fn while_sending<T>(
        &self,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Answer<T> {
        let sent = || self.sent.load(Ordering::Relaxed);
        let mut progress =
            PartProgress::new(Instant::now(), sent(), ANSWER_TIME, self.bytes_at_once);
        let mut request = std::pin::pin!(request);
        loop {
            match tokio::time::timeout(TICK, &mut request).await {
                Ok(answer) => return Ok(answer?),
                Err(_) if progress.is_late(Instant::now(), sent()) => {
                    return Err(late(ANSWER_TIME));
                }
                Err(_) => {}
            }
        }
    }

    /// The name that the store has given it.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Sends part `index`, counted from 0.
    pub(super) async fn send(&self, index: usize, data: Vec<u8>) -> Result<PartId, String> {
        let data = PutPayload::from(data);
        let request = || async {
            let path = &self.object.url().path;
            let sent = self.store()?.put_part(path, &self.id, index, data.clone());
            let content_id = named(self.while_sending(sent).await?.content_id)?;
            Ok(PartId { content_id })
        };
        self.attempts.again(request).await.map_err(|failure| failure.fault.text().to_owned())
    }

    /// Makes the object of `parts`, in their order, visible; it has `size` bytes.
    pub(super) async fn complete(&self, parts: &[PartId], size: u64) -> Result<(), String> {
        // Not every store refuses the last request if the object exists.
        if !self.replaces
            && let Ok(Some(_)) = self.attempts.again(|| self.head(Fault::of)).await
        {
            return Err(EXISTS.into());
        }
        let is_unknown = RefCell::new(false);
        let request = || async {
            let path = &self.object.url().path;
            let completed = self.store()?.complete_multipart(path, &self.id, parts.to_vec());
            let completed = within(COMPLETE_TIME, completed).await;
            // The store may have received a request whose answer does not arrive.
            *is_unknown.borrow_mut() |=
                matches!(&completed, Err(failure) if matches!(failure.fault, Fault::Transient(_)));
            completed
        };
        let Err(failure) = self.attempts.again(request).await else { return Ok(()) };
        let why = match failure.status {
            Some(409 | 412) if !self.replaces => EXISTS,
            _ => failure.fault.text(),
        };
        if !is_unknown.take() {
            return Err(why.to_owned());
        }
        match self.attempts.again(|| self.head(Fault::of)).await {
            Ok(found) if self.is_complete(found.as_ref(), size, parts.len()) => Ok(()),
            Ok(_) => Err(why.to_owned()),
            Err(_) => Err(format!("{why}; whether the object is there is not known")),
        }
    }

    /// Whether the object that was `found` is that of this upload, whose last request had no answer.
    fn is_complete(&self, found: Option<&ObjectMeta>, size: u64, parts: usize) -> bool {
        let Some(found) = found else { return false };
        let is_other = self.before.as_ref().is_none_or(|before| before.e_tag != found.e_tag);
        // S3 ends the tag of an object with the number of its parts.
        let tag = found.e_tag.as_deref().unwrap_or_default().trim_matches('"');
        let count = tag.rsplit_once('-').and_then(|(_, count)| count.parse::<usize>().ok());
        let is_s3 = matches!(self.object.url().place, Place::S3(_));
        found.size == size && is_other && (!is_s3 || count.is_none_or(|count| count == parts))
    }

    /// Has the store drop the parts that were sent.
    pub(super) async fn abort(&self) -> Result<(), String> {
        let request = || async {
            let path = &self.object.url().path;
            match within(ANSWER_TIME, self.store()?.abort_multipart(path, &self.id)).await {
                Err(Failure { status: Some(404), .. }) => Ok(()),
                ended => ended,
            }
        };
        // Without the delays that were computed for parts.
        self.attempts.forget_pace();
        let ended = tokio::time::timeout(ABORT_TIME, self.attempts.again(request)).await;
        let ended = ended.unwrap_or_else(|_| Err(late(ABORT_TIME)));
        ended.map_err(|failure| failure.fault.text().to_owned())
    }
}

/// `name`, which a store has given, if it is not too long.
fn named(name: String) -> Answer<String> {
    match name.len() {
        0..=NAME_BYTES => Ok(name),
        _ => Err(Failure::refused("the store gives a name that is too long")),
    }
}
