//! Connects to an export, the first time and each time that the connection was lost.
//!
//! Invariant: a host's name is resolved once.

use std::path::PathBuf;
use std::time::Duration;

use nowait_nbd::client::{
    ClientError, ConnectOptions, Connection, Credentials, Export, Wanted, failure,
};
use nowait_nbd::{Address, NbdUri, ReplyMode};
use rustix::net::sockopt;

use crate::host_names::addresses_of;

/// Options of the handshake: the context says which ranges read as zeros.
const WANTED: Wanted<'static> =
    Wanted { mode: ReplyMode::Structured, context: Some("base:allocation") };
/// The receive buffer in bytes, for what follows the data of a read.
const RECEIVE_BYTES: usize = 16 << 10;
/// The requested size of the socket's send and receive buffers in bytes. The kernel may grant less.
const SOCKET_BYTES: usize = 2 << 20;
/// A peer that does not answer is asked whether it is alive after this time, and as often again.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
/// How an export of an NBD server is used.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// How long requests wait for the server when the connection is lost, before they fail.
    pub reconnect: Duration,
    /// The directory with certificates for TLS, where the URI names none.
    pub certificates: Option<PathBuf>,
    /// Whether it is not written to.
    pub read_only: bool,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self { reconnect: Duration::from_secs(30), certificates: None, read_only: true }
    }
}

/// Connects to one export.
pub(super) struct Connector {
    addresses: Vec<Address>,
    credentials: Option<Credentials>,
    name: String,
}

impl Connector {
    /// # Errors
    /// A message of one line: a file of the credentials cannot be used, the name has no address.
    pub(super) fn new(uri: &NbdUri, options: &NbdOptions) -> Result<Self, String> {
        let credentials = Credentials::for_uri(uri, options.certificates.as_deref());
        let credentials = credentials.map_err(|error| error.to_string())?;
        let addresses = match &uri.address {
            Address::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                vec![Address::Unix(path)]
            }
            Address::Tcp { host, port } => {
                let found = addresses_of(host, *port);
                let found = found.map_err(|e| failure(&ClientError::Connect(e), ""))?;
                let found = found.into_iter().map(|at| (at.ip().to_string(), at.port()));
                found.map(|(host, port)| Address::Tcp { host, port }).collect()
            }
        };
        Ok(Self { addresses, credentials, name: uri.export.clone() })
    }

    /// Connects; the connection and its handshake take at most `timeout` each.
    pub(super) fn connect(&self, timeout: Duration) -> Result<(Connection, Export), String> {
        let mut last = "the name has no address".to_owned();
        for address in &self.addresses {
            let options = ConnectOptions {
                address,
                credentials: self.credentials.as_ref(),
                export: &self.name,
                wanted: WANTED,
                timeout,
                receive_bytes: RECEIVE_BYTES,
            };
            match Connection::open(&options) {
                Ok((connection, export)) => {
                    prepare(&connection, address).map_err(|error| failure(&error, ""))?;
                    return Ok((connection, export));
                }
                Err(error) => last = failure(&error, &self.name),
            }
        }
        Err(last)
    }
}

/// Sets the options of the socket. Those that cannot be set are not needed.
fn prepare(connection: &Connection, address: &Address) -> Result<(), ClientError> {
    let _ = sockopt::set_socket_send_buffer_size(connection, SOCKET_BYTES);
    let _ = sockopt::set_socket_recv_buffer_size(connection, SOCKET_BYTES);
    if matches!(address, Address::Tcp { .. }) {
        // A host that is gone is noticed although nothing is to be sent.
        let _ = sockopt::set_socket_keepalive(connection, true);
        let _ = sockopt::set_tcp_keepidle(connection, KEEPALIVE);
        let _ = sockopt::set_tcp_keepintvl(connection, KEEPALIVE);
        let _ = sockopt::set_tcp_keepcnt(connection, KEEPALIVE_PROBES);
        let timeout = KEEPALIVE * (KEEPALIVE_PROBES + 1);
        let _ = sockopt::set_tcp_user_timeout(connection, timeout.as_millis() as u32);
    }
    connection.set_nonblocking().map_err(ClientError::from)
}
