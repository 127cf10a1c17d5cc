//! An export as a local block device, `/dev/ublkbN`, through the kernel's ublk driver.
//!
//! Invariant: control commands run on threads that serve nothing, because the driver may write
//! through the device before it answers one. Each queue of the device belongs to one serving thread.

pub(crate) mod ublk_cmd;
pub(crate) mod ublk_error;
mod control_ring;
mod device_parameters;
mod node_users;
mod control_commands;
mod request_descriptors;
mod request_data;
mod queue_memory;
pub(crate) mod device_set_up;
mod abandoned_queues;
pub(crate) mod ublk_device;
pub(crate) mod ublk_list;
pub(crate) mod ublk_channel;
mod ublk_queue;
pub(crate) mod ublk_frontend;
#[cfg(feature = "sim")]
pub(crate) mod sim_ublk;
