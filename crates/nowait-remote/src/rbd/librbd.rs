//! The functions of librbd and librados that are used here (librbd.h, librados.h), and an open image.
//!
//! Invariant: the memory of a transfer, which is the engine's, is valid until the library has called back. An image is closed when no
//! transfer is in flight.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use libloading::Library;
use nowait::{AsyncTransfers, ByteRange, IoSegment, PendingTransfer};

use crate::rbd::rbd_location::RbdLocation;
use crate::rbd::request_errno::request_errno;

/// The file of the library: its name is that of its interface's version.
const LIBRARY: &str = "librbd.so.1";
/// RBD_LOCK_MODE_EXCLUSIVE.
const LOCK_EXCLUSIVE: c_int = 0;
/// RBD_WRITE_ZEROES_FLAG_THICK_PROVISION: the zeros are stored.
const THICK_PROVISION: c_int = 1;

/// The result of an iteration that is not to go on.
const CANCELLED: c_int = -libc::ECANCELED;

/// The option with the number of threads on which librbd completes requests, and its default.
///
/// One thread instead takes many answers each time it wakes up; two wake each other, for a third more
/// processor time a read.
const THREADS: &str = "librados_thread_count";
const DEFAULT_THREADS: &str = "2";

/// An object of the library.
type Handle = *mut c_void;
type Open = unsafe extern "C" fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
type Callback = unsafe extern "C" fn(Handle, *mut c_void);
type ExtentCallback = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The library, and its functions.
        struct Functions {
            _library: Library,
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn load() -> Result<Self, String> {
                let failed = |error: libloading::Error| format!(
                    "Ceph's library cannot be loaded: {error} (install it: package librbd1, or librbd2 of Fedora)"
                );
                // SAFETY: the library's initialisers are those of Ceph, which any thread may run.
                let library = unsafe { Library::new(LIBRARY) }.map_err(failed)?;
                $(
                    // SAFETY: the type is that of the function's declaration in the library's header,
                    // whose version is in the file's name.
                    let $name = *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(failed)?;
                )*
                Ok(Self { _library: library, $($name,)* })
            }
        }
    };
}

functions! {
    rados_create(*mut Handle, *const c_char) -> c_int;
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados_conf_parse_env(Handle, *const c_char) -> c_int;
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados_connect(Handle) -> c_int;
    rados_shutdown(Handle) -> ();
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_set_namespace(Handle, *const c_char) -> ();
    rados_set_pool_full_try(Handle) -> ();
    rados_ioctx_destroy(Handle) -> ();
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close(Handle) -> c_int;
    rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd_get_size(Handle, *mut u64) -> c_int;
    rbd_flush(Handle) -> c_int;
    rbd_read(Handle, u64, usize, *mut c_char) -> isize;
    rbd_write(Handle, u64, usize, *const c_char) -> isize;
    rbd_write_zeroes(Handle, u64, usize, c_int, c_int) -> isize;
    rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, ExtentCallback, *mut c_void) -> c_int;
    rbd_aio_create_completion(*mut c_void, Callback, *mut Handle) -> c_int;
    rbd_aio_get_return_value(Handle) -> isize;
    rbd_aio_release(Handle) -> ();
    rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_flush(Handle, Handle) -> c_int;
}

/// Loads the library.
///
/// # Errors
/// One line: why it cannot be loaded, and what to install.
pub(super) fn load() -> Result<(), String> {
    functions().map(drop)
}

fn functions() -> Result<&'static Functions, String> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    FUNCTIONS.get_or_init(Functions::load).as_ref().map_err(Clone::clone)
}

/// The result of a call of the library: a count, or a positive errno.
fn counted(result: isize) -> Result<usize, i32> {
    usize::try_from(result).map_err(|_| i32::try_from(-result).unwrap_or(libc::EIO))
}

fn done(result: c_int) -> Result<(), i32> {
    counted(result as isize).map(drop)
}

fn c_string(text: &str) -> CString {
    // A location has no such byte.
    CString::new(text).unwrap_or_default()
}

/// A connection to a cluster, closed when it is dropped.
struct Cluster {
    functions: &'static Functions,
    handle: Handle,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and all that was made from it is closed.
        unsafe { (self.functions.rados_shutdown)(self.handle) };
    }
}

/// A pool of a cluster, closed when it is dropped, before the cluster.
struct Pool {
    handle: Handle,
    cluster: Cluster,
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: as for the cluster.
        unsafe { (self.cluster.functions.rados_ioctx_destroy)(self.handle) };
    }
}

/// The images of this process that are open.
static OPEN: Count = Count::new();

/// Waits until no image of this process is open, at most `timeout`. The cluster counts one that a process
/// left open as used for half a minute.
pub(super) fn wait_until_closed(timeout: Duration) {
    drop(OPEN.none.wait_timeout_while(OPEN.lock(), timeout, |count| *count > 0));
}

/// An open image.
pub(super) struct RbdImage {
    functions: &'static Functions,
    handle: Handle,
    in_flight: Arc<InFlight>,
    /// Closed after the image.
    _pool: Pool,
}

// SAFETY: librbd and librados lock what their handles share; they may be used on any thread.
unsafe impl Send for RbdImage {}
// SAFETY: as above.
unsafe impl Sync for RbdImage {}

impl RbdImage {
    /// Opens the image at `location`; requests that the cluster does not answer fail after `timeout`.
    ///
    /// # Errors
    /// One line: the library is missing, the cluster cannot be reached or refuses the user, there is no
    /// such image, or another client holds its lock.
    pub(super) fn open(
        location: &RbdLocation,
        read_only: bool,
        timeout: Duration,
    ) -> Result<Self, String> {
        let functions = functions()?;
        let pool = open_pool(functions, location, timeout)?;
        let (name, mut handle) = (c_string(&location.image), ptr::null_mut());
        let snapshot = location.snapshot.as_deref().map(c_string);
        let snapshot_name = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let mut open = |open: Open| {
            // SAFETY: the pool is open, the names are strings of C, and `handle` is written to.
            done(unsafe { open(pool.handle, name.as_ptr(), &mut handle, snapshot_name) })
        };
        // With a watch, if this user may, it cannot be removed, and another size is seen.
        let opened = match open(functions.rbd_open) {
            Err(libc::EPERM | libc::EACCES | libc::EROFS) if read_only => {
                open(functions.rbd_open_read_only)
            }
            opened => opened,
        };
        opened.map_err(|errno| match (errno, &location.snapshot) {
            (libc::ENOENT, Some(_)) => "there is no such image, or no such snapshot of it".into(),
            (libc::ENOENT, None) => format!("there is no such image in pool {}", location.pool),
            (errno, _) => message("it cannot be opened", errno),
        })?;
        let image = Self { functions, handle, in_flight: Arc::default(), _pool: pool };
        OPEN.add();
        if !read_only {
            image.lock()?;
        }
        Ok(image)
    }

    /// Takes the image's lock, if it has one, and keeps it when others ask for it.
    fn lock(&self) -> Result<(), String> {
        // SAFETY: the image is open.
        let locked = unsafe { (self.functions.rbd_lock_acquire)(self.handle, LOCK_EXCLUSIVE) };
        match done(locked) {
            // Without the feature exclusive-lock there is none.
            Ok(()) | Err(libc::EINVAL) => Ok(()),
            Err(libc::EBUSY | libc::EROFS | libc::EAGAIN) => {
                Err("another client holds its lock ('rbd lock list' says which)".into())
            }
            Err(errno) => Err(message("its lock", errno)),
        }
    }

    /// Size in bytes, as of the last change that the cluster has told.
    pub(super) fn size(&self) -> Result<u64, i32> {
        let mut size = 0;
        // SAFETY: the image is open, and `size` is written to.
        let got = unsafe { (self.functions.rbd_get_size)(self.handle, &mut size) };
        self.in_flight.result(got as isize)?;
        Ok(size)
    }

    /// Fills `bytes` from `pos` on. Returns how many there are before the end.
    pub(super) fn read(&self, bytes: &mut [u8], pos: u64) -> Result<usize, i32> {
        let memory = bytes.as_mut_ptr().cast();
        // SAFETY: the image is open, and the memory is borrowed for the call.
        let read = unsafe { (self.functions.rbd_read)(self.handle, pos, bytes.len(), memory) };
        self.in_flight.result(read)
    }

    /// Writes `bytes` at `pos`.
    pub(super) fn write(&self, bytes: &[u8], pos: u64) -> Result<usize, i32> {
        let memory = bytes.as_ptr().cast();
        // SAFETY: as above; the library only reads the memory.
        let written = unsafe { (self.functions.rbd_write)(self.handle, pos, bytes.len(), memory) };
        self.in_flight.result(written)
    }

    /// Makes the completed writes durable.
    pub(super) fn flush(&self) -> Result<(), i32> {
        // SAFETY: the image is open.
        let flushed = unsafe { (self.functions.rbd_flush)(self.handle) };
        self.in_flight.result(flushed as isize).map(drop)
    }

    /// Makes `range` read as zeros, which are stored if they are to `keep` space.
    pub(super) fn zero(&self, range: ByteRange, keep: bool) -> Result<(), i32> {
        let flags = if keep { THICK_PROVISION } else { 0 };
        let ByteRange { pos, len } = range;
        // SAFETY: the image is open.
        let zeroed =
            unsafe { (self.functions.rbd_write_zeroes)(self.handle, pos, len as usize, flags, 0) };
        self.in_flight.result(zeroed).map(drop)
    }

    /// Calls `each` with the parts of `range` that have data, in their order, until it returns false.
    pub(super) fn data_in(
        &self,
        range: ByteRange,
        mut each: &mut dyn FnMut(ByteRange) -> bool,
    ) -> Result<(), i32> {
        let ByteRange { pos, len } = range;
        let argument = ptr::from_mut(&mut each).cast();
        // SAFETY: the image is open; `argument` is what `on_extent` expects, borrowed for the call.
        let iterated = unsafe {
            (self.functions.rbd_diff_iterate2)(
                self.handle,
                ptr::null(),
                pos,
                len,
                1,
                1,
                on_extent,
                argument,
            )
        };
        match iterated {
            // By `on_extent`.
            CANCELLED => Ok(()),
            iterated => self.in_flight.result(iterated as isize).map(drop),
        }
    }

    /// Has the library begin what the flight is at.
    fn begin_flight(&self, flight: Box<Flight>) {
        flight.begin(self.functions, self.handle);
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        self.in_flight.transfers.wait_for_none();
        // SAFETY: the image is open, and nothing is in flight.
        let closed = done(unsafe { (self.functions.rbd_close)(self.handle) });
        if let Err(errno) = closed {
            tracing::warn!("{}", message("an image of a Ceph cluster was not closed well", errno));
        }
        OPEN.remove();
    }
}

impl AsyncTransfers for RbdImage {
    fn begin(&self, transfers: &mut Vec<PendingTransfer>) {
        for transfer in transfers.drain(..) {
            self.in_flight.transfers.add();
            let mut segments = Vec::with_capacity(1);
            transfer.segments(&mut segments);
            let step = if transfer.is_write() { Step::Write } else { Step::Read };
            let in_flight = self.in_flight.clone();
            self.begin_flight(Box::new(Flight {
                transfer: Some(transfer),
                segments,
                step,
                functions: self.functions,
                image: self.handle,
                in_flight,
            }));
        }
    }
}

fn message(what: &str, errno: i32) -> String {
    format!("{what}: {}", nowait_image::os_message(&std::io::Error::from_raw_os_error(errno)))
}

fn open_pool(
    functions: &'static Functions,
    location: &RbdLocation,
    timeout: Duration,
) -> Result<Pool, String> {
    let RbdLocation { pool, namespace, user, conf, .. } = location;
    let user = user.as_deref().map(c_string);
    let user = user.as_ref().map_or(ptr::null(), |user| user.as_ptr());
    let mut handle = ptr::null_mut();
    // SAFETY: `handle` is written to; the name is a string of C, or null.
    let created = unsafe { (functions.rados_create)(&mut handle, user) };
    done(created).map_err(|errno| message("no connection to a cluster can be made", errno))?;
    let cluster = Cluster { functions, handle };
    let conf_path = conf.as_deref().map(c_string);
    let path = conf_path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
    // SAFETY: the handle is open; the path is a string of C, or null.
    let read = unsafe { (functions.rados_conf_read_file)(handle, path) };
    done(read).map_err(|errno| match conf {
        Some(conf) if errno == libc::EINVAL => format!("{conf} is not in the form of a ceph.conf"),
        Some(conf) => message(conf, errno),
        None => message("no ceph.conf can be read (name one: ':conf=FILE')", errno),
    })?;
    // SAFETY: as above; CEPH_ARGS is read without a name.
    let parsed = unsafe { (functions.rados_conf_parse_env)(handle, ptr::null()) };
    done(parsed).map_err(|errno| message("CEPH_ARGS", errno))?;
    let seconds = timeout.as_secs().max(1).to_string();
    let mut settings = vec![
        ("client_mount_timeout", &*seconds),
        ("rados_mon_op_timeout", &seconds),
        ("rados_osd_op_timeout", &seconds),
        // A write that fails is an error of its own then, not of a later flush.
        ("rbd_cache", "false"),
    ];
    if option(functions, handle, THREADS).as_deref() == Some(DEFAULT_THREADS) {
        settings.push((THREADS, "1"));
    }
    for (name, value) in settings {
        let (option, value) = (c_string(name), c_string(value));
        // SAFETY: as above.
        let set = unsafe { (functions.rados_conf_set)(handle, option.as_ptr(), value.as_ptr()) };
        done(set).map_err(|errno| message(&format!("the option {name} cannot be set"), errno))?;
    }
    // SAFETY: as above.
    let connected = unsafe { (functions.rados_connect)(handle) };
    done(connected).map_err(|errno| match errno {
        libc::EACCES | libc::EPERM => "the cluster refuses this user (':id=USER')".into(),
        errno => message("the cluster cannot be reached", errno),
    })?;
    let (name, mut handle) = (c_string(pool), ptr::null_mut());
    // SAFETY: as above; `handle` is written to.
    let opened =
        unsafe { (functions.rados_ioctx_create)(cluster.handle, name.as_ptr(), &mut handle) };
    done(opened).map_err(|errno| match errno {
        libc::ENOENT => format!("the cluster has no pool {pool}"),
        errno => message(pool, errno),
    })?;
    let opened = Pool { handle, cluster };
    // In a full pool a write that needs space fails with ENOSPC then, and others are made. Without this all
    // of them would wait, discards too.
    // SAFETY: as above.
    unsafe { (functions.rados_set_pool_full_try)(handle) };
    if !namespace.is_empty() {
        let namespace = c_string(namespace);
        // SAFETY: as above.
        unsafe { (functions.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
    }
    Ok(opened)
}

/// The value of an option of the cluster whose `handle` is open, if it is short.
fn option(functions: &Functions, handle: Handle, name: &str) -> Option<String> {
    let (name, mut value) = (c_string(name), [0u8; 16]);
    // SAFETY: the handle is open, the name is a string of C, and `value` is written to as far as it goes.
    let got = unsafe {
        (functions.rados_conf_get)(handle, name.as_ptr(), value.as_mut_ptr().cast(), value.len())
    };
    done(got).ok()?;
    Some(CStr::from_bytes_until_nul(&value).ok()?.to_str().ok()?.to_owned())
}

/// Counts what is in use.
#[derive(Default)]
struct Count {
    count: Mutex<usize>,
    none: Condvar,
}

impl Count {
    const fn new() -> Self {
        Self { count: Mutex::new(0), none: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) {
        *self.lock() += 1;
    }

    fn remove(&self) {
        let mut count = self.lock();
        *count -= 1;
        if *count == 0 {
            self.none.notify_all();
        }
    }

    fn wait_for_none(&self) {
        let waited = self.none.wait_while(self.lock(), |count| *count > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// The transfers in flight.
#[derive(Default)]
struct InFlight {
    transfers: Count,
    /// The cluster has refused this client for good, which was logged.
    shut_out: AtomicBool,
}

impl InFlight {
    /// The result of a request: a count, or the errno that it fails with.
    fn result(&self, result: isize) -> Result<usize, i32> {
        counted(result).map_err(|errno| self.failure(errno))
    }

    /// The errno of a request for one of the library. Logs the first failure that is that of all later
    /// requests, too.
    #[cold]
    fn failure(&self, errno: i32) -> i32 {
        if errno == libc::ESHUTDOWN && !self.shut_out.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "the cluster takes nothing more from this server: another client has broken the lock of its image \
                 (start it again when that client is done)"
            );
        }
        request_errno(errno)
    }
}

/// The operation of the library for a transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Read,
    Write,
    /// The write has completed, and is made durable.
    Flush,
}

/// A transfer that the library makes.
struct Flight {
    /// Taken at its end: until then the memory of the segments is valid.
    transfer: Option<PendingTransfer>,
    /// The library keeps the list's address, too.
    segments: Vec<IoSegment>,
    step: Step,
    functions: &'static Functions,
    image: Handle,
    in_flight: Arc<InFlight>,
}

impl Flight {
    /// Has the library begin the step.
    fn begin(self: Box<Self>, functions: &'static Functions, image: Handle) {
        let (step, count) = (self.step, self.segments.len() as c_int);
        let pos = self.transfer.as_ref().map_or(0, |transfer| transfer.range().pos);
        let flight = Box::into_raw(self);
        let mut completion = ptr::null_mut();
        // SAFETY: `completion` is written to; `on_end` gets the flight back once.
        let created = unsafe {
            (functions.rbd_aio_create_completion)(flight.cast(), on_end, &mut completion)
        };
        if let Err(errno) = done(created) {
            // SAFETY: the library has not taken it.
            return unsafe { Box::from_raw(flight) }.fail(errno);
        }
        // SAFETY: the flight is not accessed otherwise before `on_end`. A segment is laid out as an iovec.
        let segments = unsafe { (*flight).segments.as_ptr() }.cast();
        // SAFETY: the image is open as long as a transfer is in flight. The segments and their memory are valid
        // until the transfer ends, which is after `on_end`: then the library has filled the memory of a read, and
        // does not use that of a write any more.
        let begun = unsafe {
            match step {
                Step::Read => (functions.rbd_aio_readv)(image, segments, count, pos, completion),
                Step::Write => (functions.rbd_aio_writev)(image, segments, count, pos, completion),
                Step::Flush => (functions.rbd_aio_flush)(image, completion),
            }
        };
        if let Err(errno) = done(begun) {
            // SAFETY: a step that was not begun has no callback.
            let mut flight = unsafe {
                (functions.rbd_aio_release)(completion);
                Box::from_raw(flight)
            };
            flight.fail(errno);
        }
    }

    fn fail(&mut self, errno: i32) {
        if let Some(transfer) = self.transfer.take() {
            transfer.fail(self.in_flight.failure(errno));
        }
    }

    /// The step has completed.
    fn end(mut self: Box<Self>, result: Result<usize, i32>) {
        let transfer = match (self.transfer.take(), &result) {
            (Some(transfer), Err(errno)) => return transfer.fail(*errno),
            (Some(transfer), Ok(_)) => transfer,
            (None, _) => return,
        };
        match self.step {
            Step::Read => transfer.complete_filled(result.unwrap_or_default() as u64),
            Step::Write if transfer.is_durable() => {
                let (functions, image) = (self.functions, self.image);
                (self.transfer, self.step) = (Some(transfer), Step::Flush);
                self.begin(functions, image);
            }
            Step::Write | Step::Flush => transfer.complete_write(),
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.in_flight.transfers.remove();
    }
}

/// Called by the library on a thread of its own when a step has completed.
unsafe extern "C" fn on_end(completion: Handle, flight: *mut c_void) {
    // SAFETY: it is the flight of `Flight::begin`, which the library gives back once.
    let flight = unsafe { Box::from_raw(flight.cast::<Flight>()) };
    let functions = flight.functions;
    // SAFETY: the completion is the library's, and released here only.
    let result = unsafe {
        let result = (functions.rbd_aio_get_return_value)(completion);
        (functions.rbd_aio_release)(completion);
        result
    };
    let result = flight.in_flight.result(result);
    flight.end(result);
}

/// Called by the library with each part of the image that has data, or had.
unsafe extern "C" fn on_extent(pos: u64, len: usize, exists: c_int, each: *mut c_void) -> c_int {
    // SAFETY: it is the function of `RbdImage::data_in`.
    let each = unsafe { &mut *each.cast::<&mut dyn FnMut(ByteRange) -> bool>() };
    match exists != 0 && !each(ByteRange::new(pos, len as u64)) {
        true => CANCELLED,
        false => 0,
    }
}
