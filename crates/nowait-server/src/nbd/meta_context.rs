//! Metadata contexts, the kinds of information in block status replies.
//!
//! Invariant: a context that every export has has one name and one id, on every connection. That of a dirty bitmap has
//! its number among those that the client has selected as its id.

use nowait::ExtentStatus;

use crate::dirty_bitmaps::BitmapName;
use crate::dirty_bitmaps::bitmap_spec::MAX_BITMAPS;
use crate::nbd::wire;

/// A metadata context (NBD proto.md, "Metadata querying").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Context {
    /// Which extents are allocated, and which read as zeros.
    BaseAllocation,
    /// The depth of the image that determines an extent: 1 for the top one, 0 if none does (QEMU
    /// docs/interop/nbd.txt, "qemu" namespace).
    AllocationDepth,
    /// The changed ranges, by the dirty bitmap with this number among those that the client has selected (QEMU
    /// docs/interop/nbd.txt).
    DirtyBitmap(u8),
}

/// The prefix of the names of the contexts of dirty bitmaps.
const DIRTY_BITMAPS: &str = "qemu:dirty-bitmap:";
/// The only flag of a dirty bitmap (QEMU docs/interop/nbd.txt).
const STATE_DIRTY: u32 = 1;
/// Contexts that every export has.
const FIXED: u32 = 2;

impl Context {
    /// The name on the wire, if it is not that of a bitmap.
    pub(crate) const fn fixed_name(self) -> &'static str {
        match self {
            Self::BaseAllocation => "base:allocation",
            Self::AllocationDepth => "qemu:allocation-depth",
            Self::DirtyBitmap(_) => DIRTY_BITMAPS,
        }
    }

    /// Its bit in a set.
    const fn bit(self) -> u32 {
        match self {
            Self::BaseAllocation => 0,
            Self::AllocationDepth => 1,
            Self::DirtyBitmap(number) => FIXED + number as u32,
        }
    }

    const fn of_bit(bit: u32) -> Self {
        match bit {
            0 => Self::BaseAllocation,
            1 => Self::AllocationDepth,
            bit => Self::DirtyBitmap((bit - FIXED) as u8),
        }
    }

    /// The id on the wire in block status chunks.
    pub(crate) const fn id(self) -> u32 {
        self.bit() + 1
    }

    /// The flags of an extent in this context, if it is not that of a bitmap.
    #[inline]
    pub(crate) const fn flags(self, extent: ExtentStatus) -> u32 {
        match self {
            Self::BaseAllocation if extent.hole => wire::STATE_HOLE | wire::STATE_ZERO,
            Self::BaseAllocation | Self::DirtyBitmap(_) => 0,
            Self::AllocationDepth => extent.depth as u32,
        }
    }
}

/// The flags of an extent in the context of a dirty bitmap.
pub(crate) const fn dirty_flags(is_dirty: bool) -> u32 {
    if is_dirty { STATE_DIRTY } else { 0 }
}

/// The name on the wire of the context of a dirty bitmap.
pub(crate) fn bitmap_context(bitmap: &BitmapName) -> String {
    [DIRTY_BITMAPS, &bitmap.name].concat()
}

/// Whether a query of `OPT_LIST_META_CONTEXT` selects the context `name`: by its name, or by its namespace and a
/// colon; all dirty bitmaps are selected by what their names begin with, too.
fn is_listed_by(name: &str, query: &str) -> bool {
    let is_bitmap = || name.starts_with(DIRTY_BITMAPS) && query == DIRTY_BITMAPS;
    query == name || name.split_inclusive(':').next() == Some(query) || is_bitmap()
}

/// The contexts that an option selects, with their names, and what the names of bitmaps stand for.
#[derive(Default)]
pub(crate) struct ChosenContexts {
    pub(crate) contexts: Contexts,
    pub(crate) names: Vec<(Context, String)>,
    pub(crate) bitmaps: Vec<BitmapName>,
}

impl ChosenContexts {
    /// Contexts of `fixed` and `bitmaps` that `queries` name: of `OPT_SET_META_CONTEXT` if it is to `select` them, else of
    /// `OPT_LIST_META_CONTEXT`, where no query names all.
    pub(crate) fn of(
        select: bool,
        queries: &[&str],
        (fixed, bitmaps): (Contexts, &[BitmapName]),
    ) -> Self {
        let is_wanted = |name: &str| match select {
            true => queries.contains(&name),
            false => queries.is_empty() || queries.iter().any(|query| is_listed_by(name, query)),
        };
        let mut chosen = Self::default();
        for context in fixed.iter().filter(|context| is_wanted(context.fixed_name())) {
            chosen.push(context, context.fixed_name().to_owned());
        }
        for bitmap in bitmaps.iter().take(MAX_BITMAPS) {
            let name = bitmap_context(bitmap);
            if is_wanted(&name) {
                chosen.push(Context::DirtyBitmap(chosen.bitmaps.len() as u8), name);
                chosen.bitmaps.push(bitmap.clone());
            }
        }
        chosen
    }

    fn push(&mut self, context: Context, name: String) {
        self.contexts = self.contexts.with(context);
        self.names.push((context, name));
    }
}

/// A set of contexts: those of an export, or those that a client has selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contexts(u64);

impl Contexts {
    /// No context.
    pub(crate) const NONE: Self = Self(0);
    /// Those that every export has.
    pub(crate) const FIXED: Self =
        Self::NONE.with(Context::BaseAllocation).with(Context::AllocationDepth);

    /// This set and `context`.
    #[must_use]
    pub(crate) const fn with(self, context: Context) -> Self {
        Self(self.0 | 1 << context.bit())
    }

    /// Whether `context` is in it.
    pub(crate) const fn has(self, context: Context) -> bool {
        self.0 & 1 << context.bit() != 0
    }

    /// The fixed contexts of the set as a number, a bit for each.
    pub(crate) const fn fixed_bits(self) -> u8 {
        (self.0 & Self::FIXED.0) as u8
    }

    /// The set with the fixed contexts whose number is `bits`, and `bitmaps` dirty bitmaps; bits without a context are
    /// left out.
    pub(crate) fn of_bits(bits: u8, bitmaps: usize) -> Self {
        let bitmaps = (0..bitmaps.min(MAX_BITMAPS) as u8).map(Context::DirtyBitmap);
        bitmaps.fold(Self(u64::from(bits) & Self::FIXED.0), Self::with)
    }

    /// Whether the set is empty.
    #[inline]
    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of dirty bitmaps.
    #[inline]
    pub(crate) const fn bitmaps(self) -> usize {
        (self.0 & !Self::FIXED.0).count_ones() as usize
    }

    /// The number of contexts.
    pub(crate) const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The contexts by ascending id.
    pub(crate) fn iter(self) -> impl Iterator<Item = Context> {
        let bits = (0..u64::BITS).filter(move |bit| self.0 & 1 << bit != 0);
        bits.map(Context::of_bit)
    }

    /// The subset with these `ids`; `None` if an id is not in this set, or comes twice.
    pub(crate) fn select(self, ids: impl Iterator<Item = u32>) -> Option<Self> {
        ids.into_iter().try_fold(Self::NONE, |chosen, id| {
            let context = self.iter().find(|context| context.id() == id)?;
            (!chosen.has(context)).then(|| chosen.with(context))
        })
    }
}

const _: () = assert!(FIXED as usize + MAX_BITMAPS <= u64::BITS as usize);

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOCATION: Contexts = Contexts::NONE.with(Context::BaseAllocation);

    #[test]
    fn every_context_has_an_id_and_a_name_of_its_own() {
        for one in Contexts::FIXED.iter() {
            assert!(one.id() > 0 && one.fixed_name().contains(':'));
            let alike =
                |other: &Context| other.id() == one.id() || other.fixed_name() == one.fixed_name();
            assert_eq!(Contexts::FIXED.iter().filter(alike).count(), 1);
        }
    }

    /// NBD proto.md, "Metadata querying": a name MUST be a namespace that the document knows, a
    /// colon and a leaf, and keep to the rules for strings.
    #[test]
    fn nbd_must_every_context_is_named_by_a_namespace_and_a_leaf() {
        for context in Contexts::FIXED.iter() {
            let (namespace, leaf) = context.fixed_name().split_once(':').unwrap();
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
    fn a_set_has_all_bitmaps_of_an_export_beside_the_fixed_contexts() {
        let all = Contexts::of_bits(u8::MAX, MAX_BITMAPS);
        assert_eq!(all.len(), 2 + MAX_BITMAPS);
        assert_eq!(Contexts::of_bits(u8::MAX, MAX_BITMAPS + 1), all, "more are left out");
        assert_eq!((all.fixed_bits(), all.bitmaps()), (0b11, MAX_BITMAPS));
        let ids: Vec<_> = all.iter().map(Context::id).collect();
        assert_eq!(ids, (1..=2 + MAX_BITMAPS as u32).collect::<Vec<_>>());
        assert_eq!(all.select(ids.into_iter()), Some(all));
        assert_eq!(Contexts::of_bits(0b11, 0).bitmaps(), 0);
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
