//! From the first byte of a connection to its first request, as a client.
//!
//! Invariant: bounded in memory and in replies, whatever the server sends; what the server says of
//! the export is checked before it is believed.
//! Knows: wire, tls_words. Known by: connection, nbd_port. Source: NBD proto.md, "Newstyle negotiation",
//! "Option types", "Block size constraints".

use std::io::{self, Read, Write};

use super::{tls_words, wire};
use crate::error::words;

/// The context that tells of holes and zeros.
const CONTEXT: &str = "base:allocation";
/// The longest answer to an option that a server has reason to give, in bytes.
const MAX_REPLY_BYTES: u32 = 64 << 10;
/// A server may send several pieces of information before it acknowledges, but not without end.
const MAX_REPLIES: usize = 64;
/// The longest read or write where the server says nothing ("Block size constraints").
const DEFAULT_MAX_BYTES: u32 = 32 << 20;
/// The largest minimum block that the protocol allows.
const MAX_MIN_BLOCK: u32 = 64 << 10;

/// What a server says of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Export {
    /// Bytes.
    pub(super) size: u64,
    /// Transmission flags.
    pub(super) flags: u16,
    /// What the answers about [`CONTEXT`] are called, if there are any.
    pub(super) context: Option<u32>,
    /// Whether replies may come in chunks.
    pub(super) structured: bool,
    /// Bytes that positions and lengths are multiples of, a power of two.
    pub(super) min_block: u32,
    /// The longest read or write in bytes, a multiple of `min_block`.
    pub(super) max_bytes: u32,
}

/// From the server's greeting to the export called `name`.
///
/// # Errors
/// Words that say what the server refused or broke.
pub(super) fn negotiate(stream: &mut (impl Read + Write), name: &str) -> Result<Export, String> {
    greet(stream)?;
    choose(stream, name)
}

/// From the server's greeting to where TLS begins ("NBD_OPT_STARTTLS").
///
/// # Errors
/// As [`negotiate`]; the server has no TLS.
pub(super) fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), String> {
    greet(stream)?;
    let answer = ask(stream, wire::OPT_STARTTLS, &[], &mut |_, _| Ok(()))?;
    answer.map_err(|_| "the server has no TLS (without it: nbd:// or nbd+unix://)".into())
}

/// Asks for the export called `name`, after the greeting or in a TLS session.
///
/// # Errors
/// As [`negotiate`].
pub(super) fn choose(stream: &mut (impl Read + Write), name: &str) -> Result<Export, String> {
    let structured = ask(stream, wire::OPT_STRUCTURED_REPLY, &[], &mut |_, _| Ok(()))?.is_ok();
    let context = if structured { context(stream, name)? } else { None };
    let mut go = Vec::with_capacity(name.len() + 8);
    go.extend((name.len() as u32).to_be_bytes());
    go.extend(name.as_bytes());
    go.extend(1u16.to_be_bytes());
    go.extend(wire::INFO_BLOCK_SIZE.to_be_bytes());
    let mut found = None;
    let mut blocks = (1, DEFAULT_MAX_BYTES);
    let gone = ask(stream, wire::OPT_GO, &go, &mut |kind, data| {
        match (kind, wire::u16_of(data)) {
            (wire::REP_INFO, Some((wire::INFO_EXPORT, rest))) => found = export(rest).or(found),
            (wire::REP_INFO, Some((wire::INFO_BLOCK_SIZE, rest))) => blocks = block_sizes(rest)?,
            _ => {}
        }
        Ok(())
    })?;
    gone.map_err(|refusal| refusal.words(name))?;
    let (size, flags) = found.ok_or("the server does not say how large the export is")?;
    if i64::try_from(size).is_err() {
        return Err(format!("the server says that the export has {size} bytes"));
    }
    let (min_block, max_bytes) = blocks;
    Ok(Export { size, flags, context, structured, min_block, max_bytes })
}

fn greet(stream: &mut (impl Read + Write)) -> Result<(), String> {
    const NO_NBD: &str = "what listens there does not speak NBD, or only its old style";
    let mut greeting = [0; 18];
    receive(stream, &mut greeting)?;
    let (magic, rest) = wire::u64_of(&greeting).ok_or(NO_NBD)?;
    let (option_magic, rest) = wire::u64_of(rest).ok_or(NO_NBD)?;
    let (flags, _) = wire::u16_of(rest).ok_or(NO_NBD)?;
    let newstyle = magic == wire::INIT_MAGIC && option_magic == wire::OPTION_MAGIC;
    if !newstyle || flags & wire::FLAG_FIXED_NEWSTYLE == 0 {
        return Err(NO_NBD.into());
    }
    let own = wire::FLAG_FIXED_NEWSTYLE | (flags & wire::FLAG_NO_ZEROES);
    send(stream, &u32::from(own).to_be_bytes())
}

/// Asks for the answers about [`CONTEXT`]; `None` where the server has none.
fn context(stream: &mut (impl Read + Write), name: &str) -> Result<Option<u32>, String> {
    let mut data = Vec::with_capacity(name.len() + CONTEXT.len() + 12);
    data.extend((name.len() as u32).to_be_bytes());
    data.extend(name.as_bytes());
    data.extend(1u32.to_be_bytes());
    data.extend((CONTEXT.len() as u32).to_be_bytes());
    data.extend(CONTEXT.as_bytes());
    let mut id = None;
    let asked = ask(stream, wire::OPT_SET_META_CONTEXT, &data, &mut |kind, data| {
        if kind == wire::REP_META_CONTEXT
            && let Some((number, name)) = wire::u32_of(data)
            && name == CONTEXT.as_bytes()
        {
            id = Some(number);
        }
        Ok(())
    })?;
    // A refusal of the export's name comes again with GO, where it counts.
    Ok(asked.ok().and(id))
}

/// Why a server refused an option: the type of its reply, and its own words.
struct Refusal {
    kind: u32,
    words: String,
}

impl Refusal {
    fn words(&self, export: &str) -> String {
        let what = match self.kind {
            wire::REP_ERR_UNKNOWN if export.is_empty() => {
                "the server has no default export (give its name in the URI)".into()
            }
            wire::REP_ERR_UNKNOWN => format!("the server has no export '{export}'"),
            wire::REP_ERR_POLICY => "the server does not allow it".into(),
            wire::REP_ERR_TLS_REQD => {
                "the server wants TLS (use nbds:// or nbds+unix://, and --tls-certs)".into()
            }
            wire::REP_ERR_SHUTDOWN => "the server is shutting down".into(),
            wire::REP_ERR_UNSUP => "the server is too old: it does not know NBD_OPT_GO".into(),
            other => format!("the server refused the export (option error {other:#x})"),
        };
        if self.words.is_empty() { what } else { format!("{what}: {}", self.words) }
    }
}

/// Takes the type and the data of a reply.
type Take<'a> = dyn FnMut(u32, &[u8]) -> Result<(), String> + 'a;

/// Sends an option and hands every reply before the last to `take`. The outer error breaks the
/// connection; the inner one is the server's refusal.
fn ask(
    stream: &mut (impl Read + Write),
    option: u32,
    data: &[u8],
    take: &mut Take<'_>,
) -> Result<Result<(), Refusal>, String> {
    const BROKEN: &str = "the server's answer in the handshake is no answer";
    let mut message = Vec::with_capacity(data.len() + 16);
    message.extend(wire::OPTION_MAGIC.to_be_bytes());
    message.extend(option.to_be_bytes());
    message.extend((data.len() as u32).to_be_bytes());
    message.extend(data);
    send(stream, &message)?;
    for _ in 0..MAX_REPLIES {
        let mut head = [0; 20];
        receive(stream, &mut head)?;
        let (magic, rest) = wire::u64_of(&head).ok_or(BROKEN)?;
        let (answered, rest) = wire::u32_of(rest).ok_or(BROKEN)?;
        let (kind, rest) = wire::u32_of(rest).ok_or(BROKEN)?;
        let (len, _) = wire::u32_of(rest).ok_or(BROKEN)?;
        if magic != wire::OPTION_REPLY_MAGIC || answered != option || len > MAX_REPLY_BYTES {
            return Err(BROKEN.into());
        }
        let mut data = vec![0; len as usize];
        receive(stream, &mut data)?;
        match kind {
            wire::REP_ACK => return Ok(Ok(())),
            _ if kind & wire::REP_ERR_BIT != 0 => {
                let words = String::from_utf8_lossy(&data).into_owned();
                return Ok(Err(Refusal { kind, words }));
            }
            _ => take(kind, &data)?,
        }
    }
    Err("the server does not come to an end in the handshake".into())
}

/// Size and flags of `INFO_EXPORT`.
fn export(data: &[u8]) -> Option<(u64, u16)> {
    let (size, rest) = wire::u64_of(data)?;
    let (flags, rest) = wire::u16_of(rest)?;
    rest.is_empty().then_some((size, flags))
}

/// The least and the greatest of `INFO_BLOCK_SIZE`.
fn block_sizes(data: &[u8]) -> Result<(u32, u32), String> {
    let parsed = wire::u32_of(data).and_then(|(min, rest)| {
        let (_preferred, rest) = wire::u32_of(rest)?;
        Some((min, wire::u32_of(rest)?.0))
    });
    let (min, max) = parsed.unwrap_or_default();
    if !min.is_power_of_two() || min > MAX_MIN_BLOCK || max < min {
        return Err(format!("the server's block sizes, {min} to {max} bytes, cannot be"));
    }
    // No limit at all is said as all bits set.
    Ok((min, max.min(DEFAULT_MAX_BYTES) & !(min - 1)))
}

fn receive(stream: &mut impl Read, bytes: &mut [u8]) -> Result<(), String> {
    stream.read_exact(bytes).map_err(|error| failure(&error))
}

fn send(stream: &mut impl Write, bytes: &[u8]) -> Result<(), String> {
    stream.write_all(bytes).map_err(|error| failure(&error))
}

fn failure(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the server closed the connection in the handshake".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the server does not answer in the handshake".into()
        }
        _ => tls_words::of_io(error).unwrap_or_else(|| words(error)),
    }
}
