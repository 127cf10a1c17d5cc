//! The command-line options for images that are behind a network.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::CliError;
use crate::habits;
use crate::secrets;
use crate::size;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nowait_remote::{
    BootRecord, CacheOptions, MIN_BLOCK_MEMORY, MIN_CACHE_BYTES, RemoteOptions, limit_block_memory,
};

/// The most seconds that requests wait: a day.
const MAX_SECONDS: u64 = 24 * 60 * 60;
/// The size of a cache, unless it is given.
const CACHE_BYTES: u64 = 10 << 30;

/// The credentials for web servers.
#[derive(Debug, Args)]
pub(crate) struct AuthArgs {
    /// A file with the token, the password or other headers for images of web servers (https://)
    ///
    /// Each line is 'bearer TOKEN', 'basic USER:PASSWORD' or a header, 'NAME: VALUE'; a file with a
    /// token alone will do. Lines after 'host HOST[:PORT]' are for that server only, those before the
    /// first such line for all that the command names. Nothing of it is sent to another server to
    /// which one redirects. It is read again when a server refuses it (401, 403), so a program that
    /// renews a token only has to replace the file.
    #[arg(long, value_name = "FILE", value_parser = OsStringValueParser::new().try_map(file_for_objects))]
    pub(crate) http_auth: Option<PathBuf>,
}

impl AuthArgs {
    /// How the storages behind a network are opened by a command without further options for them.
    pub(crate) fn options(&self) -> RemoteOptions {
        if self.http_auth.is_some() {
            secrets::keep_in_memory();
        }
        RemoteOptions { http_auth: self.http_auth.clone(), ..RemoteOptions::default() }
    }
}

/// What is done when a server is not there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Exports")]
pub(crate) struct RemoteArgs {
    /// How long requests wait for the server of an IMAGE when its connection is lost, at most 86400;
    /// then they fail with EIO until the server is there again
    ///
    /// What it had not answered is asked again, and so are the writes that no flush has made durable:
    /// no client notices a server that is killed and started again within this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=MAX_SECONDS))]
    reconnect: u64,

    /// How many bytes of an answer of an object store have to come a second; 0: any number but none
    ///
    /// A slower answer is asked for again, as one that stops: on average over 20 s, or --reconnect if
    /// that is less. So a server that sends a byte now and then is an error after --reconnect.
    #[arg(long, value_name = "BYTES", default_value = "1K")]
    #[arg(value_parser = size::parse_with_zero)]
    minimum_rate: u64,

    /// Where blocks of objects (s3://, https:// and others) stay when they were read, for this server
    /// and for others of this user on this machine; made if it is not there
    ///
    /// At most SIZE bytes, 10G unless given: what was used longest ago goes. Each block has a
    /// checksum, so a crash or a foreign file costs a second fetch and nothing else. QEMU's cache
    /// modes (none, writeback, …) are --direct here.
    #[arg(long, value_name = "DIR[,size=SIZE]")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| parse_cache(&text)))]
    pub(crate) cache: Option<CacheOptions>,

    /// How much memory blocks of all objects (s3://, https:// and others) have together, at least 8M
    ///
    /// It keeps the blocks that were read last, at most 32M of each object; the least recently used one is replaced first.
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    #[arg(value_parser = parse_memory)]
    remote_memory: u64,

    /// Write the order in which blocks of objects are read first to FILE
    #[arg(long, value_name = "FILE", value_parser = OsStringValueParser::new().try_map(file_for_objects))]
    pub(crate) record: Option<PathBuf>,

    /// Fetch the blocks of objects that FILE, written by --record, names into the cache, in its order,
    /// beside what clients read
    #[arg(long, value_name = "FILE", requires = "cache")]
    #[arg(value_parser = OsStringValueParser::new().try_map(file_for_objects))]
    pub(crate) prefetch: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,
}

impl RemoteArgs {
    /// How remote storages are used. Makes the file of `--record`, and sets the limit of `--remote-memory`.
    ///
    /// # Errors
    /// The file cannot be made.
    pub(crate) fn options(&self) -> Result<RemoteOptions, CliError> {
        let record = self.record.as_deref().map(BootRecord::create).transpose();
        limit_block_memory(self.remote_memory);
        Ok(RemoteOptions {
            reconnect: Duration::from_secs(self.reconnect),
            minimum_rate: self.minimum_rate,
            cache: self.cache.clone(),
            record: record.map_err(CliError::new)?,
            prefetch: self.prefetch.clone(),
            ..self.auth.options()
        })
    }
}

/// Parses the size of the memory for blocks.
fn parse_memory(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes < MIN_BLOCK_MEMORY => {
            Err(format!("at least {} MiB are needed", MIN_BLOCK_MEMORY >> 20))
        }
        bytes => Ok(bytes),
    }
}

/// A file that only objects are of use for.
fn file_for_objects(path: OsString) -> Result<PathBuf, String> {
    built_with_objects()?;
    Ok(path.into())
}

fn built_with_objects() -> Result<(), String> {
    nowait_remote::OBJECT_STORES_DISABLED.map_or(Ok(()), |why| Err(why.into()))
}

/// Parses `DIR[,size=SIZE]`.
fn parse_cache(text: &OsString) -> Result<CacheOptions, String> {
    if let Some(advice) = text.to_str().and_then(habits::cache_word) {
        return Err(advice);
    }
    built_with_objects()?;
    let (directory, size) = match text.to_str().and_then(|text| text.rsplit_once(",size=")) {
        Some((directory, size)) => (OsString::from(directory), Some(size)),
        None => (text.clone(), None),
    };
    let bytes = size.map_or(Ok(CACHE_BYTES), size::parse)?;
    if directory.is_empty() {
        return Err("the directory is missing".into());
    }
    if bytes < MIN_CACHE_BYTES {
        return Err(format!("a cache has at least {} MiB", MIN_CACHE_BYTES >> 20));
    }
    Ok(CacheOptions { directory: directory.into(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_for_blocks_is_large_enough() {
        assert_eq!(parse_memory("1G"), Ok(1 << 30));
        assert_eq!(parse_memory("256M"), Ok(nowait_remote::BLOCK_MEMORY));
        for wrong in ["0", "7M", "x", ""] {
            assert!(parse_memory(wrong).is_err(), "{wrong}");
        }
    }

    #[cfg(feature = "object-stores")]
    #[test]
    fn a_cache_is_a_directory_and_a_size_that_is_large_enough() {
        let parse = |text: &str| parse_cache(&text.into());
        let cache = |directory: &str, bytes| CacheOptions { directory: directory.into(), bytes };
        assert_eq!(parse("/a,b"), Ok(cache("/a,b", 10 << 30)));
        assert_eq!(parse("/a,size=1G"), Ok(cache("/a", 1 << 30)));
        for wrong in ["", ",size=1G", "/a,size=1M", "/a,size=x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
