//! From the first byte of a connection to its first request, as a client.
//!
//! Invariant: bounded in memory and in replies, whatever the server sends; what the server says of
//! the export is checked before it is believed.

use std::fmt;
use std::io::{self, Read, Write};

use crate::constants::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, INFO_BLOCK_SIZE, OPT_EXTENDED_HEADERS, OPT_GO,
    OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY, REP_ACK, REP_INFO, REP_META_CONTEXT,
};
use crate::export_info::Info;
use crate::fields::Fields;
use crate::greeting::{GREETING_BYTES, parse_greeting};
use crate::option::{InfoOption, MetaContextOption, OptionReplyHeader, option};
use crate::reply_mode::ReplyMode;

/// The longest reply to an option that a server has reason to give, in bytes.
/// Beyond it: the handshake fails.
const MAX_REPLY_BYTES: u32 = 64 << 10;
/// The most replies to one option: a server may send several pieces of information before it acknowledges.
/// Beyond it: the handshake fails.
const MAX_REPLIES: usize = 64;
/// The longest read or write in bytes where the server says nothing (NBD proto.md, "Block size
/// constraints").
/// Beyond it: a request is split.
const DEFAULT_MAX_BYTES: u32 = 32 << 20;
/// The largest minimum block in bytes that the protocol allows.
/// Beyond it: the handshake fails.
const MAX_MIN_BLOCK: u32 = 64 << 10;

const BROKEN: &str = "the server's answer in the handshake is not an answer";

/// Requests of a client, the export aside.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted<'a> {
    /// The messages to use, if the server has them; else those of the next simpler mode.
    pub mode: ReplyMode,
    /// The metadata context that block status is asked for in; it needs replies in chunks.
    pub context: Option<&'a str>,
}

/// Facts of a server about an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes, less than 2^63.
    pub size: u64,
    /// Transmission flags, `FLAG_*`.
    pub flags: u16,
    /// The id of the context that was asked for, if the server has it.
    pub context: Option<u32>,
    /// The messages that were agreed on.
    pub mode: ReplyMode,
    /// Bytes that positions and lengths are multiples of, a power of two.
    pub min_block: u32,
    /// The longest read or write in bytes, a multiple of `min_block`.
    pub max_bytes: u32,
}

/// Why a handshake led to no export.
#[derive(Debug)]
pub enum HandshakeError {
    /// The stream failed.
    Io(io::Error),
    /// The greeting is not that of a server with fixed newstyle negotiation.
    NotNbd,
    /// The server refused an option.
    Refused {
        /// The option, `OPT_*`.
        option: u32,
        /// Why, `REP_ERR_*`.
        kind: u32,
        /// The server's own words; may be empty.
        words: String,
    },
    /// An answer that breaks the protocol, in words.
    Broken(String),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(out),
            Self::NotNbd => {
                out.write_str("what listens there does not speak NBD, or only its old style")
            }
            Self::Refused { option, kind, words } => {
                write!(out, "the server refused option {option}: error {kind:#x} {words}")
            }
            Self::Broken(words) => out.write_str(words),
        }
    }
}

impl std::error::Error for HandshakeError {}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<&str> for HandshakeError {
    fn from(words: &str) -> Self {
        Self::Broken(words.to_owned())
    }
}

/// Answers the server's greeting; options follow.
///
/// # Errors
/// The greeting is not that of a server with fixed newstyle negotiation; the stream failed.
pub fn greet(stream: &mut (impl Read + Write)) -> Result<(), HandshakeError> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    let fixed = parse_greeting(&greeting).filter(|flags| flags & FLAG_FIXED_NEWSTYLE != 0);
    let flags = fixed.ok_or(HandshakeError::NotNbd)?;
    let own = FLAG_FIXED_NEWSTYLE | (flags & FLAG_NO_ZEROES);
    Ok(stream.write_all(&u32::from(own).to_be_bytes())?)
}

/// Asks for TLS, after the greeting. It begins with the next byte in both directions (NBD proto.md,
/// "NBD_OPT_STARTTLS").
///
/// # Errors
/// The server refused it or broke the protocol; the stream failed.
pub fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), HandshakeError> {
    ask(stream, OPT_STARTTLS, &[], &mut |_, _| Ok(()))
}

/// Asks for the export called `name`, after the greeting or in a TLS session; requests follow.
///
/// # Errors
/// The server refused the export or broke the protocol; the stream failed.
pub fn choose(
    stream: &mut (impl Read + Write),
    name: &str,
    wanted: Wanted<'_>,
) -> Result<Export, HandshakeError> {
    let mode = agree(stream, wanted.mode)?;
    let context = match wanted.context {
        Some(context) if mode.has_chunks() => select(stream, name, context)?,
        _ => None,
    };
    let mut found = None;
    let mut blocks = (1, DEFAULT_MAX_BYTES);
    let request = InfoOption { export: name, kinds: vec![INFO_BLOCK_SIZE] }.encode();
    ask(stream, OPT_GO, &request, &mut |kind, data| {
        if kind == REP_INFO {
            match Info::parse(data).ok_or(BROKEN)? {
                Info::Export { size, flags } => found = Some((size, flags)),
                Info::BlockSize { min, max, .. } => blocks = block_sizes(min, max)?,
                Info::Other { .. } => {}
            }
        }
        Ok(())
    })?;
    let (size, flags) = found.ok_or("the server does not say how large the export is")?;
    if i64::try_from(size).is_err() {
        let words = format!("the server says that the export has {size} bytes");
        return Err(HandshakeError::Broken(words));
    }
    let (min_block, max_bytes) = blocks;
    Ok(Export { size, flags, context, mode, min_block, max_bytes })
}

/// Agrees on `wanted`, or the next simpler mode that the server has.
fn agree(stream: &mut (impl Read + Write), wanted: ReplyMode) -> Result<ReplyMode, HandshakeError> {
    let mut has_option = |option| has(ask(stream, option, &[], &mut |_, _| Ok(())));
    if wanted == ReplyMode::Extended && has_option(OPT_EXTENDED_HEADERS)? {
        return Ok(ReplyMode::Extended);
    }
    Ok(match wanted.has_chunks() && has_option(OPT_STRUCTURED_REPLY)? {
        true => ReplyMode::Structured,
        false => ReplyMode::Simple,
    })
}

/// Selects `context`; `None` where the server does not have it.
fn select(
    stream: &mut (impl Read + Write),
    name: &str,
    context: &str,
) -> Result<Option<u32>, HandshakeError> {
    let mut id = None;
    let query = MetaContextOption { export: name, queries: vec![context] }.encode();
    let asked = ask(stream, OPT_SET_META_CONTEXT, &query, &mut |kind, data| {
        let mut fields = Fields(data);
        if kind == REP_META_CONTEXT
            && let Some(number) = fields.u32()
            && fields.0 == context.as_bytes()
        {
            id = Some(number);
        }
        Ok(())
    });
    // A refusal of the export's name comes again with GO, where it counts.
    Ok(if has(asked)? { id } else { None })
}

/// Whether the server acknowledged an option. A refusal is not an error here.
fn has(asked: Result<(), HandshakeError>) -> Result<bool, HandshakeError> {
    match asked {
        Ok(()) => Ok(true),
        Err(HandshakeError::Refused { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes the kind and the data of a reply.
type Take<'a> = dyn FnMut(u32, &[u8]) -> Result<(), HandshakeError> + 'a;

/// Sends an option and hands every reply before the last to `take`.
fn ask(
    stream: &mut (impl Read + Write),
    asked: u32,
    data: &[u8],
    take: &mut Take<'_>,
) -> Result<(), HandshakeError> {
    stream.write_all(&option(asked, data))?;
    for _ in 0..MAX_REPLIES {
        let mut head = [0; OptionReplyHeader::BYTES];
        stream.read_exact(&mut head)?;
        let head = OptionReplyHeader::parse(&head).ok_or(BROKEN)?;
        if head.option != asked || head.length > MAX_REPLY_BYTES {
            return Err(BROKEN.into());
        }
        let mut data = vec![0; head.length as usize];
        stream.read_exact(&mut data)?;
        match head.kind {
            REP_ACK => return Ok(()),
            kind if head.is_error() => {
                let words = String::from_utf8_lossy(&data).into_owned();
                return Err(HandshakeError::Refused { option: asked, kind, words });
            }
            kind => take(kind, &data)?,
        }
    }
    Err("the server does not come to an end in the handshake".into())
}

/// The least and the greatest of `INFO_BLOCK_SIZE`, in bytes.
fn block_sizes(min: u32, max: u32) -> Result<(u32, u32), HandshakeError> {
    if !min.is_power_of_two() || min > MAX_MIN_BLOCK || max < min {
        let words = format!("the server's block sizes, {min} to {max} bytes, cannot be");
        return Err(HandshakeError::Broken(words));
    }
    // No limit at all is said as all bits set.
    Ok((min, max.min(DEFAULT_MAX_BYTES) & !(min - 1)))
}
