//! Requests with extended headers: which of them have a payload, and what the payload of a block
//! status request says (NBD proto.md of the branch extension-ext-header).
//!
//! Invariant: a request that comes out of here looks as its compact form does, only with longer
//! lengths; what its payload flag should not be on still has it, so that the door refuses it.
//! Knows: wire, context, door. Known by: parse.

use super::context::Contexts;
use super::door::MAX_PAYLOAD_BYTES;
use super::wire::{self, Mode, RequestHeader};

/// Bytes of the effect length, at the start of a block status payload.
const EFFECT_LENGTH_BYTES: usize = 8;
/// Bytes of each context id behind it.
const ID_BYTES: usize = 4;

/// Why a request cannot be taken as it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// More of it must come first.
    TooFew,
    /// Where the next request begins is not known, or too far away: the connection ends.
    Broken,
}

/// Brings `header` into the form of a compact one. `rest` is what has come behind it, `contexts`
/// what a block status request is about. Returns how many bytes of payload were used up.
///
/// # Errors
/// [`Trouble::TooFew`] until the payload of a block status request is complete.
/// [`Trouble::Broken`] for a payload beyond [`MAX_PAYLOAD_BYTES`] ("a server SHOULD initiate hard
/// disconnect").
pub(crate) fn unwrap(
    header: &mut RequestHeader,
    contexts: &mut Contexts,
    rest: &[u8],
) -> Result<usize, Trouble> {
    if header.payload(Mode::Extended) > u64::from(MAX_PAYLOAD_BYTES) {
        return Err(Trouble::Broken);
    }
    match header.command {
        wire::CMD_WRITE => {
            header.flags &= !wire::CMD_FLAG_PAYLOAD_LEN;
            Ok(0)
        }
        wire::CMD_BLOCK_STATUS if header.flags & wire::CMD_FLAG_PAYLOAD_LEN != 0 => {
            narrow(header, contexts, rest)
        }
        _ => Ok(0),
    }
}

/// Narrows a block status request to the contexts that its payload names, if it is a good one.
fn narrow(
    header: &mut RequestHeader,
    contexts: &mut Contexts,
    rest: &[u8],
) -> Result<usize, Trouble> {
    let bytes = header.length as usize;
    let least = EFFECT_LENGTH_BYTES + ID_BYTES;
    let most = EFFECT_LENGTH_BYTES + ID_BYTES * contexts.len();
    if !(least..=most).contains(&bytes) || !bytes.is_multiple_of(ID_BYTES) {
        return Ok(0);
    }
    let payload = rest.get(..bytes).ok_or(Trouble::TooFew)?;
    let (effect_length, ids) = payload.split_first_chunk().ok_or(Trouble::TooFew)?;
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
    use super::super::context::Context;
    use super::*;

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

    /// What becomes of the header, the contexts, and how much of `rest` is used up.
    fn unwrapped(
        mut header: RequestHeader,
        rest: &[u8],
    ) -> Result<(RequestHeader, Contexts, usize), Trouble> {
        let mut contexts = ALLOCATION;
        unwrap(&mut header, &mut contexts, rest).map(|used| (header, contexts, used))
    }

    #[test]
    fn a_request_without_payload_stays_as_it_is_whatever_its_length() {
        for command in [wire::CMD_READ, wire::CMD_WRITE_ZEROES, wire::CMD_TRIM, 77] {
            let header = header(command, wire::CMD_FLAG_FUA, u64::MAX);
            assert_eq!(unwrapped(header, &[]), Ok((header, ALLOCATION, 0)));
        }
    }

    #[test]
    fn nbd_must_a_write_has_a_payload_whether_it_says_so_or_not() {
        let fua = wire::CMD_FLAG_FUA;
        let plain = header(wire::CMD_WRITE, fua, 512);
        for flags in [fua | LEN_FLAG, fua] {
            let write = header(wire::CMD_WRITE, flags, 512);
            assert_eq!(unwrapped(write, &[]), Ok((plain, ALLOCATION, 0)));
        }
    }

    #[test]
    fn nbd_should_a_payload_beyond_the_maximum_ends_the_connection() {
        let max = u64::from(MAX_PAYLOAD_BYTES);
        let all = (0..10).map(|command| (command, LEN_FLAG)).chain([(wire::CMD_WRITE, 0)]);
        for (command, flags) in all {
            assert!(unwrapped(header(command, flags, max), &[]).is_ok(), "command {command}");
            for length in [max + 1, 1 << 63, u64::MAX] {
                let header = header(command, flags, length);
                assert_eq!(unwrapped(header, &[]), Err(Trouble::Broken), "command {command}");
            }
        }
    }

    #[test]
    fn a_payload_where_none_may_be_keeps_its_flag_and_is_not_used_up() {
        for command in [wire::CMD_READ, wire::CMD_FLUSH, wire::CMD_TRIM, wire::CMD_DISC, 77] {
            let header = header(command, LEN_FLAG, 12);
            assert_eq!(unwrapped(header, &payload(1, &[ID])), Ok((header, ALLOCATION, 0)));
        }
    }

    #[test]
    fn a_block_status_payload_gives_the_length_and_the_contexts() {
        let rest = [payload(1 << 40, &[ID]), vec![9; 30]].concat();
        let asked = header(wire::CMD_BLOCK_STATUS, LEN_FLAG | wire::CMD_FLAG_REQ_ONE, 12);
        let plain = header(wire::CMD_BLOCK_STATUS, wire::CMD_FLAG_REQ_ONE, 1 << 40);
        assert_eq!(unwrapped(asked, &rest), Ok((plain, ALLOCATION, 12)));
        for cut in 0..12 {
            assert_eq!(unwrapped(asked, &rest[..cut]), Err(Trouble::TooFew), "{cut} bytes");
        }
    }

    #[test]
    fn nbd_must_a_block_status_payload_with_unknown_or_double_ids_or_odd_length_is_not_taken() {
        let two = payload(4096, &[ID, ID]);
        let bad =
            [&two[..], &payload(4096, &[ID + 1]), &payload(4096, &[]), &two[..11], &two[..13]];
        for payload in bad {
            let asked = header(wire::CMD_BLOCK_STATUS, LEN_FLAG, payload.len() as u64);
            assert_eq!(unwrapped(asked, payload), Ok((asked, ALLOCATION, 0)), "{payload:?}");
        }
    }
}
