//! An NBD server for disk images; each image is an [`Export`].
//!
//! For programs that serve disks within their own process; a process that is a server is `nowait-daemon`.
//!
//! A frontend only translates: a wire request becomes a request of the engine, and a completion
//! becomes a wire reply. The checks of what a request may do are in one place, [`Export`]. The
//! modules are listed in dependency order: each uses only those above it.
#![deny(unsafe_code)]

mod locking;
mod log_limit;
mod injected_bug;
mod fault_log;
mod refusal_log;
mod latency;
mod slow_requests;
mod rate_limit;
mod frontend_kind;
mod statistics;
mod block_size;
mod dirty_bitmaps;
mod export_error;
mod export;
mod shared_export;
mod bulk_queues;
mod fairness;
mod export_throttle;
mod injected_death;
mod net;
mod buffer_budget;
mod delayed_release;
mod thread_handle;
mod served_export;
mod member;
mod throttle;
mod loop_context;
mod frontend;
mod nbd;
mod ublk;
mod vhost_user;
mod server_options;
mod frontends;
mod any_export;
mod backup;
mod registered_export;
mod export_registry;
mod backup_transaction;
mod threads;
mod event_loop;
mod reactor;
mod exports;
mod server;

pub use any_export::AnyExport;
pub use backup::backup_spec::{BackupEnd, BackupError, BackupRefusal, BackupSpec, BackupStatus};
pub use backup::scratch::scratch_file;
#[cfg(feature = "sim")]
pub use backup::sim_backup::SimBackup;
pub use block_size::BlockSize;
pub use dirty_bitmaps::bitmap_spec::{BitmapError, BitmapSpec, BitmapStatus, RestoreError};
#[cfg(feature = "sim")]
pub use event_loop::sim::{SimParked, SimThread, Simulated};
#[cfg(feature = "sim")]
pub use event_loop::sim_change::SimChange;
#[cfg(feature = "sim")]
pub use event_loop::simulated_ublk::SimulatedUblk;
#[cfg(feature = "sim")]
pub use event_loop::simulated_vhost::SimulatedVhost;
pub use export::{Export, ExportId};
pub use export_error::ExportError;
pub use exports::change_tracker::ChangeTracker;
pub use exports::changed_ranges::{ChangedRanges, copy_changes};
pub use exports::frozen_changes::FrozenChanges;
#[cfg(feature = "sim")]
pub use exports::sim_changes::SimChanges;
pub use exports::{ExportChanges, ExportStatus, Exports};
pub use frontend_kind::FrontendKind;
pub use frontends::export_device::NewDevice;
pub use latency::Latencies;
pub use nbd::connection_state::{ConnectionState, SplitState};
#[cfg(feature = "fuzz")]
pub use nbd::fuzz;
pub use net::connection_limit::ConnectionStatus;
pub use net::deadline::call_until;
pub use net::listener::remove_sockets_by;
pub use rate_limit::{Limits, TokenBucket};
pub use server::{
    ClientAuth, Credentials, ExportOptions, Listener, Options, QueueKind, Server, ShutdownHandle,
    ShutdownReport, Tls, TlsError,
};
#[cfg(feature = "sim")]
pub use server::{ServerBug, die_after, inject};
pub use statistics::{FrontendTotals, OpTotals};
pub use threads::pause::{PausedExport, PausedServer};
pub use ublk::device_set_up::UblkOptions;
#[cfg(feature = "sim")]
pub use ublk::sim_ublk::SimUblkRequest;
pub use ublk::ublk_device::{UblkDevice, UblkNode};
pub use ublk::ublk_error::UblkError;
pub use ublk::ublk_list::{UblkStatus, ublk_devices, ublk_features, ublk_stop};
pub use vhost_user::control_thread::{DeviceSocket, PausedDevice};
pub use vhost_user::device::vmm_state::{VmmSetup, VmmState};
#[cfg(feature = "fuzz")]
pub use vhost_user::queue_fuzz::FuzzedQueue;
#[cfg(feature = "sim")]
pub use vhost_user::sim_guest::{SimGuest, SimRing, SimVhostDevice};
