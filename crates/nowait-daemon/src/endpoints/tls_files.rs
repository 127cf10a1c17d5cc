//! The TLS files of a server: where they are, and which clients they are to verify.
//!
//! Invariant: before a private key is read, this process is protected from others of its user.

use std::path::{Path, PathBuf};

use crate::error::CliError;
use nowait_server::{ClientAuth, Credentials, Tls};

use crate::config::{Encryption, ServeConfig};
use crate::secrets;

/// A directory with certificates and a key.
#[derive(Clone, Debug)]
pub(crate) struct TlsFiles {
    directory: PathBuf,
    clients: ClientAuth,
}

impl TlsFiles {
    fn new(directory: &Path, clients: ClientAuth) -> Self {
        Self { directory: directory.to_owned(), clients }
    }

    /// The files in `directory`; clients need a certificate that they vouch for.
    pub(crate) fn verified(directory: &Path) -> Self {
        Self::new(directory, ClientAuth::Verified)
    }

    /// Reads the files.
    ///
    /// # Errors
    /// Like [`Credentials::load`].
    pub(crate) fn load(&self) -> Result<Credentials, CliError> {
        secrets::keep_in_memory();
        let loaded = Credentials::load(&self.directory, self.clients);
        loaded.map_err(|error| CliError::new(error.to_string()))
    }
}

/// The TLS configuration of a server and, where it has one, its files with what was read from them.
pub(crate) type Keys = (Tls, Option<(TlsFiles, Credentials)>);

/// The TLS configuration of a server, and the files that it was read from.
///
/// # Errors
/// Like [`TlsFiles::load`].
pub(crate) fn read(config: &ServeConfig) -> Result<Keys, CliError> {
    let (files, make): (_, fn(Credentials) -> Tls) = match config.encryption() {
        Encryption::Off => return Ok((Tls::Off, None)),
        Encryption::Offered(directory) => (TlsFiles::new(directory, ClientAuth::Any), Tls::Offered),
        Encryption::Required { directory, verify } => {
            let clients = if verify { ClientAuth::Verified } else { ClientAuth::Any };
            (TlsFiles::new(directory, clients), Tls::Required)
        }
    };
    let credentials = files.load()?;
    Ok((make(credentials.clone()), Some((files, credentials))))
}
