//! vhost-user-blk: exports as disks of virtual machines, whose requests are taken from and answered
//! in memory of the guest (QEMU, docs/interop/vhost-user.rst; Virtual I/O Device 1.2, 5.2).
//!
//! Invariant: set-up messages are handled on a thread of their socket, requests on the export's
//! threads. A message of the VMM never blocks a serving thread. What a guest or a VMM breaks stops
//! its device only.

mod fault_guard;
pub(crate) mod guest_memory;
pub(crate) mod device_config;
mod dirty_log;
mod inflight_region;
mod block_request;
pub(crate) mod virtqueue;
pub(crate) mod queue_channel;
mod device_queue;
pub(crate) mod vhost_frontend;
#[cfg(feature = "fuzz")]
pub(crate) mod queue_fuzz;
#[cfg(feature = "sim")]
pub(crate) mod sim_guest;
pub(crate) mod device;
mod message_replay;
mod config_change;
mod vmm_log;
pub(crate) mod control_thread;

pub(crate) use device::QueueThreads;
pub(crate) use device_config::BlockProperties;
