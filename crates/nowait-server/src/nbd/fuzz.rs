//! Entry point for fuzzing the handshake by itself: bytes in, bytes out.
//!
//! Invariant: it adds no logic of its own; the exports are the same each time.

use super::handshake::{ExportInfo, Handshake, HandshakeProgress, TlsState};
use super::wire;
use crate::dirty_bitmaps::BitmapName;
use crate::export::ExportId;
use crate::nbd::meta_context::{Context, Contexts};

/// The most bytes of unsent replies before the client has read any: the replies to one option.
const MAX_ANSWER_BYTES: usize = 512;

/// The server's TLS policy when a handshake begins.
#[derive(Clone, Copy, Debug)]
pub enum Tls {
    /// There is no TLS.
    Off,
    /// Clients may use TLS.
    Offered,
    /// Clients must use TLS.
    Required,
}

/// The result of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The server's bytes after its greeting; those inside TLS are not encrypted.
    pub answers: Vec<u8>,
    /// Bytes of the client that were consumed.
    pub taken: usize,
    /// Whether a request comes next.
    pub transmission: bool,
    /// The state of the connection: equal strings for equal states.
    pub state: String,
}

/// Runs a handshake in which the client's bytes arrive in `pieces`. The bytes after STARTTLS count
/// as decrypted ones.
///
/// # Errors
/// A description of a broken rule of `Handshake::feed`.
pub fn handshake<'a>(
    tls: Tls,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Outcome, String> {
    let state = match tls {
        Tls::Off => TlsState::Off,
        Tls::Offered => TlsState::Offered,
        Tls::Required => TlsState::Required,
    };
    let mut handshake = Handshake::new(state);
    let (mut answers, mut taken, mut last) = (Vec::new(), 0, HandshakeProgress::More);
    for mut piece in pieces {
        while !piece.is_empty() && continues(last) {
            let answered = answers.len();
            let (used, step) = handshake.feed(piece, &exports(), &mut answers);
            if answers.len() - answered > MAX_ANSWER_BYTES {
                return Err(format!("{} bytes wait to be sent", answers.len() - answered));
            }
            if answers.len() > answered && step == HandshakeProgress::More {
                return Err("it answers and asks for more before the answer was sent".into());
            }
            taken += used;
            piece = piece.get(used..).ok_or("more was taken than was there")?;
            if step == HandshakeProgress::More && !piece.is_empty() {
                return Err("it asks for more and leaves what is there".into());
            }
            if step == HandshakeProgress::StartTls && used == 0 {
                return Err("TLS begins without having been asked for".into());
            }
            last = step;
        }
    }
    // Whether TLS has begun just now or some bytes ago makes no difference to the state.
    let last = if continues(last) { HandshakeProgress::More } else { last };
    let transmission = matches!(last, HandshakeProgress::Transmission(_));
    Ok(Outcome { answers, taken, transmission, state: format!("{last:?}") })
}

fn continues(step: HandshakeProgress) -> bool {
    matches!(
        step,
        HandshakeProgress::More | HandshakeProgress::Answered | HandshakeProgress::StartTls
    )
}

fn exports() -> Vec<ExportInfo> {
    let export = |id, name: &str, description: &str, contexts| ExportInfo {
        id: ExportId(id),
        name: name.into(),
        description: description.into(),
        size: 5 << 30,
        transmission_flags: wire::FLAG_SEND_FLUSH | wire::FLAG_SEND_DF,
        contexts,
        bitmaps: ["a", "b:c"].map(BitmapName::removed).to_vec(),
        min_block: 1,
        preferred_block: 4096,
        max_payload: 32 << 20,
    };
    let all = Contexts::NONE.with(Context::BaseAllocation);
    vec![export(0, "disk", "the first of two", all), export(1, "other", "", Contexts::NONE)]
}
