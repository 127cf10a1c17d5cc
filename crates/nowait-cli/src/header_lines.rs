//! Contents of the header of an image, as lines of text.
//!
//! Invariant: a format adds its own facts after those that all formats have.

use nowait_image::{Fact, ImageInfo};

use nowait_daemon::size::human;

/// The lines about a header. `file_bytes` is the length of the file, `space` the text for its allocated
/// space.
pub(crate) fn header_lines(
    header: &ImageInfo,
    file_bytes: u64,
    space: String,
) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        ("format", header.title.clone()),
        ("virtual size", human(header.size)),
        ("disk size", space),
        ("file length", human(file_bytes)),
    ];
    lines.extend(header.lines.iter().map(|(name, fact)| match fact {
        Fact::Bytes(bytes) => (*name, human(*bytes)),
        Fact::Words(words) => (*name, words.clone()),
    }));
    lines
}
