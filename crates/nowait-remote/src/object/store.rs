//! One object of a store: what it is when it is opened, and parts of it.
//!
//! Invariant: bytes are returned only if the answer says that they are those of the object that was
//! opened: its entity tag, or its date and size, and the range that was asked for.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::HttpConnector;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::{
    GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, RetryConfig, UpdateVersion,
};

use crate::object::answer_progress::Progress;
use crate::object::aws_files;
use crate::object::fault::{Failure, Fault, status_of};
use crate::object::http_auth::HttpAuth;
use crate::object::http_client::Connector;
use crate::object::object_url::{ObjectUrl, Place};

/// How long an answer may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// Until its first bytes have come, and between later ones.
    pub(super) silence: Duration,
    /// Until all of it has come.
    pub(super) all: Duration,
    /// Bytes a second that have to come; 0: it may be any number but none.
    pub(super) minimum_rate: u64,
}

/// An answer may always take so long.
const SHORTEST: Duration = Duration::from_secs(2);

/// The version of an object, which tells it from another one that has its name later.
#[derive(Clone, Debug)]
pub(super) struct Version {
    meta: ObjectMeta,
    /// The version's name in conditions of requests.
    pub(super) found: UpdateVersion,
}

impl Version {
    /// # Errors
    /// A message: the store does not tell enough to notice that the object changes, or answers with
    /// another version than the one that was `named`.
    fn of(meta: ObjectMeta, named: Option<&String>) -> Result<Self, String> {
        if i64::try_from(meta.size).is_err() {
            return Err(format!("the server says that it has {} bytes", meta.size));
        }
        if named.is_some() && meta.version.as_ref() != named {
            return Err("the store answers with another version than the one that was named".into());
        }
        // Only a version that was named has to be the one of each answer: a copy of the object with the
        // same bytes, tag and date is as good.
        let found = UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() };
        let version = Self { meta: ObjectMeta { version: named.cloned(), ..meta }, found };
        if version.strong_tag().is_none() && version.date() == 0 {
            return Err(
                "the server tells neither an ETag nor a date of it, so that a change while \
                        it is in use would not be noticed"
                    .into(),
            );
        }
        Ok(version)
    }

    /// Bytes of the object.
    pub(super) const fn size(&self) -> u64 {
        self.meta.size
    }

    /// The tag, if If-Match may be used with it (RFC 9110, 13.1.1).
    fn strong_tag(&self) -> Option<&String> {
        self.meta.e_tag.as_ref().filter(|tag| !tag.starts_with("W/"))
    }

    /// Seconds since 1970; 0 where the server tells no date.
    pub(super) fn date(&self) -> i64 {
        self.meta.last_modified.timestamp()
    }

    /// A name of this version of the object, and of no other one of the same place. The date belongs to
    /// it beside a strong tag, too: some servers make the tag of the time in seconds and the size.
    pub(super) fn identity(&self) -> String {
        let (size, tag) = (self.size(), self.meta.e_tag.as_deref().unwrap_or_default());
        let named = self.meta.version.as_ref().map_or_else(String::new, |id| format!(" {id}"));
        format!("{size} {tag} {}{named}", self.date())
    }

    /// Whether an answer about `other` is about this version. One with the strong tag may leave the date
    /// out (RFC 9110, 15.3.7).
    fn is_same(&self, other: &ObjectMeta) -> bool {
        let (own, new) = (&self.meta, other);
        let date = other.last_modified.timestamp();
        let dated = self.date() != 0 && date != 0;
        let same_date = self.date() == date || !dated && self.strong_tag().is_some();
        let same_version = own.version.is_none() || own.version == new.version;
        own.size == new.size && own.e_tag == new.e_tag && same_date && same_version
    }
}

/// An object of a store.
pub(super) struct Object {
    store: Arc<dyn ObjectStore>,
    /// The store for uploads; none where the place is a web server.
    uploads: Option<Arc<dyn MultipartStore>>,
    url: ObjectUrl,
    timeouts: Timeouts,
    /// Whether the credentials are in a file that is read again.
    renewable: bool,
}

/// A store as it is read from and written to.
type Stores = (Arc<dyn ObjectStore>, Option<Arc<dyn MultipartStore>>);

fn stores(store: impl ObjectStore + MultipartStore + Clone) -> Stores {
    (Arc::new(store.clone()), Some(Arc::new(store)))
}

/// A client that asks once; who asks again is the caller.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

impl Object {
    /// The object at `url`, with the credentials of the environment, or the headers in the file
    /// `http_auth` for a web server. Asks for nothing yet.
    ///
    /// # Errors
    /// A message of one line: the environment does not say what is needed, or the file is wrong.
    pub(super) fn new(
        url: &ObjectUrl,
        timeouts: Timeouts,
        http_auth: Option<&Path>,
    ) -> Result<Self, String> {
        let server = if let Place::Web(server) = &url.place { Some(server) } else { None };
        let auth = http_auth.zip(server).map(|(path, server)| HttpAuth::open(path, server));
        let (auth, is_web) = (auth.transpose()?, server.is_some());
        let is_renewed = auth.is_some();
        let connector = Connector::new(is_web, timeouts.silence, auth)?;
        let object = Self::over(url, timeouts, connector)?;
        Ok(Self { renewable: is_renewed || object.renewable, ..object })
    }

    /// Like [`Object::new`], with requests by `connector`.
    pub(super) fn over(
        url: &ObjectUrl,
        timeouts: Timeouts,
        connector: impl HttpConnector,
    ) -> Result<Self, String> {
        let (retry, mut renewable) = (no_retries(), false);
        let store: Result<Stores, _> = match &url.place {
            Place::Web(server) => {
                let builder = HttpBuilder::new().with_url(server.as_str()).with_retry(retry);
                builder
                    .with_http_connector(connector)
                    .build()
                    .map(|store| (Arc::new(store) as _, None))
            }
            Place::S3(bucket) => {
                let (builder, is_renewed) = aws_files::builder(&connector)?;
                renewable = is_renewed;
                let builder = builder
                    .with_bucket_name(bucket)
                    .with_retry(retry)
                    // Not every store can delete several objects by one request.
                    .with_disable_bulk_delete(true)
                    .with_http_connector(connector);
                builder.build().map(stores)
            }
            Place::Gcs(bucket) => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
                let builder = builder.with_retry(retry).with_http_connector(connector);
                builder.build().map(stores)
            }
            Place::Azure(container) => {
                let builder = MicrosoftAzureBuilder::from_env().with_container_name(container);
                let builder = builder.with_retry(retry).with_http_connector(connector);
                builder.build().map(stores)
            }
        };
        let (store, uploads) = store.map_err(|error| Fault::of(&error).text().to_owned())?;
        Ok(Self { store, uploads, url: url.clone(), timeouts, renewable })
    }

    /// The progress of an answer that is asked for now and may be late after `left`.
    pub(super) fn progress(&self, left: Duration) -> Progress {
        let Timeouts { silence, minimum_rate, .. } = self.timeouts;
        Progress::new(left.max(SHORTEST).min(silence), minimum_rate)
    }

    /// Asks what the object is, by its first byte, within `left`: a server that cannot send a part of
    /// it is noticed.
    pub(super) async fn probe(&self, left: Duration) -> Result<Version, Fault> {
        let first = self.first(1, left).await;
        first.map(|(version, _)| version).map_err(|failure| failure.fault)
    }

    /// Asks what the object is, and for its first bytes, `most` at most, within `left` or as long as they come.
    pub(super) async fn first(
        &self,
        most: u64,
        left: Duration,
    ) -> Result<(Version, Vec<u8>), Failure> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(0..most)),
            version: self.url.version.clone(),
            ..GetOptions::default()
        };
        let mut progress = self.progress(left);
        let answer = self.answer(options, &progress).await?;
        let answer = answer.map_err(|error| Failure {
            fault: Fault::at_open(&error),
            status: status_of(&error),
        })?;
        let version =
            Version::of(answer.meta.clone(), self.url.version.as_ref()).map_err(Fault::Refused)?;
        let bytes = body(answer, most.min(version.size()), &mut progress).await?;
        Ok((version, bytes))
    }

    /// The object `name` in the folder that has the name of this one, by the same client.
    pub(super) fn within(&self, name: &str) -> Self {
        Self {
            store: self.store.clone(),
            uploads: self.uploads.clone(),
            url: self.url.within(name),
            ..*self
        }
    }

    /// Reads `len` bytes, at least 1, from byte `pos` on, with the `progress` that is noted there. All
    /// of them are in the object.
    pub(super) async fn read(
        &self,
        version: &Version,
        (pos, len): (u64, u64),
        progress: &mut Progress,
    ) -> Result<Vec<u8>, Fault> {
        let begin = *progress;
        let read = self.read_in_time(version, (pos, len), progress);
        tokio::time::timeout(self.timeouts.all, read).await.unwrap_or_else(|_| {
            *progress = begin;
            let seconds = self.timeouts.all.as_secs_f32();
            Err(Fault::Transient(format!("the answer has not come within {seconds} s")))
        })
    }

    /// The answer to a request, as long as it is not late.
    async fn answer(
        &self,
        options: GetOptions,
        progress: &Progress,
    ) -> Result<object_store::Result<GetResult>, Fault> {
        let answer = self.store.get_opts(&self.url.path, options);
        let answer = tokio::time::timeout_at(progress.end(), answer).await;
        answer.map_err(|_| Fault::Transient(progress.late()))
    }

    async fn read_in_time(
        &self,
        version: &Version,
        (pos, len): (u64, u64),
        progress: &mut Progress,
    ) -> Result<Vec<u8>, Fault> {
        let tag = version.strong_tag();
        let options = GetOptions {
            range: Some(GetRange::Bounded(pos..pos + len)),
            version: self.url.version.clone(),
            if_match: tag.cloned(),
            if_unmodified_since: tag.is_none().then_some(version.meta.last_modified),
            ..GetOptions::default()
        };
        let answer = self.answer(options, progress).await?;
        let answer = answer.map_err(|error| Fault::of_read(&error, self.renewable))?;
        if !version.is_same(&answer.meta) {
            let what = "the object has changed since it was opened (another ETag, date or size)";
            return Err(Fault::Changed(what.into()));
        }
        body(answer, len, progress).await
    }

    pub(super) const fn url(&self) -> &ObjectUrl {
        &self.url
    }

    pub(super) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    pub(super) fn uploads(&self) -> Option<&dyn MultipartStore> {
        self.uploads.as_deref()
    }
}

/// The `len` bytes of an answer.
async fn body(answer: GetResult, len: u64, progress: &mut Progress) -> Result<Vec<u8>, Fault> {
    let mut data = Vec::with_capacity(len as usize);
    let mut body = answer.into_stream();
    loop {
        let part = tokio::time::timeout_at(progress.end(), body.next()).await;
        let Some(part) = part.map_err(|_| Fault::Transient(progress.late()))? else { break };
        let part = part.map_err(|error| Fault::of(&error))?;
        if data.len() + part.len() > len as usize {
            return Err(Fault::Transient("the answer is longer than the server says".into()));
        }
        data.extend_from_slice(&part);
        progress.came(part.len(), Instant::now());
    }
    match data.len() as u64 == len {
        true => Ok(data),
        false => Err(Fault::Transient(format!("{} bytes of {len} came", data.len()))),
    }
}
