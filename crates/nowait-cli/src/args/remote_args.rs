//! The command-line options for images that are behind a network.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nowait_remote::{CacheOptions, RemoteOptions};

use crate::habits;
use nowait_daemon::config::{MAX_RECONNECT, ServeConfig, notation};
use nowait_daemon::secrets;
use nowait_daemon::size;

/// The credentials for web servers.
#[derive(Debug, Args)]
pub(crate) struct AuthArgs {
    /// A file with the token, the password or other headers for images of web servers (https://)
    ///
    /// Each line is 'bearer TOKEN', 'basic USER:PASSWORD' or a header, 'NAME: VALUE'; a file with a
    /// token alone will do. Lines after 'host HOST[:PORT]' are for that server only, those before the
    /// first such line for all that the command names. None of it is sent to another server that one redirects to. It
    /// is read again when a server refuses it (401, 403), so a program that
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

/// Options for a server that is not there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Exports")]
pub(crate) struct RemoteArgs {
    /// How long requests wait for the server of an IMAGE when its connection is lost, at most 86400;
    /// then they fail with EIO until the server is there again [default: 30]
    ///
    /// What it had not answered is asked again, and so are the writes that no flush has made durable:
    /// no client notices a server that is killed and started again within this time.
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=MAX_RECONNECT))]
    reconnect: Option<u64>,

    /// The fewest bytes a second that an object store may send of an answer; with 0 any progress will do [default: 1K]
    ///
    /// An answer that is slower, on average over 20 s, or over --reconnect if that is less, counts as one that has
    /// stopped: it is requested again. So a server that sends a byte now and then is an error after --reconnect.
    #[arg(long, value_name = "BYTES")]
    #[arg(value_parser = size::parse_with_zero)]
    minimum_rate: Option<u64>,

    /// Where blocks of objects (s3://, https:// and others) are kept once they were read, for this server and for
    /// others of this user on this host; made if it is not there
    ///
    /// At most SIZE bytes, 10G unless given: the least recently used blocks go first. Each block has a
    /// checksum, so a crash or a foreign file costs a second fetch and nothing else. QEMU's cache
    /// modes (none, writeback, …) are --direct here.
    #[arg(long, value_name = "DIR[,size=SIZE]")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| parse_cache(&text)))]
    pub(crate) cache: Option<CacheOptions>,

    /// Memory for the blocks of all objects (s3://, https:// and others) together, at least 8M [default: 256M]
    ///
    /// It keeps the blocks that were read last, at most 32M of each object; the least recently used one is replaced first.
    #[arg(long, value_name = "SIZE", value_parser = notation::parse_memory)]
    remote_memory: Option<u64>,

    /// Write the order in which blocks of objects are read first to FILE
    #[arg(long, value_name = "FILE", value_parser = OsStringValueParser::new().try_map(file_for_objects))]
    pub(crate) record: Option<PathBuf>,

    /// Fetch the blocks of objects that FILE, written by --record, names into the cache, in its order, while clients
    /// are served
    #[arg(long, value_name = "FILE")]
    #[arg(value_parser = OsStringValueParser::new().try_map(file_for_objects))]
    pub(crate) prefetch: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,
}

impl RemoteArgs {
    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { reconnect, minimum_rate, cache, remote_memory, record, prefetch, auth } = self;
        config.reconnect = reconnect.unwrap_or(config.reconnect);
        config.minimum_rate = minimum_rate.unwrap_or(config.minimum_rate);
        config.cache = cache.clone().or(config.cache.take());
        config.remote_memory = remote_memory.unwrap_or(config.remote_memory);
        config.record = record.clone().or(config.record.take());
        config.prefetch = prefetch.clone().or(config.prefetch.take());
        config.http_auth = auth.http_auth.clone().or(config.http_auth.take());
    }
}

/// A file that only objects are of use for.
fn file_for_objects(path: OsString) -> Result<PathBuf, String> {
    notation::built_with_objects()?;
    Ok(path.into())
}

/// Parses `DIR[,size=SIZE]`.
fn parse_cache(text: &OsString) -> Result<CacheOptions, String> {
    match text.to_str().and_then(habits::cache_word) {
        Some(advice) => Err(advice),
        None => notation::parse_cache(text),
    }
}
