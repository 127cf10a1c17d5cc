//! Starts and stops servers in this process.
//!
//! Invariant: a server has stopped when the value is dropped.

use std::path::{Path, PathBuf};

use nowait_daemon::config::config_file;
use nowait_daemon::config::control_address::ControlAddress;
use nowait_daemon::config::export_spec::ExportSpec;
use nowait_daemon::error::CliError;
use nowait_daemon::serve::EmbeddedServer;
use nowait_nbd::Address;
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::no_child_starts;

use super::{Scratch, text};

/// A running server with one Unix socket in a directory of its own.
pub(crate) struct Server {
    running: EmbeddedServer,
    own: Scratch,
}

impl Server {
    /// Serves `image`, as the export without a name, with `options`, which are a configuration file's.
    pub(crate) fn start(image: &Path, options: &str) -> Self {
        let started = Self::tried(Some(image), options);
        started.unwrap_or_else(|why| panic!("{}: {options}: {why}", image.display()))
    }

    /// Serves what `options` name.
    pub(crate) fn of(options: &str) -> Self {
        Self::tried(None, options).unwrap_or_else(|why| panic!("{options}: {why}"))
    }

    /// Why `image` is not served with `options`: one line, and no socket is left.
    pub(crate) fn refusal(image: &Path, options: &str) -> String {
        match Self::tried(Some(image), options) {
            Ok(_) => panic!("{}: {options}: was to be refused", image.display()),
            Err(error) => {
                let why = error.to_string();
                assert_eq!(why.lines().count(), 1, "{why}");
                why
            }
        }
    }

    fn tried(image: Option<&Path>, options: &str) -> Result<Self, CliError> {
        let own = Scratch::new();
        let parsed = config_file::parse(options);
        let mut config = parsed.unwrap_or_else(|(line, why)| panic!("{options}:{line}: {why}"));
        let first =
            image.map(|image| ExportSpec { image: Some(image.into()), ..ExportSpec::default() });
        config.export.splice(0..0, first);
        config.nbd.insert(0, Address::Unix(own.join("socket")));
        if config.control.is_empty() {
            config.control.push(ControlAddress::Off);
        }
        let started = EmbeddedServer::start(config);
        assert!(started.is_ok() || !own.join("socket").exists(), "the socket is left behind");
        started.map(|running| Self { running, own })
    }

    /// Its Unix socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.own.join("socket")
    }

    /// The addresses of all exports, those of the Unix socket first.
    pub(crate) fn uris(&self) -> Vec<String> {
        let lines = self.running.ready_lines().lines();
        lines.map(|line| line.strip_prefix("serving ").expect("a place").to_owned()).collect()
    }

    /// The URI of its Unix socket.
    pub(crate) fn uri(&self) -> String {
        self.uri_of("")
    }

    /// The URI of export `name`.
    pub(crate) fn uri_of(&self, name: &str) -> String {
        let uris = self.uris();
        let (scheme, _) = uris[0].split_once(':').expect("a scheme");
        format!("{scheme}:///{name}?socket={}", self.socket().display())
    }

    /// Its port on 127.0.0.1, in digits.
    pub(crate) fn port(&self) -> String {
        let uris = self.uris();
        let tcp = uris.iter().find_map(|uri| uri.strip_prefix("nbd://127.0.0.1:"));
        tcp.and_then(|rest| rest.split('/').next()).expect("a TCP address").to_owned()
    }

    /// A new connection to the default export, with structured replies.
    pub(crate) fn connect(&self) -> Client {
        self.connect_to("")
    }

    /// A new connection to export `name`, with structured replies.
    pub(crate) fn connect_to(&self, name: &str) -> Client {
        Client::connect_to(&self.socket(), name, Mode::Structured).expect("a connection")
    }

    /// Stops it, and checks that all is flushed and no socket left.
    pub(crate) fn stop(self) {
        let Self { running, own } = self;
        running.stop().unwrap_or_else(|error| panic!("{error}"));
        // A process that is being started has copies of the descriptors, and with them of the locks.
        drop(no_child_starts());
        assert!(!own.join("socket").exists(), "the socket is left behind");
    }
}

/// An export in a configuration file.
pub(crate) fn export(name: &str, image: &Path) -> String {
    format!("\n[[export]]\nname = '{name}'\nimage = '{}'\n", text(image))
}
