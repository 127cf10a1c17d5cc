//! Clients that send any bytes and show every message as it came, plain or by TLS.
//!
//! Invariant: messages are parsed only as far as their headers require.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

use nowait_testkit::BOUND;
use nowait_testkit::nbd::constants::OPT_STARTTLS;
use nowait_testkit::nbd::{Mode, WireClient, greet};
use rustls::pki_types::CertificateDer;

use crate::stream::Stream;

pub(crate) use nowait_testkit::nbd::{Message, Outcome, Request};

/// A server that takes nothing for this long is blocked.
const STILL: Duration = Duration::from_secs(1);

pub(crate) type Client = WireClient<Stream>;

/// Opens the default export at `socket`, with `base:allocation` where `mode` has chunks.
pub(crate) fn connect(socket: &Path, mode: Mode) -> Client {
    connect_selecting(socket, mode, mode != Mode::Simple)
}

/// The same, with or without a context.
pub(crate) fn connect_selecting(socket: &Path, mode: Mode, with_context: bool) -> Client {
    chosen(greeted(socket, mode), "", with_context, &[])
}

/// Like `connect`, by TLS with the server whose certificate is `cert`.
pub(crate) fn connect_encrypted(
    socket: &Path,
    mode: Mode,
    cert: &CertificateDer<'static>,
) -> Client {
    let mut client = greeted(socket, mode);
    assert_eq!(client.option(OPT_STARTTLS, &[]).unwrap(), []);
    client.stream = client.stream.encrypted(cert);
    chosen(client, "", mode != Mode::Simple, &[])
}

/// Like `connect`, to the export called `name`, with `bytes` directly after the choice.
pub(crate) fn connect_to(socket: &Path, mode: Mode, name: &str, bytes: &[u8]) -> Client {
    chosen(greeted(socket, mode), name, mode != Mode::Simple, bytes)
}

/// A client that has received the greeting and sent its flags.
pub(crate) fn greeted(socket: &Path, mode: Mode) -> Client {
    Client::greeted(Stream::Plain(greet(socket).unwrap()), mode)
}

fn chosen(client: Client, name: &str, with_context: bool, bytes: &[u8]) -> Client {
    let queries = if with_context { &["base:allocation"][..] } else { &[] };
    let client = client.choose(name, queries, bytes).unwrap();
    assert_eq!(client.contexts.len(), queries.len());
    client
}

/// Sends bytes unchanged until the server stops taking them. Returns whether it took all.
pub(crate) fn send_while_taken(client: &mut Client, bytes: &[u8]) -> bool {
    client.stream.socket().set_write_timeout(Some(STILL)).unwrap();
    let sent = client.stream.write_all(bytes);
    client.stream.socket().set_write_timeout(Some(BOUND)).unwrap();
    match sent {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            false
        }
    }
}
