//! The names of a log's files.
//!
//! Invariant: a name that is not one of these is not touched.

/// A file of a log, with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SegmentName {
    /// A segment that has records, or will have them next.
    Segment(u64),
    /// A file of a segment's size that is free for reuse.
    Spare(u64),
    /// A file that is being made.
    New(u64),
}

impl SegmentName {
    /// The file with this name, if it is one of a log.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (kind, digits) = name.split_once('-')?;
        let number = u64::from_str_radix(digits, 16).ok()?;
        let parsed = match kind {
            "segment" => Self::Segment(number),
            "spare" => Self::Spare(number),
            "new" => Self::New(number),
            _ => return None,
        };
        (parsed.text() == name).then_some(parsed)
    }

    /// The name.
    pub(crate) fn text(self) -> String {
        match self {
            Self::Segment(number) => format!("segment-{number:016x}"),
            Self::Spare(number) => format!("spare-{number:016x}"),
            Self::New(number) => format!("new-{number:016x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_log_has_given_are_its_own() {
        for name in [SegmentName::Segment(1), SegmentName::Spare(255), SegmentName::New(u64::MAX)] {
            assert_eq!(SegmentName::parse(&name.text()), Some(name));
        }
        assert_eq!(SegmentName::Segment(255).text(), "segment-00000000000000ff");
        for other in
            ["lock", "segment-1", "segment-00000000000000FF", "segment-+000000000000001", ""]
        {
            assert_eq!(SegmentName::parse(other), None, "{other}");
        }
    }
}
