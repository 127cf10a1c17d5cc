//! The part of the command line that is about encryption.
//!
//! Invariant: nobody who asked for encryption, or for known clients only, gets less.
//! Knows: nothing. Known by: args, serve.

use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, ValueEnum};

/// Whether and how connections are encrypted.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Whether connections are encrypted by TLS
    ///
    /// Without it: require where --tls-certs is given, else off.
    #[arg(long, value_name = "WHEN", value_enum)]
    #[arg(requires_ifs([("on", "tls_certs"), ("require", "tls_certs")]))]
    tls: Option<TlsWhen>,

    /// Encrypt connections, with the certificate and key in DIR
    ///
    /// The files are named as for qemu-nbd and nbdkit: server-cert.pem, server-key.pem and, for
    /// --tls-verify-peer, ca-cert.pem and ca-crl.pem (which may be absent). TLS 1.2 and 1.3 are
    /// spoken; keys agreed upon beforehand (PSK) are not known.
    #[arg(long, value_name = "DIR")]
    tls_certs: Option<PathBuf>,

    /// Admit only clients with a certificate that ca-cert.pem vouches for
    ///
    /// Without it TLS tells clients whom they speak to, but not the server: whoever reaches the
    /// address still has the disk. Not with --tls on, which lets clients in without TLS.
    #[arg(long, requires = "tls_certs")]
    tls_verify_peer: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TlsWhen {
    /// Never
    Off,
    /// Where the client asks for it
    On,
    /// Always; a client without TLS gets nothing
    Require,
}

/// What `--tls` and its companions come to.
pub(crate) enum Encryption<'a> {
    Off,
    /// Where a client asks for it, with the files of this directory.
    Offered(&'a Path),
    /// Always; `verify` says whether clients show a certificate too.
    Required {
        directory: &'a Path,
        verify: bool,
    },
}

impl TlsArgs {
    /// Whether connections are encrypted.
    pub(crate) fn encryption(&self) -> Encryption<'_> {
        match (self.tls, &self.tls_certs) {
            (Some(TlsWhen::Off), _) | (_, None) => Encryption::Off,
            (Some(TlsWhen::On), Some(directory)) => Encryption::Offered(directory),
            (Some(TlsWhen::Require) | None, Some(directory)) => {
                Encryption::Required { directory, verify: self.tls_verify_peer }
            }
        }
    }

    /// Refuses what parses but makes no sense, as clap refuses what does not parse.
    ///
    /// # Errors
    /// Clients are to be verified, but need not use TLS.
    pub(crate) fn check(&self) -> Result<(), clap::Error> {
        if self.tls_verify_peer && !matches!(self.encryption(), Encryption::Required { .. }) {
            let why = "--tls-verify-peer verifies nobody while clients may come without TLS \
                       (give --tls require)";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, why));
        }
        Ok(())
    }
}
