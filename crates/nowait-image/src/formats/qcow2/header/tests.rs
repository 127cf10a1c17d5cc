//! The numbers of a header at their limits.

use super::*;

/// Sets a number of a header.
type Change = fn(&mut Header, u64);

#[test]
fn numbers_are_accepted_up_to_their_limits_and_refused_beyond() {
    let check = |change: &dyn Fn(&mut Header)| {
        let mut header = Header { l1_entries: 1, ..Header::empty(512, 16) };
        (header.l1_pos, header.refcount_table_pos) = (1 << 30, 1 << 40);
        header.refcount_table_clusters = 1;
        change(&mut header);
        header.check_numbers()
    };
    let changes: [(Change, u64); 6] = [
        (|it, n| it.cluster_bits = n as u32, u64::from(MAX_CLUSTER_BITS)),
        (|it, n| it.refcount_order = n as u32, u64::from(MAX_REFCOUNT_ORDER)),
        (|it, n| it.l1_entries = n as u32, MAX_L1_BYTES / 8),
        (|it, n| it.refcount_table_clusters = n as u32, MAX_REFCOUNT_TABLE_BYTES >> 16),
        (|it, n| it.snapshots = n as u32, u64::from(MAX_SNAPSHOTS)),
        (|it, n| it.refcount_table_pos = n << 16, (MAX_POS >> 16) - 1),
    ];
    for (number, (change, most)) in changes.into_iter().enumerate() {
        assert_eq!(check(&|header| change(header, most)), Ok(()), "{number}");
        assert!(check(&|header| change(header, most + 1)).is_err(), "{number}");
    }
    let list = |bitmaps: u32, bytes: u64| {
        let (count, len) = (u64::from(bitmaps) << 32, bytes);
        let data = [count, len, 1 << 16].map(u64::to_be_bytes).concat();
        Header::empty(512, 16).read_bitmaps(&data).is_ok()
    };
    assert!(list(MAX_BITMAPS, MAX_DIRECTORY_BYTES));
    assert!(!list(MAX_BITMAPS + 1, MAX_DIRECTORY_BYTES));
    assert!(!list(MAX_BITMAPS, MAX_DIRECTORY_BYTES + 1));
}
