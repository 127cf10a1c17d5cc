//! The rules of metadata contexts in the handshake, one test each.
//!
//! Invariant: as for the tests of the handshake.

use crate::nbd::handshake::tests::*;

#[test]
fn nbd_should_meta_contexts_before_structured_replies_are_invalid() {
    for kind in [wire::OPT_LIST_META_CONTEXT, wire::OPT_SET_META_CONTEXT] {
        let early = option(kind, &context_data("disk", &[BASE_ALLOCATION]));
        let refusal = (kind, wire::REP_ERR_INVALID, vec![]);
        assert_eq!(fixed(&[early]), (HandshakeProgress::More, vec![refusal]));
    }
}

#[test]
fn nbd_must_list_meta_context_lists_all_without_queries_and_by_name_and_wildcard() {
    let kind = wire::OPT_LIST_META_CONTEXT;
    let listed = |queries: &[&str]| {
        let (step, seen) = fixed(&[structured(), option(kind, &context_data("other", queries))]);
        assert_eq!(step, HandshakeProgress::More);
        assert_eq!(*seen.last().unwrap(), (kind, wire::REP_ACK, vec![]));
        seen[1..seen.len() - 1].to_vec()
    };
    let allocation = [&[0, 0, 0, 0][..], b"base:allocation"].concat();
    let one = [(kind, wire::REP_META_CONTEXT, allocation)];
    assert_eq!(listed(&[]), one);
    assert_eq!(listed(&["base:"]), one);
    assert_eq!(listed(&["base:allocation"]), one);
    assert_eq!(listed(&["x:", "base:", "base:allocation"]), one);
    for unknown in ["base:other", "qemu:", "base", "", "x:base:allocation"] {
        assert_eq!(listed(&[unknown]), [], "{unknown}");
    }
}

#[test]
fn dirty_bitmaps_are_listed_by_name_by_their_namespace_and_by_that_of_qemu() {
    let kind = wire::OPT_LIST_META_CONTEXT;
    let listed = |queries: &[&str]| {
        let (_, seen) = fixed(&[structured(), option(kind, &context_data("disk", queries))]);
        assert_eq!(*seen.last().unwrap(), (kind, wire::REP_ACK, vec![]));
        let name = |(_, _, data): &Reply| {
            assert_eq!(data[..4], [0; 4]);
            String::from_utf8(data[4..].to_vec()).unwrap()
        };
        seen[1..seen.len() - 1].iter().map(name).collect::<Vec<_>>()
    };
    let both = ["qemu:dirty-bitmap:monday", "qemu:dirty-bitmap:a:b"];
    assert_eq!(listed(&[]), ["base:allocation", both[0], both[1]]);
    assert_eq!(listed(&["qemu:"]), both);
    assert_eq!(listed(&["qemu:dirty-bitmap:"]), both);
    assert_eq!(listed(&["qemu:dirty-bitmap:a:b"]), both[1..]);
    for unknown in
        ["qemu:dirty-bitmap", "qemu:dirty-bitmap:a:", "qemu:dirty-bitmap:other", "monday", ""]
    {
        assert_eq!(listed(&[unknown]), [""; 0], "{unknown}");
    }
}

#[test]
fn dirty_bitmaps_are_selected_by_their_names_only_and_numbered_in_their_order() {
    let selected = |queries: &[&str]| {
        let (_, seen) = fixed(&[structured(), set("disk", queries)]);
        let id = |(_, kind, data): &Reply| {
            assert_eq!(*kind, wire::REP_META_CONTEXT);
            let (id, name) = data.split_first_chunk().unwrap();
            (u32::from_be_bytes(*id), String::from_utf8(name.to_vec()).unwrap())
        };
        seen[1..seen.len() - 1].iter().map(id).collect::<Vec<_>>()
    };
    let [first, second] = ["qemu:dirty-bitmap:monday", "qemu:dirty-bitmap:a:b"];
    let all = [(1, BASE_ALLOCATION.into()), (3, first.into()), (4, second.into())];
    assert_eq!(selected(&[second, BASE_ALLOCATION, first]), all);
    assert_eq!(selected(&[second]), [(3, second.into())]);
    assert_eq!(selected(&["qemu:", "qemu:dirty-bitmap:", "qemu:dirty-bitmap:other"]), []);
    let chosen = negotiated(&[set("disk", &[second])], "disk").contexts;
    assert_eq!(chosen, Contexts::NONE.with(Context::DirtyBitmap(0)));
    assert_eq!(negotiated(&[set("other", &[second])], "other").contexts, Contexts::NONE);
}

#[test]
fn nbd_must_set_meta_context_selects_each_context_once_under_the_id_of_the_outcome() {
    let twice = set("disk", &[BASE_ALLOCATION, "x:y", BASE_ALLOCATION]);
    let (_, seen) = fixed(&[structured(), twice.clone()]);
    assert_eq!(negotiated(&[twice], "disk").contexts, ALLOCATION);
    let id = Context::BaseAllocation.id();
    let context = [&id.to_be_bytes()[..], b"base:allocation"].concat();
    let kind = wire::OPT_SET_META_CONTEXT;
    assert_eq!(seen[1], (kind, wire::REP_META_CONTEXT, context));
    assert_eq!(seen[2..], [(kind, wire::REP_ACK, vec![])]);
}

#[test]
fn nbd_must_set_meta_context_selects_nothing_by_wildcard_or_without_queries() {
    for queries in [&[][..], &["base:"], &["base:other", "qemu:"]] {
        let (_, seen) = fixed(&[structured(), set("disk", queries)]);
        let ack = (wire::OPT_SET_META_CONTEXT, wire::REP_ACK, vec![]);
        assert_eq!(seen[1..], [ack]);
        let outcome = negotiated(&[set("disk", queries)], "disk");
        assert_eq!(outcome.contexts, Contexts::NONE);
    }
}

#[test]
fn nbd_must_a_second_set_meta_context_replaces_the_first_even_when_it_fails() {
    let first = set("disk", &[BASE_ALLOCATION]);
    let kind = wire::OPT_SET_META_CONTEXT;
    let seconds = [
        set("disk", &[]),
        set("other", &[BASE_ALLOCATION]),
        set("nodisk", &[BASE_ALLOCATION]),
        option(kind, &[1]),
        option(kind, &vec![0; MAX_OPTION_BYTES as usize + 1]),
    ];
    for second in seconds {
        let outcome = negotiated(&[first.clone(), second], "disk");
        assert_eq!(outcome.contexts, Contexts::NONE);
    }
    let again = negotiated(&[set("disk", &[]), first.clone()], "disk");
    assert_eq!(again.contexts, ALLOCATION);
    let listed = option(wire::OPT_LIST_META_CONTEXT, &context_data("", &[]));
    let kept = negotiated(&[first, listed], "disk");
    assert_eq!(kept.contexts, ALLOCATION);
}

#[test]
fn nbd_must_contexts_set_for_another_export_do_not_count() {
    let options = [set("other", &[BASE_ALLOCATION])];
    assert_eq!(negotiated(&options, "disk").contexts, Contexts::NONE);
    let by_go = negotiated(&options, "other");
    assert_eq!(by_go.contexts, ALLOCATION);
    let name = option(wire::OPT_EXPORT_NAME, b"other");
    let [set] = options;
    let (step, _) = talk(FIXED, &[structured(), set, name]);
    assert_eq!(step, HandshakeProgress::Transmission(by_go));
}

#[test]
fn nbd_must_malformed_meta_context_requests_are_invalid_and_the_connection_kept() {
    let bad = [
        vec![],
        text("disk"),
        [&text("disk")[..], &[0, 0, 0, 1]].concat(),
        [&text("disk")[..], &[0, 0, 0, 1, 0, 0, 0, 2, b'x']].concat(),
        [&text("disk")[..], &[0, 0, 0, 0, 0]].concat(),
        [&text("disk")[..], &[0xff; 4], &text("base:")].concat(),
        [&text("disk")[..], &[0, 0, 0, 1, 0, 0, 0, 1, 0xff]].concat(),
        context_data("\0", &[]),
        context_data("disk", &[&"x".repeat(4097)]),
    ];
    for data in bad {
        for kind in [wire::OPT_LIST_META_CONTEXT, wire::OPT_SET_META_CONTEXT] {
            assert_refused(kind, &data, wire::REP_ERR_INVALID);
        }
    }
}

#[test]
fn data_of_an_option_are_read_up_to_64_kib_and_not_a_byte_further() {
    // The bytes after the last query are malformed, which is found only if they are parsed.
    let of_length = |bytes: u32| {
        let mut data = context_data("disk", &[]);
        data.resize(bytes as usize, 0);
        data
    };
    let kind = wire::OPT_LIST_META_CONTEXT;
    assert_refused(kind, &of_length(MAX_OPTION_BYTES), wire::REP_ERR_INVALID);
    assert_refused(kind, &of_length(MAX_OPTION_BYTES + 1), wire::REP_ERR_TOO_BIG);
}
