//! The command-line options for encryption.
//!
//! Invariant: a command line that requires encryption, or verified clients, never results in less.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

/// Whether and how connections are encrypted.
#[derive(Debug, Args)]
#[command(next_help_heading = "Encryption")]
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
    /// spoken; keys agreed upon beforehand (PSK) are not known. The key is an RSA key of 2048, 3072 or
    /// 4096 bits, an ECDSA key on P-256 or P-384, or an Ed25519 key, not encrypted, and only the
    /// server's user should be able to read it.
    #[arg(long, value_name = "DIR")]
    tls_certs: Option<PathBuf>,

    /// Admit only clients with a certificate that ca-cert.pem vouches for
    ///
    /// Without it TLS tells clients whom they speak to, but not the server: a client that reaches
    /// the address still has the disk. Not with --tls on, which lets clients in without TLS.
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

/// The combined meaning of the TLS options.
pub(crate) enum Encryption<'a> {
    Off,
    /// TLS if the client asks for it, with the files of this directory.
    Offered(&'a Path),
    /// Always TLS; `verify` says whether clients must have a certificate, too.
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

    /// Whether clients must use TLS.
    pub(crate) fn is_required(&self) -> bool {
        matches!(self.encryption(), Encryption::Required { .. })
    }

    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user: certificates are given but not used, or clients are to be verified
    /// but need not use TLS.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.tls_verify_peer && !self.is_required() {
            let why = "--tls-verify-peer verifies nobody while clients may come without TLS \
                       (give --tls require)";
            return Err(why.into());
        }
        if self.tls == Some(TlsWhen::Off) && self.tls_certs.is_some() {
            return Err("--tls-certs does not go with --tls off".into());
        }
        Ok(())
    }
}
