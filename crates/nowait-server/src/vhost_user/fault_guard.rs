//! Survives guest memory whose file was shrunk after it was mapped: an access of the CPU to it
//! raises SIGBUS, which would end the server.
//!
//! Invariant: the handler replaces a guarded range by zeros and marks its guard, and passes every
//! other fault on. It takes no lock and allocates nothing. A range is guarded only while it is
//! mapped.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use nowait::{Error, Operation};
use vm_memory::{FileOffset, MmapRegion};

use crate::locking::lock;

/// An entry of the list that the handler reads. Entries are used again, and never freed.
struct Entry {
    /// The first address, and the one behind the last; both 0 while the entry is free.
    begin: AtomicUsize,
    end: AtomicUsize,
    faulted: AtomicBool,
    next: *const Entry,
}

// SAFETY: `next` is written before the entry is published, and entries live for ever.
unsafe impl Send for Entry {}
// SAFETY: as above; the rest is atomic.
unsafe impl Sync for Entry {}

static LIST: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// Faults of all guarded ranges so far.
static FAULTS: AtomicUsize = AtomicUsize::new(0);
static REGISTER: Mutex<()> = Mutex::new(());
/// The action of SIGBUS before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Maps `len` bytes at `offset` of `file`, shared, and guards them. The guard is to be dropped before
/// the mapping.
///
/// # Errors
/// `EINVAL`: the file is too short, or cannot be mapped; the errno of sigaction(2).
pub(crate) fn map_shared(
    file: File,
    offset: u64,
    len: u64,
) -> Result<(FaultGuard, MmapRegion), Error> {
    let failed = Error::new(libc::EINVAL, Operation::SetUp);
    let end = offset.checked_add(len).ok_or(failed)?;
    if file.metadata().map_err(|_| failed)?.len() < end || len == 0 {
        return Err(failed);
    }
    let bytes = usize::try_from(len).map_err(|_| failed)?;
    let mapping = MmapRegion::from_file(FileOffset::new(file, offset), bytes);
    let mapping = mapping.map_err(|_| failed)?;
    Ok((FaultGuard::new(mapping.as_ptr(), bytes)?, mapping))
}

/// A copy of the file that a mapping is of.
///
/// # Errors
/// `EMFILE`, `ENFILE`; `InvalidData`: it is of none.
pub(crate) fn file_of(place: Option<&FileOffset>) -> io::Result<OwnedFd> {
    let file = place.ok_or(io::ErrorKind::InvalidData)?.file();
    Ok(file.try_clone()?.into())
}

/// A guarded range of mapped memory.
pub(crate) struct FaultGuard(&'static Entry);

impl FaultGuard {
    /// Guards `len` bytes at `begin`, a shared mapping. The guard must be dropped before they are
    /// unmapped.
    ///
    /// # Errors
    /// The errno of sigaction(2).
    fn new(begin: *const u8, len: usize) -> Result<Self, Error> {
        install_handler()?;
        let _registering = lock(&REGISTER);
        let entry = free_entry();
        entry.faulted.store(false, Ordering::Relaxed);
        entry.begin.store(begin as usize, Ordering::Relaxed);
        entry.end.store(begin as usize + len, Ordering::Release);
        Ok(Self(entry))
    }

    /// Whether memory of the range was missing.
    #[inline]
    pub(crate) fn has_faulted(&self) -> bool {
        self.0.faulted.load(Ordering::Relaxed)
    }

    /// Whether memory of any range was missing.
    #[inline]
    pub(crate) fn any_has_faulted() -> bool {
        FAULTS.load(Ordering::Acquire) > 0
    }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::Release);
        self.0.begin.store(0, Ordering::Release);
    }
}

/// A free entry of the list, a new one if there is none. Called under the lock.
fn free_entry() -> &'static Entry {
    let first = LIST.load(Ordering::Acquire);
    let mut at: *const Entry = first;
    // SAFETY: the list has null at its end, and entries that are never freed.
    while let Some(entry) = unsafe { at.as_ref() } {
        if entry.begin.load(Ordering::Acquire) == 0 {
            return entry;
        }
        at = entry.next;
    }
    let new = Box::leak(Box::new(Entry {
        begin: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        faulted: AtomicBool::new(false),
        next: first,
    }));
    LIST.store(new, Ordering::Release);
    new
}

/// Installs the handler, once in the life of the process.
fn install_handler() -> Result<(), Error> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    let failed = || Error::from_io(&std::io::Error::last_os_error(), Operation::SetUp);
    // SAFETY: a zeroed sigaction is a valid value, and sigaction(2) fills it.
    let mut previous = unsafe { std::mem::zeroed::<libc::sigaction>() };
    // SAFETY: the pointer is valid; no action is set.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) } != 0 {
        return Err(failed());
    }
    // The handler may run immediately, and reads the previous action.
    let _ = PREVIOUS.set(previous);
    // SAFETY: as above.
    let mut action = unsafe { std::mem::zeroed::<libc::sigaction>() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the handler has the signature of SA_SIGINFO and calls only what a handler may.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
        return Err(failed());
    }
    *installed = true;
    Ok(())
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t; SIGBUS has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut at: *const Entry = LIST.load(Ordering::Acquire);
    // SAFETY: as in `free_entry`.
    while let Some(entry) = unsafe { at.as_ref() } {
        let end = entry.end.load(Ordering::Acquire);
        let begin = entry.begin.load(Ordering::Acquire);
        if begin != 0 && (begin..end).contains(&address) && replace(begin, end) {
            entry.faulted.store(true, Ordering::Relaxed);
            FAULTS.fetch_add(1, Ordering::Release);
            return;
        }
        at = entry.next;
    }
    pass_on(signal, info, context);
}

/// Puts zeros in the place of the mapping `begin..end`. All of it: a part of huge pages could not
/// be replaced. Returns whether it could.
fn replace(begin: usize, end: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is a whole mapping of guest memory, which stays mapped and is accessed as
    // memory that changes at any time; mmap(2) may be called by a handler.
    let mapped = unsafe { libc::mmap(begin as *mut _, end - begin, prot, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

/// Does what would be done without this handler.
fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.get();
    let handler = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: the default action is set, and ends the process when the access is repeated.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    let has_info = previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0);
    if has_info {
        // SAFETY: it was installed as a handler with this signature.
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: as above.
        let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
