//! The rules of the handshake, one test each; `must` and `should` are those of NBD proto.md.
//!
//! Invariant: a test uses the state machine in bytes only, as a client does.

use crate::export::ExportId;
use crate::nbd::handshake::*;
use crate::nbd::meta_context::Context;
use crate::nbd::wire::{OptionReplyHeader, option};
use nowait_testkit::Random;

mod contexts;
mod extended;
mod starttls;

const FIXED: u32 = wire::FLAG_FIXED_NEWSTYLE as u32;
const NO_ZEROES: u32 = wire::FLAG_NO_ZEROES as u32;

/// The error bit of a reply type.
const REFUSED: u32 = 1 << 31;

/// Withdrawn from the protocol; stands for an unknown option.
const OPT_PEEK_EXPORT: u32 = 4;

const ALLOCATION: Contexts = Contexts::NONE.with(Context::BaseAllocation);
const BASE_ALLOCATION: &str = Context::BaseAllocation.fixed_name();

/// Dirty bitmaps of the first export.
const BITMAPS: [&str; 2] = ["monday", "a:b"];

const DISK_FLAGS: u16 = wire::FLAG_SEND_FLUSH | wire::FLAG_SEND_DF;
const DISK_BYTES: u64 = 5 << 30;

fn exports() -> Vec<ExportInfo> {
    let export = |id, name: &str, description: &str| ExportInfo {
        id: ExportId(id),
        name: name.into(),
        description: description.into(),
        size: DISK_BYTES,
        transmission_flags: DISK_FLAGS,
        contexts: ALLOCATION,
        bitmaps: match id {
            0 => BITMAPS.map(BitmapName::removed).to_vec(),
            _ => Vec::new(),
        },
        min_block: 1,
        preferred_block: 4096,
        max_payload: 32 << 20,
    };
    vec![export(0, "disk", "first of two"), export(1, "other", "")]
}

fn header(kind: u32, length: u32) -> Vec<u8> {
    let mut bytes = option(kind, &[]);
    bytes.splice(12.., length.to_be_bytes());
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn info_data(name: &str, kinds: &[u16]) -> Vec<u8> {
    InfoOption { export: name, kinds: kinds.into() }.encode()
}

fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    MetaContextOption { export: name, queries: queries.into() }.encode()
}

fn go(name: &str) -> Vec<u8> {
    option(wire::OPT_GO, &info_data(name, &[]))
}

fn set(name: &str, queries: &[&str]) -> Vec<u8> {
    option(wire::OPT_SET_META_CONTEXT, &context_data(name, queries))
}

/// One reply: option, type, data.
type Reply = (u32, u32, Vec<u8>);

fn replies(out: &[u8]) -> Vec<Reply> {
    let (mut fields, mut seen) = (Fields(out), Vec::new());
    while let Some(head) = fields.array() {
        let OptionReplyHeader { option, kind, length } = OptionReplyHeader::parse(&head).unwrap();
        seen.push((option, kind, fields.take(length as usize).unwrap().to_vec()));
    }
    assert!(fields.is_empty());
    for (_, kind, data) in &mut seen {
        // Every refusal has a text, which is for humans only.
        if *kind & REFUSED != 0 {
            assert!(!data.is_empty() && wire::valid_string(data).is_some());
            data.clear();
        }
    }
    seen
}

/// Feeds `input` on behalf of a client that reads each answer.
fn feed(handshake: &mut Handshake, input: &[u8]) -> (usize, HandshakeProgress, Vec<u8>) {
    let (mut taken, mut out) = (0, Vec::new());
    loop {
        let (more, step) = handshake.feed(&input[taken..], &exports(), &mut out);
        taken += more;
        if step != HandshakeProgress::Answered {
            return (taken, step, out);
        }
    }
}

/// Feeds `options` to a new connection that agreed to `flags`; all bytes must be consumed.
fn talk(flags: u32, options: &[Vec<u8>]) -> (HandshakeProgress, Vec<u8>) {
    let input = [&flags.to_be_bytes()[..], &options.concat()].concat();
    let (taken, step, out) = feed(&mut Handshake::new(TlsState::Off), &input);
    assert_eq!(taken, input.len());
    (step, out)
}

fn fixed(options: &[Vec<u8>]) -> (HandshakeProgress, Vec<Reply>) {
    let (step, out) = talk(FIXED, options);
    (step, replies(&out))
}

/// After structured replies, the only reply to the option must be `verdict`, and the connection
/// must still lead to an export.
fn assert_refused(kind: u32, data: &[u8], verdict: u32) {
    let (step, seen) = fixed(&[structured(), option(kind, data), go("other")]);
    assert_eq!(step, entered(1, ReplyMode::Structured));
    assert_eq!(seen[1], (kind, verdict, vec![]));
    assert_eq!(seen[2].0, wire::OPT_GO);
}

fn structured() -> Vec<u8> {
    option(wire::OPT_STRUCTURED_REPLY, &[])
}

fn extended() -> Vec<u8> {
    option(wire::OPT_EXTENDED_HEADERS, &[])
}

fn entered(export: u64, mode: ReplyMode) -> HandshakeProgress {
    let export = ExportId(export);
    HandshakeProgress::Transmission(Negotiated { export, mode, contexts: Contexts::NONE })
}

/// The outcome for a client that sends `options` after structured replies and then goes to `name`.
fn negotiated(options: &[Vec<u8>], name: &str) -> Negotiated {
    let all = [&[structured()], options, &[go(name)]].concat();
    match fixed(&all).0 {
        HandshakeProgress::Transmission(negotiated) => negotiated,
        step => panic!("{step:?}"),
    }
}

#[test]
fn nbd_must_the_greeting_offers_fixed_newstyle_and_no_zeroes_and_nothing_else() {
    let mut out = Vec::new();
    Handshake::greeting(&mut out);
    assert_eq!(out, b"NBDMAGICIHAVEOPT\x00\x03");
}

#[test]
fn nbd_must_an_unknown_client_flag_closes_the_connection() {
    for bit in 2..32 {
        assert_eq!(talk(FIXED | 1 << bit, &[]), (HandshakeProgress::Close, vec![]));
    }
    assert_eq!(talk(FIXED | NO_ZEROES, &[]), (HandshakeProgress::More, vec![]));
}

#[test]
fn a_wrong_option_magic_closes_the_connection() {
    let mut wrong = option(wire::OPT_LIST, &[]);
    wrong[7] ^= 1;
    assert_eq!(talk(FIXED, &[wrong]), (HandshakeProgress::Close, vec![]));
}

#[test]
fn without_fixed_newstyle_only_export_name_is_allowed() {
    let name = option(wire::OPT_EXPORT_NAME, b"disk");
    assert_eq!(talk(0, &[name]).0, entered(0, ReplyMode::Simple));
    for kind in (0..20).filter(|kind| *kind != wire::OPT_EXPORT_NAME) {
        let (step, out) = talk(0, &[header(kind, 0)]);
        assert_eq!((step, out), (HandshakeProgress::Close, vec![]), "option {kind}");
    }
}

#[test]
fn nbd_must_export_name_is_answered_by_size_flags_and_padding() {
    let (step, out) = talk(0, &[option(wire::OPT_EXPORT_NAME, b"other")]);
    assert_eq!(step, entered(1, ReplyMode::Simple));
    let flags = wire::FLAG_HAS_FLAGS | wire::FLAG_SEND_FLUSH;
    assert_eq!(out[..8], DISK_BYTES.to_be_bytes());
    assert_eq!(out[8..10], flags.to_be_bytes());
    assert_eq!(out[10..], [0; 124]);
}

#[test]
fn nbd_must_no_padding_follows_export_name_if_no_zeroes_was_agreed() {
    let options = [option(wire::OPT_EXPORT_NAME, b"disk")];
    assert_eq!(talk(NO_ZEROES, &options).1.len(), 10);
}

#[test]
fn nbd_must_export_name_of_no_export_closes_the_connection() {
    for name in [&b"nodisk"[..], b"dis", b"disk\0", b"\xff", &[b'x'; 4096]] {
        let options = [option(wire::OPT_EXPORT_NAME, name)];
        assert_eq!(talk(FIXED, &options), (HandshakeProgress::Close, vec![]));
    }
    let too_long = header(wire::OPT_EXPORT_NAME, 4097);
    assert_eq!(talk(FIXED, &[too_long]), (HandshakeProgress::Close, vec![]));
}

#[test]
fn a_server_without_exports_has_no_default_one() {
    let name = header(wire::OPT_EXPORT_NAME, 0);
    let input = [&FIXED.to_be_bytes()[..], &name].concat();
    let mut out = Vec::new();
    let (_, step) = Handshake::new(TlsState::Off).feed(&input, &Vec::new(), &mut out);
    assert_eq!((step, out), (HandshakeProgress::Close, vec![]));
}

#[test]
fn nbd_the_empty_name_is_the_first_export_for_every_option() {
    let (by_name, _) = talk(FIXED, &[option(wire::OPT_EXPORT_NAME, b"")]);
    assert_eq!(by_name, entered(0, ReplyMode::Simple));
    let selected = negotiated(&[set("", &[BASE_ALLOCATION])], "disk");
    assert_eq!(selected.export, ExportId(0));
    assert_eq!(selected.contexts, ALLOCATION);
    assert_eq!(negotiated(&[], "").export, ExportId(0));
}

#[test]
fn nbd_must_abort_is_acknowledged_and_should_ignore_data() {
    for length in [0, 1, MAX_OPTION_BYTES as usize + 1] {
        let abort = option(wire::OPT_ABORT, &vec![7; length]);
        let wanted = vec![(wire::OPT_ABORT, wire::REP_ACK, vec![])];
        assert_eq!(fixed(&[abort]), (HandshakeProgress::Close, wanted));
    }
}

#[test]
fn nbd_must_list_tells_name_and_description_of_every_export() {
    let (step, seen) = fixed(&[option(wire::OPT_LIST, &[])]);
    let first = [&text("disk")[..], b"first of two"].concat();
    let wanted = [
        (wire::OPT_LIST, wire::REP_SERVER, first),
        (wire::OPT_LIST, wire::REP_SERVER, text("other")),
        (wire::OPT_LIST, wire::REP_ACK, vec![]),
    ];
    assert_eq!((step, &seen[..]), (HandshakeProgress::More, &wanted[..]));
}

#[test]
fn nbd_should_list_and_structured_reply_with_data_are_invalid() {
    for kind in [wire::OPT_LIST, wire::OPT_STRUCTURED_REPLY] {
        assert_refused(kind, &[0], wire::REP_ERR_INVALID);
    }
    let (step, _) = fixed(&[option(wire::OPT_STRUCTURED_REPLY, &[0]), go("disk")]);
    assert_eq!(step, entered(0, ReplyMode::Simple));
}

#[test]
fn nbd_must_go_enters_transmission_and_info_does_not() {
    let info = option(wire::OPT_INFO, &info_data("other", &[]));
    let (step, seen) = fixed(std::slice::from_ref(&info));
    assert_eq!((step, seen.last().unwrap().1), (HandshakeProgress::More, wire::REP_ACK));
    let (step, seen) = fixed(&[info, structured(), go("other")]);
    assert_eq!(step, entered(1, ReplyMode::Structured));
    assert_eq!(*seen.last().unwrap(), (wire::OPT_GO, wire::REP_ACK, vec![]));
}

#[test]
fn nbd_must_info_and_go_always_tell_the_export_and_here_the_block_sizes() {
    for kind in [wire::OPT_INFO, wire::OPT_GO] {
        let (_, seen) = fixed(&[option(kind, &info_data("disk", &[]))]);
        let flags = wire::FLAG_HAS_FLAGS | wire::FLAG_SEND_FLUSH;
        let export = [&[0, 0][..], &DISK_BYTES.to_be_bytes(), &flags.to_be_bytes()];
        let blocks = [0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0];
        let wanted = [
            (kind, wire::REP_INFO, export.concat()),
            (kind, wire::REP_INFO, blocks.to_vec()),
            (kind, wire::REP_ACK, vec![]),
        ];
        assert_eq!(seen, wanted);
    }
}

#[test]
fn nbd_must_unknown_kinds_of_information_are_ignored_and_known_ones_told_once() {
    let kinds = [2, 1, 0, 3, 1, 2, 4, 0xffff];
    let (_, seen) = fixed(&[option(wire::OPT_INFO, &info_data("", &kinds))]);
    let info: Vec<_> = seen[..seen.len() - 1].iter().map(|r| &r.2[..]).collect();
    let types: Vec<_> = info.iter().map(|data| data[1]).collect();
    assert_eq!(types, [0, 3, 1, 2]);
    assert_eq!(info[2][2..], *b"disk");
    assert_eq!(info[3][2..], *b"first of two");
    assert_eq!(seen.last().unwrap().1, wire::REP_ACK);
}

#[test]
fn an_option_about_no_export_is_refused_and_the_connection_kept() {
    let (info, contexts) = (info_data("nodisk", &[]), context_data("nodisk", &[]));
    let options = [
        (wire::OPT_INFO, &info),
        (wire::OPT_GO, &info),
        (wire::OPT_LIST_META_CONTEXT, &contexts),
        (wire::OPT_SET_META_CONTEXT, &contexts),
    ];
    for (kind, data) in options {
        assert_refused(kind, data, wire::REP_ERR_UNKNOWN);
    }
}

/// "Option types": GO right after an INFO with the same parameters "MUST reply with the same set of
/// information", and no padding MUST follow, whatever the client's flags.
#[test]
fn nbd_must_go_repeats_the_replies_to_info_and_no_padding_follows() {
    let replies_of = |out: &[u8]| -> Vec<_> {
        replies(out).into_iter().map(|(_, kind, data)| (kind, data)).collect()
    };
    for flags in [FIXED, FIXED | NO_ZEROES] {
        for mode in [&[][..], &[structured()], &[extended()]] {
            for kinds in [&[][..], &[3], &[1, 2], &[0, 1, 2, 3, 77]] {
                let data = info_data("disk", kinds);
                let with_info = [mode, &[option(wire::OPT_INFO, &data)]].concat();
                let with_both = [&with_info[..], &[option(wire::OPT_GO, &data)]].concat();
                let [before, info, both] =
                    [mode, &with_info, &with_both].map(|options| talk(flags, options));
                assert!(matches!(both.0, HandshakeProgress::Transmission(_)));
                let (info, go) = (&info.1[before.1.len()..], &both.1[info.1.len()..]);
                assert_eq!(replies_of(info), replies_of(go));
                assert!(replies_of(go).len() >= 3, "{kinds:?}");
            }
        }
    }
}

#[test]
fn nbd_must_malformed_info_and_go_are_invalid_and_the_connection_kept() {
    let name_past_the_end = [&[0, 0, 0, 3][..], b"disk"].concat();
    let bad = [
        vec![],
        vec![0; 5],
        vec![0xff; 6],
        name_past_the_end,
        text("disk"),
        [&text("disk")[..], &[0, 1]].concat(),
        [&text("disk")[..], &[0, 1, 0]].concat(),
        [&text("disk")[..], &[0, 1, 0, 0, 0]].concat(),
        [&text("disk")[..], &[0, 0, 0]].concat(),
        [&[0, 0, 0, 2][..], b"\xc3\x28", &[0, 0]].concat(),
        info_data("disk\0", &[]),
        info_data(&"x".repeat(4097), &[]),
    ];
    for data in bad {
        for kind in [wire::OPT_INFO, wire::OPT_GO] {
            assert_refused(kind, &data, wire::REP_ERR_INVALID);
        }
    }
}

#[test]
fn nbd_must_dont_fragment_is_offered_only_with_structured_replies() {
    let offered = |options: &[Vec<u8>]| {
        let (_, seen) = fixed(options);
        let export = seen.iter().find(|reply| reply.1 == wire::REP_INFO).unwrap();
        u16::from_be_bytes(export.2[10..12].try_into().unwrap())
    };
    let plain = wire::FLAG_HAS_FLAGS | wire::FLAG_SEND_FLUSH;
    assert_eq!(offered(&[go("disk")]), plain);
    let chunked = offered(&[structured(), go("disk")]);
    assert_eq!(chunked, plain | wire::FLAG_SEND_DF);
}

#[test]
fn nbd_must_unknown_option_is_refused_and_the_connection_kept() {
    for kind in [0, OPT_PEEK_EXPORT, 12, u32::MAX] {
        for length in [0, 1, MAX_OPTION_BYTES as usize + 1] {
            assert_refused(kind, &vec![b'x'; length], wire::REP_ERR_UNSUP);
        }
    }
}

#[test]
fn an_option_above_64_kib_is_too_big_and_its_data_are_never_kept() {
    for kind in [3, 6, 7, 8, 9, 10, 11] {
        let mut handshake = Handshake::new(TlsState::Off);
        feed(&mut handshake, &FIXED.to_be_bytes());
        let data = vec![0; MAX_OPTION_BYTES as usize + 1];
        feed(&mut handshake, &header(kind, data.len() as u32));
        let (taken, step, out) = feed(&mut handshake, &data[1..]);
        assert_eq!((taken, step), (data.len() - 1, HandshakeProgress::More));
        assert!(out.is_empty() && handshake.partial.capacity() == 0);
        let last = [&data[..1], &option(OPT_PEEK_EXPORT, &[])].concat();
        let (_, step, out) = feed(&mut handshake, &last);
        let wanted =
            [(kind, wire::REP_ERR_TOO_BIG, vec![]), (OPT_PEEK_EXPORT, wire::REP_ERR_UNSUP, vec![])];
        assert_eq!((step, &replies(&out)[..]), (HandshakeProgress::More, &wanted[..]));
    }
}

#[test]
fn an_option_above_32_mib_closes_the_connection() {
    for kind in 0..12 {
        let options = [header(kind, MAX_SKIPPED_BYTES + 1)];
        assert_eq!(talk(FIXED, &options), (HandshakeProgress::Close, vec![]));
    }
    let limit = header(OPT_PEEK_EXPORT, MAX_SKIPPED_BYTES);
    assert_eq!(talk(FIXED, &[limit]), (HandshakeProgress::More, vec![]));
}

#[test]
fn a_refusal_says_why_in_words() {
    let rows = [
        (go("nothing"), "no such export"),
        (option(wire::OPT_STARTTLS, &[]), "TLS is not configured"),
        (option(wire::OPT_LIST, &[1]), "this option has no data"),
        (option(wire::OPT_GO, &[1]), "the data of this option are malformed"),
        (option(OPT_PEEK_EXPORT, &[]), "this option is not supported"),
    ];
    for (option, text) in rows {
        let (_, out) = talk(FIXED, &[option]);
        assert_eq!(std::str::from_utf8(&out[20..]), Ok(text));
    }
}

#[test]
fn nothing_after_an_answered_option_is_consumed_before_the_answer_is_sent() {
    let list = option(wire::OPT_LIST, &[]);
    let input = [&FIXED.to_be_bytes()[..], &list, &list].concat();
    let (mut handshake, mut out) = (Handshake::new(TlsState::Off), Vec::new());
    let (taken, step) = handshake.feed(&input, &exports(), &mut out);
    assert_eq!((taken, step), (input.len() - list.len(), HandshakeProgress::Answered));
    assert_eq!(replies(&out).len(), exports().len() + 1);
}

#[test]
fn the_1025th_option_closes_the_connection() {
    let option = option(OPT_PEEK_EXPORT, &[]);
    let (step, seen) = fixed(&vec![option.clone(); 1024]);
    assert_eq!((step, seen.len()), (HandshakeProgress::More, 1024));
    let (step, seen) = fixed(&vec![option; 1025]);
    assert_eq!((step, seen.len()), (HandshakeProgress::Close, 1024));
}

#[test]
fn nothing_is_consumed_after_the_end() {
    for last in [go("disk"), option(wire::OPT_ABORT, &[])] {
        let mut handshake = Handshake::new(TlsState::Off);
        let input = [&FIXED.to_be_bytes()[..], &last].concat();
        assert_eq!(feed(&mut handshake, &input).0, input.len());
        assert_eq!(feed(&mut handshake, &last), (0, HandshakeProgress::Close, vec![]));
    }
}

/// Feeds `input` in pieces of the given lengths (at least 1). Returns the consumed bytes, the state
/// and the output.
fn pieces(input: &[u8], mut length: impl FnMut() -> usize) -> (usize, HandshakeProgress, Vec<u8>) {
    let (mut handshake, mut start, mut sent) = (Handshake::new(TlsState::Off), 0, Vec::new());
    while start < input.len() {
        let piece = &input[start..input.len().min(start + length())];
        let (taken, step, out) = feed(&mut handshake, piece);
        start += taken;
        sent.extend(out);
        assert!(handshake.partial.len() <= MAX_OPTION_BYTES as usize);
        if step != HandshakeProgress::More {
            return (start, step, sent);
        }
        assert_eq!(taken, piece.len());
    }
    (start, HandshakeProgress::More, sent)
}

#[test]
fn the_outcome_is_the_same_however_the_bytes_are_cut_and_the_first_request_is_left_alone() {
    let all_kinds = info_data("disk", &[0, 1, 2, 3]);
    let options = [
        option(wire::OPT_LIST, &[]),
        option(OPT_PEEK_EXPORT, b"data"),
        structured(),
        option(wire::OPT_LIST_META_CONTEXT, &context_data("disk", &[])),
        set("disk", &["base:", BASE_ALLOCATION]),
        option(wire::OPT_INFO, &vec![1; MAX_OPTION_BYTES as usize + 1]),
        option(wire::OPT_INFO, &all_kinds),
        option(wire::OPT_GO, &all_kinds),
    ];
    let handshake = [&FIXED.to_be_bytes()[..], &options.concat()].concat();
    let input = [&handshake[..], &[0x25; 28]].concat();
    let whole = pieces(&input, || input.len());
    let end = HandshakeProgress::Transmission(Negotiated {
        export: ExportId(0),
        mode: ReplyMode::Structured,
        contexts: ALLOCATION,
    });
    assert_eq!((whole.0, whole.1), (handshake.len(), end));
    for length in [1, 2, 3, 7, 16, 4099] {
        assert!(pieces(&input, || length) == whole, "pieces of {length}");
    }
}

/// Fewer than `below` random bytes.
fn random_bytes(random: &mut Random, below: u64) -> Vec<u8> {
    (0..random.below(below)).map(|_| random.below(256) as u8).collect()
}

/// Client flags and a few options, most of them well-formed, some with a byte replaced.
fn random_options(random: &mut Random) -> Vec<u8> {
    let mut stream = (random.below(4) as u32).to_be_bytes().to_vec();
    for _ in 0..random.below(12) {
        let kind = random.below(13) as u32;
        let name = ["", "disk", "other", "nodisk"][random.below(4) as usize];
        let data = match random.below(5) {
            0 => vec![],
            1 => random_bytes(random, 40),
            2 => info_data(name, &[random.below(5) as u16]),
            3 => context_data(name, &[["base:", BASE_ALLOCATION][random.below(2) as usize]]),
            _ => name.as_bytes().to_vec(),
        };
        stream.extend(option(kind, &data));
    }
    if random.below(3) == 0 {
        let at = random.below(stream.len() as u64) as usize;
        stream[at] = random.below(256) as u8;
    }
    stream
}

#[test]
fn random_bytes_never_panic_nor_fill_the_output_and_no_cut_changes_the_outcome() {
    const FEEDS: u32 = 200_000;
    const MAX_REPLY_BYTES_OF_AN_OPTION: usize = 256;
    let mut random = Random::from_seed(1);
    let mut feeds = 0;
    // More, transmission, closed: the streams must reach each often.
    let mut ends = [0; 3];
    while feeds < FEEDS {
        let stream = match random.below(8) {
            0 => random_bytes(&mut random, 64),
            _ => random_options(&mut random),
        };
        let cut = pieces(&stream, || {
            feeds += 1;
            1 + random.below(24) as usize
        });
        let options = stream.len().div_ceil(OptionHeader::BYTES);
        assert!(cut.2.len() <= options * MAX_REPLY_BYTES_OF_AN_OPTION);
        assert!(cut == pieces(&stream, || stream.len()), "{stream:?}");
        let end = match cut.1 {
            HandshakeProgress::More => &mut ends[0],
            HandshakeProgress::Transmission(_) => &mut ends[1],
            HandshakeProgress::Close => &mut ends[2],
            HandshakeProgress::StartTls | HandshakeProgress::Answered => panic!("{:?}", cut.1),
        };
        *end += 1;
    }
    assert!(ends.iter().all(|end| *end > 1000), "{ends:?}");
}
