//! The rules of extended headers in the handshake, one test each; those of NBD proto.md on the
//! branch extension-ext-header.
//!
//! Invariant: as for the tests of the handshake.

use crate::nbd::handshake::tests::*;

const GO_FLAGS_AT: std::ops::Range<usize> = 10..12;

/// The transmission flags in the last reply to `OPT_INFO` or `OPT_GO`.
fn transmission_flags(options: &[Vec<u8>]) -> u16 {
    let (_, seen) = fixed(options);
    let mut exports = seen.iter().filter(|(_, kind, data)| *kind == wire::REP_INFO && data[1] == 0);
    let (_, _, data) = exports.next_back().unwrap();
    u16::from_be_bytes(data[GO_FLAGS_AT].try_into().unwrap())
}

#[test]
fn nbd_must_extended_headers_take_precedence_over_structured_replies_in_either_order() {
    let ack = (wire::OPT_EXTENDED_HEADERS, wire::REP_ACK, vec![]);
    let (step, seen) = fixed(&[extended(), go("disk")]);
    assert_eq!((step, &seen[0]), (entered(0, ReplyMode::Extended), &ack));
    let (step, seen) = fixed(&[structured(), extended(), extended(), go("disk")]);
    assert_eq!((step, &seen[1..3]), (entered(0, ReplyMode::Extended), &[ack.clone(), ack][..]));
    let (step, seen) = fixed(&[extended(), structured(), go("disk")]);
    let refused = (wire::OPT_STRUCTURED_REPLY, wire::REP_ERR_EXT_HEADER_REQD, vec![]);
    assert_eq!((step, &seen[1]), (entered(0, ReplyMode::Extended), &refused));
}

#[test]
fn nbd_should_extended_headers_with_data_are_invalid_and_not_agreed_on() {
    assert_refused(wire::OPT_EXTENDED_HEADERS, &[0], wire::REP_ERR_INVALID);
}

#[test]
fn nbd_must_not_export_name_after_extended_headers_closes_the_connection() {
    let (step, seen) = fixed(&[extended(), header(wire::OPT_EXPORT_NAME, 4)]);
    assert_eq!((step, seen.len()), (HandshakeProgress::Close, 1));
}

#[test]
fn extended_headers_need_fixed_newstyle() {
    assert_eq!(talk(0, &[extended()]), (HandshakeProgress::Close, vec![]));
}

#[test]
fn nbd_must_extended_headers_imply_chunks_and_contexts_can_be_selected() {
    let set = set("disk", &[BASE_ALLOCATION]);
    let wanted =
        Negotiated { export: ExportId(0), mode: ReplyMode::Extended, contexts: ALLOCATION };
    // Contexts that were selected before extended headers were requested stay selected.
    for options in [&[extended(), set.clone()][..], &[structured(), set, extended()]] {
        let (step, seen) = fixed(&[options, &[go("disk")]].concat());
        assert_eq!(step, HandshakeProgress::Transmission(wanted));
        assert!(seen.iter().any(|(_, kind, _)| *kind == wire::REP_META_CONTEXT));
    }
    assert_eq!(
        transmission_flags(&[extended(), go("disk")]) & wire::FLAG_SEND_DF,
        wire::FLAG_SEND_DF
    );
}

#[test]
fn nbd_must_not_offer_block_status_payloads_without_extended_headers_and_a_context() {
    let selected = set("disk", &[BASE_ALLOCATION]);
    let info = option(wire::OPT_INFO, &info_data("disk", &[]));
    let offered = |options: &[Vec<u8>]| {
        let flags = transmission_flags(options);
        // GO directly after INFO gives the same flags.
        assert_eq!(transmission_flags(&[options, &[go("disk")]].concat()), flags);
        flags & wire::FLAG_BLOCK_STATUS_PAYLOAD != 0
    };
    assert!(offered(&[extended(), selected.clone(), info.clone()]));
    assert!(!offered(&[structured(), selected, info.clone()]));
    assert!(!offered(&[extended(), info.clone()]));
    assert!(!offered(&[extended(), set("other", &[BASE_ALLOCATION]), info.clone()]));
    assert!(!offered(&[extended(), set("disk", &[]), info.clone()]));
    assert!(!offered(&[info]));
}
