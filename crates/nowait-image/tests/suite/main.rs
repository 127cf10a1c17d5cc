//! Tests with QEMU: images made by one side are read by the other, and damaged ones are refused in
//! one line.
//!
//! Invariant: a test writes only to its own directory. It uses the crate's public API, and QEMU's
//! tools as programs.

mod images;

mod bitmap_validity;
mod bitmaps;
mod check;
mod commit;
mod contents;
mod create;
mod handed_over;
mod inconsistent_images;
mod random_damage;
mod raw_bitmaps;
mod read_only_formats;
mod refusals;
mod resize;
mod served;
mod snapshots;
mod subclusters;
mod vhdx;
mod vmdk;
mod zstd;
