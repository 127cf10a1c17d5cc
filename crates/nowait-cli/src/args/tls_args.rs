//! The command-line options for encryption.

use std::path::PathBuf;

use clap::Args;

use nowait_daemon::config::ServeConfig;
use nowait_daemon::config::choices::TlsChoice;

/// Whether and how connections are encrypted.
#[derive(Debug, Args)]
#[command(next_help_heading = "Encryption")]
pub(crate) struct TlsArgs {
    /// Whether connections are encrypted by TLS
    ///
    /// Without it: require where --tls-certs is given, else off.
    #[arg(long, value_name = "WHEN", value_enum)]
    tls: Option<TlsChoice>,

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
    #[arg(long)]
    tls_verify_peer: bool,
}

impl TlsArgs {
    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { tls, tls_certs, tls_verify_peer } = self;
        config.tls = tls.or(config.tls);
        config.tls_certs = tls_certs.clone().or(config.tls_certs.take());
        config.tls_verify_peer |= tls_verify_peer;
    }
}
