//! The kinds of images that servers are measured on.

/// The kind of image that a server is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageKind {
    /// A raw file without holes.
    Raw,
    /// A qcow2 image with all of its clusters, of 64 KiB.
    Qcow2,
    /// A qcow2 image over another one over a raw file: each has every third cluster.
    Chain,
}

impl ImageKind {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Raw, Self::Qcow2, Self::Chain];

    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ImageKind::Raw => "raw",
            ImageKind::Qcow2 => "qcow2",
            ImageKind::Chain => "chain of 3",
        }
    }

    /// The name that all servers use for its format.
    pub(crate) fn format(self) -> &'static str {
        match self {
            ImageKind::Raw => "raw",
            ImageKind::Qcow2 | ImageKind::Chain => "qcow2",
        }
    }
}
