//! A program without a runtime: `LocalDriver` runs one future on one thread, and pollster, or any other `block_on`,
//! runs those of `AsyncFile`.
//!
//! `block_on FILE`: writes a block by the one and reads it back by the other.

use std::path::Path;
use std::process::ExitCode;

use nowait::{AsyncFile, Error, Flags, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};

/// The first byte of the block that was written.
pub(crate) fn run(path: &Path) -> Result<u8, Error> {
    let block = LocalDriver::new()?.block_on(async {
        let file = LocalAsyncFile::open(path, OpenOptions::new().create(true))?;
        let mut block = IoBuffer::zeroed(4096)?;
        block.fill(7);
        let (written, block) = file.write_at(block, 0, Flags::NONE).await;
        written.map(|_| block)
    })?;
    pollster::block_on(async {
        let file = AsyncFile::open(path, OpenOptions::new().read_only(true))?;
        let (read, block) = file.read_at(block, 0).await;
        read.map(|_| block[0])
    })
}

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: block_on FILE");
        return ExitCode::from(2);
    };
    match run(Path::new(&path)) {
        Ok(byte) => {
            println!("{byte}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("block_on: {error}");
            ExitCode::FAILURE
        }
    }
}
