//! Tests of the runs alone, without requests or a queue.

use super::*;

const BLOCK: u32 = 4096;

/// The transfer of block `n`, whose memory is block `at` of an address space that nothing accesses.
fn block(n: u64, at: usize) -> Transfer {
    let base = std::ptr::without_provenance_mut(at * BLOCK as usize);
    Transfer { base, pos: n * u64::from(BLOCK), len: BLOCK, ..Transfer::NONE }
}

/// Places transfers of one device in slots from 0 on, which all join one run, and takes it.
fn run(merging: &mut Merging, transfers: &[Transfer]) -> Run {
    for (slot, transfer) in (0..).zip(transfers) {
        match merging.place(0, slot, transfer) {
            Placed::First(None) if slot == 0 => {}
            Placed::Behind(before) if slot > 0 => assert_eq!(before, slot - 1),
            _ => panic!("slot {slot} is not in the run"),
        }
    }
    merging.take_open().unwrap()
}

#[test]
fn a_run_has_the_segments_of_its_requests_in_their_order() {
    let mut merging = Merging::new(true);
    let transfers = [block(7, 30), block(8, 31), block(9, 50)];
    let run = run(&mut merging, &transfers);
    assert_eq!((run.head, run.tail, run.requests), (0, 2, 3));
    let all = merging.transfer_of(&run);
    assert_eq!((all.pos, all.len, all.segments), (7 * 4096, 3 * BLOCK, 2));
    let one = |at: usize, blocks: usize| IoSegment { base: block(0, at).base, len: blocks * 4096 };
    assert_eq!(merging.lists[run.list as usize], [one(30, 2), one(50, 1)]);
    assert_eq!(merging.bytes(run.list), 3 * 4096);
    assert!(!merging.has_run());
}

#[test]
fn a_run_in_one_piece_of_memory_needs_no_list_and_keeps_its_registered_buffer() {
    let mut merging = Merging::new(true);
    let registered = |n, at| Transfer { buffer: 3, ..block(n, at) };
    let one = run(&mut merging, &[registered(7, 30), registered(8, 31)]);
    let all = merging.transfer_of(&one);
    assert_eq!((all.segments, all.buffer, all.base), (0, 3, block(0, 30).base));
    let mixed = run(&mut merging, &[registered(7, 30), block(8, 31)]);
    assert_eq!(merging.transfer_of(&mixed).buffer, UNREGISTERED);
}

#[test]
fn the_next_run_uses_a_list_only_after_its_transfer_has_ended() {
    let mut merging = Merging::new(true);
    let two = [block(0, 0), block(1, 1)];
    let (first, second) = (run(&mut merging, &two), run(&mut merging, &two));
    assert_ne!(first.list, second.list);
    merging.end(0, first.list, 2, true);
    assert_eq!(run(&mut merging, &two).list, first.list);
    assert_eq!(merging.merged(0), 2);
}

#[test]
fn a_run_is_limited_in_bytes_and_a_request_in_its_length() {
    let mut merging = Merging::new(true);
    let blocks = MAX_BYTES / BLOCK;
    let fitting: Vec<_> = (0..blocks).map(|n| block(n.into(), n as usize)).collect();
    assert_eq!(run(&mut merging, &fitting).transfer.len, MAX_BYTES);
    for (slot, transfer) in (0..).zip(&fitting) {
        merging.place(0, slot, transfer);
    }
    let next = merging.place(0, blocks, &block(blocks.into(), 0));
    assert!(matches!(next, Placed::First(Some(run)) if run.requests == blocks));
    let long = |len| Transfer { len, ..block(900, 0) };
    assert!(matches!(merging.place(1, 0, &long(MAX_PART_BYTES)), Placed::First(None)));
    assert!(matches!(merging.place(1, 0, &long(MAX_PART_BYTES + 1)), Placed::Alone));
}

#[test]
fn after_a_run_that_was_not_done_as_a_whole_neighbours_of_its_device_are_pushed_alone() {
    let mut merging = Merging::new(true);
    let list = run(&mut merging, &[block(0, 0), block(1, 1)]).list;
    merging.end(0, list, 2, false);
    for _ in 0..PAUSE {
        assert!(matches!(merging.place(0, 0, &block(5, 0)), Placed::Alone));
        assert!(!merging.has_run());
    }
    assert!(matches!(merging.place(0, 0, &block(5, 0)), Placed::First(None)));
    assert_eq!(merging.merged(0), 0);
}

#[test]
fn runs_of_two_devices_stay_apart_and_one_that_is_detached_leaves_nothing_to_the_next() {
    let mut merging = Merging::new(true);
    for device in [0, 1] {
        assert!(matches!(merging.place(device, device, &block(0, 0)), Placed::First(None)));
    }
    // It touches the run of either device.
    assert!(matches!(merging.place(1, 2, &block(1, 1)), Placed::Behind(1)));
    let runs: Vec<_> = std::iter::from_fn(|| merging.take_open()).collect();
    let mut heads: Vec<_> = runs.iter().map(|run| (run.head, run.requests)).collect();
    heads.sort_unstable();
    assert_eq!(heads, [(0, 1), (1, 2)]);
    let list = runs.iter().find(|run| run.requests == 2).unwrap().list;
    merging.end(1, list, 2, true);
    merging.end(1, list, 2, false);
    assert_eq!((merging.forget(1), merging.merged(1), merging.forget(9)), (2, 0, 0));
    // Nor its pause.
    assert!(matches!(merging.place(1, 0, &block(5, 0)), Placed::First(None)));
}

#[test]
fn the_merging_switched_off_places_every_request_alone() {
    let mut merging = Merging::new(false);
    assert!(matches!(merging.place(0, 0, &block(5, 0)), Placed::Alone));
    assert!(!merging.is_busy());
}
