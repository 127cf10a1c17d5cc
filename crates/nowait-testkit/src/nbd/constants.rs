//! The protocol's numbers (NBD proto.md, "Values" and the sections named below), under its names.
#![allow(missing_docs, reason = "the names are the specification's, which explains them")]

pub const SERVER_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Value of the branch extension-ext-header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// "Client flags": fixed newstyle, no zeroes.
pub const CLIENT_FLAGS: u32 = 0b11;

/// "Option types".
pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_SET_META_CONTEXT: u32 = 10;
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// "Option reply types".
pub const REP_ACK: u32 = 1;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const REP_ERROR_BIT: u32 = 1 << 31;
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR_BIT + 5;
pub const INFO_EXPORT: u16 = 0;
pub const INFO_BLOCK_SIZE: u16 = 3;

/// "Request types".
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

/// "Command flags".
pub const FUA: u16 = 1 << 0;
pub const NO_HOLE: u16 = 1 << 1;
pub const DF: u16 = 1 << 2;
pub const REQ_ONE: u16 = 1 << 3;
pub const FAST_ZERO: u16 = 1 << 4;
pub const PAYLOAD_LEN: u16 = 1 << 5;

/// "Structured reply types", and the flag of the last chunk.
pub const CHUNK_DONE: u16 = 1;
pub const NONE: u16 = 0;
pub const OFFSET_DATA: u16 = 1;
pub const OFFSET_HOLE: u16 = 2;
pub const BLOCK_STATUS_CHUNK: u16 = 5;
pub const BLOCK_STATUS_EXT: u16 = 6;
pub const CHUNK_ERROR_BIT: u16 = 1 << 15;
pub const ERROR: u16 = CHUNK_ERROR_BIT + 1;

/// "Error values".
pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;
