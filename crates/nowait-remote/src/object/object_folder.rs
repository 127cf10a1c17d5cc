//! A folder of objects in a store: small objects are read and put whole, on conditions, and all are listed and deleted.
//!
//! Invariant: an object is put whole or not at all. What is read is of one version of the object.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use tokio::runtime::{Builder, Runtime};

use crate::object::attempts::{ANSWER_TIME, Answer, Attempts, NOT_IMPLEMENTED, within};
use crate::object::fault::Failure;
use crate::object::http_client::Connector;
use crate::object::object_upload::{ObjectUpload, UploadOptions};
use crate::object::object_url::ObjectUrl;
use crate::object::store::{Object, Timeouts};
use crate::object::upload_client::UploadConnector;
use crate::stored_object;

/// The most objects of a folder, those in folders below included.
/// Beyond it: the folder is refused.
const MAX_OBJECTS: usize = 200_000;
/// The longest name of a folder in bytes.
/// Beyond it: it is refused; a page of a list has to fit into an answer.
const MAX_FOLDER_BYTES: usize = 400;
/// Bytes that are read or put by one request.
const REQUEST_BYTES: u64 = 1 << 20;
/// How long a request with data is waited for.
const DATA_TIME: Duration = Duration::from_secs(300);
/// The most threads that wait for names of hosts.
const RESOLVER_THREADS: usize = 4;

/// The name of a version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundVersion(UpdateVersion);

/// An object that was read.
pub type StoredObject = stored_object::StoredObject<FoundVersion>;
/// The condition on which an object is put.
pub type Condition = stored_object::Condition<FoundVersion>;

/// A folder of objects. Its calls wait, one after the other.
pub struct ObjectFolder {
    url: ObjectUrl,
    retry: Duration,
    client: Mutex<Client>,
}

/// Makes the requests.
struct Client {
    runtime: Runtime,
    /// The object that would have the name of the folder.
    folder: Object,
    attempts: Attempts,
}

impl ObjectFolder {
    /// The folder at `url`, with the credentials of the environment. Requests are made again for the time of `retry`. Asks for
    /// nothing yet.
    ///
    /// # Errors
    /// A message of one line: the place is a web server, a version is named, or the environment does not say what is needed.
    pub fn open(url: &ObjectUrl, retry: Duration) -> Result<Self, String> {
        if url.is_web() {
            return Err("a web server is only read (this needs s3://, gs:// or az://)".into());
        }
        if url.version.is_some() {
            return Err("a folder has no version".into());
        }
        if url.path.as_ref().len() > MAX_FOLDER_BYTES {
            return Err(format!("the name of the folder has more than {MAX_FOLDER_BYTES} bytes"));
        }
        let mut builder = Builder::new_current_thread();
        let builder = builder.enable_all().max_blocking_threads(RESOLVER_THREADS);
        let runtime = builder.thread_name("nowait-resolve").build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let timeouts = Timeouts { silence: ANSWER_TIME, all: DATA_TIME, minimum_rate: 0 };
        let inner = Connector::new(false, DATA_TIME, None)?;
        let folder = Object::over(url, timeouts, UploadConnector { inner, creates: false })?;
        let client = Client { runtime, folder, attempts: Attempts::new(retry) };
        Ok(Self { url: url.clone(), retry, client: Mutex::new(client) })
    }

    /// The URL of the object `name`.
    #[must_use]
    pub fn url_of(&self, name: &str) -> ObjectUrl {
        self.url.within(name)
    }

    /// The names of its objects and their bytes; not those of folders in it.
    ///
    /// # Errors
    /// A message of one line: the store refuses or does not answer; there are too many.
    pub fn list(&self) -> Result<Vec<(String, u64)>, String> {
        let client = self.client();
        let path = client.folder.url().path.clone();
        let listed = client.ask(|folder| {
            let path = path.clone();
            async move {
                let mut found = Vec::new();
                let mut objects = folder.store().list(Some(&path));
                while let Some(object) = within(ANSWER_TIME, objects.try_next()).await? {
                    if found.len() == MAX_OBJECTS {
                        let text = format!("there are more than {MAX_OBJECTS} objects in it");
                        return Err(Failure::refused(text));
                    }
                    found.push(object);
                }
                Ok(found)
            }
        });
        let name = |object: ObjectMeta| {
            let mut rest = object.location.prefix_match(&path)?;
            let name = rest.next().filter(|_| rest.next().is_none())?;
            Some((name.as_ref().to_owned(), object.size))
        };
        let listed = self.told(listed).map_err(|why| format!("cannot list it: {why}"))?;
        Ok(listed.into_iter().filter_map(name).collect())
    }

    /// Reads the object `name` of `most` bytes at most; `None` if it is absent.
    ///
    /// # Errors
    /// A message of one line: the store refuses or does not answer; it has more bytes, or none.
    pub fn get(&self, name: &str, most: u64) -> Result<Option<StoredObject>, String> {
        self.told(self.client().get(name, most))
    }

    /// Puts `bytes` as the object `name`, in place of one that is there. Returns `None` where the condition is not met.
    ///
    /// # Errors
    /// A message of one line: the store refuses or does not answer. Whether the object is there is not known then.
    pub fn put(
        &self,
        name: &str,
        bytes: &[u8],
        condition: &Condition,
    ) -> Result<Option<FoundVersion>, String> {
        let client = self.client();
        let put = client.put(name, bytes, condition);
        // An answer may be lost, and the request have been made twice.
        let put = match put {
            Err(Failure { status: Some(409 | 412), .. }) => {
                let there = client.get(name, bytes.len() as u64);
                let own = |object: &StoredObject| object.bytes == bytes;
                Ok(there.ok().flatten().filter(own).map(|object| object.version))
            }
            Err(Failure { status: Some(NOT_IMPLEMENTED), .. })
                if *condition != Condition::Always =>
            {
                return self.put_unconditionally(&client, name, bytes, condition);
            }
            put => put.map(Some),
        };
        self.told(put)
    }

    /// Puts an object in a store that knows no conditions.
    fn put_unconditionally(
        &self,
        client: &Client,
        name: &str,
        bytes: &[u8],
        condition: &Condition,
    ) -> Result<Option<FoundVersion>, String> {
        let there = self.told(client.get(name, u64::MAX))?.map(|object| object.version);
        let is_met = match condition {
            Condition::Always => true,
            Condition::Absent => there.is_none(),
            Condition::Same(version) => there.as_ref() == Some(version),
        };
        match is_met {
            true => self.told(client.put(name, bytes, &Condition::Always)).map(Some),
            false => Ok(None),
        }
    }

    /// Puts `bytes`, which may be many, as the object `name`; in place of one that is there only if `replaces` is set.
    ///
    /// # Errors
    /// A message of one line: there is such an object; the store refuses or does not answer.
    pub fn put_long(&self, name: &str, bytes: &[u8], replaces: bool) -> Result<(), String> {
        if bytes.len() as u64 <= REQUEST_BYTES {
            let condition = if replaces { Condition::Always } else { Condition::Absent };
            let put = self.put(name, bytes, &condition)?;
            return put.map(drop).ok_or_else(|| "there is such an object already".into());
        }
        let options = UploadOptions { replaces, retry: self.retry };
        let upload = ObjectUpload::begin(&self.url_of(name), bytes.len() as u64, options)?;
        let mut in_flight = 0;
        for (index, part) in bytes.chunks(upload.part_bytes() as usize).enumerate() {
            if in_flight == upload.parts_at_once() {
                upload.wait_sent()?;
                in_flight -= 1;
            }
            upload.send(index, part.to_vec());
            in_flight += 1;
        }
        (0..in_flight).try_for_each(|_| upload.wait_sent().map(drop))?;
        upload.complete()
    }

    /// Begins an upload of the object `name`, which is new, of `most` bytes at most.
    ///
    /// # Errors
    /// A message of one line, as of [`ObjectUpload::begin`].
    pub fn upload(&self, name: &str, most: u64) -> Result<ObjectUpload, String> {
        let options = UploadOptions { replaces: false, retry: self.retry };
        ObjectUpload::begin_growing(&self.url_of(name), most, options)
    }

    /// Has the store drop the parts of the upload `id` of the object `name`, if it is not complete.
    ///
    /// # Errors
    /// A message of one line: the store refuses or does not answer.
    pub fn abort_upload(&self, name: &str, id: &str) -> Result<(), String> {
        self.told(self.client().ask(|folder| {
            let (object, id) = (folder.within(name), id.to_owned());
            async move {
                let Some(uploads) = object.uploads() else { return Ok(()) };
                gone(within(ANSWER_TIME, uploads.abort_multipart(&object.url().path, &id)).await)
            }
        }))
    }

    /// Deletes the object `name`; one that is absent is deleted.
    ///
    /// # Errors
    /// A message of one line: the store refuses or does not answer.
    pub fn remove(&self, name: &str) -> Result<(), String> {
        self.told(self.client().ask(|folder| {
            let object = folder.within(name);
            async move { gone(within(ANSWER_TIME, object.store().delete(&object.url().path)).await) }
        }))
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told<T>(&self, answer: Answer<T>) -> Result<T, String> {
        answer.map_err(|failure| format!("{}{}", failure.fault.text(), self.url.hint()))
    }
}

/// A request that has deleted something, or has found that it is absent.
fn gone(ended: Answer<()>) -> Answer<()> {
    match ended {
        Err(Failure { status: Some(404), fault }) if !fault.text().contains("NoSuchBucket") => {
            Ok(())
        }
        ended => ended,
    }
}

impl Client {
    /// The answer to a request, which is made again after transient faults.
    fn ask<'a, T, F: Future<Output = Answer<T>>>(
        &'a self,
        request: impl Fn(&'a Object) -> F,
    ) -> Answer<T> {
        self.runtime.block_on(self.attempts.again(|| request(&self.folder)))
    }

    fn get(&self, name: &str, most: u64) -> Answer<Option<StoredObject>> {
        self.ask(|folder| {
            let object = folder.within(name);
            async move {
                let (version, mut bytes) = match object.first(REQUEST_BYTES, ANSWER_TIME).await {
                    Err(Failure { status: Some(404), fault })
                        if !fault.text().contains("NoSuchBucket") =>
                    {
                        return Ok(None);
                    }
                    first => first?,
                };
                if version.size() > most {
                    return Err(Failure::refused(format!("{name} is too long")));
                }
                while (bytes.len() as u64) < version.size() {
                    let pos = bytes.len() as u64;
                    let len = (version.size() - pos).min(REQUEST_BYTES);
                    let mut progress = object.progress(ANSWER_TIME);
                    bytes.extend(object.read(&version, (pos, len), &mut progress).await?);
                }
                let (seconds, version) = (version.date(), FoundVersion(version.found));
                Ok(Some(StoredObject { bytes, version, seconds }))
            }
        })
    }

    fn put(&self, name: &str, bytes: &[u8], condition: &Condition) -> Answer<FoundVersion> {
        let payload = PutPayload::from(bytes.to_vec());
        let mode = match condition {
            Condition::Always => PutMode::Overwrite,
            Condition::Absent => PutMode::Create,
            Condition::Same(FoundVersion(version)) => PutMode::Update(version.clone()),
        };
        self.ask(|folder| {
            let (object, payload, mode) = (folder.within(name), payload.clone(), mode.clone());
            async move {
                let path = &object.url().path;
                let put = object.store().put_opts(path, payload, mode.into());
                let put = within(DATA_TIME, put).await?;
                Ok(FoundVersion(UpdateVersion { e_tag: put.e_tag, version: put.version }))
            }
        })
    }
}
