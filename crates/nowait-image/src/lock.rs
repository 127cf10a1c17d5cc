//! Locks on images: neither QEMU nor a second server opens an image that is in use.
//!
//! Invariant: of two open file descriptions that both got `Ok`, neither has an access that the
//! other refuses; of two that lock simultaneously both may be refused, never both admitted.
//!
//! The protocol is that of QEMU's file-posix driver, so that both sides see each other: every
//! permission has a number; a lock on byte 100 + number states that the permission is in use, one
//! on byte 200 + number that no other process may use it. All of these are read locks and never
//! exclude each other; a conflict is found afterwards, by a query whether a write lock on the
//! opposite byte would be possible.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;
use std::{fmt, io, thread};

/// The access that an image is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only: other readers are admitted, writers are not.
    Read,
    /// Reads and writes: no other process may write, or read in reliance on an unchanging image.
    Write,
}

/// The reason why an image was not locked. No lock is held then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockError {
    /// The image is in use in a way that excludes the requested access.
    Conflict {
        /// The other process's use, as a sentence without its full stop.
        what: &'static str,
    },
    /// The file system has no locks that belong to an open file description.
    Unsupported,
    /// Another error: the positive errno of fcntl(2), `EBADF` for a descriptor not open for
    /// reading.
    Os(i32),
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conflict { what } => f.write_str(what),
            Self::Unsupported => f.write_str("the file system does not support locks"),
            Self::Os(errno) => {
                let reason = io::Error::from_raw_os_error(*errno);
                write!(f, "locking failed: {reason}")
            }
        }
    }
}

impl std::error::Error for LockError {}

/// A permission by its number in QEMU's block layer (block-common.h, `BLK_PERM_*`).
#[derive(Clone, Copy)]
enum Permission {
    /// Reads see the whole image as of one moment.
    ConsistentRead = 0,
    /// The bytes change.
    Write = 1,
    /// The size changes.
    Resize = 3,
}

/// A byte of the image that stands for a statement; its content is never touched.
#[derive(Clone, Copy)]
struct LockByte(libc::off_t);

impl LockByte {
    /// "This process does this." QEMU: `RAW_LOCK_PERM_BASE`.
    const fn does(permission: Permission) -> Self {
        Self(100 + permission as libc::off_t)
    }

    /// "No other process may do this." QEMU: `RAW_LOCK_SHARED_BASE`.
    const fn refuses(permission: Permission) -> Self {
        Self(200 + permission as libc::off_t)
    }
}

/// The statements of both accesses; a writer makes those in [`WRITER_STATES`], too.
const ALL_STATE: [LockByte; 3] = [
    LockByte::does(Permission::ConsistentRead),
    LockByte::refuses(Permission::Write),
    LockByte::refuses(Permission::Resize),
];
const WRITER_STATES: [LockByte; 1] = [LockByte::does(Permission::Write)];

/// Statements of other processes that exclude either access, the most telling first.
const ALL_EXCLUDE: [(LockByte, &str); 3] = [
    (LockByte::does(Permission::Write), "another process has it open for writing"),
    (LockByte::does(Permission::Resize), "another process may change its size"),
    (
        LockByte::refuses(Permission::ConsistentRead),
        "another process has it open and lets nobody else read it",
    ),
];
const WRITER_EXCLUDES: [(LockByte, &str); 1] = [(
    LockByte::refuses(Permission::Write),
    "another process has it open for reading and lets nobody write to it",
)];
const FOREIGN_LOCK: &str = "another process has locked it for itself";

/// How often a conflict is looked at again, and how long the thread sleeps before it does.
const RETRIES: u32 = 10;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Locks the image behind `fd` for `access`. A conflict is reported after 0.2 s: a process that
/// another thread starts has the descriptors of its parent from fork(2) to execve(2), and with them
/// the locks of images that the parent closes meanwhile.
///
/// The lock belongs to the open file description: it ends when the last descriptor made from that
/// one open(2) is closed, also when the process dies. It is advisory: a process that does not query
/// it does not see it. Locking a description again changes nothing, unless it conflicts.
///
/// # Errors
/// [`LockError::Conflict`] when another description, of this process or any other, excludes
/// `access`; [`LockError::Unsupported`] when the file system has no such locks (`EINVAL`, `ENOLCK`,
/// `EOPNOTSUPP`), and the image may still be used with care; [`LockError::Os`] otherwise. In each
/// case all locks of this protocol on the description are released.
pub fn lock(fd: BorrowedFd<'_>, access: Access) -> Result<(), LockError> {
    for _ in 0..RETRIES {
        match lock_once(fd, access) {
            Err(LockError::Conflict { .. }) => thread::sleep(RETRY_INTERVAL),
            locked => return locked,
        }
    }
    lock_once(fd, access)
}

/// Makes a lock for [`Access::Write`] one for [`Access::Read`].
///
/// # Errors
/// [`LockError::Os`]: it is as it was.
pub fn lower(fd: BorrowedFd<'_>) -> Result<(), LockError> {
    for byte in WRITER_STATES {
        match fcntl(fd, libc::F_OFD_SETLK, byte, libc::F_UNLCK) {
            Ok(_) | Err(LockError::Unsupported) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn lock_once(fd: BorrowedFd<'_>, access: Access) -> Result<(), LockError> {
    let locked = state(fd, access).and_then(|()| find_conflict(fd, access));
    if locked.is_err() {
        // If the release fails, the first error is still the one to report; the caller's close
        // releases the rest.
        for &byte in ALL_STATE.iter().chain(&WRITER_STATES) {
            let _ = fcntl(fd, libc::F_OFD_SETLK, byte, libc::F_UNLCK);
        }
    }
    locked
}

/// Takes the read locks for what this description does and refuses.
fn state(fd: BorrowedFd<'_>, access: Access) -> Result<(), LockError> {
    let more: &[LockByte] = if access == Access::Write { &WRITER_STATES } else { &[] };
    for &byte in ALL_STATE.iter().chain(more) {
        fcntl(fd, libc::F_OFD_SETLK, byte, libc::F_RDLCK)?;
    }
    Ok(())
}

/// Queries whether another description made a statement that excludes `access`. Only sound after
/// [`state`]: of two descriptions that lock simultaneously, at least the later one sees the other.
fn find_conflict(fd: BorrowedFd<'_>, access: Access) -> Result<(), LockError> {
    let more: &[_] = if access == Access::Write { &WRITER_EXCLUDES } else { &[] };
    for &(byte, what) in ALL_EXCLUDE.iter().chain(more) {
        if fcntl(fd, libc::F_OFD_GETLK, byte, libc::F_WRLCK)? != libc::F_UNLCK {
            return Err(LockError::Conflict { what });
        }
    }
    Ok(())
}

/// One lock command on one byte. Returns the lock type that the kernel left in the record; after
/// `F_OFD_GETLK`, `F_UNLCK` means that there is no conflicting lock.
fn fcntl(
    fd: BorrowedFd<'_>,
    command: libc::c_int,
    byte: LockByte,
    kind: libc::c_int,
) -> Result<libc::c_int, LockError> {
    // SAFETY: `flock` is a plain C structure, for which all zeros is a valid value; on some
    // targets it has padding members that a literal could not name.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = kind as libc::c_short;
    record.l_whence = libc::SEEK_SET as libc::c_short;
    record.l_start = byte.0;
    record.l_len = 1;
    // SAFETY: `fd` is open for as long as it is borrowed, and the F_OFD_* commands read and write
    // one `flock`, which `record` is, during the call only.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut record) };
    if result != -1 {
        return Ok(libc::c_int::from(record.l_type));
    }
    let errno = io::Error::last_os_error().raw_os_error();
    Err(match errno.unwrap_or(libc::EIO) {
        libc::EAGAIN | libc::EACCES => LockError::Conflict { what: FOREIGN_LOCK },
        libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP => LockError::Unsupported,
        errno => LockError::Os(errno),
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::AsFd;
    use std::path::Path;
    use std::process::{Child, Command, Output, Stdio};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    const IMAGE_BYTES: u64 = 1 << 20;
    const OPEN_FOR_WRITING: Result<(), LockError> =
        Err(LockError::Conflict { what: "another process has it open for writing" });

    /// A child process has a copy of every descriptor until its exec(2), and with it the lock.
    /// Tests run one at a time, so that none starts a child while another relies on a close.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    struct Image {
        directory: tempfile::TempDir,
        _guard: MutexGuard<'static, ()>,
    }

    impl Image {
        fn new() -> Self {
            let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
            let image = Self { directory: tempfile::tempdir().unwrap(), _guard: guard };
            File::create(image.path()).unwrap().set_len(IMAGE_BYTES).unwrap();
            image
        }

        fn path(&self) -> std::path::PathBuf {
            self.directory.path().join("disk.img")
        }

        fn open(&self) -> File {
            OpenOptions::new().read(true).write(true).open(self.path()).unwrap()
        }
    }

    fn reader_is_in_the_way(result: Result<(), LockError>) -> bool {
        matches!(result, Err(LockError::Conflict { what }) if what.contains("open for reading"))
    }

    /// A process that was just started closes its copy of a descriptor like this.
    #[test]
    fn a_lock_that_is_released_soon_is_waited_for() {
        let image = Image::new();
        let is_waited_for = || {
            let holder = image.open();
            assert_eq!(lock(holder.as_fd(), Access::Write), Ok(()));
            let release = thread::spawn(move || {
                thread::sleep(RETRY_INTERVAL / 2);
                drop(holder);
            });
            let locked = lock(image.open().as_fd(), Access::Write);
            release.join().unwrap();
            locked == Ok(())
        };
        // A machine that is busy may release it too late.
        assert!((0..20).any(|_| is_waited_for()));
    }

    #[test]
    fn many_readers_coexist() {
        let image = Image::new();
        let (a, b, c) = (image.open(), image.open(), image.open());
        for file in [&a, &b, &c] {
            assert_eq!(lock(file.as_fd(), Access::Read), Ok(()));
        }
    }

    #[test]
    fn a_reader_is_refused_beside_a_writer() {
        let image = Image::new();
        let (writer, reader) = (image.open(), image.open());
        assert_eq!(lock(writer.as_fd(), Access::Write), Ok(()));
        assert_eq!(lock(reader.as_fd(), Access::Read), OPEN_FOR_WRITING);
    }

    #[test]
    fn a_writer_is_refused_beside_a_reader() {
        let image = Image::new();
        let (reader, writer) = (image.open(), image.open());
        assert_eq!(lock(reader.as_fd(), Access::Read), Ok(()));
        let refused = lock(writer.as_fd(), Access::Write);
        assert!(reader_is_in_the_way(refused), "{refused:?}");
    }

    #[test]
    fn a_second_writer_is_refused() {
        let image = Image::new();
        let (first, second) = (image.open(), image.open());
        assert_eq!(lock(first.as_fd(), Access::Write), Ok(()));
        assert_eq!(lock(second.as_fd(), Access::Write), OPEN_FOR_WRITING);
    }

    #[test]
    fn a_refused_description_leaves_no_lock_behind() {
        let image = Image::new();
        let (writer, refused, next) = (image.open(), image.open(), image.open());
        assert_eq!(lock(writer.as_fd(), Access::Write), Ok(()));
        assert_eq!(lock(refused.as_fd(), Access::Write), OPEN_FOR_WRITING);
        drop(writer);
        assert_eq!(lock(next.as_fd(), Access::Write), Ok(()));
    }

    #[test]
    fn a_lowered_lock_admits_readers_and_no_writer() {
        let image = Image::new();
        let (writer, reader, other) = (image.open(), image.open(), image.open());
        assert_eq!(lock(writer.as_fd(), Access::Write), Ok(()));
        assert_eq!(lower(writer.as_fd()), Ok(()));
        assert_eq!(lock(reader.as_fd(), Access::Read), Ok(()));
        drop(reader);
        let refused = lock(other.as_fd(), Access::Write);
        assert!(reader_is_in_the_way(refused), "{refused:?}");
    }

    #[test]
    fn the_lock_goes_with_the_last_descriptor() {
        let image = Image::new();
        let (writer, next) = (image.open(), image.open());
        assert_eq!(lock(writer.as_fd(), Access::Write), Ok(()));
        let duplicate = writer.try_clone().unwrap();
        drop(writer);
        assert_eq!(lock(next.as_fd(), Access::Read), OPEN_FOR_WRITING);
        drop(duplicate);
        assert_eq!(lock(next.as_fd(), Access::Read), Ok(()));
    }

    #[test]
    fn a_write_lock_of_another_program_is_a_conflict() {
        let image = Image::new();
        let (other, ours) = (image.open(), image.open());
        let byte = LockByte::does(Permission::ConsistentRead);
        assert!(fcntl(other.as_fd(), libc::F_OFD_SETLK, byte, libc::F_WRLCK).is_ok());
        let refused = lock(ours.as_fd(), Access::Read);
        assert_eq!(refused, Err(LockError::Conflict { what: FOREIGN_LOCK }));
    }

    #[test]
    fn a_descriptor_that_cannot_read_is_ebadf() {
        let image = Image::new();
        let file = OpenOptions::new().write(true).open(image.path()).unwrap();
        assert_eq!(lock(file.as_fd(), Access::Write), Err(LockError::Os(libc::EBADF)));
    }

    fn run(tool: &str, arguments: &[&str], image: &Path) -> Output {
        Command::new(tool).args(arguments).arg(image).output().unwrap()
    }

    fn qemu_img_convert(image: &Path) -> Output {
        let copy = image.with_extension("copy");
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "raw"]).args([image, &copy]).output().unwrap()
    }

    fn assert_refused_by_lock(output: &Output) {
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("lock"), "{output:?}");
    }

    /// A write by qemu-io; QEMU lets tools share raw images with each other, except for writes.
    const QEMU_WRITES: [&str; 4] = ["-f", "raw", "-c", "write 0 4k"];

    /// An image in QEMU's own format, which QEMU does not even let others read beside a writer.
    fn qcow2() -> Image {
        let image = Image::new();
        let size = IMAGE_BYTES.to_string();
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2"]).arg(image.path()).arg(size);
        assert!(command.status().unwrap().success());
        image
    }

    /// A qemu-io process with the image open, killed on drop.
    struct QemuIo(Child);

    impl QemuIo {
        fn holding(image: &Path, options: &[&str]) -> Self {
            let mut child = Command::new("qemu-io")
                .args(options)
                .arg(image)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            // qemu-io takes commands once it has the image open: the answer to the first proves
            // that.
            child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
            let mut answer = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut answer).unwrap();
            assert!(answer.contains("1 MiB"), "{answer:?}");
            Self(child)
        }
    }

    impl Drop for QemuIo {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn qemu_neither_copies_nor_writes_an_image_that_we_write_to() {
        nowait_testkit::needs!(
            nowait_testkit::require_tool("qemu-img") && nowait_testkit::require_tool("qemu-io")
        );
        let image = Image::new();
        let file = image.open();
        assert_eq!(lock(file.as_fd(), Access::Write), Ok(()));
        assert_refused_by_lock(&qemu_img_convert(&image.path()));
        assert_refused_by_lock(&run("qemu-io", &QEMU_WRITES, &image.path()));
        drop(file);
        assert!(qemu_img_convert(&image.path()).status.success());
        assert!(run("qemu-io", &QEMU_WRITES, &image.path()).status.success());
    }

    #[test]
    fn qemu_does_not_even_read_the_header_of_a_qcow2_image_that_we_write_to() {
        nowait_testkit::needs!(nowait_testkit::require_tool("qemu-img"));
        let image = qcow2();
        let file = image.open();
        assert!(run("qemu-img", &["info"], &image.path()).status.success());
        assert_eq!(lock(file.as_fd(), Access::Write), Ok(()));
        assert_refused_by_lock(&run("qemu-img", &["info"], &image.path()));
    }

    #[test]
    fn qemu_copies_but_does_not_write_an_image_that_we_read() {
        nowait_testkit::needs!(
            nowait_testkit::require_tool("qemu-img") && nowait_testkit::require_tool("qemu-io")
        );
        let image = Image::new();
        let file = image.open();
        assert_eq!(lock(file.as_fd(), Access::Read), Ok(()));
        assert!(qemu_img_convert(&image.path()).status.success());
        assert_refused_by_lock(&run("qemu-io", &QEMU_WRITES, &image.path()));
    }

    #[test]
    fn we_open_no_image_that_qemu_writes_to() {
        nowait_testkit::needs!(nowait_testkit::require_tool("qemu-io"));
        let image = Image::new();
        let file = image.open();
        let qemu = QemuIo::holding(&image.path(), &["-f", "raw"]);
        assert_eq!(lock(file.as_fd(), Access::Write), OPEN_FOR_WRITING);
        assert_eq!(lock(file.as_fd(), Access::Read), OPEN_FOR_WRITING);
        drop(qemu);
        assert_eq!(lock(file.as_fd(), Access::Write), Ok(()));
    }

    #[test]
    fn we_read_but_do_not_write_an_image_that_qemu_reads() {
        nowait_testkit::needs!(
            nowait_testkit::require_tool("qemu-img") && nowait_testkit::require_tool("qemu-io")
        );
        let image = qcow2();
        let (reader, writer) = (image.open(), image.open());
        let _qemu = QemuIo::holding(&image.path(), &["-r", "-f", "qcow2"]);
        assert_eq!(lock(reader.as_fd(), Access::Read), Ok(()));
        drop(reader);
        let refused = lock(writer.as_fd(), Access::Write);
        assert!(reader_is_in_the_way(refused), "{refused:?}");
    }
}
