//! Metadata contexts: what a client may ask about a range by block status.
//!
//! Invariant: a context has one name and one id, on every connection and for every export.
//! Knows: wire. Known by: handshake, door.

use nowait::Span;

use super::wire;

/// A metadata context (NBD proto.md, "Metadata querying").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Context {
    /// Which extents have storage behind them, and which read as zeros.
    BaseAllocation,
    /// Which image of a chain decides what a range is: 1 for the top one, 0 where none does (QEMU
    /// docs/interop/nbd.txt, "qemu" namespace).
    AllocationDepth,
}

impl Context {
    const ALL: [Self; 2] = [Self::BaseAllocation, Self::AllocationDepth];

    /// What clients call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::BaseAllocation => "base:allocation",
            Self::AllocationDepth => "qemu:allocation-depth",
        }
    }

    /// The id under which clients find it in block status chunks.
    pub(crate) const fn id(self) -> u32 {
        self as u32 + 1
    }

    /// Whether a query of `OPT_LIST_META_CONTEXT` asks for it: by its name, or by its namespace
    /// with nothing behind the colon.
    pub(crate) fn is_listed_by(self, query: &str) -> bool {
        query == self.name() || self.name().split_inclusive(':').next() == Some(query)
    }

    /// The flags that a span of storage has in this context.
    #[inline]
    pub(crate) const fn flags(self, span: Span) -> u32 {
        match self {
            Self::BaseAllocation if span.hole => wire::STATE_HOLE | wire::STATE_ZERO,
            Self::BaseAllocation => 0,
            Self::AllocationDepth => span.depth as u32,
        }
    }
}

/// A set of contexts: those that an export has, or those that a client selected.
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

    /// Whether nothing is in it.
    #[inline]
    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many are in it.
    pub(crate) const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Those in it, by ascending id.
    pub(crate) fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |context| self.has(*context))
    }

    /// Those of this set for which `wanted` holds.
    #[must_use]
    pub(crate) fn filter(self, wanted: impl Fn(Context) -> bool) -> Self {
        self.iter().filter(|context| wanted(*context)).fold(Self::NONE, Self::with)
    }

    /// Those of this set that a client names by `ids`; `None` if an id is not in it, or comes twice.
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

    /// NBD proto.md, "Metadata querying": a name MUST be a namespace that the document knows, a colon
    /// and a leaf, and keep to the rules for strings.
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
    fn a_context_tells_of_a_span_what_it_is_about() {
        let deep = Span { depth: 3, ..Span::on_top(1, true) };
        assert_eq!(Context::AllocationDepth.flags(deep), 3);
        assert_eq!(Context::AllocationDepth.flags(Span::on_top(1, false)), 1);
    }

    #[test]
    fn nbd_must_a_hole_of_the_allocation_context_reads_as_zeros() {
        let flags = |hole| Context::BaseAllocation.flags(Span::on_top(1, hole));
        assert_eq!((flags(true), flags(false)), (0b11, 0));
    }
}
