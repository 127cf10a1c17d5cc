//! Counters with their names: a struct of counts and the table of its counts are one declaration.
//!
//! Invariant: names are those that programs see, and are never changed; a count that is not named here
//! is in no metric.

/// A count of a `T`: its names, and its value.
pub struct Count<T> {
    /// The name of its field, which is its key in JSON.
    pub field: &'static str,
    /// The name of its metric, without the suffixes of its unit and its kind; of a count of
    /// [`Stats`](crate::Stats) the name of the mechanism.
    pub name: &'static str,
    /// One line for people.
    pub help: &'static str,
    /// `bytes` or `seconds`, or empty.
    pub unit: &'static str,
    /// Whether it may fall.
    pub kind: CountKind,
    /// The value.
    pub get: fn(&T) -> CountValue,
    /// Adds the value of the second to the first.
    pub add: fn(&mut T, &T),
}

/// Whether a count may fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountKind {
    /// It only grows.
    Counter,
    /// It may fall.
    Gauge,
}

/// The value of a count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CountValue {
    /// A number of something.
    Integer(u64),
    /// A fraction.
    Float(f64),
    /// Whether something holds.
    Flag(bool),
}

impl CountValue {
    /// The value as an integer; a flag that holds is 1, and a fraction is rounded down.
    #[must_use]
    pub fn integer(self) -> u64 {
        match self {
            Self::Integer(value) => value,
            Self::Float(value) => value as u64,
            Self::Flag(value) => u64::from(value),
        }
    }
}

/// A type that counts.
pub trait Countable {
    /// The value.
    fn value(&self) -> CountValue;
    /// Adds `other`; of two flags one is enough.
    fn add(&mut self, other: &Self);
}

impl Countable for u64 {
    fn value(&self) -> CountValue {
        CountValue::Integer(*self)
    }

    fn add(&mut self, other: &Self) {
        *self += other;
    }
}

impl Countable for f64 {
    fn value(&self) -> CountValue {
        CountValue::Float(*self)
    }

    fn add(&mut self, other: &Self) {
        *self += other;
    }
}

impl Countable for bool {
    fn value(&self) -> CountValue {
        CountValue::Flag(*self)
    }

    fn add(&mut self, other: &Self) {
        *self |= other;
    }
}

/// A fault counts as a flag that it is there.
impl Countable for Option<String> {
    fn value(&self) -> CountValue {
        CountValue::Flag(self.is_some())
    }

    fn add(&mut self, other: &Self) {
        if self.is_none() {
            self.clone_from(other);
        }
    }
}

/// A struct that [`counts!`](crate::counts) has declared.
pub trait Counted: Sized + 'static {
    /// Its counts, in the order of the fields.
    const COUNTS: &'static [Count<Self>];

    /// Adds the counts of `other`; fields that are not counts stay.
    fn add_counts(&mut self, other: &Self) {
        Self::COUNTS.iter().for_each(|count| (count.add)(self, other));
    }
}

/// Declares a struct; `=> Counter "name"` or `=> Gauge "name" "unit"` after a field makes it a
/// count of the table [`Counted::COUNTS`](crate::internal::Counted::COUNTS). Its documentation, one line, is the
/// text that people read.
#[doc(hidden)]
#[macro_export]
macro_rules! counts {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(
                #[doc = $doc:literal]
                $(#[$attr:meta])*
                $field_vis:vis $field:ident: $ty:ty $(=> $kind:ident $metric:literal $($unit:literal)?)?
            ),* $(,)?
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $(
                #[doc = $doc]
                $(#[$attr])*
                $field_vis $field: $ty,
            )*
        }

        impl $crate::internal::Counted for $name {
            const COUNTS: &'static [$crate::internal::Count<Self>] = &[
                $($(
                    $crate::internal::Count {
                        field: stringify!($field),
                        name: $metric,
                        help: $doc,
                        unit: concat!($($unit)?),
                        kind: $crate::internal::CountKind::$kind,
                        get: |it| $crate::internal::Countable::value(&it.$field),
                        add: |it, other| $crate::internal::Countable::add(&mut it.$field, &other.$field),
                    },
                )?)*
            ];
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    counts! {
        /// An example.
        #[derive(Default)]
        struct Example {
            /// Requests.
            requests: u64 => Counter "requests",
            /// Time.
            time: f64 => Gauge "time" "seconds",
            /// Whether it is open.
            open: bool => Gauge "open",
            /// A name.
            name: String,
        }
    }

    #[test]
    fn what_is_named_is_in_the_table_and_added() {
        let (mut sum, other) =
            (Example::default(), Example { requests: 2, time: 1.5, open: true, name: "x".into() });
        sum.add_counts(&other);
        sum.add_counts(&other);
        let values: Vec<_> =
            Example::COUNTS.iter().map(|it| (it.name, it.unit, it.kind, (it.get)(&sum))).collect();
        let expected = [
            ("requests", "", CountKind::Counter, CountValue::Integer(4)),
            ("time", "seconds", CountKind::Gauge, CountValue::Float(3.0)),
            ("open", "", CountKind::Gauge, CountValue::Flag(true)),
        ];
        assert_eq!(values, expected);
        assert_eq!(sum.name, "", "a field without a name of a metric is not added");
        assert_eq!(Example::COUNTS[0].help.trim(), "Requests.");
        let integers = values.iter().map(|(.., value)| value.integer());
        assert_eq!(integers.collect::<Vec<_>>(), [4, 3, 1]);
    }
}
