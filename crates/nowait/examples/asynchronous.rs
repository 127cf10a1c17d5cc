//! Compares two images with tasks on a runtime: the async API, `nowait::AsyncFile`.
//!
//! `asynchronous ONE OTHER`: each task takes the next part that no task has taken, and reads it
//! from both images simultaneously. Exits with 1 if the images differ, as cmp(1) does.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nowait::{AsyncFile, Error, IoBuffer, OpenOptions};

/// Bytes of a part, and the number of tasks.
const STEP_BYTES: u64 = 256 << 10;
const TASKS: usize = 16;
/// `first` as long as no difference was found.
const NONE: u64 = u64::MAX;

struct Pair {
    one: AsyncFile,
    other: AsyncFile,
    /// First byte of the next part.
    next: AtomicU64,
    /// The first differing byte found so far.
    first: AtomicU64,
}

/// Compares parts until no part is left before the first difference.
async fn compare(pair: Arc<Pair>) -> Result<(), Error> {
    let mut left = IoBuffer::zeroed(STEP_BYTES as usize)?;
    let mut right = IoBuffer::zeroed(STEP_BYTES as usize)?;
    loop {
        let pos = pair.next.fetch_add(STEP_BYTES, Ordering::Relaxed);
        if pos >= pair.one.size().min(pair.first.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let both = tokio::join!(pair.one.read_at(left, pos), pair.other.read_at(right, pos));
        let (read_left, read_right);
        ((read_left, left), (read_right, right)) = both;
        let (left, right) = (&left[..read_left?], &right[..read_right?]);
        let equal = left.iter().zip(right).take_while(|(a, b)| a == b).count();
        if equal < left.len().max(right.len()) {
            pair.first.fetch_min(pos + equal as u64, Ordering::Relaxed);
        }
    }
}

/// The first differing byte; `None` if the images are the same.
pub(crate) async fn first_difference(one: &Path, other: &Path) -> Result<Option<u64>, Error> {
    let options = OpenOptions::new().read_only(true);
    let one = AsyncFile::open(one, options)?;
    let other = AsyncFile::open(other, options)?;
    let first = if one.size() == other.size() { NONE } else { one.size().min(other.size()) };
    let pair = Arc::new(Pair { one, other, next: AtomicU64::new(0), first: AtomicU64::new(first) });
    let tasks: Vec<_> = (0..TASKS).map(|_| tokio::spawn(compare(pair.clone()))).collect();
    for task in tasks {
        // A task that panics prints a message on stderr; its part counts as not read.
        task.await.unwrap_or(Err(Error::new(libc::EIO, nowait::Operation::Read)))?;
    }
    let first = pair.first.load(Ordering::Relaxed);
    Ok((first != NONE).then_some(first))
}

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [one, other] = args.as_slice() else {
        eprintln!("usage: asynchronous ONE OTHER");
        return ExitCode::from(2);
    };
    match first_difference(Path::new(one), Path::new(other)).await {
        Ok(None) => {
            println!("the images are the same");
            ExitCode::SUCCESS
        }
        Ok(Some(byte)) => {
            println!("the images differ from byte {byte} on");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("asynchronous: {error}");
            ExitCode::from(2)
        }
    }
}
