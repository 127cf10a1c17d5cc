//! Metadata contexts, the kinds of information in block status replies.
//!
//! Invariant: a context has one name and one id, on every connection and for every export.

use nowait::ExtentStatus;

use crate::nbd::wire;

/// A metadata context (NBD proto.md, "Metadata querying").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Context {
    /// Which extents are allocated, and which read as zeros.
    BaseAllocation,
    /// The depth of the image that determines an extent: 1 for the top one, 0 if none does (QEMU
    /// docs/interop/nbd.txt, "qemu" namespace).
    AllocationDepth,
}

impl Context {
    const ALL: [Self; 2] = [Self::BaseAllocation, Self::AllocationDepth];

    /// The name on the wire.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::BaseAllocation => "base:allocation",
            Self::AllocationDepth => "qemu:allocation-depth",
        }
    }

    /// The id on the wire in block status chunks.
    pub(crate) const fn id(self) -> u32 {
        self as u32 + 1
    }

    /// Whether a query of `OPT_LIST_META_CONTEXT` selects it: by its name, or by its namespace and
    /// a colon.
    pub(crate) fn is_listed_by(self, query: &str) -> bool {
        query == self.name() || self.name().split_inclusive(':').next() == Some(query)
    }

    /// The flags of an extent in this context.
    #[inline]
    pub(crate) const fn flags(self, extent: ExtentStatus) -> u32 {
        match self {
            Self::BaseAllocation if extent.hole => wire::STATE_HOLE | wire::STATE_ZERO,
            Self::BaseAllocation => 0,
            Self::AllocationDepth => extent.depth as u32,
        }
    }
}

/// A set of contexts: those of an export, or those that a client has selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contexts(u8);

impl Contexts {
    /// No context.
    pub(crate) const NONE: Self = Self(0);

    /// This set and `context`.
    #[must_use]
    pub(crate) const fn with(self, context: Context) -> Self {
        Self(self.0 | 1 << context as u8)
    }

    /// Whether `context` is in it.
    pub(crate) const fn has(self, context: Context) -> bool {
        self.0 & 1 << context as u8 != 0
    }

    /// The set as a number, a bit for each context.
    pub(crate) const fn bits(self) -> u8 {
        self.0
    }

    /// The set whose number is `bits`; bits without a context are left out.
    pub(crate) fn of_bits(bits: u8) -> Self {
        let all = Context::ALL.into_iter().fold(Self::NONE, Self::with);
        Self(bits & all.0)
    }

    /// Whether the set is empty.
    #[inline]
    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of contexts.
    pub(crate) const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The contexts by ascending id.
    pub(crate) fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |context| self.has(*context))
    }

    /// The contexts of this set for which `wanted` holds.
    #[must_use]
    pub(crate) fn filter(self, wanted: impl Fn(Context) -> bool) -> Self {
        self.iter().filter(|context| wanted(*context)).fold(Self::NONE, Self::with)
    }

    /// The subset with these `ids`; `None` if an id is not in this set, or comes twice.
    pub(crate) fn select(self, ids: impl Iterator<Item = u32>) -> Option<Self> {
        ids.into_iter().try_fold(Self::NONE, |chosen, id| {
            let context = self.iter().find(|context| context.id() == id)?;
            (!chosen.has(context)).then(|| chosen.with(context))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOCATION: Contexts = Contexts::NONE.with(Context::BaseAllocation);

    #[test]
    fn every_context_has_an_id_and_a_name_of_its_own() {
        for one in Context::ALL {
            assert!(one.id() > 0 && one.name().contains(':'));
            let alike = |other: &Context| other.id() == one.id() || other.name() == one.name();
            assert_eq!(Context::ALL.into_iter().filter(alike).count(), 1);
        }
    }

    /// NBD proto.md, "Metadata querying": a name MUST be a namespace that the document knows, a
    /// colon and a leaf, and keep to the rules for strings.
    #[test]
    fn nbd_must_every_context_is_named_by_a_namespace_and_a_leaf() {
        for context in Context::ALL {
            let (namespace, leaf) = context.name().split_once(':').unwrap();
            assert!(["base", "nbd-server", "qemu"].contains(&namespace), "{namespace}");
            assert!(
                !leaf.is_empty() && leaf.len() < wire::MAX_STRING_BYTES && !leaf.contains('\0')
            );
        }
    }

    #[test]
    fn a_selection_by_ids_has_each_known_id_once() {
        let id = Context::BaseAllocation.id();
        let select = |set: Contexts, ids: &[u32]| set.select(ids.iter().copied());
        assert_eq!(select(ALLOCATION, &[id]), Some(ALLOCATION));
        assert_eq!(select(ALLOCATION, &[]), Some(Contexts::NONE));
        for bad in [&[id, id][..], &[0], &[id, 77], &[u32::MAX]] {
            assert_eq!(select(ALLOCATION, bad), None, "{bad:?}");
        }
        assert_eq!(select(Contexts::NONE, &[id]), None);
    }

    #[test]
    fn the_flags_of_a_context_describe_the_extent() {
        let deep = ExtentStatus { depth: 3, ..ExtentStatus::top(1, true) };
        assert_eq!(Context::AllocationDepth.flags(deep), 3);
        assert_eq!(Context::AllocationDepth.flags(ExtentStatus::top(1, false)), 1);
    }

    #[test]
    fn nbd_must_a_hole_of_the_allocation_context_reads_as_zeros() {
        let flags = |hole| Context::BaseAllocation.flags(ExtentStatus::top(1, hole));
        assert_eq!((flags(true), flags(false)), (0b11, 0));
    }
}
