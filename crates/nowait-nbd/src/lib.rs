//! The NBD protocol as bytes, for servers and clients: no socket, no thread, no I/O.
//!
//! For programs that speak NBD with I/O of their own; a whole server is the crate `nowait-server`.
//!
//! Servers read request headers and options; clients write them and read replies. [`client`] has the
//! handshake of a client over any stream that blocks and the parser of replies; with the feature
//! `transport` also a connection, with TLS. Nothing here decides what a request means.
#![forbid(unsafe_code)]

mod constants;
mod fields;
mod reply_mode;
mod request_header;
mod reply_header;
mod extents;
mod reply_encoder;
mod greeting;
mod option;
mod export_info;
mod address;
mod uri;
#[cfg(feature = "transport")]
pub mod secret_file;
#[cfg(feature = "transport")]
pub mod tls_words;
pub mod client;

pub use address::{Address, DEFAULT_PORT, MAX_SOCKET_PATH_BYTES};
pub use constants::*;
pub use export_info::Info;
pub use extents::{ExtentList, Extents};
pub use fields::{Fields, valid_string};
pub use greeting::{GREETING_BYTES, greeting, parse_greeting};
pub use option::{
    InfoOption, MetaContextOption, OptionHeader, OptionReplyHeader, option, option_reply,
};
pub use reply_encoder::{ChunkPosition, ReplyEncoder};
pub use reply_header::{EncodedHeader, ReplyHeader, WrongMagic};
pub use reply_mode::ReplyMode;
pub use request_header::RequestHeader;
pub use uri::{NbdUri, TlsParams};
