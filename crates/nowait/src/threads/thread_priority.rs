//! The priority at the block layer of what a thread does (ioprio_set(2)).
//!
//! Invariant: a thread has its own priority again when the value is dropped.
#![allow(unsafe_code)]

use std::io;

/// The call is about the calling thread (`IOPRIO_WHO_PROCESS` with number 0).
const OF_THREAD: (libc::c_int, libc::c_int) = (1, 0);

/// Another priority of the calling thread, while this lives.
#[must_use]
pub(crate) struct ThreadPriority {
    /// The number of its own; `None` if that was not changed.
    before: Option<u16>,
}

impl ThreadPriority {
    /// Gives the thread the priority with this number; 0 changes nothing, without a system call.
    ///
    /// # Errors
    /// The errno of ioprio_set(2): `EPERM` for a class that the process may not use.
    #[inline]
    pub(crate) fn set(number: u16) -> Result<Self, i32> {
        if number == 0 { Ok(Self { before: None }) } else { Self::change(number) }
    }

    #[cold]
    fn change(number: u16) -> Result<Self, i32> {
        let before = get()?;
        set(number)?;
        Ok(Self { before: Some(before) })
    }
}

impl Drop for ThreadPriority {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // It had this one before.
            let _ = set(before);
        }
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

fn get() -> Result<u16, i32> {
    let (which, who) = OF_THREAD;
    // SAFETY: the call has no memory.
    let number = unsafe { libc::syscall(libc::SYS_ioprio_get, which, who) };
    u16::try_from(number).map_err(|_| errno())
}

fn set(number: u16) -> Result<(), i32> {
    let (which, who) = OF_THREAD;
    // SAFETY: as above.
    let done =
        unsafe { libc::syscall(libc::SYS_ioprio_set, which, who, libc::c_int::from(number)) };
    if done == 0 { Ok(()) } else { Err(errno()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_its_own_priority_again_and_one_that_is_not_known_is_refused() {
        let own = get().unwrap();
        for number in [0x4000, 0x4007, 0x6000] {
            let priority = ThreadPriority::set(number).unwrap();
            assert_eq!(get(), Ok(number));
            drop(priority);
            // A thread without a priority is said to have that of its nice value.
            assert_eq!(get(), Ok(own));
        }
        drop(ThreadPriority::set(0).unwrap());
        assert_eq!(ThreadPriority::set(0x8000).map(drop), Err(libc::EINVAL));
        assert_eq!(get(), Ok(own));
    }
}
