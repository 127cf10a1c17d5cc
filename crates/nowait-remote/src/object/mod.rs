//! An object of an object store, or a file of a web server, as a storage that is only read; and uploads
//! of whole objects.
//!
//! Invariant: every byte that a read returns is of the object as it was when it was opened. An object
//! that changes meanwhile makes every read fail, whatever the server sends. An upload is visible when it is
//! complete, or not at all.

mod fault;
mod resolver;
mod redirect_ports;
mod proxy;
mod secret_text;
mod aws_sso;
mod credential_process;
mod process_credentials;
mod aws_files;
mod object_url;
mod http_auth;
mod http_versions;
mod http_client;
mod answer_progress;
mod store;
mod read_job;
mod block_memory;
mod block_queue;
mod cache_directory;
mod block_cache;
mod boot_record;
mod asking;
mod block_fetcher;
mod object_storage;
mod attempts;
mod upload_client;
mod upload_progress;
mod upload;
mod object_upload;
mod object_folder;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use aws_files::credential_command;
pub use block_memory::{BLOCK_MEMORY, MIN_BLOCK_MEMORY, block_memory, limit_block_memory};
pub use boot_record::BootRecord;
pub use cache_directory::{CacheOptions, MIN_CACHE_BYTES};
pub use credential_process::{
    credential_program, run_credential_process, run_credential_processes_by,
    run_only_credential_process,
};
pub use object_folder::{Condition, FoundVersion, ObjectFolder, StoredObject};
pub(crate) use object_storage::MINIMUM_RATE;
pub use object_storage::{ObjectOptions, ObjectStorage};
pub use object_upload::{ObjectUpload, UploadOptions};
pub use object_url::ObjectUrl;
pub use redirect_ports::redirect_ports;

/// The reason why this build has no object stores: it has them.
pub const DISABLED: Option<&str> = None;
