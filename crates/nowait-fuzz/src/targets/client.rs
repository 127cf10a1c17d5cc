//! The bytes of a server as the copying client receives them: the first byte selects the phase.
//!
//! Checked: which requests complete, with which bytes, and what breaks the connection do not depend
//! on how the bytes are split.

use nowait_copy::fuzz::{CONTEXT, PENDING, negotiate, replies};
use nowait_nbd::{self as nbd, Info, ReplyHeader, ReplyMode};

use crate::split::cut;
use crate::target::{Check, Target};

pub(crate) const TARGET: Target = Target {
    name: "client",
    about: "what a server says to `nowait copy`: negotiation and replies",
    prepare: || Ok(Box::new(check) as Check),
    seeds,
    words: &[
        &[0x67, 0x44, 0x66, 0x98],
        &[0x66, 0x8e, 0x33, 0xef],
        &[0, 0, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 0, 2],
        &[0, 1, 0, 1],
        &[0, 1, 0, 2],
        &[0, 1, 0, 5],
        &[0x80, 1],
        b"base:allocation",
    ],
    longest: 8192,
    // The longest block status reply, in wire format and as spans.
    memory: 64 << 20,
};

fn check(input: &[u8]) -> Result<(), String> {
    let Some((&first, bytes)) = input.split_first() else { return Ok(()) };
    if first % 2 == 0 {
        // A rejection is an error with a message; there is nothing else to check.
        return negotiate(bytes).map_or_else(one_line, |_| Ok(()));
    }
    let whole = replies([bytes]);
    whole.1.clone().or_else(one_line)?;
    for longest in [1, 32] {
        let pieces = replies(cut(bytes, longest));
        if pieces != whole {
            return Err(format!("cut it ends as {pieces:?}, whole as {whole:?}"));
        }
    }
    Ok(())
}

fn one_line(words: String) -> Result<(), String> {
    if words.is_empty() { Err("a refusal without words".into()) } else { Ok(()) }
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    nbd::option_reply(&mut bytes, option, kind, &[data]);
    bytes
}

/// A server that accepts everything, and one that does not.
fn negotiations() -> [Vec<u8>; 2] {
    let flags = nbd::FLAG_FIXED_NEWSTYLE | nbd::FLAG_NO_ZEROES;
    let greeting = [&[0][..], &nbd::greeting(flags)].concat();
    let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
    let size = Info::Export { size: 1 << 30, flags: 0x56d }.encode();
    let blocks = Info::BlockSize { min: 1, preferred: 4096, max: 32 << 20 }.encode();
    let good = [
        reply(nbd::OPT_STRUCTURED_REPLY, nbd::REP_ACK, &[]),
        reply(nbd::OPT_SET_META_CONTEXT, nbd::REP_META_CONTEXT, &context),
        reply(nbd::OPT_SET_META_CONTEXT, nbd::REP_ACK, &[]),
        reply(nbd::OPT_GO, nbd::REP_INFO, &size),
        reply(nbd::OPT_GO, nbd::REP_INFO, &blocks),
        reply(nbd::OPT_GO, nbd::REP_ACK, &[]),
    ];
    let bad = [
        reply(nbd::OPT_STRUCTURED_REPLY, nbd::REP_ERR_UNSUP, b"no"),
        reply(nbd::OPT_GO, nbd::REP_ERR_UNKNOWN, b"no such export"),
    ];
    [[greeting.clone(), good.concat()].concat(), [greeting, bad.concat()].concat()]
}

fn simple(error: u32, cookie: u64) -> Vec<u8> {
    ReplyHeader::Simple { error, cookie }.encode(ReplyMode::Simple, 0).as_slice().to_vec()
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let header = ReplyHeader::Chunk { flags, kind, cookie, length: payload.len() as u64 };
    [header.encode(ReplyMode::Structured, 0).as_slice(), payload].concat()
}

fn seeds() -> Vec<Vec<u8>> {
    let pos = |cookie: usize| PENDING.get(cookie).map_or(0, |pending| pending.0).to_be_bytes();
    let done = nbd::REPLY_FLAG_DONE;
    let hole = [&pos(1)[..], &4096u32.to_be_bytes()].concat();
    let data = [&pos(0)[..], &[7; 8]].concat();
    let status = [CONTEXT, 65536, 0, 1 << 20, nbd::STATE_HOLE | nbd::STATE_ZERO];
    let status: Vec<u8> = status.iter().flat_map(|number| number.to_be_bytes()).collect();
    let error = [&nbd::ENOSPC.to_be_bytes()[..], &[0, 4], b"full"].concat();
    let simple_ones = [&[1][..], &simple(0, 3), &simple(0, 0), &[9; 8], &simple(0, 5)];
    let chunks = [
        vec![1],
        chunk(done, nbd::REPLY_TYPE_OFFSET_HOLE, 1, &hole),
        chunk(0, nbd::REPLY_TYPE_OFFSET_DATA, 0, &data),
        chunk(done, nbd::REPLY_TYPE_NONE, 0, &[]),
        chunk(done, nbd::REPLY_TYPE_BLOCK_STATUS, 4, &status),
        simple(0, 6),
        chunk(done, nbd::REPLY_TYPE_ERROR, 2, &error),
    ];
    let mut seeds = Vec::from(negotiations());
    seeds.push(simple_ones.concat());
    seeds.push(chunks.concat());
    seeds
}
