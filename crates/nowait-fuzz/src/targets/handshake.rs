//! The bytes of a client in the handshake: the first byte selects the TLS mode of the server.
//!
//! Checked: the outcome does not depend on how the bytes are split; the server sends complete
//! option replies, and after `OPT_EXPORT_NAME` what the protocol specifies.

use nowait_nbd::{self as nbd, Fields, InfoOption, MetaContextOption, OptionReplyHeader, option};
use nowait_server::fuzz::{Outcome, Tls, handshake};

use crate::split::cut;
use crate::target::{Check, Target};

/// The lengths of the reply to `OPT_EXPORT_NAME`: size and flags, without and with padding.
const EXPORT_NAME_REPLY_BYTES: [usize; 2] = [10, 134];

pub(crate) const TARGET: Target = Target {
    name: "handshake",
    about: "NBD option haggling, from client flags to the first request",
    prepare: || Ok(Box::new(check) as Check),
    seeds,
    words: &[
        b"IHAVEOPT",
        b"base:allocation",
        b"base:",
        b"disk",
        b"other",
        &[0, 0, 0, 0],
        &[0, 0, 0, 4],
        &[0, 0, 0, 5],
        &[0, 0, 0, 7],
        &[0, 0, 0, 8],
        &[0, 0, 0, 10],
        &[0, 0, 0, 11],
        &[0, 1, 0, 0],
        &[0, 1, 0, 1],
        &[2, 0, 0, 0],
        &[2, 0, 0, 1],
    ],
    longest: 4096,
    memory: 4 << 20,
};

fn check(input: &[u8]) -> Result<(), String> {
    let Some((&first, bytes)) = input.split_first() else { return Ok(()) };
    let tls = [Tls::Off, Tls::Offered, Tls::Required][usize::from(first % 3)];
    let whole = handshake(tls, [bytes])?;
    answers_make_sense(&whole)?;
    for longest in [1, 16] {
        let pieces = handshake(tls, cut(bytes, longest))?;
        if pieces != whole {
            return Err(format!("cut it ends as {pieces:?}, whole as {whole:?}"));
        }
    }
    Ok(())
}

fn answers_make_sense(outcome: &Outcome) -> Result<(), String> {
    let mut rest = Fields(&outcome.answers);
    while !rest.0.is_empty() {
        if outcome.transmission && EXPORT_NAME_REPLY_BYTES.contains(&rest.0.len()) {
            return Ok(());
        }
        let Some(head) = rest.array() else { return Err("the last reply is cut off".into()) };
        let Some(head) = OptionReplyHeader::parse(&head) else {
            return Err(format!("{head:x?} begins no reply"));
        };
        if rest.take(head.length as usize).is_none() {
            return Err("the last reply is cut off".into());
        }
    }
    Ok(())
}

fn info_request(export: &str, kinds: &[u16]) -> Vec<u8> {
    InfoOption { export, kinds: kinds.into() }.encode()
}

fn context_query(export: &str, queries: &[&str]) -> Vec<u8> {
    MetaContextOption { export, queries: queries.into() }.encode()
}

fn seeds() -> Vec<Vec<u8>> {
    let flags = u32::from(nbd::FLAG_FIXED_NEWSTYLE | nbd::FLAG_NO_ZEROES).to_be_bytes();
    let begin = |tls: u8| [&[tls][..], &flags].concat();
    let selected = [
        option(nbd::OPT_STRUCTURED_REPLY, &[]),
        option(nbd::OPT_LIST_META_CONTEXT, &context_query("disk", &[])),
        option(nbd::OPT_SET_META_CONTEXT, &context_query("disk", &["base:allocation", "x:y"])),
        option(nbd::OPT_INFO, &info_request("disk", &[0, 1, 2, 3, 77])),
        option(nbd::OPT_GO, &info_request("disk", &[3])),
    ];
    let mixed = [
        option(nbd::OPT_LIST, &[]),
        option(0x7777, b"unknown"),
        option(nbd::OPT_EXTENDED_HEADERS, &[]),
        option(nbd::OPT_STRUCTURED_REPLY, &[]),
        option(nbd::OPT_SET_META_CONTEXT, &context_query("other", &["base:"])),
        option(nbd::OPT_ABORT, &[]),
    ];
    let tls = [
        option(nbd::OPT_INFO, &info_request("", &[])),
        option(nbd::OPT_STARTTLS, &[]),
        option(nbd::OPT_STARTTLS, &[1]),
        option(nbd::OPT_GO, &info_request("", &[])),
    ];
    let long = [option(nbd::OPT_INFO, &[0x41; 3000]), option(nbd::OPT_LIST, &[1])];
    vec![
        [begin(0), selected.concat()].concat(),
        [begin(1), mixed.concat()].concat(),
        [begin(1), tls.concat()].concat(),
        [begin(2), tls.concat()].concat(),
        [begin(0), long.concat()].concat(),
        [begin(0), option(nbd::OPT_EXPORT_NAME, b"disk")].concat(),
        [&[0, 0, 0, 0, 1][..], &option(nbd::OPT_EXPORT_NAME, b"other")].concat(),
    ]
}
