//! Whether this process was forked from the one in which the library was first used.
//!
//! Invariant: the mark is set in the process that made it and clear in every child, in which the kernel
//! wipes its page (madvise(2), `MADV_WIPEONFORK`, Linux 4.14).
#![allow(unsafe_code)]

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The mark; `None` where the kernel wipes no page. Then no child is told from its parent.
static MARK: LazyLock<Option<&'static AtomicBool>> = LazyLock::new(make);

fn make() -> Option<&'static AtomicBool> {
    let page = rustix::param::page_size();
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the mapping is new, private, one page of zeros, and never unmapped.
    let mark = unsafe {
        let at = libc::mmap(std::ptr::null_mut(), page, protection, flags, -1, 0);
        if at == libc::MAP_FAILED || libc::madvise(at, page, libc::MADV_WIPEONFORK) != 0 {
            return None;
        }
        &*at.cast::<AtomicBool>()
    };
    mark.store(true, Ordering::Relaxed);
    Some(mark)
}

/// Makes the mark, unless it is there. A child that is forked later has none.
pub(crate) fn set() {
    LazyLock::force(&MARK);
}

/// Whether this process is a child of the one that has called [`set`] first.
#[inline]
pub(crate) fn is_child() -> bool {
    MARK.is_some_and(|mark| !mark.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_child_has_no_mark() {
        set();
        assert!(!is_child());
        if MARK.is_none() {
            nowait_testkit::skip("no MADV_WIPEONFORK");
            return;
        }
        // SAFETY: the child only reads memory and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the call has no conditions.
            unsafe { libc::_exit(i32::from(is_child())) }
        }
        let mut status = 0;
        // SAFETY: the call writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 1));
        assert!(!is_child());
    }
}
