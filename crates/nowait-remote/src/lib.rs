//! Storages behind a network, for images anywhere: exports of NBD servers, objects of object stores,
//! files of web servers, and images of Ceph clusters.
//!
//! For programs with an engine of the crate `nowait` that read disks where they are.
//!
//! A remote storage makes its transfers on a thread of its own, which has its connection; the threads
//! of an engine hand requests to it and learn of their ends by a descriptor. No request has a thread.
//!
//! The cargo features `object-stores` and `ceph`, on by default, can be left out: the types are the same then, but no
//! location of such a storage is parsed, and the message names the feature.
#![deny(unsafe_code)]

mod host_names;
mod open_list;
mod store_counters;
mod fault_log;
mod policy;
mod credential_output;
mod stored_object;
#[cfg(feature = "object-stores")]
mod object;

mod nbd;
mod rbd_options;
#[cfg(feature = "ceph")]
mod rbd;
#[cfg(not(all(feature = "object-stores", feature = "ceph")))]
mod disabled;
mod location;
mod open;

#[cfg(not(feature = "ceph"))]
use disabled::ceph as rbd;
#[cfg(not(feature = "object-stores"))]
use disabled::object;

pub use credential_output::{
    CREDENTIAL_COMMAND_BYTES, CREDENTIAL_OUTPUT_BYTES, CredentialOutput, RunCredentialProcess,
};
pub use host_names::{LookUp, look_up_names_by, looked_up_here};
pub use location::Location;
pub use nbd::{LinkCounts, NbdOptions, NbdStorage, open_links};
#[cfg(feature = "sim")]
pub use nbd::{RemoteBug, SimLimits, SimNbdEnd, SimNbdRequest, SimNext, SimulatedNbd, inject};
pub use object::DISABLED as OBJECT_STORES_DISABLED;
#[cfg(feature = "fuzz")]
pub use object::fuzz;
pub use object::{
    BLOCK_MEMORY, BootRecord, CacheOptions, Condition, FoundVersion, MIN_BLOCK_MEMORY,
    MIN_CACHE_BYTES, ObjectFolder, ObjectOptions, ObjectStorage, ObjectUpload, ObjectUrl,
    StoredObject, UploadOptions, block_memory, credential_command, credential_program,
    limit_block_memory, redirect_ports, run_credential_process, run_credential_processes_by,
    run_only_credential_process,
};
pub use open::{RemoteOptions, open, open_backings, open_storage};
pub use policy::{
    BLOCK_BYTES, BackOff, Pace, PrefetchCursor, PrefetchOrder, ReadAhead, block_runs,
};
pub use rbd::{RbdLocation, RbdStorage};
pub use rbd_options::RbdOptions;
pub use store_counters::{MemoryCounts, StoreCounters, StoreCounts, open_stores};
