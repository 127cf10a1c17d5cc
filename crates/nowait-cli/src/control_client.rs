//! The running server that a command is for.
//!
//! Invariant: a command never chooses between several servers; a token goes over no network.

use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};

use nowait_control::{Client, ClientError, Proof, Token};
use nowait_daemon::error::{CliError, os_message, plain};
use nowait_nbd::Address;
use nowait_nbd::client::{CipherSuites, Credentials};
use nowait_remote::Location;
use serde::Serialize;

use crate::args::control_args::ServerArgs;
use crate::output;
use nowait_daemon::control::control_socket;
use nowait_daemon::control::token_file;

/// The variable of the environment with the token of a server on TCP.
const TOKEN: &str = "NOWAIT_CONTROL_TOKEN";

/// The server that `args` name, or the only one of this user.
///
/// # Errors
/// There is none, or more than one; or there is no token, or no certificate, for the one named.
pub(crate) fn the_client(args: &ServerArgs) -> Result<Client, CliError> {
    match &args.control {
        Some(Address::Unix(path)) => return at(path),
        Some(Address::Tcp { host, port }) => return on_tcp(args, host, *port),
        None => {}
    }
    let sockets: Vec<PathBuf> = control_socket::all();
    match sockets.as_slice() {
        [] => Err(no_server()),
        [socket] => at(socket),
        all => {
            let all: Vec<_> = all.iter().map(|socket| socket.to_string_lossy()).collect();
            let all = plain(&all.join(", "));
            Err(CliError::new(format!(
                "several servers are running; choose one by --control: {all}"
            )))
        }
    }
}

/// The server at `socket`.
///
/// # Errors
/// Like [`Client::new`].
pub(crate) fn at(socket: &Path) -> Result<Client, CliError> {
    Client::new(socket).map_err(|error| CliError::at(socket, error))
}

/// There is no server to ask.
pub(crate) fn no_server() -> CliError {
    CliError::new("no server of this user is running (or it was started with --control off)")
}

fn on_tcp(args: &ServerArgs, host: &str, port: u16) -> Result<Client, CliError> {
    let proof = match &args.control_tls_certs {
        Some(directory) => {
            let credentials = Credentials::load(directory, Some(host), CipherSuites::All);
            Proof::Certificate(credentials.map_err(|error| CliError::new(error.to_string()))?)
        }
        None => {
            check_loopback(host, port)?;
            Proof::Token(token(args, port)?)
        }
    };
    let client = Client::tcp(host, port, proof);
    client.map_err(|error| CliError::new(format!("tcp:{host}:{port}: {}", os_message(&error))))
}

fn check_loopback(host: &str, port: u16) -> Result<(), CliError> {
    let failed = |why: &str| CliError::new(format!("tcp:{}:{port}: {why}", plain(host)));
    let mut all = (host, port).to_socket_addrs().map_err(|error| failed(&os_message(&error)))?;
    match all.all(|address| address.ip().is_loopback()) {
        true => Ok(()),
        false => Err(failed("a token is sent to this host only (give --control-tls-certs)")),
    }
}

/// The token from the file of `args`, the environment, or a server of this user at `port`.
fn token(args: &ServerArgs, port: u16) -> Result<Token, CliError> {
    if let Some(path) = &args.control_token {
        return token_file::read(path);
    }
    if let Some(text) = std::env::var_os(TOKEN) {
        let text = text.into_string().unwrap_or_default();
        return Token::parse(&text).map_err(|why| CliError::new(format!("{TOKEN}: {why}")));
    }
    match token_file::of_port(port).filter(|path| path.exists()) {
        Some(path) => token_file::read(&path),
        None => Err(CliError::new(format!(
            "there is no token for port {port} (give --control-token FILE, or set {TOKEN})"
        ))),
    }
}

/// A path as it is sent to a server.
pub(crate) fn absolute(path: &Path) -> Result<String, CliError> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let text = absolute.into_os_string().into_string();
    text.map_err(|_| CliError::at(path, "a path that is not text cannot be sent"))
}

/// An image as it is sent to a server: a URI as it is.
pub(crate) fn image_name(image: &Path) -> Result<String, CliError> {
    match Location::parse(&image.into()).map_err(|error| CliError::at(image, error))? {
        Location::File(path) => absolute(&path),
        location => Ok(location.to_string()),
    }
}

/// Prints the answer of the server of `args`: as JSON, or in `words`.
pub(crate) fn ask<T: Serialize>(
    args: &ServerArgs,
    request: impl FnOnce(&Client) -> Result<T, ClientError>,
    words: impl FnOnce(&T) -> String,
) -> Result<(), CliError> {
    let client = the_client(args)?;
    let answer = request(&client).map_err(|error| failed(client.place(), &error))?;
    if args.json { print_json(&answer) } else { output::print(words(&answer)) }
}

/// Has the server of `args` do something.
pub(crate) fn tell(
    args: &ServerArgs,
    request: impl FnOnce(&Client) -> Result<(), ClientError>,
) -> Result<(), CliError> {
    let client = the_client(args)?;
    request(&client).map_err(|error| failed(client.place(), &error))
}

/// The failure of a request to the server at `socket`, for the user.
pub(crate) fn failed(socket: &Path, error: &ClientError) -> CliError {
    match error {
        ClientError::Refused(why) => CliError::new(plain(why)),
        _ => CliError::at(socket, plain(&error.to_string())),
    }
}

/// Prints `value` as a line of JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(value).map_err(|error| CliError::new(error.to_string()))?;
    output::print(text + "\n")
}
