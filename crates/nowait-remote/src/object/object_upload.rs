//! An upload of a whole object in parts, made by a thread of its own.
//!
//! Invariant: the object is visible only after [`ObjectUpload::complete`]; an upload that is dropped
//! before is aborted. A part is in memory until the store has it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use object_store::multipart::PartId;
use rustix::event::{EventfdFlags, eventfd};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::object::object_url::ObjectUrl;
use crate::object::upload::Upload;

/// The largest object: that of S3.
/// Beyond it: the copy is refused.
const MAX_BYTES: u64 = 5 << 40;
/// The most parts of an object of S3, and the least bytes of a part here.
/// Beyond it: the copy is refused.
const MAX_PARTS: u64 = 10_000;
const MIN_PART_BYTES: u64 = 8 << 20;
/// Parts are sent so many at a time, fewer where they have more bytes than these together.
const PARTS_AT_ONCE: u64 = 4;
const BYTES_AT_ONCE: u64 = 256 << 20;
/// The most threads that wait for names of hosts.
const RESOLVER_THREADS: usize = 4;
const ENDED: &str = "its thread has exited";

/// How an object is uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadOptions {
    /// Replace an object that exists.
    pub replaces: bool,
    /// How long a request is made again after its first transient fault.
    pub retry: Duration,
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self { replaces: false, retry: Duration::from_secs(30) }
    }
}

enum Job {
    Send(usize, Vec<u8>),
    Complete(mpsc::Sender<Result<(), String>>),
}

/// The index of a part that the store has, or why it has not.
type Sent = Result<usize, String>;

/// An upload that has begun.
pub struct ObjectUpload {
    jobs: Option<UnboundedSender<Job>>,
    sent: mpsc::Receiver<Sent>,
    wake: Arc<OwnedFd>,
    /// Ends with an error where an upload that is not complete could not be aborted.
    thread: Option<JoinHandle<Result<(), String>>>,
    id: String,
    part_bytes: u64,
    at_once: usize,
}

/// Bytes of each part of an object of `size` bytes but the last one, and how many are sent at a time.
fn parts_of(size: u64) -> (u64, usize) {
    let least = size.div_ceil(MAX_PARTS).next_multiple_of(1 << 20);
    let bytes = least.max(MIN_PART_BYTES);
    (bytes, (BYTES_AT_ONCE / bytes).clamp(1, PARTS_AT_ONCE) as usize)
}

impl ObjectUpload {
    /// Begins an upload of an object of `size` bytes to `url`, with the credentials of the environment.
    ///
    /// # Errors
    /// A message of one line: the size is 0 or more than 5 TiB, the place is a web server, there is an
    /// object already, or the store cannot be reached or refuses.
    pub fn begin(url: &ObjectUrl, size: u64, options: UploadOptions) -> Result<Self, String> {
        match size {
            0 => Err("an object without bytes could not be read as a disk".into()),
            1..=MAX_BYTES => Self::start(url, size, Some(size), options),
            _ => Err(format!("an object has at most 5 TiB, and this would be {size} bytes")),
        }
    }

    /// Like [`ObjectUpload::begin`], of an object that has all bytes that will be sent, `most` at most.
    ///
    /// # Errors
    /// Like [`ObjectUpload::begin`].
    pub fn begin_growing(
        url: &ObjectUrl,
        most: u64,
        options: UploadOptions,
    ) -> Result<Self, String> {
        Self::start(url, most.clamp(1, MAX_BYTES), None, options)
    }

    fn start(
        url: &ObjectUrl,
        most: u64,
        size: Option<u64>,
        options: UploadOptions,
    ) -> Result<Self, String> {
        let (part_bytes, at_once) = parts_of(most);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|error| format!("eventfd: {error}"))?);
        let (jobs, inbox) = unbounded_channel();
        let (ended, sent) = mpsc::channel();
        let (opened, is_open) = mpsc::channel();
        let (url, woken) = (url.clone(), wake.clone());
        let run = move || {
            let mut builder = Builder::new_current_thread();
            let builder = builder.enable_all().max_blocking_threads(RESOLVER_THREADS);
            let runtime = match builder.thread_name("nowait-resolve").build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = opened.send(Err(error.to_string()));
                    return Ok(());
                }
            };
            let ended = runtime.block_on(async {
                let bytes = part_bytes * at_once as u64;
                let begun = Upload::begin(&url, options.replaces, options.retry, bytes).await;
                let id = begun.as_ref().map(|upload| upload.id().to_owned());
                let told = opened.send(id.map_err(Clone::clone));
                match (told, begun) {
                    (Ok(()), Ok(upload)) => {
                        UploadLoop { upload, size, ended, woken }.run(inbox).await
                    }
                    _ => Ok(()),
                }
            });
            // A thread that waits for a resolver is not waited for.
            runtime.shutdown_background();
            ended
        };
        let thread = std::thread::Builder::new().name("nowait-upload".into()).spawn(run);
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        let id = is_open.recv().map_err(|_| ENDED)??;
        Ok(Self { jobs: Some(jobs), sent, wake, thread: Some(thread), id, part_bytes, at_once })
    }

    /// The name that the store has given it, by which it can be aborted later.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Bytes of each part but the last one.
    #[must_use]
    pub const fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// How many parts are to be sent at a time.
    #[must_use]
    pub const fn parts_at_once(&self) -> usize {
        self.at_once
    }

    /// Sends part `index`, counted from 0. Each is sent once.
    pub fn send(&self, index: usize, data: Vec<u8>) {
        // Where the thread has exited, `complete` fails.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(Job::Send(index, data)));
    }

    /// The next part that the store has. [`AsFd::as_fd`] is readable when there is one.
    ///
    /// # Errors
    /// A message of one line: the store has refused a part, or has not taken it in time.
    pub fn next_sent(&self) -> Result<Option<usize>, String> {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        match self.sent.try_recv() {
            Ok(sent) => sent.map(Some),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err(ENDED.into()),
        }
    }

    /// Like [`ObjectUpload::next_sent`], and waits until there is one.
    ///
    /// # Errors
    /// Like [`ObjectUpload::next_sent`].
    pub fn wait_sent(&self) -> Result<usize, String> {
        self.sent.recv().map_err(|_| ENDED)?
    }

    /// Makes the object visible when the store has all parts, and waits until it is.
    ///
    /// # Errors
    /// A message of one line: a part is missing, there is an object by now, or the store refuses. The
    /// upload is aborted then.
    pub fn complete(mut self) -> Result<(), String> {
        let (sender, completed) = mpsc::channel();
        let _ = self.jobs.take().map(|jobs| jobs.send(Job::Complete(sender)));
        completed.recv().map_err(|_| ENDED)?
    }

    /// Has the store drop the parts that were sent, and waits until it has, for 10 s at most.
    ///
    /// # Errors
    /// A message of one line: parts may be left in the store.
    pub fn abort(mut self) -> Result<(), String> {
        self.end()
    }

    fn end(&mut self) -> Result<(), String> {
        self.jobs = None;
        self.thread
            .take()
            .map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err(ENDED.into())))
    }
}

impl AsFd for ObjectUpload {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Drop for ObjectUpload {
    /// Like [`ObjectUpload::abort`], where nothing has ended it.
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// The data of the thread.
struct UploadLoop {
    upload: Upload,
    /// Bytes of the object, if they are known.
    size: Option<u64>,
    ended: mpsc::Sender<Sent>,
    woken: Arc<OwnedFd>,
}

impl UploadLoop {
    /// Sends parts until the upload is completed or aborted.
    ///
    /// # Errors
    /// It could not be aborted.
    async fn run(&self, mut inbox: UnboundedReceiver<Job>) -> Result<(), String> {
        let (mut parts, mut bytes): (Vec<Option<PartId>>, u64) = (Vec::new(), 0);
        let mut sending = FuturesUnordered::new();
        let completed = loop {
            tokio::select! {
                job = inbox.recv() => match job {
                    Some(Job::Send(index, data)) => {
                        bytes += data.len() as u64;
                        sending.push(async move { (index, self.upload.send(index, data).await) });
                    }
                    Some(Job::Complete(sender)) => break Some(sender),
                    None => break None,
                },
                Some((index, sent)) = sending.next() => {
                    let told = sent.map(|part| {
                        if parts.len() <= index {
                            parts.resize(index + 1, None);
                        }
                        if let Some(place) = parts.get_mut(index) {
                            *place = Some(part);
                        }
                        index
                    });
                    let _ = self.ended.send(told);
                    let _ = rustix::io::write(&*self.woken, &1_u64.to_ne_bytes());
                }
            }
        };
        // The connections of parts that are not sent yet are closed before the parts are dropped.
        drop(sending);
        let Some(sender) = completed else { return self.abort().await };
        let mut result = self.complete(parts, bytes).await;
        if let Err(why) = &mut result
            && let Err(left) = self.abort().await
        {
            *why = format!("{why}; {left}");
        }
        let _ = sender.send(result);
        Ok(())
    }

    async fn abort(&self) -> Result<(), String> {
        let left = |why| format!("parts of it may be left in the store: {why}");
        self.upload.abort().await.map_err(left)
    }

    async fn complete(&self, parts: Vec<Option<PartId>>, bytes: u64) -> Result<(), String> {
        let parts: Option<Vec<PartId>> = parts.into_iter().collect();
        match parts {
            Some(parts) if self.size.unwrap_or(bytes) == bytes && !parts.is_empty() => {
                self.upload.complete(&parts, bytes).await
            }
            _ => Err("a part of it was not sent".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_many_and_as_large_as_stores_take_and_memory_is_bounded() {
        let mib = |size: u64| (parts_of(size).0 >> 20, parts_of(size).1);
        assert_eq!(mib(1), (8, 4));
        assert_eq!(mib(80_000 << 20), (8, 4));
        assert_eq!(mib((80_000 << 20) + 1), (9, 4));
        assert_eq!(mib(1 << 40), (105, 2));
        assert_eq!(mib(MAX_BYTES), (525, 1));
        assert!(MAX_BYTES.div_ceil(parts_of(MAX_BYTES).0) <= MAX_PARTS);
    }
}
