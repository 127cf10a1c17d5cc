//! Locations and storages of a kind that this build leaves out.
//!
//! Invariant: none of these types has a value.

use std::convert::Infallible;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::str::FromStr;

use nowait::{Error, Flags, Storage, StorageProperties};

/// Functions with a parameter that has no value, so that they are never called.
macro_rules! never_called {
    ($($name:ident($none:ident: $kind:ty $(, $of:ty)*) $(-> $answer:ty)?;)*) => {
        $(
            /// Never called: it is about something that this build has not.
            #[allow(clippy::needless_arbitrary_self_type, reason = "any parameter may be the one")]
            pub fn $name($none: $kind $(, _: $of)*) $(-> $answer)? {
                match $none.0 {}
            }
        )*
    };
}
pub(super) use never_called;

/// A kind of storages.
pub trait DisabledKind: Clone + fmt::Debug + PartialEq + Eq + Send + Sync {
    /// The beginnings of its locations.
    const SCHEMES: &'static [&'static str];
    /// The refusal of a location.
    const REFUSAL: &'static str;
}

/// A location of a storage of kind `K`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DisabledLocation<K>(pub(crate) Infallible, PhantomData<K>);

impl<K: DisabledKind> DisabledLocation<K> {
    /// Whether `text` begins with a scheme of such a location.
    #[must_use]
    pub fn is_like(text: &str) -> bool {
        K::SCHEMES.iter().any(|scheme| text.starts_with(scheme))
    }

    pub(crate) fn short_name(&self) -> String {
        match self.0 {}
    }
}

impl<K: DisabledKind> FromStr for DisabledLocation<K> {
    type Err = String;

    fn from_str(_: &str) -> Result<Self, String> {
        Err(K::REFUSAL.into())
    }
}

impl<K: DisabledKind> fmt::Display for DisabledLocation<K> {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {}
    }
}

/// A storage of kind `K`.
pub struct DisabledStorage<K>(pub(crate) Infallible, PhantomData<K>);

impl<K: DisabledKind> Storage for DisabledStorage<K> {
    fn properties(&self) -> StorageProperties {
        match self.0 {}
    }

    fn size(&self) -> Result<u64, Error> {
        match self.0 {}
    }

    fn read(&self, _: &mut [IoSliceMut<'_>], _: u64) -> Result<usize, Error> {
        match self.0 {}
    }

    fn write(&self, _: &[IoSlice<'_>], _: u64, _: Flags) -> Result<usize, Error> {
        match self.0 {}
    }

    fn sync(&self) -> Result<(), Error> {
        match self.0 {}
    }
}
