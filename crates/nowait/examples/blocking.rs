//! Copies an image with one call after the other: the blocking API, `nowait::BlockingFile`.
//!
//! `blocking FROM TO`: TO is created, or must be as long as FROM. Parts that are all zeros are
//! zeroed, not written, so that the copy is sparse where the file system allows it.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use nowait::{BlockingFile, ByteRange, Flags, OpenOptions};

/// Bytes of one read or write.
const STEP_BYTES: usize = 1 << 20;

/// Bytes copied and bytes zeroed.
#[derive(Default)]
struct Copied {
    data: u64,
    zeros: u64,
}

/// The image of `size` bytes to write to; created if it does not exist.
fn target(path: &Path, size: u64) -> Result<BlockingFile, Box<dyn Error>> {
    if !path.try_exists()? {
        std::fs::File::create_new(path)?.set_len(size)?;
    }
    let file = BlockingFile::open(path, OpenOptions::default())?;
    if file.size() != size {
        return Err(format!("the target has {} bytes, not {size}", file.size()).into());
    }
    Ok(file)
}

fn copy(from: &Path, to: &Path) -> Result<Copied, Box<dyn Error>> {
    let from = BlockingFile::open(from, OpenOptions::new().read_only(true))?;
    let to = target(to, from.size())?;
    let mut buffer = nowait::IoBuffer::zeroed(STEP_BYTES)?;
    let mut copied = Copied::default();
    let mut pos = 0;
    while pos < from.size() {
        let len = from.read_at(&mut buffer, pos)?;
        let bytes = &buffer[..len];
        if len == 0 {
            return Err(format!("the image ends at byte {pos}, earlier than it did").into());
        }
        if bytes.iter().all(|&byte| byte == 0) {
            to.zero(ByteRange::new(pos, len as u64), Flags::NONE)?;
            copied.zeros += len as u64;
        } else {
            let written = to.write_at(bytes, pos, Flags::NONE)?;
            if written < len {
                return Err(format!("only {written} of {len} bytes written at {pos}").into());
            }
            copied.data += len as u64;
        }
        pos += len as u64;
    }
    to.flush()?;
    Ok(copied)
}

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [from, to] = args.as_slice() else {
        eprintln!("usage: blocking FROM TO");
        return ExitCode::from(2);
    };
    match copy(Path::new(from), Path::new(to)) {
        Ok(Copied { data, zeros }) => {
            println!("{data} bytes copied, {zeros} bytes zeroed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("blocking: {error}");
            ExitCode::FAILURE
        }
    }
}
