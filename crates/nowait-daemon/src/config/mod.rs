//! Everything that `nowait serve` can be told, as plain data.
//!
//! Invariant: each field is an option of the command line and a key of a file, both with its name; a secret is only ever
//! the path of a file.

pub mod listen_address;
pub mod export_spec;
pub(crate) mod device_options;
pub mod vhost_user_spec;
pub mod ublk_spec;
pub mod start_bitmap;
pub mod allowed_uri;
pub mod control_address;
pub mod choices;
pub(crate) mod changed_places;
pub mod notation;
pub mod config_file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nowait_image::Format;
use nowait_nbd::Address;
use nowait_remote::{
    BLOCK_MEMORY, BootRecord, CacheOptions, Location, RemoteOptions, limit_block_memory,
};
use nowait_server::{BlockSize, Limits, TokenBucket};
use serde::{Deserialize, Serialize};

use crate::config::allowed_uri::AllowedUri;
use crate::config::control_address::ControlAddress;
use crate::config::device_options::DeviceOptions;
use crate::config::export_spec::{ExportSpec, NamedExport};
use crate::config::start_bitmap::StartBitmap;
use crate::config::ublk_spec::UblkSpec;
use crate::config::vhost_user_spec::VhostUserSpec;
use crate::error::CliError;
use crate::secrets;
use choices::{Direct, Mechanism, QueueChoice, SandboxChoice, Threshold, TlsChoice};

/// The most serving threads.
/// Beyond it: the option is refused.
pub const MAX_THREADS: u16 = 256;
/// The most serving threads that are started where no number is given.
/// Beyond it: further processors have no thread.
pub const MOST_BY_DEFAULT: u16 = 8;
/// The most connections that can be allowed.
/// Beyond it: the option is refused.
pub const MAX_CONNECTIONS: u32 = 1 << 20;
/// The most seconds that requests wait for a lost server: a day.
/// Beyond it: the option is refused.
pub const MAX_RECONNECT: u64 = 24 * 60 * 60;

/// Everything that a server can be told.
///
/// The meaning of each field is in the help of the option of its name (`nowait serve --help`). The default is a server of the
/// default image at a private socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct ServeConfig {
    /// Format of all images; `None`: guessed for each.
    #[serde(with = "notation::format", skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Directories that backing files may be in, beside that of the image.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub backing_dir: Vec<PathBuf>,
    /// URLs that images may stand on.
    #[serde(with = "notation::locations", skip_serializing_if = "Vec::is_empty")]
    pub backing: Vec<Location>,
    /// Data files of qcow2 images.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub data_file: Vec<PathBuf>,
    /// Whether images are opened for reading only.
    pub read_only: bool,
    /// The smallest request of all frontends.
    #[serde(with = "notation::block_size", skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
    /// Whether a block device that is in use is served for writing.
    pub allow_mounted: bool,
    /// Whether this host uses the disks, so that memory for the server must not wait for them.
    pub io_flusher: bool,

    /// Addresses of NBD.
    #[serde(with = "notation::addresses", skip_serializing_if = "Vec::is_empty")]
    pub nbd: Vec<Address>,
    /// Block devices of this host.
    #[serde(with = "notation::words", skip_serializing_if = "Vec::is_empty")]
    pub ublk: Vec<UblkSpec>,
    /// Sockets of virtual machines.
    #[serde(with = "notation::devices", skip_serializing_if = "Vec::is_empty")]
    pub vhost_user: Vec<VhostUserSpec>,
    /// Dirty bitmaps that are there from the start.
    #[serde(with = "notation::words", skip_serializing_if = "Vec::is_empty")]
    pub bitmap: Vec<StartBitmap>,
    /// The directory of the bitmaps of raw disks; without it they are beside each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitmap_dir: Option<PathBuf>,
    /// The most connections, 1 to 1048576.
    #[serde(deserialize_with = "notation::number::<_, _, 1, { MAX_CONNECTIONS as u64 }>")]
    pub max_connections: u32,

    /// Whether connections are encrypted; without it `require` where there are certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsChoice>,
    /// The directory of certificates and key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_certs: Option<PathBuf>,
    /// Whether clients need a certificate.
    pub tls_verify_peer: bool,

    /// Addresses of the control interface: one of a Unix socket and off, and one of TCP.
    #[serde(with = "notation::controls", skip_serializing_if = "Vec::is_empty")]
    pub control: Vec<ControlAddress>,
    /// The file with the token of the control interface on TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_token: Option<PathBuf>,
    /// The directory of certificates and key of the control interface on TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_tls_certs: Option<PathBuf>,
    /// Directories of images that may be added.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow_dir: Vec<PathBuf>,
    /// URIs of images that may be added.
    #[serde(with = "notation::uris", skip_serializing_if = "Vec::is_empty")]
    pub allow_uri: Vec<AllowedUri>,

    /// Requests a second of all clients of an export together, at least 1.
    #[serde(deserialize_with = "notation::some_number::<_, _, 1, { u64::MAX }>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_iops: Option<u64>,
    /// Bytes a second of all clients of an export together, at least 1.
    #[serde(with = "notation::some_size", skip_serializing_if = "Option::is_none")]
    pub limit_bandwidth: Option<u64>,
    /// Requests a second of each client, at least 1.
    #[serde(deserialize_with = "notation::some_number::<_, _, 1, { u64::MAX }>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_iops_per_client: Option<u64>,
    /// Bytes a second of each client, at least 1.
    #[serde(with = "notation::some_size", skip_serializing_if = "Option::is_none")]
    pub limit_bandwidth_per_client: Option<u64>,

    /// Whether the server ends with its last client.
    pub exit_with_last_client: bool,
    /// Whether the server ends with the process that started it.
    pub exit_with_parent: bool,
    /// Whether the server goes to the background.
    pub fork: bool,
    /// The file with the number of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid_file: Option<PathBuf>,
    /// The file for messages, in place of standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_file: Option<PathBuf>,

    /// Whether the server confines itself.
    pub sandbox: SandboxChoice,

    /// The time after which a request is slow.
    pub slow_requests: Threshold,
    /// Whether the ready line is JSON.
    pub json: bool,
    /// Whether everything is told that is found and done.
    pub verbose: bool,

    /// Whether images are read and written past the page cache.
    pub direct: Direct,
    /// The number of serving threads, 1 to 256; `None`: one for each processor, at most 8.
    #[serde(deserialize_with = "notation::some_number::<_, _, 1, { MAX_THREADS as u64 }>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u16>,
    /// How requests get to the kernel; `None`: by io_uring if the system has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueChoice>,
    /// Whether the device is polled for the end of each request.
    pub poll: bool,
    /// Mechanisms that are turned off.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub off: Vec<Mechanism>,

    /// Seconds that requests wait for a lost server, at most 86400.
    #[serde(deserialize_with = "notation::number::<_, _, 0, MAX_RECONNECT>")]
    pub reconnect: u64,
    /// Bytes a second that an object store has to send at least; 0: any number but none.
    #[serde(with = "notation::size_with_zero")]
    pub minimum_rate: u64,
    /// The cache for blocks of objects.
    #[serde(with = "notation::cache", skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheOptions>,
    /// Bytes of memory for blocks of all objects, at least 8 MiB.
    #[serde(with = "notation::memory")]
    pub remote_memory: u64,
    /// The file that takes the order of first reads of objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<PathBuf>,
    /// The file with the order in which blocks of objects are fetched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<PathBuf>,
    /// The file with credentials for web servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_auth: Option<PathBuf>,

    /// The exports; empty for the default image alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub export: Vec<ExportSpec>,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            format: None,
            backing_dir: Vec::new(),
            backing: Vec::new(),
            data_file: Vec::new(),
            read_only: false,
            block_size: None,
            allow_mounted: false,
            io_flusher: false,
            nbd: Vec::new(),
            ublk: Vec::new(),
            vhost_user: Vec::new(),
            bitmap: Vec::new(),
            bitmap_dir: None,
            max_connections: 1024,
            tls: None,
            tls_certs: None,
            tls_verify_peer: false,
            control: Vec::new(),
            control_token: None,
            control_tls_certs: None,
            allow_dir: Vec::new(),
            allow_uri: Vec::new(),
            limit_iops: None,
            limit_bandwidth: None,
            limit_iops_per_client: None,
            limit_bandwidth_per_client: None,
            exit_with_last_client: false,
            exit_with_parent: false,
            fork: false,
            pid_file: None,
            log_file: None,
            sandbox: SandboxChoice::Auto,
            slow_requests: Threshold(Some(Duration::from_secs(10))),
            json: false,
            verbose: false,
            direct: Direct::Auto,
            threads: None,
            queue: None,
            poll: false,
            off: Vec::new(),
            reconnect: 30,
            minimum_rate: 1 << 10,
            cache: None,
            remote_memory: BLOCK_MEMORY,
            record: None,
            prefetch: None,
            http_auth: None,
            export: Vec::new(),
        }
    }
}

/// The combined meaning of the TLS options.
pub enum Encryption<'a> {
    /// Never.
    Off,
    /// TLS if the client asks for it, with the files of this directory.
    Offered(&'a Path),
    /// Always TLS; `verify` says whether clients must have a certificate, too.
    Required {
        /// The directory of certificates and key.
        directory: &'a Path,
        /// Whether clients need a certificate.
        verify: bool,
    },
}

impl ServeConfig {
    /// The exports with their names; an empty list means the default image, whose name is
    /// [`ServeConfig::default_name`].
    ///
    /// # Errors
    /// A message for the user, as [`export_spec::named`].
    pub fn exports(&self) -> Result<Vec<NamedExport>, String> {
        export_spec::named(&self.export)
    }

    /// The exports with their names; the default image is there without its path.
    fn exports_or_default(&self) -> Result<Vec<NamedExport>, String> {
        let mut exports = self.exports()?;
        if exports.is_empty() {
            let name = self.default_name().to_owned();
            exports.push(NamedExport { name, image: PathBuf::new() });
        }
        Ok(exports)
    }

    /// The name of the first export if it has none of its own.
    pub fn default_name(&self) -> &str {
        self.export.first().and_then(|first| first.name.as_deref()).unwrap_or_default()
    }

    /// Numbers of the local block devices, where they are given, by the names of their exports.
    ///
    /// # Errors
    /// A message for the user, as [`ublk_spec::assign`].
    pub fn nodes(&self) -> Result<BTreeMap<String, Option<u32>>, String> {
        let exports = self.exports_or_default()?;
        let nodes = ublk_spec::assign(&self.ublk, &exports)?.into_iter();
        Ok(nodes.map(|(at, id)| (exports[at].name.clone(), id)).collect())
    }

    /// The table of the options for devices: a row for each kind.
    pub(crate) fn devices(&self) -> [&dyn DeviceOptions; 2] {
        [&self.ublk, &self.vhost_user]
    }

    /// The option for devices that need io_uring, if some are given.
    pub(crate) fn needs_ring(&self) -> Option<&'static str> {
        self.devices().into_iter().find_map(DeviceOptions::needs_ring)
    }

    /// Whether sockets of clients are connected to.
    pub(crate) fn connects_to_clients(&self) -> bool {
        self.devices().into_iter().any(|it| !it.sockets_of_clients().is_empty())
    }

    /// Whether objects are served, or may be later.
    pub fn names_objects(&self) -> bool {
        let images = self.export.iter().filter_map(ExportSpec::location);
        let later = self.allow_uri.iter().filter_map(|uri| uri.location().ok());
        let mut all = images.chain(later).chain(self.backing.iter().cloned());
        all.any(|location| matches!(location, Location::Object(_)))
    }

    /// Why another program cannot open the images as long as this one has them, if it cannot.
    pub fn cannot_open_twice(&self) -> Option<&'static str> {
        let is_ceph = |image: &ExportSpec| matches!(image.location(), Some(Location::Rbd(_)));
        if self.export.iter().any(is_ceph) && !self.read_only {
            return Some("an image of a Ceph cluster is locked by this process");
        }
        self.record.as_ref().map(|_| "the record of the reads is this process's")
    }

    /// The number of serving threads, 1 to [`MAX_THREADS`].
    pub fn threads(&self) -> u16 {
        self.threads.unwrap_or_else(|| {
            let processors = thread::available_parallelism().map_or(1, usize::from);
            u16::try_from(processors).unwrap_or(MOST_BY_DEFAULT).min(MOST_BY_DEFAULT)
        })
    }

    /// Whether a node's data may go without a copy.
    pub fn zero_copy(&self) -> bool {
        self.is_on(Mechanism::ZeroCopy)
    }

    /// Whether `mechanism` is not off.
    pub fn is_on(&self, mechanism: Mechanism) -> bool {
        !self.off.contains(&mechanism)
    }

    /// The engine's configuration: all mechanisms on except those that are off.
    pub fn engine(&self) -> nowait::Config {
        let mut config = nowait::Config::default();
        self.off.iter().for_each(|mechanism| mechanism.turn_off(&mut config));
        config
    }

    /// Whether connections are encrypted.
    pub fn encryption(&self) -> Encryption<'_> {
        match (self.tls, &self.tls_certs) {
            (Some(TlsChoice::Off), _) | (_, None) => Encryption::Off,
            (Some(TlsChoice::On), Some(directory)) => Encryption::Offered(directory),
            (Some(TlsChoice::Require) | None, Some(directory)) => {
                Encryption::Required { directory, verify: self.tls_verify_peer }
            }
        }
    }

    /// Whether clients must use TLS.
    pub fn requires_tls(&self) -> bool {
        matches!(self.encryption(), Encryption::Required { .. })
    }

    /// The Unix socket of the control interface, if that was said.
    pub fn control_socket(&self) -> Option<&ControlAddress> {
        self.control.iter().find(|address| !address.is_tcp())
    }

    /// Host and port of the control interface on TCP.
    pub fn control_tcp(&self) -> Option<(&str, u16)> {
        self.control.iter().find_map(|address| match address {
            ControlAddress::Tcp { host, port } => Some((&**host, *port)),
            _ => None,
        })
    }

    /// Whether there is no control interface at all.
    pub fn control_is_off(&self) -> bool {
        let is_disabled = nowait_control::DISABLED.is_some();
        let is_off = self.control_socket() == Some(&ControlAddress::Off);
        is_disabled || is_off && self.control_tcp().is_none()
    }

    /// The limits of all clients of an export together; a tenth of a second's worth is let through immediately.
    pub fn limits(&self) -> Limits {
        limits(self.limit_iops, self.limit_bandwidth)
    }

    /// Limits of each client.
    pub fn limits_per_client(&self) -> Limits {
        limits(self.limit_iops_per_client, self.limit_bandwidth_per_client)
    }

    /// How remote storages are used. Makes the file of `record`, and sets the limit of `remote_memory`.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn remote_options(&self) -> Result<RemoteOptions, CliError> {
        let record = self.record.as_deref().map(BootRecord::create).transpose();
        limit_block_memory(self.remote_memory);
        if self.http_auth.is_some() {
            secrets::keep_in_memory();
        }
        Ok(RemoteOptions {
            reconnect: Duration::from_secs(self.reconnect),
            minimum_rate: self.minimum_rate,
            cache: self.cache.clone(),
            record: record.map_err(CliError::new)?,
            prefetch: self.prefetch.clone(),
            http_auth: self.http_auth.clone(),
            ..RemoteOptions::default()
        })
    }

    /// Checks the rules about more than one option.
    ///
    /// # Errors
    /// A message for the user that names an option.
    pub fn check(&self) -> Result<(), String> {
        let exports = self.exports_or_default()?;
        if let (Some(option), Some(QueueChoice::Threads)) = (self.needs_ring(), self.queue) {
            return Err(format!("{option} needs io_uring: leave --queue threads out"));
        }
        self.devices().into_iter().try_for_each(|devices| devices.check(&exports))?;
        start_bitmap::check(&self.bitmap, &exports)?;
        self.check_images()?;
        self.check_control()?;
        self.check_tls()?;
        let conflicts = [
            (self.poll && self.queue.is_some(), "--poll", "--queue"),
            (self.fork && self.exit_with_parent, "--fork", "--exit-with-parent"),
        ];
        match conflicts.iter().find(|(conflict, ..)| *conflict) {
            Some((_, one, other)) => Err(format!("{one} does not go with {other}")),
            None => Ok(()),
        }
    }

    fn check_images(&self) -> Result<(), String> {
        let others = [
            (!self.backing_dir.is_empty(), "--backing-dir"),
            (!self.backing.is_empty(), "--backing"),
            (!self.data_file.is_empty(), "--data-file"),
        ];
        let given = others.iter().find(|(is_given, _)| *is_given);
        if let Some((_, given)) = given.filter(|_| self.format.is_some_and(Format::is_raw)) {
            let why = "does not go with format raw: a raw image names no other file";
            return Err(format!("{given} {why}"));
        }
        match &self.prefetch {
            Some(_) if self.cache.is_none() => Err("--cache is missing (for --prefetch)".into()),
            _ => Ok(()),
        }
    }

    /// Refuses two addresses of one kind, and a token or certificates for none.
    fn check_control(&self) -> Result<(), String> {
        let tcp = self.control.iter().filter(|address| address.is_tcp()).count();
        if tcp > 1 || self.control.len() > tcp + 1 {
            return Err("--control takes one of unix:PATH and off, and one tcp:HOST:PORT".into());
        }
        let (token, certs) = (self.control_token.is_some(), self.control_tls_certs.is_some());
        if token && certs {
            return Err("--control-token does not go with --control-tls-certs".into());
        }
        if (token || certs) && tcp == 0 {
            let why = "--control-token and --control-tls-certs are for --control tcp:HOST:PORT";
            return Err(why.into());
        }
        Ok(())
    }

    /// Refuses certificates that are not used, encryption without any, and a verification of clients that need no TLS.
    fn check_tls(&self) -> Result<(), String> {
        let needs = self.tls_verify_peer || self.tls.is_some_and(|tls| tls != TlsChoice::Off);
        if needs && self.tls_certs.is_none() {
            return Err("--tls-certs is missing".into());
        }
        if self.tls_verify_peer && !self.requires_tls() {
            let why = "--tls-verify-peer verifies nobody while clients may come without TLS \
                       (give --tls require)";
            return Err(why.into());
        }
        if self.tls == Some(TlsChoice::Off) && self.tls_certs.is_some() {
            return Err("--tls-certs does not go with --tls off".into());
        }
        Ok(())
    }
}

/// The limits of so many requests and bytes a second, where they are given; a tenth of a second's worth is let through
/// immediately.
pub fn limits(requests: Option<u64>, bytes: Option<u64>) -> Limits {
    let bucket = |rate: Option<u64>| rate.map(TokenBucket::per_second);
    Limits { requests: bucket(requests), bytes: bucket(bytes) }
}
