//! What of the server's inside is fuzzed by itself: the handshake, which is bytes in, bytes out.
//!
//! Invariant: nothing here decides anything; the exports are the same each time.
//! Knows: handshake, context, wire. Known by: the fuzz targets, which alone have the feature `fuzz`.

use super::context::{Context, Contexts};
use super::handshake::{ExportInfo, Handshake, Secrecy, Step};
use super::wire;

/// How the server stands to encryption when a handshake begins.
#[derive(Clone, Copy, Debug)]
pub enum Tls {
    /// There is none.
    Off,
    /// Clients may ask for it.
    Offered,
    /// Clients must ask for it.
    Required,
}

/// What became of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What the server has said after its greeting; inside TLS too, but not encrypted.
    pub answers: Vec<u8>,
    /// Bytes of the client that were taken.
    pub taken: usize,
    /// Whether a request comes next.
    pub transmission: bool,
    /// Where the connection stands, in words that are the same for the same state.
    pub state: String,
}

/// Goes through a handshake in which the client's bytes come in `pieces`. What follows on
/// STARTTLS is taken for what came through TLS.
///
/// # Errors
/// What breaks the rules by which the handshake takes bytes.
pub fn handshake<'a>(
    tls: Tls,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Outcome, String> {
    let secrecy = match tls {
        Tls::Off => Secrecy::Off,
        Tls::Offered => Secrecy::Offered,
        Tls::Required => Secrecy::Required,
    };
    let mut handshake = Handshake::new(secrecy);
    let (mut answers, mut taken, mut last) = (Vec::new(), 0, Step::More);
    for mut piece in pieces {
        while !piece.is_empty() && matches!(last, Step::More | Step::StartTls) {
            let (used, step) = handshake.feed(piece, &exports, &mut answers);
            taken += used;
            piece = piece.get(used..).ok_or("more was taken than was there")?;
            if step == Step::More && !piece.is_empty() {
                return Err("it asks for more and leaves what is there".into());
            }
            if step == Step::StartTls && used == 0 {
                return Err("TLS begins without having been asked for".into());
            }
            last = step;
        }
    }
    // At a place where TLS has just begun and where it has begun a while ago is the same place.
    let last = if last == Step::StartTls { Step::More } else { last };
    let transmission = matches!(last, Step::Transmission(_));
    Ok(Outcome { answers, taken, transmission, state: format!("{last:?}") })
}

fn exports() -> Vec<ExportInfo> {
    let export = |name: &str, description: &str, contexts| ExportInfo {
        name: name.into(),
        description: description.into(),
        size: 5 << 30,
        transmission_flags: wire::FLAG_SEND_FLUSH | wire::FLAG_SEND_DF,
        contexts,
        min_block: 1,
        preferred_block: 4096,
        max_payload: 32 << 20,
    };
    let all = Contexts::NONE.with(Context::BaseAllocation);
    vec![export("disk", "the first of two", all), export("other", "", Contexts::NONE)]
}
