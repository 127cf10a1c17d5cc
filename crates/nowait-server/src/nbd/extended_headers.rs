//! Requests with extended headers: which have a payload, and the payload of a block status request
//! (NBD proto.md of the branch extension-ext-header).
//!
//! Invariant: a normalized request looks like its compact form with longer lengths. A misplaced
//! payload flag stays set, so that the translation refuses it.

use crate::nbd::command::MAX_PAYLOAD_BYTES;
use crate::nbd::meta_context::Contexts;
use crate::nbd::wire;
use crate::nbd::wire::{ReplyMode, RequestHeader};

/// Bytes of the effect length, at the start of a block status payload.
const EFFECT_LENGTH_BYTES: usize = 8;
/// Bytes of each context id after the effect length.
const ID_BYTES: usize = 4;

/// Why a request cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParseError {
    /// The request is incomplete.
    NeedMore,
    /// The start of the next request is unknown, or too far away: the connection ends.
    Malformed,
}

/// Brings `header` into the form of a compact one. `rest` is the input after it, `contexts` the
/// contexts of a block status request. Returns the bytes of payload consumed.
///
/// # Errors
/// [`ParseError::NeedMore`] until the payload of a block status request is complete.
/// [`ParseError::Malformed`] for a payload beyond [`MAX_PAYLOAD_BYTES`] ("a server SHOULD initiate
/// hard disconnect").
pub(crate) fn normalize(
    header: &mut RequestHeader,
    contexts: &mut Contexts,
    rest: &[u8],
) -> Result<usize, ParseError> {
    if header.payload(ReplyMode::Extended) > u64::from(MAX_PAYLOAD_BYTES) {
        return Err(ParseError::Malformed);
    }
    match header.command {
        wire::CMD_WRITE => {
            header.flags &= !wire::CMD_FLAG_PAYLOAD_LEN;
            Ok(0)
        }
        wire::CMD_BLOCK_STATUS if header.flags & wire::CMD_FLAG_PAYLOAD_LEN != 0 => {
            apply_payload(header, contexts, rest)
        }
        _ => Ok(0),
    }
}

/// Restricts a block status request to the contexts in its payload, if the payload is valid.
fn apply_payload(
    header: &mut RequestHeader,
    contexts: &mut Contexts,
    rest: &[u8],
) -> Result<usize, ParseError> {
    let bytes = header.length as usize;
    let min = EFFECT_LENGTH_BYTES + ID_BYTES;
    let max = EFFECT_LENGTH_BYTES + ID_BYTES * contexts.len();
    if !(min..=max).contains(&bytes) || !bytes.is_multiple_of(ID_BYTES) {
        return Ok(0);
    }
    let payload = rest.get(..bytes).ok_or(ParseError::NeedMore)?;
    let (effect_length, ids) = payload.split_first_chunk().ok_or(ParseError::NeedMore)?;
    let (ids, _) = ids.as_chunks();
    let Some(selected) = contexts.select(ids.iter().copied().map(u32::from_be_bytes)) else {
        return Ok(0);
    };
    *contexts = selected;
    header.flags &= !wire::CMD_FLAG_PAYLOAD_LEN;
    header.length = u64::from_be_bytes(*effect_length);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::meta_context::Context;

    const ALLOCATION: Contexts = Contexts::NONE.with(Context::BaseAllocation);
    const ID: u32 = Context::BaseAllocation.id();
    const LEN_FLAG: u16 = wire::CMD_FLAG_PAYLOAD_LEN;

    fn header(command: u16, flags: u16, length: u64) -> RequestHeader {
        RequestHeader { flags, command, cookie: 1, offset: 2, length }
    }

    fn payload(effect_length: u64, ids: &[u32]) -> Vec<u8> {
        let ids = ids.iter().flat_map(|id| id.to_be_bytes());
        effect_length.to_be_bytes().into_iter().chain(ids).collect()
    }

    /// The normalized header, the contexts, and the bytes of `rest` consumed.
    fn normalized(
        mut header: RequestHeader,
        rest: &[u8],
    ) -> Result<(RequestHeader, Contexts, usize), ParseError> {
        let mut contexts = ALLOCATION;
        normalize(&mut header, &mut contexts, rest).map(|used| (header, contexts, used))
    }

    #[test]
    fn a_request_without_payload_stays_as_it_is_whatever_its_length() {
        for command in [wire::CMD_READ, wire::CMD_WRITE_ZEROES, wire::CMD_TRIM, 77] {
            let header = header(command, wire::CMD_FLAG_FUA, u64::MAX);
            assert_eq!(normalized(header, &[]), Ok((header, ALLOCATION, 0)));
        }
    }

    #[test]
    fn nbd_must_a_write_has_a_payload_whether_it_says_so_or_not() {
        let fua = wire::CMD_FLAG_FUA;
        let plain = header(wire::CMD_WRITE, fua, 512);
        for flags in [fua | LEN_FLAG, fua] {
            let write = header(wire::CMD_WRITE, flags, 512);
            assert_eq!(normalized(write, &[]), Ok((plain, ALLOCATION, 0)));
        }
    }

    #[test]
    fn nbd_should_a_payload_beyond_the_maximum_ends_the_connection() {
        let max = u64::from(MAX_PAYLOAD_BYTES);
        let all = (0..10).map(|command| (command, LEN_FLAG)).chain([(wire::CMD_WRITE, 0)]);
        for (command, flags) in all {
            assert!(normalized(header(command, flags, max), &[]).is_ok(), "command {command}");
            for length in [max + 1, 1 << 63, u64::MAX] {
                let header = header(command, flags, length);
                assert_eq!(
                    normalized(header, &[]),
                    Err(ParseError::Malformed),
                    "command {command}"
                );
            }
        }
    }

    #[test]
    fn a_misplaced_payload_keeps_its_flag_and_is_not_consumed() {
        for command in [wire::CMD_READ, wire::CMD_FLUSH, wire::CMD_TRIM, wire::CMD_DISC, 77] {
            let header = header(command, LEN_FLAG, 12);
            assert_eq!(normalized(header, &payload(1, &[ID])), Ok((header, ALLOCATION, 0)));
        }
    }

    #[test]
    fn a_block_status_payload_gives_the_length_and_the_contexts() {
        let rest = [payload(1 << 40, &[ID]), vec![9; 30]].concat();
        let request = header(wire::CMD_BLOCK_STATUS, LEN_FLAG | wire::CMD_FLAG_REQ_ONE, 12);
        let plain = header(wire::CMD_BLOCK_STATUS, wire::CMD_FLAG_REQ_ONE, 1 << 40);
        assert_eq!(normalized(request, &rest), Ok((plain, ALLOCATION, 12)));
        for cut in 0..12 {
            assert_eq!(normalized(request, &rest[..cut]), Err(ParseError::NeedMore), "{cut} bytes");
        }
    }

    #[test]
    fn nbd_must_a_block_status_payload_with_unknown_or_double_ids_or_odd_length_is_not_taken() {
        let two = payload(4096, &[ID, ID]);
        let bad =
            [&two[..], &payload(4096, &[ID + 1]), &payload(4096, &[]), &two[..11], &two[..13]];
        for payload in bad {
            let request = header(wire::CMD_BLOCK_STATUS, LEN_FLAG, payload.len() as u64);
            assert_eq!(normalized(request, payload), Ok((request, ALLOCATION, 0)), "{payload:?}");
        }
    }
}
