//! The rules of NBD proto.md, "TLS support" and `NBD_OPT_STARTTLS`, one test each.
//!
//! Invariant: as for the tests of the handshake.

use crate::nbd::handshake::tests::*;

/// Feeds `options` to a new connection; also returns how many bytes were not consumed.
fn talk_about(tls: TlsState, options: &[Vec<u8>]) -> (HandshakeProgress, Vec<Reply>, usize) {
    let input = [&FIXED.to_be_bytes()[..], &options.concat()].concat();
    let (taken, step, out) = feed(&mut Handshake::new(tls), &input);
    (step, replies(&out), input.len() - taken)
}

fn starttls() -> Vec<u8> {
    option(wire::OPT_STARTTLS, &[])
}

const ACKNOWLEDGED: Reply = (wire::OPT_STARTTLS, wire::REP_ACK, vec![]);

/// A handshake after STARTTLS, before which `options` were sent.
fn encrypted(tls: TlsState, options: &[Vec<u8>]) -> Handshake {
    let mut handshake = Handshake::new(tls);
    let input = [&FIXED.to_be_bytes()[..], &options.concat(), &starttls()].concat();
    let (taken, step, _) = feed(&mut handshake, &input);
    assert_eq!((taken, step), (input.len(), HandshakeProgress::StartTls));
    handshake
}

#[test]
fn nbd_must_without_tls_starttls_is_refused_for_policy_and_nothing_asks_for_tls() {
    for data in [&b""[..], b"data"] {
        assert_refused(wire::OPT_STARTTLS, data, wire::REP_ERR_POLICY);
    }
    for kind in 2..20 {
        let (_, seen, _) = talk_about(TlsState::Off, &[option(kind, &[0; 6])]);
        assert!(seen.iter().all(|reply| reply.1 != wire::REP_ERR_TLS_REQD), "option {kind}");
    }
}

#[test]
fn nbd_must_starttls_is_acknowledged_where_tls_is_offered_or_required() {
    for tls in [TlsState::Offered, TlsState::Required] {
        assert_eq!(
            talk_about(tls, &[starttls()]),
            (HandshakeProgress::StartTls, vec![ACKNOWLEDGED], 0)
        );
    }
}

#[test]
fn nbd_must_starttls_with_data_is_invalid_and_tls_does_not_begin() {
    for tls in [TlsState::Offered, TlsState::Required] {
        for length in [1, 100, MAX_OPTION_BYTES as usize + 1] {
            let bad = option(wire::OPT_STARTTLS, &vec![7; length]);
            let invalid = (wire::OPT_STARTTLS, wire::REP_ERR_INVALID, vec![]);
            let (step, seen, left) = talk_about(tls, &[bad, starttls()]);
            assert_eq!((step, left), (HandshakeProgress::StartTls, 0));
            assert_eq!(seen, [invalid, ACKNOWLEDGED]);
        }
    }
}

#[test]
fn nbd_must_where_tls_is_required_every_other_option_but_abort_says_so() {
    let others = (0..20).filter(|kind| {
        ![wire::OPT_EXPORT_NAME, wire::OPT_ABORT, wire::OPT_STARTTLS].contains(kind)
    });
    for kind in others.chain([u32::MAX]) {
        for data in [&[][..], &[0; 6], &[0; MAX_OPTION_BYTES as usize + 1]] {
            let (step, seen, left) = talk_about(TlsState::Required, &[option(kind, data)]);
            assert_eq!((step, left), (HandshakeProgress::More, 0), "option {kind}");
            assert_eq!(seen, [(kind, wire::REP_ERR_TLS_REQD, vec![])]);
        }
    }
    let abort = talk_about(TlsState::Required, &[option(wire::OPT_ABORT, &[])]);
    assert_eq!(
        abort,
        (HandshakeProgress::Close, vec![(wire::OPT_ABORT, wire::REP_ACK, vec![])], 0)
    );
}

#[test]
fn nbd_must_where_tls_is_required_export_name_without_it_closes_the_connection() {
    for name in ["", "disk"] {
        let (step, seen, _) =
            talk_about(TlsState::Required, &[option(wire::OPT_EXPORT_NAME, name.as_bytes())]);
        assert_eq!((step, seen), (HandshakeProgress::Close, vec![]));
    }
}

/// "SELECTIVETLS mode": `NBD_REP_ERR_TLS_REQD` MUST NOT be sent but for exports that are TLS-only,
/// and here none is.
#[test]
fn nbd_must_where_tls_is_offered_no_option_is_answered_by_a_demand_for_it() {
    for kind in (2..20).filter(|kind| *kind != wire::OPT_STARTTLS) {
        for data in [vec![], vec![0; 6], info_data("nodisk", &[]), info_data("disk", &[])] {
            let (_, seen, _) = talk_about(TlsState::Offered, &[option(kind, &data)]);
            assert!(!seen.is_empty(), "option {kind}");
            assert!(seen.iter().all(|reply| reply.1 != wire::REP_ERR_TLS_REQD), "option {kind}");
        }
    }
}

#[test]
fn where_tls_is_offered_a_client_may_do_without() {
    let (step, _, _) = talk_about(TlsState::Offered, &[structured(), go("other")]);
    assert_eq!(step, entered(1, ReplyMode::Structured));
}

#[test]
fn nbd_must_a_client_without_fixed_newstyle_gets_no_tls() {
    for tls in [TlsState::Offered, TlsState::Required] {
        let input = [&0u32.to_be_bytes()[..], &starttls()].concat();
        let (_, step, out) = feed(&mut Handshake::new(tls), &input);
        assert_eq!((step, out), (HandshakeProgress::Close, vec![]));
    }
}

#[test]
fn nbd_must_starttls_resets_the_negotiation_before_it() {
    let before = [structured(), set("disk", &[BASE_ALLOCATION])];
    let mut handshake = encrypted(TlsState::Offered, &[extended()]);
    assert_eq!(feed(&mut handshake, &go("disk")).1, entered(0, ReplyMode::Simple));
    let mut handshake = encrypted(TlsState::Offered, &before);
    assert_eq!(feed(&mut handshake, &go("disk")).1, entered(0, ReplyMode::Simple));
    // A context can be selected only after structured replies were negotiated again.
    let mut handshake = encrypted(TlsState::Offered, &before);
    let (_, _, out) = feed(&mut handshake, &set("disk", &[BASE_ALLOCATION]));
    assert_eq!(replies(&out)[0].1, wire::REP_ERR_INVALID);
    let after = before.concat();
    feed(&mut handshake, &after);
    let negotiated =
        Negotiated { export: ExportId(0), mode: ReplyMode::Structured, contexts: ALLOCATION };
    assert_eq!(feed(&mut handshake, &go("disk")).1, HandshakeProgress::Transmission(negotiated));
}

#[test]
fn nbd_must_a_second_starttls_is_invalid_and_nothing_asks_for_tls_after_the_first() {
    for tls in [TlsState::Offered, TlsState::Required] {
        let mut handshake = encrypted(tls, &[]);
        let (_, step, out) = feed(&mut handshake, &starttls());
        assert_eq!(step, HandshakeProgress::More);
        assert_eq!(replies(&out), [(wire::OPT_STARTTLS, wire::REP_ERR_INVALID, vec![])]);
        for kind in (2..20).filter(|kind| ![wire::OPT_ABORT, wire::OPT_GO].contains(kind)) {
            let (_, _, out) = feed(&mut handshake, &option(kind, &[0; 6]));
            assert!(replies(&out).iter().all(|reply| reply.1 != wire::REP_ERR_TLS_REQD));
        }
        assert_eq!(feed(&mut handshake, &go("other")).1, entered(1, ReplyMode::Simple));
    }
}

#[test]
fn no_byte_after_starttls_is_consumed_however_the_bytes_are_cut() {
    for tls in [TlsState::Offered, TlsState::Required] {
        let (step, seen, left) = talk_about(tls, &[starttls(), structured(), go("disk")]);
        assert_eq!(
            (step, left),
            (HandshakeProgress::StartTls, [structured(), go("disk")].concat().len())
        );
        assert_eq!(seen, [ACKNOWLEDGED]);
        let input = [&FIXED.to_be_bytes()[..], &starttls(), &structured()].concat();
        let end = input.len() - structured().len();
        for cut in 1..input.len() {
            let mut handshake = Handshake::new(tls);
            let (first, step, _) = feed(&mut handshake, &input[..cut]);
            assert_eq!(first, cut.min(end));
            if step == HandshakeProgress::More {
                let (second, step, _) = feed(&mut handshake, &input[cut..]);
                assert_eq!((cut + second, step), (end, HandshakeProgress::StartTls));
            }
        }
    }
}

#[test]
fn the_bound_on_options_counts_those_before_tls_too() {
    let before: Vec<_> = (0..MAX_OPTIONS - 2).map(|_| structured()).collect();
    let mut handshake = encrypted(TlsState::Offered, &before);
    assert_eq!(feed(&mut handshake, &structured()).1, HandshakeProgress::More);
    assert_eq!(feed(&mut handshake, &structured()).1, HandshakeProgress::Close);
}
