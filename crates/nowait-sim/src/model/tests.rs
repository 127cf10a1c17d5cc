//! Tests of the model without a device: the contents that it must refuse and that it must accept.

use crate::model::*;

const DONE: Ending = Ending::Done { durable: false };
const DURABLE: Ending = Ending::Done { durable: true };
const CELL: ByteRange = ByteRange::new(64, 64);

fn model() -> Model {
    Model::new(1024, 64, 512, 512)
}

fn write(model: &mut Model, value: Value, ending: Ending) {
    let began = model.begin_write(CELL, value, 0);
    model.end_write(CELL, began, ending);
}

fn bytes(value: Value) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    pattern::fill(&mut bytes, 64, value);
    bytes
}

fn finds(model: &mut Model, value: Value) -> bool {
    let began = model.begin();
    model.check(64, &bytes(value), began).is_ok()
}

fn leaves(mut model: Model, value: Value) -> bool {
    let mut all = vec![0; 1024];
    all[64..128].copy_from_slice(&bytes(value));
    model.power_cut(&all, &[]).is_ok()
}

#[test]
fn c18_unwritten_bytes_are_zero() {
    assert!(finds(&mut model(), ZERO) && !finds(&mut model(), 3));
}

#[test]
fn a_read_finds_the_last_write_and_none_before_it() {
    let mut model = model();
    write(&mut model, 1, DONE);
    write(&mut model, 2, DONE);
    assert!(finds(&mut model, 2) && !finds(&mut model, 1) && !finds(&mut model, ZERO));
}

#[test]
fn c54_of_two_overlapping_writes_either_remains_and_then_does_not_change() {
    let mut model = model();
    let one = model.begin_write(CELL, 1, 0);
    let two = model.begin_write(CELL, 2, 0);
    assert!(finds(&mut model, ZERO) && finds(&mut model, 1) && finds(&mut model, 2));
    model.end_write(CELL, one, DONE);
    model.end_write(CELL, two, DONE);
    assert!(!finds(&mut model, ZERO));
    assert!(finds(&mut model, 1) && !finds(&mut model, 2));
}

#[test]
fn a_read_in_flight_may_still_find_the_previous_content() {
    let mut model = model();
    let early = model.begin();
    write(&mut model, 1, DURABLE);
    write(&mut model, 2, DURABLE);
    let began = model.begin_write(CELL, 3, early);
    model.end_write(CELL, began, Ending::Never);
    assert!(model.check(64, &bytes(1), early).is_ok());
    assert!(model.check(64, &bytes(ZERO), early).is_ok());
    assert!(model.check(64, &bytes(3), early).is_err());
}

#[test]
fn a_failed_write_may_be_present_or_not() {
    let mut model = model();
    write(&mut model, 1, DONE);
    write(&mut model, 2, Ending::Maybe);
    assert!(finds(&mut model, 1) && !finds(&mut model, 2) && !finds(&mut model, ZERO));
}

#[test]
fn c49_a_power_cut_keeps_the_writes_before_a_flush() {
    let make = |flushed: bool| {
        let mut model = model();
        write(&mut model, 1, DONE);
        let began = model.begin();
        if flushed {
            model.end_flush(began);
        }
        model
    };
    assert!(leaves(make(false), ZERO) && leaves(make(false), 1));
    assert!(!leaves(make(true), ZERO) && leaves(make(true), 1));
}

#[test]
fn c49_a_flush_does_not_cover_writes_in_flight() {
    let mut model = model();
    let flush = model.begin();
    write(&mut model, 1, DONE);
    model.end_flush(flush);
    assert!(leaves(model, ZERO));
}

#[test]
fn c28_a_power_cut_keeps_a_durable_write_and_removes_all_before_it() {
    let mut model = model();
    write(&mut model, 1, DONE);
    write(&mut model, 2, DURABLE);
    write(&mut model, 3, DONE);
    let again = || {
        let mut again = self::model();
        write(&mut again, 1, DONE);
        write(&mut again, 2, DURABLE);
        write(&mut again, 3, DONE);
        again
    };
    assert!(leaves(model, 2) && leaves(again(), 3));
    assert!(!leaves(again(), 1) && !leaves(again(), ZERO));
}

#[test]
fn c54_a_block_that_is_a_mixture_of_two_whole_writes_is_refused() {
    let mut model = model();
    let both = ByteRange::new(0, 512);
    let one = model.begin_write(both, 1, 0);
    let two = model.begin_write(both, 2, 0);
    model.end_write(both, one, DONE);
    model.end_write(both, two, DONE);
    let mut mixed = vec![0; 512];
    pattern::fill(&mut mixed[..256], 0, 1);
    pattern::fill(&mut mixed[256..], 256, 2);
    let began = model.begin();
    assert!(model.check(0, &mixed, began).unwrap_err().to_string().contains("mixture"));
}

#[test]
fn the_rest_of_a_cell_on_a_shrunk_device_may_equal_another_write() {
    let cell = ByteRange::new(500, 100);
    let mut model = Model::new(1024, 100, 512, 512);
    let began = model.begin_write(ByteRange::new(400, 200), 1, 0);
    model.end_write(ByteRange::new(400, 200), began, DONE);
    // The power cut tears the write: its part of the first block is unchanged.
    let mut all = vec![0; 1024];
    pattern::fill(&mut all[400..500], 400, 1);
    pattern::fill(&mut all[512..600], 512, 1);
    model.power_cut(&all, &[]).unwrap();
    model.shrink(512);
    let zeros = model.begin_write(ByteRange::new(400, 112), ZERO, 0);
    let began = model.begin();
    model.check(400, &all[400..512], began).unwrap();
    // The bytes may be older than the zeros, and remain if the zeros are never written.
    model.end_write(cell, zeros, Ending::Never);
    let began = model.begin();
    model.check(500, &all[500..512], began).unwrap();
}

#[test]
fn garbage_is_accepted_only_where_the_device_reports_it_and_no_write_was_durable() {
    let garbage = |durable: bool, rotten: &[ByteRange]| {
        let mut model = model();
        write(&mut model, 1, Ending::Done { durable });
        let mut all = vec![0; 1024];
        all[64..128].fill(9);
        model.power_cut(&all, rotten).is_ok()
    };
    assert!(garbage(false, &[ByteRange::new(64, 64)]));
    assert!(!garbage(false, &[]) && !garbage(true, &[ByteRange::new(64, 64)]));
}

#[test]
fn later_reads_find_what_the_power_cut_left() {
    let mut model = model();
    write(&mut model, 1, DONE);
    assert!({
        let all = vec![0; 1024];
        model.power_cut(&all, &[]).is_ok()
    });
    assert!(finds(&mut model, ZERO) && !finds(&mut model, 1));
}

/// Whether a power cut may leave a failed write in only the first of two units of a cell, which was
/// zero; with `zeroed`, after a failed write of zeros to the same range.
fn leaves_a_part(zeroed: bool) -> bool {
    let cell = ByteRange::new(500, 100);
    let first = |value| {
        let mut all = vec![0; 1024];
        pattern::fill(&mut all[512..600], 512, 1);
        pattern::fill(&mut all[500..512], 500, value);
        all
    };
    let mut model = Model::new(1024, 100, 512, 512);
    let began = model.begin_write(cell, 1, 0);
    model.end_write(cell, began, DONE);
    model.power_cut(&first(ZERO), &[]).unwrap();
    for value in [Some(2), zeroed.then_some(ZERO)].into_iter().flatten() {
        let began = model.begin_write(cell, value, 0);
        model.end_write(cell, began, Ending::Maybe);
    }
    let began = model.begin();
    model.check(500, &first(ZERO)[500..600], began).unwrap();
    model.power_cut(&first(2), &[]).is_ok()
}

#[test]
fn bytes_that_were_read_may_partly_come_from_another_write_that_a_power_cut_reverts() {
    assert!(leaves_a_part(true) && !leaves_a_part(false));
}

#[test]
fn c51_data_lost_by_a_failed_flush_becomes_durable_only_by_another_write() {
    let after = |ending| {
        let mut model = model();
        write(&mut model, 1, DONE);
        model.doubt();
        if let Some(ending) = ending {
            write(&mut model, 2, ending);
        }
        let began = model.begin();
        model.end_flush(began);
        model
    };
    assert!(leaves(after(None), ZERO) && leaves(after(None), 1));
    for ending in [DONE, DURABLE] {
        let left = |value| leaves(after(Some(ending)), value);
        assert!(left(2) && !left(1) && !left(ZERO), "{ending:?}");
    }
}
