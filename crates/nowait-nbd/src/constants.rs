//! The numbers of NBD.
//!
//! Invariant: names are those of NBD proto.md without `NBD_`; on the wire all numbers are big-endian.
//! Constants marked "ext" are of proto.md on the branch extension-ext-header, where extended headers
//! are specified.

/// `NBDMAGIC`: the first eight bytes of a server's greeting.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: the second eight bytes of the greeting and the start of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The start of every request of the transmission phase.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The start of every request after `OPT_EXTENDED_HEADERS` (ext).
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The start of every chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The start of every chunk of a reply after `OPT_EXTENDED_HEADERS` (ext).
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The longest string of the protocol, in bytes (NBD proto.md, "Conventions").
/// Beyond it: the string is refused.
pub const MAX_STRING_BYTES: usize = 4096;

/// Handshake flag, and client flag in answer to it: options other than `OPT_EXPORT_NAME` work.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag, and client flag in answer to it: no padding after `OPT_EXPORT_NAME`.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

// Option types (NBD proto.md, "Option types"); options that are missing here are not supported.
/// `NBD_OPT_EXPORT_NAME`.
pub const OPT_EXPORT_NAME: u32 = 1;
/// `NBD_OPT_ABORT`.
pub const OPT_ABORT: u32 = 2;
/// `NBD_OPT_LIST`.
pub const OPT_LIST: u32 = 3;
/// `NBD_OPT_STARTTLS`.
pub const OPT_STARTTLS: u32 = 5;
/// `NBD_OPT_INFO`.
pub const OPT_INFO: u32 = 6;
/// `NBD_OPT_GO`.
pub const OPT_GO: u32 = 7;
/// `NBD_OPT_STRUCTURED_REPLY`.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// `NBD_OPT_LIST_META_CONTEXT`.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// `NBD_OPT_SET_META_CONTEXT`.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// `NBD_OPT_EXTENDED_HEADERS`.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

// Option reply types (NBD proto.md, "Option reply types").

/// Set in the type of an option reply that is an error.
pub const REP_ERR_BIT: u32 = 1 << 31;
/// `NBD_REP_ACK`.
pub const REP_ACK: u32 = 1;
/// `NBD_REP_SERVER`.
pub const REP_SERVER: u32 = 2;
/// `NBD_REP_INFO`.
pub const REP_INFO: u32 = 3;
/// `NBD_REP_META_CONTEXT`.
pub const REP_META_CONTEXT: u32 = 4;
/// `NBD_REP_ERR_UNSUP`.
pub const REP_ERR_UNSUP: u32 = REP_ERR_BIT + 1;
/// `NBD_REP_ERR_POLICY`.
pub const REP_ERR_POLICY: u32 = REP_ERR_BIT + 2;
/// `NBD_REP_ERR_INVALID`.
pub const REP_ERR_INVALID: u32 = REP_ERR_BIT + 3;
/// `NBD_REP_ERR_TLS_REQD`.
pub const REP_ERR_TLS_REQD: u32 = REP_ERR_BIT + 5;
/// `NBD_REP_ERR_UNKNOWN`.
pub const REP_ERR_UNKNOWN: u32 = REP_ERR_BIT + 6;
/// `NBD_REP_ERR_SHUTDOWN`.
pub const REP_ERR_SHUTDOWN: u32 = REP_ERR_BIT + 7;
/// `NBD_REP_ERR_TOO_BIG`.
pub const REP_ERR_TOO_BIG: u32 = REP_ERR_BIT + 9;
/// `NBD_REP_ERR_EXT_HEADER_REQD`.
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERR_BIT + 10;

// Information types of `REP_INFO`.
/// `NBD_INFO_EXPORT`.
pub const INFO_EXPORT: u16 = 0;
/// `NBD_INFO_NAME`.
pub const INFO_NAME: u16 = 1;
/// `NBD_INFO_DESCRIPTION`.
pub const INFO_DESCRIPTION: u16 = 2;
/// `NBD_INFO_BLOCK_SIZE`.
pub const INFO_BLOCK_SIZE: u16 = 3;

// Transmission flags (NBD proto.md, "Transmission flags"): the abilities of an export.
/// `NBD_FLAG_HAS_FLAGS`.
pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
/// `NBD_FLAG_READ_ONLY`.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// `NBD_FLAG_SEND_FLUSH`.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// `NBD_FLAG_SEND_FUA`.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// `NBD_FLAG_SEND_TRIM`.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// `NBD_FLAG_SEND_WRITE_ZEROES`.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// `NBD_FLAG_SEND_DF`.
pub const FLAG_SEND_DF: u16 = 1 << 7;
/// `NBD_FLAG_CAN_MULTI_CONN`.
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
/// `NBD_FLAG_SEND_CACHE`.
pub const FLAG_SEND_CACHE: u16 = 1 << 10;
/// `NBD_FLAG_SEND_FAST_ZERO`.
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;
/// `NBD_FLAG_BLOCK_STATUS_PAYLOAD`.
pub const FLAG_BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;

// Commands (NBD proto.md, "Request types").
/// `NBD_CMD_READ`.
pub const CMD_READ: u16 = 0;
/// `NBD_CMD_WRITE`.
pub const CMD_WRITE: u16 = 1;
/// `NBD_CMD_DISC`.
pub const CMD_DISC: u16 = 2;
/// `NBD_CMD_FLUSH`.
pub const CMD_FLUSH: u16 = 3;
/// `NBD_CMD_TRIM`.
pub const CMD_TRIM: u16 = 4;
/// `NBD_CMD_CACHE`.
pub const CMD_CACHE: u16 = 5;
/// `NBD_CMD_WRITE_ZEROES`.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// `NBD_CMD_BLOCK_STATUS`.
pub const CMD_BLOCK_STATUS: u16 = 7;

// Command flags (NBD proto.md, "Command flags").
/// `NBD_CMD_FLAG_FUA`.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
/// `NBD_CMD_FLAG_NO_HOLE`.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// `NBD_CMD_FLAG_DF`.
pub const CMD_FLAG_DF: u16 = 1 << 2;
/// `NBD_CMD_FLAG_REQ_ONE`.
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// `NBD_CMD_FLAG_FAST_ZERO`.
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// `NBD_CMD_FLAG_PAYLOAD_LEN`.
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// Reply flag of a chunk: the last one for its request.
pub const REPLY_FLAG_DONE: u16 = 1 << 0;

// Reply types of a chunk (NBD proto.md, "Structured reply types").

/// Set in the type of an error chunk.
pub const REPLY_TYPE_ERROR_BIT: u16 = 1 << 15;
/// `NBD_REPLY_TYPE_NONE`.
pub const REPLY_TYPE_NONE: u16 = 0;
/// `NBD_REPLY_TYPE_OFFSET_DATA`.
pub const REPLY_TYPE_OFFSET_DATA: u16 = 1;
/// `NBD_REPLY_TYPE_OFFSET_HOLE`.
pub const REPLY_TYPE_OFFSET_HOLE: u16 = 2;
/// `NBD_REPLY_TYPE_BLOCK_STATUS`.
pub const REPLY_TYPE_BLOCK_STATUS: u16 = 5;
/// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
pub const REPLY_TYPE_BLOCK_STATUS_EXT: u16 = 6;
/// `NBD_REPLY_TYPE_ERROR`.
pub const REPLY_TYPE_ERROR: u16 = REPLY_TYPE_ERROR_BIT + 1;

/// `base:allocation`: the extent has no allocated storage.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the extent reads as zeros.
pub const STATE_ZERO: u32 = 1 << 1;

// Error values (NBD proto.md, "Error values"): the only ones a reply may carry.
/// Error value `NBD_EPERM`.
pub const EPERM: u32 = 1;
/// Error value `NBD_EIO`.
pub const EIO: u32 = 5;
/// Error value `NBD_ENOMEM`.
pub const ENOMEM: u32 = 12;
/// Error value `NBD_EINVAL`.
pub const EINVAL: u32 = 22;
/// Error value `NBD_ENOSPC`.
pub const ENOSPC: u32 = 28;
/// Error value `NBD_EOVERFLOW`.
pub const EOVERFLOW: u32 = 75;
/// Error value `NBD_ENOTSUP`.
pub const ENOTSUP: u32 = 95;
/// Error value `NBD_ESHUTDOWN`.
pub const ESHUTDOWN: u32 = 108;

/// Bytes of a compact request header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of the header of a request after `OPT_EXTENDED_HEADERS` (ext).
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Bytes of a simple reply before its data.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of the header of a chunk of a structured reply.
pub const CHUNK_HEAD_BYTES: usize = 20;
/// Bytes of the header of a chunk after `OPT_EXTENDED_HEADERS` (ext).
pub const EXTENDED_REPLY_BYTES: usize = 32;
/// Zero bytes after the flags of an export in the answer to `OPT_EXPORT_NAME`, unless
/// `FLAG_NO_ZEROES` was agreed on.
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;
