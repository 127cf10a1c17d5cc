//! Objects of object stores and files of web servers in a build without them.

use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::credential_output::{CredentialOutput, RunCredentialProcess};
use crate::disabled::disabled_kind::{
    DisabledKind, DisabledLocation, DisabledStorage, never_called,
};
use crate::store_counters::{MemoryCounts, StoreCounters};
use crate::stored_object;

/// The smallest size of a cache in bytes.
pub const MIN_CACHE_BYTES: u64 = 64 << 20;
/// The least bytes of memory for blocks of all objects.
pub const MIN_BLOCK_MEMORY: u64 = 8 << 20;
/// The most bytes of memory for blocks of all objects, unless another number is given.
pub const BLOCK_MEMORY: u64 = 256 << 20;
/// Bytes a second that have to come of an answer, unless another number is given.
pub(crate) const MINIMUM_RATE: u64 = 1 << 10;

const REFUSAL: &str =
    "this nowait was built without object stores (they are the cargo feature \"object-stores\")";

/// The reason why this build has no object stores.
pub const DISABLED: Option<&str> = Some(REFUSAL);

/// The kind of the objects of stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Objects {}

impl DisabledKind for Objects {
    const SCHEMES: &'static [&'static str] = &["https://", "http://", "s3://", "gs://", "az://"];
    const REFUSAL: &'static str = REFUSAL;
}

/// A URL of an object.
pub type ObjectUrl = DisabledLocation<Objects>;

/// An object of a store.
pub type ObjectStorage = DisabledStorage<Objects>;

impl DisabledLocation<Objects> {
    never_called! {
        server(self: &Self) -> String;
        kind(self: &Self) -> &'static str;
        needs(self: &Self) -> (Vec<u16>, Vec<PathBuf>);
    }
}

impl DisabledStorage<Objects> {
    never_called! {
        open(url: &ObjectUrl, &ObjectOptions) -> Result<Self, String>;
        counters(self: &Self) -> &Arc<StoreCounters>;
        identity(self: &Self) -> String;
    }
}

/// A cache of what was read of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The directory.
    pub directory: PathBuf,
    /// The most bytes in it.
    pub bytes: u64,
}

/// A file that takes the records of all objects of a server.
#[derive(Clone, Debug)]
pub struct BootRecord(Infallible);

impl BootRecord {
    /// Makes no file.
    ///
    /// # Errors
    /// Always: there is nothing to record.
    pub fn create(_: &Path) -> Result<Self, String> {
        Err(REFUSAL.into())
    }
}

/// How an object is read.
#[derive(Clone, Debug, Default)]
pub struct ObjectOptions {
    /// How long a read waits for a store.
    pub reconnect: Duration,
    /// How long a server may send nothing in the middle of a request.
    pub silence: Duration,
    /// How long one request may take.
    pub request: Duration,
    /// Bytes a second that have to come of an answer.
    pub minimum_rate: u64,
    /// Where what was read stays.
    pub cache: Option<CacheOptions>,
    /// Where the order of the blocks that are read is written.
    pub record: Option<BootRecord>,
    /// The record whose blocks are fetched into the cache.
    pub prefetch: Option<PathBuf>,
    /// The file with the headers that web servers want.
    pub http_auth: Option<PathBuf>,
}

/// How an object is uploaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadOptions {
    /// Replace an object that exists.
    pub replaces: bool,
    /// How long a request is made again after its first transient fault.
    pub retry: Duration,
}

/// An upload that has begun.
pub struct ObjectUpload(Infallible);

impl ObjectUpload {
    never_called! {
        begin(url: &ObjectUrl, u64, UploadOptions) -> Result<Self, String>;
        part_bytes(self: &Self) -> u64;
        parts_at_once(self: &Self) -> usize;
        send(self: &Self, usize, Vec<u8>);
        id(self: &Self) -> &str;
        wait_sent(self: &Self) -> Result<usize, String>;
        next_sent(self: &Self) -> Result<Option<usize>, String>;
        complete(self: Self) -> Result<(), String>;
        abort(self: Self) -> Result<(), String>;
    }
}

impl AsFd for ObjectUpload {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}

/// The name of a version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundVersion(Infallible);

/// An object that was read.
pub type StoredObject = stored_object::StoredObject<FoundVersion>;
/// The condition on which an object is put.
pub type Condition = stored_object::Condition<FoundVersion>;

/// A folder of objects.
pub struct ObjectFolder(Infallible);

impl ObjectFolder {
    never_called! {
        open(url: &ObjectUrl, Duration) -> Result<Self, String>;
        url_of(self: &Self, &str) -> ObjectUrl;
        list(self: &Self) -> Result<Vec<(String, u64)>, String>;
        get(self: &Self, &str, u64) -> Result<Option<StoredObject>, String>;
        put(self: &Self, &str, &[u8], &Condition) -> Result<Option<FoundVersion>, String>;
        put_long(self: &Self, &str, &[u8], bool) -> Result<(), String>;
        upload(self: &Self, &str, u64) -> Result<ObjectUpload, String>;
        abort_upload(self: &Self, &str, &str) -> Result<(), String>;
        remove(self: &Self, &str) -> Result<(), String>;
    }
}

/// The memory for blocks of objects: none.
#[must_use]
pub fn block_memory() -> MemoryCounts {
    MemoryCounts::default()
}

/// Limits nothing: no object has blocks.
pub const fn limit_block_memory(_: u64) {}

/// The TCP ports to which web servers have redirected this process so far: none.
#[must_use]
pub const fn redirect_ports() -> Vec<u16> {
    Vec::new()
}

/// Without effect: no program of a profile is run.
pub const fn run_only_credential_process(_: &str) {}

/// Without effect: no program of a profile is run.
pub fn run_credential_processes_by(_: RunCredentialProcess) {}

/// Runs no program.
#[must_use]
pub fn run_credential_process(_: &str, _: Option<BorrowedFd<'_>>) -> CredentialOutput {
    CredentialOutput::failed(REFUSAL)
}

/// The command line of a profile: there is none.
#[must_use]
pub const fn credential_command() -> Option<String> {
    None
}

/// The program of a command line: there is none.
#[must_use]
pub const fn credential_program(_: &str) -> Option<String> {
    None
}
