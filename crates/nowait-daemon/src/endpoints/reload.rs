//! Files that a server reads again at SIGHUP: its log file's name, its TLS files, the sizes of its images.
//!
//! Invariant: one reload at a time; a signal that comes meanwhile causes another one after it. What
//! cannot be read stays as it was, with one line that says why.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nowait_server::{Credentials, Exports};
use tracing::{error, info};

use crate::endpoints::tls_files::TlsFiles;
use crate::process::log_file::LogFile;
use crate::process::systemd;

/// The parts of a running server that can be read again; clones share them.
#[derive(Clone)]
pub(crate) struct Reload(Arc<Parts>);

struct Parts {
    exports: Exports,
    tls: Vec<(TlsFiles, Credentials)>,
    log_file: Option<LogFile>,
    /// Reloads that were asked for and have not begun.
    asked: AtomicU32,
    running: Mutex<()>,
}

impl Reload {
    /// The parts of a server; `tls` are its certificates and where they are read from.
    pub(crate) fn new(
        exports: Exports,
        tls: Vec<(TlsFiles, Credentials)>,
        log_file: Option<LogFile>,
    ) -> Self {
        let (asked, running) = (AtomicU32::new(0), Mutex::new(()));
        Self(Arc::new(Parts { exports, tls, log_file, asked, running }))
    }

    /// Reads everything again, on a thread of its own: storage may make it wait.
    pub(crate) fn start(&self) {
        let parts = self.0.clone();
        parts.asked.fetch_add(1, Ordering::AcqRel);
        // A reload under way finds the count. Without a thread the next signal tries again.
        let _ = thread::Builder::new().name("reload".into()).spawn(move || parts.run());
    }
}

impl Parts {
    fn run(&self) {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // Of several threads that have waited, the first does it for all.
        if self.asked.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        systemd::notify_reloading();
        if let Some(Err(error)) = self.log_file.as_ref().map(LogFile::begin) {
            error!("{error}");
        }
        for (files, credentials) in &self.tls {
            match files.load() {
                Ok(new) => credentials.replace(&new),
                Err(error) => error!("{error}; the TLS files that were read before stay in use"),
            }
        }
        self.exports.refresh_sizes();
        info!("read again: {}", self.what());
        systemd::notify_reloaded();
    }

    fn what(&self) -> String {
        let log = self.log_file.as_ref().map(|_| "the log file");
        let tls = self.tls.first().map(|_| "the TLS files");
        let all: Vec<_> = log.into_iter().chain(tls).chain(["the sizes of images"]).collect();
        all.join(", ")
    }
}
