//! The layout of every 64-bit word that goes through a queue and comes back: tokens, the target of a
//! transfer, and tags of requests. No other file of this crate shifts or masks such a word.
//!
//! ```text
//!  63 62 61 60 59                  32 31                     0
//! +--+--+--+--+----------------------+-----------------------+
//! | 0| 0| 0| 0|          0           | slot of the engine    |  transfer
//! | 0| 1| 0| 0|          0           |           0           |  RING_OWN: a ring's entry for itself
//! | 1| 0| 0| 0| number that the caller of the engine chooses |  watched descriptor; command
//! | 1| 0| 0| 0| 1         0             0 wake, 1 transfers |  WAKE_EVENT, CALLERS_EVENT: such numbers
//! | 1| 0| 1| 0| the same number                              |  RING_ONCE: reported once, in a ring
//! | 1| 0| 0| 1|          0             0 workers, 1 storages |  event of the engine
//! | 1| 1| 0| 0|          0             0 threads, 1 AIO      |  event of a queue without a ring
//! +--+--+--+--+----------------------+-----------------------+
//!  in the ring that polls devices:
//! +----------------------------------+-----------------------+
//! |                0                 | place of the transfer |  transfer
//! |          all ones                        all ones        |  POLLING_PROBE: tries a file
//! +----------------------------------+-----------------------+
//!  in slots and requests:
//! +--+-------------------------------+-----------------------+
//! | R| number of the file (queue)    | index of the device   |  Target; R: REMOTE_FILE
//! | number of the client             | chosen by the client  |  tag of a request
//! +----------------------------------+-----------------------+
//! ```
//!
//! Invariant: bit 63 tells transfers from all else, so that no event can end a transfer. Of the tokens
//! that a queue returns, no two kinds have a value in common.

/// The caller's name for a transfer or a watched descriptor.
///
/// Tokens of transfers are below 2³²; [`FD_TOKEN`] marks those of descriptors.
pub type Token = u64;

/// Set in the token of a watched descriptor or of a driver's command.
pub const FD_TOKEN: Token = 1 << 63;

/// Without [`FD_TOKEN`]: the token of entries that a ring makes for itself, which it does not return.
pub(crate) const RING_OWN: Token = 1 << 62;
/// Set in a ring's entry for a token with [`FD_TOKEN`] that is reported once; the ring returns the
/// token without it.
pub(crate) const RING_ONCE: Token = 1 << 61;
/// With [`FD_TOKEN`]: an event of the engine or of a queue's storages.
const ENGINE: Token = 1 << 60;
/// With [`FD_TOKEN`]: an event of a queue without a ring.
const RINGLESS: Token = 1 << 62;
/// Bits of a watched descriptor's token that its caller may not choose.
const RESERVED: Token = RINGLESS | RING_ONCE | ENGINE;

/// A worker has returned a slot to the engine.
pub(crate) const WORKERS_EVENT: Token = FD_TOKEN | ENGINE;
/// A transfer of a storage that makes its transfers itself has completed.
pub(crate) const STORAGES_EVENT: Token = FD_TOKEN | ENGINE | 1;
/// A thread of a queue without a ring has completed a transfer.
pub(crate) const THREADS_EVENT: Token = FD_TOKEN | RINGLESS;
/// AIO of a queue without a ring has completed a transfer.
pub(crate) const AIO_EVENT: Token = FD_TOKEN | RINGLESS | 1;
/// The driver of an async API was woken; a number of a caller of the engine.
pub(crate) const WAKE_EVENT: Token = FD_TOKEN | 1 << 59;
/// A transfer that a caller of the async API has submitted itself has completed; a number as that of `WAKE_EVENT`.
pub(crate) const CALLERS_EVENT: Token = WAKE_EVENT | 1;

/// In the ring that polls devices: a read that tells whether a file system polls. No place is that
/// great.
pub(crate) const POLLING_PROBE: u64 = u64::MAX;

/// Set in the numbers of files of devices whose storage makes its transfers itself.
pub(crate) const REMOTE_FILE: u32 = 1 << 31;

/// The token of the transfer in `slot`.
#[inline(always)]
pub(crate) const fn of_slot(slot: u32) -> Token {
    slot as Token
}

/// The slot of a transfer, from its token.
#[inline(always)]
pub(crate) const fn slot_of(token: Token) -> u32 {
    debug_assert!(token <= u32::MAX as Token);
    token as u32
}

/// The slot of a transfer as an index, from its token; beyond every slot for a token of another kind.
#[inline(always)]
pub(crate) const fn index_of(token: Token) -> usize {
    token as usize
}

/// Whether a queue returns `token` for a transfer.
#[inline(always)]
pub(crate) const fn is_transfer(token: Token) -> bool {
    token & (FD_TOKEN | RING_OWN) == 0
}

/// Whether `token` is one of a watched descriptor or of a command.
#[inline(always)]
pub(crate) const fn is_event(token: Token) -> bool {
    token & FD_TOKEN != 0
}

/// Whether a caller of the engine may watch a descriptor under `token`.
pub(crate) const fn is_of_caller(token: Token) -> bool {
    token & (FD_TOKEN | RESERVED) == FD_TOKEN
}

/// The number of the client that a request's tag names.
#[inline(always)]
pub(crate) const fn client_of(tag: u64) -> u32 {
    (tag >> 32) as u32
}

/// A device, and a file of it: the index of the device in the table of the engine, and the number of
/// the file in the queue. Both are one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target(u64);

impl Target {
    #[inline(always)]
    pub(crate) const fn new(device: u32, file: u32) -> Self {
        Self((file as u64) << 32 | device as u64)
    }

    #[inline(always)]
    pub(crate) const fn device(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    pub(crate) const fn file(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of each kind that a queue, or a ring for itself, may hold, the extreme ones among them.
    fn kinds() -> Vec<(&'static str, Vec<Token>)> {
        let numbers = [0, 1, 5, 1 << 31, (1 << 59) - 1, (1 << 60) - 1];
        let watches = numbers.map(|number| FD_TOKEN | number).to_vec();
        let once = watches.iter().map(|token| token | RING_ONCE).collect();
        vec![
            ("transfer", [0, 1, 1 << 15, u32::MAX].map(of_slot).to_vec()),
            ("of the ring", vec![RING_OWN]),
            ("watch", watches),
            ("reported once", once),
            ("workers", vec![WORKERS_EVENT]),
            ("storages", vec![STORAGES_EVENT]),
            ("threads", vec![THREADS_EVENT]),
            ("AIO", vec![AIO_EVENT]),
        ]
    }

    #[test]
    fn no_two_kinds_of_tokens_have_a_value_in_common() {
        let kinds = kinds();
        for (n, (kind, tokens)) in kinds.iter().enumerate() {
            for (other, others) in &kinds[n + 1..] {
                assert!(!tokens.iter().any(|token| others.contains(token)), "{kind}, {other}");
            }
        }
    }

    #[test]
    fn each_kind_of_token_is_told_from_the_others() {
        for (kind, tokens) in kinds() {
            for token in tokens {
                assert_eq!(is_transfer(token), kind == "transfer", "{kind}: {token:x}");
                let is_event = !["transfer", "of the ring"].contains(&kind);
                assert_eq!(super::is_event(token), is_event, "{kind}: {token:x}");
                assert_eq!(is_of_caller(token), kind == "watch", "{kind}: {token:x}");
            }
        }
        assert!(is_of_caller(WAKE_EVENT) && !is_of_caller(WAKE_EVENT & !FD_TOKEN));
    }

    #[test]
    fn slots_targets_and_clients_come_back_as_they_were_put_in() {
        let numbers = [0, 1, (1 << 15) - 1, REMOTE_FILE, REMOTE_FILE | 7, u32::MAX];
        for number in numbers {
            assert_eq!(slot_of(of_slot(number)), number);
            for other in numbers {
                let target = Target::new(number, other);
                assert_eq!((target.device(), target.file()), (number, other));
                assert_eq!(client_of(u64::from(number) << 32 | u64::from(other)), number);
            }
        }
        assert_ne!(Target::new(1, 0), Target::new(0, 1));
        // Places of the ring that polls are bytes.
        assert!(POLLING_PROBE > u64::from(u8::MAX));
    }

    #[test]
    fn a_token_is_the_same_with_its_mark_in_a_ring_taken_off() {
        for token in [FD_TOKEN, FD_TOKEN | 5, WAKE_EVENT] {
            assert_eq!((token | RING_ONCE) & !RING_ONCE, token);
        }
    }
}
