//! The driver's interface, as in the kernel's `include/uapi/linux/ublk_cmd.h`.
//!
//! Invariant: numbers and layouts are those of the kernel; nothing here makes a system call.

/// The device through which devices are added and removed.
pub(crate) const CONTROL_DEVICE: &str = "/dev/ublk-control";

/// `_IOWR('u', number, …)` for a structure of `bytes`.
const fn read_write(number: u32, bytes: u32) -> u32 {
    3 << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

/// `_IOR('u', number, …)` for a structure of `bytes`.
const fn read(number: u32, bytes: u32) -> u32 {
    2 << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

/// Bytes of the arguments of a control command.
pub(crate) const CONTROL_BYTES: usize = 32;
/// Bytes of the arguments of an I/O command.
const IO_BYTES: u32 = 16;

/// A control command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ControlOp(pub(crate) u32);

impl ControlOp {
    pub(crate) const ADD_DEV: Self = Self(read_write(0x04, CONTROL_BYTES as u32));
    pub(crate) const DEL_DEV: Self = Self(read_write(0x05, CONTROL_BYTES as u32));
    pub(crate) const START_DEV: Self = Self(read_write(0x06, CONTROL_BYTES as u32));
    pub(crate) const STOP_DEV: Self = Self(read_write(0x07, CONTROL_BYTES as u32));
    pub(crate) const SET_PARAMS: Self = Self(read_write(0x08, CONTROL_BYTES as u32));
    pub(crate) const GET_PARAMS: Self = Self(read(0x09, CONTROL_BYTES as u32));
    pub(crate) const START_USER_RECOVERY: Self = Self(read_write(0x10, CONTROL_BYTES as u32));
    pub(crate) const END_USER_RECOVERY: Self = Self(read_write(0x11, CONTROL_BYTES as u32));
    pub(crate) const GET_DEV_INFO2: Self = Self(read(0x12, CONTROL_BYTES as u32));
    pub(crate) const GET_FEATURES: Self = Self(read(0x13, CONTROL_BYTES as u32));
    pub(crate) const UPDATE_SIZE: Self = Self(read_write(0x15, CONTROL_BYTES as u32));
    pub(crate) const QUIESCE_DEV: Self = Self(read_write(0x16, CONTROL_BYTES as u32));
    pub(crate) const TRY_STOP_DEV: Self = Self(read_write(0x17, CONTROL_BYTES as u32));
}

/// Fetches the first request of a tag.
pub(crate) const FETCH_REQ: u32 = read_write(0x20, IO_BYTES);
/// Answers the request of a tag, and fetches the next one.
pub(crate) const COMMIT_AND_FETCH_REQ: u32 = read_write(0x21, IO_BYTES);

/// Requests in flight that outlive the server are queued for the next one.
pub(crate) const F_USER_RECOVERY: u64 = 1 << 3;
/// So are those that the server had taken.
pub(crate) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Any user may add the device.
pub(crate) const F_UNPRIVILEGED_DEV: u64 = 1 << 5;
/// Commands are encoded as for ioctl(2).
pub(crate) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// The server copies data itself, by read and write calls on the character device.
pub(crate) const F_USER_COPY: u64 = 1 << 7;
/// The driver registers the memory of each request with the ring of its fetch command.
pub(crate) const F_AUTO_BUF_REG: u64 = 1 << 11;
/// Both: data need no copy, and can be copied where that does not work.
pub(crate) const F_ZERO_COPY: u64 = F_AUTO_BUF_REG | F_USER_COPY;
/// The size of a device that is served can be changed.
pub(crate) const F_UPDATE_SIZE: u64 = 1 << 10;
/// The server can have its requests queued for the next one before it ends.
pub(crate) const F_QUIESCE: u64 = 1 << 12;
/// A device can be stopped on the condition that nothing has it open.
pub(crate) const F_SAFE_STOP_DEV: u64 = 1 << 17;

/// The features by their names in the header, without `UBLK_F_`.
pub(crate) const FEATURE_NAMES: [&str; 21] = [
    "SUPPORT_ZERO_COPY",
    "URING_CMD_COMP_IN_TASK",
    "NEED_GET_DATA",
    "USER_RECOVERY",
    "USER_RECOVERY_REISSUE",
    "UNPRIVILEGED_DEV",
    "CMD_IOCTL_ENCODE",
    "USER_COPY",
    "ZONED",
    "USER_RECOVERY_FAIL_IO",
    "UPDATE_SIZE",
    "AUTO_BUF_REG",
    "QUIESCE",
    "PER_IO_DAEMON",
    "BUF_REG_OFF_DAEMON",
    "BATCH_IO",
    "INTEGRITY",
    "SAFE_STOP_DEV",
    "NO_AUTO_PART_SCAN",
    "SHMEM_ZC",
    "IO_DESC_SIZE",
];

/// The most requests of a queue of a ublk device: `UBLK_MAX_QUEUE_DEPTH` of the kernel.
/// Beyond it: the kernel refuses the device; this server asks for less.
const MAX_QUEUE_DEPTH: usize = 4096;
/// Bytes between the descriptors of two queues in the character device.
pub(crate) const QUEUE_STRIDE: u64 = (MAX_QUEUE_DEPTH * DESCRIPTOR_BYTES) as u64;
/// Bytes of a request's descriptor.
pub(crate) const DESCRIPTOR_BYTES: usize = 24;
// The stride is a number of whole pages.
const _: () = assert!(QUEUE_STRIDE.is_multiple_of(4096));

/// The server gets no more requests of this tag (`UBLK_IO_RES_ABORT`).
pub(crate) const ABORTED: i32 = -libc::ENODEV;

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceState {
    /// It has no node.
    Dead,
    /// A server serves it.
    Live,
    /// Its server has ended; requests wait for the next one.
    Quiesced,
    /// Its server has ended; requests fail.
    FailIo,
    /// A state of a newer kernel.
    Other(u16),
}

impl From<u16> for DeviceState {
    fn from(number: u16) -> Self {
        match number {
            0 => Self::Dead,
            1 => Self::Live,
            2 => Self::Quiesced,
            3 => Self::FailIo,
            other => Self::Other(other),
        }
    }
}

/// The state of a device in the driver (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceInfo {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) state: DeviceState,
    /// The longest request, in bytes.
    pub(crate) max_io_bytes: u32,
    /// `u32::MAX` asks for any free one.
    pub(crate) id: u32,
    /// The process that serves it; not positive without one.
    pub(crate) pid: i32,
    /// `F_*`.
    pub(crate) features: u64,
    /// A number that the driver keeps for the server.
    pub(crate) server_data: u64,
}

impl DeviceInfo {
    pub(crate) const BYTES: usize = 64;

    /// The arguments of [`ControlOp::ADD_DEV`].
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.queues.to_ne_bytes());
        put(2, &self.depth.to_ne_bytes());
        put(8, &self.max_io_bytes.to_ne_bytes());
        put(12, &self.id.to_ne_bytes());
        put(16, &self.pid.to_ne_bytes());
        put(24, &self.features.to_ne_bytes());
        put(32, &self.server_data.to_ne_bytes());
        bytes
    }

    /// The answer of the driver.
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            queues: u16::from_ne_bytes(field(bytes, 0)),
            depth: u16::from_ne_bytes(field(bytes, 2)),
            state: u16::from_ne_bytes(field(bytes, 4)).into(),
            max_io_bytes: u32::from_ne_bytes(field(bytes, 8)),
            id: u32::from_ne_bytes(field(bytes, 12)),
            pid: i32::from_ne_bytes(field(bytes, 16)),
            features: u64::from_ne_bytes(field(bytes, 24)),
            server_data: u64::from_ne_bytes(field(bytes, 32)),
        }
    }
}

/// The `N` bytes of a structure from `at` on; zeros where it is shorter.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..at + N).and_then(|field| field.try_into().ok());
    found.unwrap_or([0; N])
}

/// The arguments of a control command (`struct ublksrv_ctrl_cmd`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlArguments {
    pub(crate) id: u32,
    /// Address and length of the buffer.
    pub(crate) buffer: (u64, u16),
    pub(crate) data: u64,
    /// Bytes of the character device's path at the start of the buffer, with its NUL.
    pub(crate) path_len: u16,
}

impl ControlArguments {
    pub(crate) fn to_bytes(self) -> [u8; CONTROL_BYTES] {
        let mut bytes = [0; CONTROL_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.id.to_ne_bytes());
        // No command here is one for a single queue.
        put(4, &u16::MAX.to_ne_bytes());
        put(6, &self.buffer.1.to_ne_bytes());
        put(8, &self.buffer.0.to_ne_bytes());
        put(16, &self.data.to_ne_bytes());
        put(24, &self.path_len.to_ne_bytes());
        bytes
    }
}

/// The arguments of an I/O command (`struct ublksrv_io_cmd`): the result of the tag's last request,
/// and the address at which the data of its next one are.
#[inline]
pub(crate) fn io_arguments(queue: u16, tag: u16, result: i32, address: u64) -> [u8; 16] {
    let low = u64::from(queue) | u64::from(tag) << 16 | u64::from(result as u32) << 32;
    // Layout of the structure on a little-endian machine; the other order of bytes needs its own.
    const { assert!(cfg!(target_endian = "little")) };
    (u128::from(low) | u128::from(address) << 64).to_le_bytes()
}

/// The operation of a request.
pub(crate) const OP_READ: u8 = 0;
pub(crate) const OP_WRITE: u8 = 1;
pub(crate) const OP_FLUSH: u8 = 2;
pub(crate) const OP_DISCARD: u8 = 3;
pub(crate) const OP_WRITE_ZEROES: u8 = 5;
/// The write is durable when it is answered.
pub(crate) const IO_FUA: u32 = 1 << 13;
/// The zeroed range keeps its storage.
pub(crate) const IO_NO_UNMAP: u32 = 1 << 15;
/// The memory of the request could not be registered.
pub(crate) const IO_NEED_REG_BUF: u32 = 1 << 17;

/// The address of a fetch command's entry (`struct ublk_auto_buf_reg`): the number under which the
/// memory of the request is registered. A request whose memory cannot be is marked with
/// [`IO_NEED_REG_BUF`].
#[inline]
pub(crate) fn register_as(number: u16) -> u64 {
    const FALLBACK: u64 = 1 << 16;
    u64::from(number) | FALLBACK
}

/// The position in the character device at which the data of a request are.
#[inline]
pub(crate) fn data_position(queue: u16, tag: u16) -> u64 {
    const DATA: u64 = 1 << 31;
    const TAG_SHIFT: u32 = 25;
    const QUEUE_SHIFT: u32 = TAG_SHIFT + 16;
    DATA + (u64::from(queue) << QUEUE_SHIFT | u64::from(tag) << TAG_SHIFT)
}

/// A request (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// The operation in the lowest 8 bits, `IO_*` in the others.
    pub(crate) op_flags: u32,
    pub(crate) sectors: u32,
    pub(crate) start_sector: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_commands_are_those_of_the_header() {
        assert_eq!(ControlOp::ADD_DEV.0, 0xc020_7504);
        assert_eq!(ControlOp::GET_FEATURES.0, 0x8020_7513);
        assert_eq!((FETCH_REQ, COMMIT_AND_FETCH_REQ), (0xc010_7520, 0xc010_7521));
    }

    #[test]
    fn structures_have_the_layout_of_the_header() {
        let info = DeviceInfo {
            queues: 1,
            depth: 2,
            state: DeviceState::Dead,
            max_io_bytes: 3,
            id: 4,
            pid: -1,
            features: 6,
            server_data: 7,
        };
        assert_eq!(DeviceInfo::from_bytes(&info.to_bytes()), info);
        assert_eq!(info.to_bytes()[12], 4);
        let arguments = ControlArguments { id: 1, buffer: (2, 3), data: 4, path_len: 5 };
        let bytes = arguments.to_bytes();
        assert_eq!([bytes[0], bytes[4], bytes[6], bytes[8]], [1, 0xff, 3, 2]);
        assert_eq!([bytes[16], bytes[24]], [4, 5]);
        let bytes = io_arguments(1, 2, -3, 4);
        assert_eq!(bytes, [1, 0, 2, 0, 0xfd, 0xff, 0xff, 0xff, 4, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(register_as(256), 0x1_0100);
        assert_eq!((data_position(0, 0), data_position(1, 2)), (0x8000_0000, 0x200_8400_0000));
    }
}
