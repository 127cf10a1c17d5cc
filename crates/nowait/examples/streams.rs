//! Copies a file as a stream: code for `AsyncRead` and `AsyncWrite` of tokio, such as `tokio::io::copy`, on `FileStream`.
//!
//! `streams FROM TO`: tasks may run on any thread of the runtime.

use std::path::Path;
use std::process::ExitCode;

use nowait::{AsyncFile, FileStream, OpenOptions};
use tokio::io::AsyncWriteExt;

/// Copies, makes the copy durable, and returns its bytes.
pub(crate) async fn run(from: &Path, to: &Path) -> std::io::Result<u64> {
    let mut from = FileStream::new(AsyncFile::open(from, OpenOptions::new().read_only(true))?);
    let mut to = FileStream::new(AsyncFile::open(to, OpenOptions::new().create_new(true))?);
    let bytes = tokio::io::copy_buf(&mut from, &mut to).await?;
    to.flush().await?; // the last write has ended
    to.get_ref().sync_all().await?; // and is durable
    Ok(bytes)
}

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [from, to] = args.as_slice() else {
        eprintln!("usage: streams FROM TO");
        return ExitCode::from(2);
    };
    match run(Path::new(from), Path::new(to)).await {
        Ok(bytes) => {
            println!("{bytes} bytes");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("streams: {error}");
            ExitCode::FAILURE
        }
    }
}
