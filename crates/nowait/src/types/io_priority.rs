//! Priorities at the block layer, which the scheduler of a device may heed.
//!
//! Invariant: a value is one that the kernel knows; its number 0 is none.

use crate::types::error::{Error, Operation};

/// Bits of a priority below its class.
const CLASS_SHIFT: u32 = 13;
/// The lowest priority of a class.
const LOWEST_LEVEL: u8 = 7;

/// A class of requests: each is served before those of the next one, as far as the device's scheduler has classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PriorityClass {
    /// Before all others; it needs `CAP_SYS_NICE` or `CAP_SYS_ADMIN`, else the request fails with `EPERM`.
    RealTime = 1,
    /// The class of processes without another one, which have level 4 unless their nice value says otherwise.
    BestEffort = 2,
    /// While the device has no other request.
    Idle = 3,
}

/// The priority of a request at the block layer (ioprio_set(2), C88): a hint for the scheduler of the device. bfq has
/// classes and levels, mq-deadline has classes, kyber and none have neither.
///
/// ```
/// use nowait::{Flags, IoPriority, PriorityClass};
///
/// let high = IoPriority::new(PriorityClass::BestEffort, 0)?;
/// assert_eq!(Flags::DSYNC.with_priority(high).priority(), Some(high));
/// assert!(IoPriority::new(PriorityClass::BestEffort, 8).is_err());
/// # Ok::<(), nowait::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoPriority {
    class: PriorityClass,
    level: u8,
}

impl IoPriority {
    /// [`PriorityClass::Idle`], which has no levels.
    pub const IDLE: Self = Self { class: PriorityClass::Idle, level: 0 };

    /// A priority of `class` with a `level` from 0, the highest, to 7.
    ///
    /// # Errors
    /// `EINVAL` for a greater level, and for one of [`PriorityClass::Idle`] other than 0.
    pub const fn new(class: PriorityClass, level: u8) -> Result<Self, Error> {
        let lowest = if matches!(class, PriorityClass::Idle) { 0 } else { LOWEST_LEVEL };
        match level <= lowest {
            true => Ok(Self { class, level }),
            false => Err(Error::new(libc::EINVAL, Operation::Validate)),
        }
    }

    /// The class.
    #[must_use]
    pub const fn class(self) -> PriorityClass {
        self.class
    }

    /// The level in its class, from 0, the highest, to 7.
    #[must_use]
    pub const fn level(self) -> u8 {
        self.level
    }

    /// The priority with this number of the kernel; `None` for 0.
    pub(crate) const fn from_number(number: u16) -> Option<Self> {
        let class = match number >> CLASS_SHIFT {
            1 => PriorityClass::RealTime,
            2 => PriorityClass::BestEffort,
            3 => PriorityClass::Idle,
            _ => return None,
        };
        Some(Self { class, level: number as u8 & LOWEST_LEVEL })
    }

    /// The kernel's number of it.
    pub(crate) const fn number(self) -> u16 {
        (self.class as u16) << CLASS_SHIFT | self.level as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_levels_of_each_class_are_numbers_of_the_kernel_and_others_are_refused() {
        let number = |class, level| {
            let priority = IoPriority::new(class, level)?;
            assert_eq!((priority.class(), priority.level()), (class, level));
            assert_eq!(IoPriority::from_number(priority.number()), Some(priority));
            Ok(priority.number())
        };
        let refused = Err(Error::new(libc::EINVAL, Operation::Validate));
        assert_eq!(number(PriorityClass::RealTime, 0), Ok(0x2000));
        assert_eq!(number(PriorityClass::RealTime, 7), Ok(0x2007));
        assert_eq!(number(PriorityClass::BestEffort, 0), Ok(0x4000));
        assert_eq!(number(PriorityClass::BestEffort, 7), Ok(0x4007));
        assert_eq!(number(PriorityClass::Idle, 0), Ok(0x6000));
        assert_eq!(IoPriority::new(PriorityClass::Idle, 0), Ok(IoPriority::IDLE));
        for (class, level) in [
            (PriorityClass::RealTime, 8),
            (PriorityClass::BestEffort, 8),
            (PriorityClass::BestEffort, 255),
            (PriorityClass::Idle, 1),
        ] {
            assert_eq!(number(class, level), refused, "{class:?} {level}");
        }
    }
}
