//! The bytes of a server as the copying client receives them: the first byte selects the phase.
//!
//! Checked: which requests complete, with which bytes, and what breaks the connection do not depend
//! on how the bytes are split.

use nowait_copy::fuzz::{CONTEXT, PENDING, negotiate, replies};
use nowait_nbd as nbd;

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
    let mut bytes = nbd::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for number in [option, kind, data.len() as u32] {
        bytes.extend(number.to_be_bytes());
    }
    [bytes, data.to_vec()].concat()
}

/// A server that accepts everything, and one that does not.
fn negotiations() -> [Vec<u8>; 2] {
    let greeting = [
        &[0][..],
        &nbd::INIT_MAGIC.to_be_bytes(),
        &nbd::OPTION_MAGIC.to_be_bytes(),
        &(nbd::FLAG_FIXED_NEWSTYLE | nbd::FLAG_NO_ZEROES).to_be_bytes(),
    ]
    .concat();
    let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
    let size = [&[0, 0][..], &(1u64 << 30).to_be_bytes(), &[5, 0x6d]].concat();
    let blocks = [[0, 3, 0, 0], [0, 1, 0, 0], [16, 0, 2, 0], [0, 0, 0, 0]].concat();
    let good = [
        reply(nbd::OPT_STRUCTURED_REPLY, nbd::REP_ACK, &[]),
        reply(nbd::OPT_SET_META_CONTEXT, nbd::REP_META_CONTEXT, &context),
        reply(nbd::OPT_SET_META_CONTEXT, nbd::REP_ACK, &[]),
        reply(nbd::OPT_GO, nbd::REP_INFO, &size),
        reply(nbd::OPT_GO, nbd::REP_INFO, blocks.get(..14).unwrap_or_default()),
        reply(nbd::OPT_GO, nbd::REP_ACK, &[]),
    ];
    let bad = [
        reply(nbd::OPT_STRUCTURED_REPLY, nbd::REP_ERR_UNSUP, b"no"),
        reply(nbd::OPT_GO, nbd::REP_ERR_UNKNOWN, b"no such export"),
    ];
    [[greeting.clone(), good.concat()].concat(), [greeting, bad.concat()].concat()]
}

fn simple(error: u32, cookie: u64) -> Vec<u8> {
    let magic = nbd::SIMPLE_REPLY_MAGIC.to_be_bytes();
    [&magic[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = nbd::STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    [bytes, payload.to_vec()].concat()
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
        chunk(done, nbd::REPLY_TYPE_ERROR_BIT + 1, 2, &error),
    ];
    let mut seeds = Vec::from(negotiations());
    seeds.push(simple_ones.concat());
    seeds.push(chunks.concat());
    seeds
}
