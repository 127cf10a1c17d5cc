//! A client of the control interface, which blocks.
//!
//! Invariant: a server that does not answer costs at most [`TIMEOUT`]; an answer is at most
//! [`MAX_ANSWER_BYTES`] long.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use nowait_nbd::client::Credentials;
use nowait_server::BackupEnd;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsConnector;

use crate::api::{
    AddExport, ConnectionInfo, PatchExport, SnapshotReport, SnapshotRequest, UpgradeReport,
    UpgradeRequest,
};
use crate::backup_api::{BackupInfo, EndBackup, StartBackup};
use crate::bitmap_api::{AddBitmap, BitmapInfo, MergeBitmaps, PatchBitmap};
use crate::client_error::ClientError;
use crate::counted_api::{ExportInfo, ServerInfo};
use crate::http::http_listener::Stream;
use crate::http::refusal::ErrorInfo;
use crate::http::token::Token;
use crate::move_api::{MoveInfo, ReplicationInfo, StartMove, StartReplication};

/// How long an answer may take that a command waits for; opening an image, or a flush, may take its time.
/// Beyond it: the command fails.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The longest answer that a command reads, in bytes.
/// Beyond it: the command fails.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Bytes that stand for themselves in a path (RFC 3986, section 2.3).
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// How a client on TCP shows that it may.
#[derive(Clone)]
pub enum Proof {
    /// By a token, which is sent in the clear.
    Token(Token),
    /// By a certificate.
    Certificate(Credentials),
}

/// A server's control socket.
pub struct Client {
    place: Place,
    runtime: Runtime,
}

enum Place {
    Unix(PathBuf),
    /// Host and port, the same as in a URI, and the proof.
    Tcp(String, u16, PathBuf, Proof),
}

impl Client {
    /// A client of the server at `socket`. Nothing is sent yet.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it.
    pub fn new(socket: &Path) -> io::Result<Self> {
        Self::of(Place::Unix(socket.to_owned()))
    }

    /// A client of the server at `port` of `host`. Nothing is sent yet.
    ///
    /// # Errors
    /// Like [`Client::new`].
    pub fn tcp(host: &str, port: u16, proof: Proof) -> io::Result<Self> {
        let authority = match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        Self::of(Place::Tcp(host.to_owned(), port, authority.into(), proof))
    }

    fn of(place: Place) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { place, runtime })
    }

    /// The path of the socket, or host and port.
    #[must_use]
    pub fn place(&self) -> &Path {
        match &self.place {
            Place::Unix(path) | Place::Tcp(_, _, path, _) => path,
        }
    }

    /// The server.
    ///
    /// # Errors
    /// Any [`ClientError`], as of all methods here.
    pub fn server(&self) -> Result<ServerInfo, ClientError> {
        self.get("/v1/server")
    }

    /// Its exports, the default first.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn exports(&self) -> Result<Vec<ExportInfo>, ClientError> {
        self.get("/v1/exports")
    }

    /// Its connections, the oldest first.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn connections(&self) -> Result<Vec<ConnectionInfo>, ClientError> {
        self.get("/v1/connections")
    }

    /// Adds an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn add(&self, export: &AddExport) -> Result<ExportInfo, ClientError> {
        read(&self.send(Method::POST, "/v1/exports", &body(export)?)?)
    }

    /// Removes the export called `name`, or number N for `@N`; with `hard` also while clients use it.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn remove(&self, name: &str, hard: bool) -> Result<(), ClientError> {
        let mode = if hard { "hard" } else { "safe" };
        let path = format!("{}?mode={mode}", export_path(name));
        self.send(Method::DELETE, &path, "").map(drop)
    }

    /// Changes an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn change(&self, name: &str, change: &PatchExport) -> Result<ExportInfo, ClientError> {
        read(&self.send(Method::PATCH, &export_path(name), &body(change)?)?)
    }

    /// Makes the completed writes of an export durable.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn flush(&self, name: &str) -> Result<(), ClientError> {
        self.send(Method::POST, &format!("{}/flush", export_path(name)), "").map(drop)
    }

    /// Makes an overlay for what is written to an export from then on.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn snapshot(
        &self,
        name: &str,
        snapshot: &SnapshotRequest,
    ) -> Result<SnapshotReport, ClientError> {
        let path = format!("{}/snapshot", export_path(name));
        read(&self.send(Method::POST, &path, &body(snapshot)?)?)
    }

    /// The dirty bitmaps of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn bitmaps(&self, name: &str) -> Result<Vec<BitmapInfo>, ClientError> {
        self.get(&format!("{}/bitmaps", export_path(name)))
    }

    /// Adds a bitmap to an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn add_bitmap(&self, name: &str, bitmap: &AddBitmap) -> Result<BitmapInfo, ClientError> {
        let path = format!("{}/bitmaps", export_path(name));
        read(&self.send(Method::POST, &path, &body(bitmap)?)?)
    }

    /// Removes a bitmap of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn remove_bitmap(&self, name: &str, bitmap: &str) -> Result<(), ClientError> {
        self.send(Method::DELETE, &bitmap_path(name, bitmap), "").map(drop)
    }

    /// Marks all of a bitmap of an export as clean.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn clear_bitmap(&self, name: &str, bitmap: &str) -> Result<(), ClientError> {
        let path = format!("{}/clear", bitmap_path(name, bitmap));
        self.send(Method::POST, &path, "").map(drop)
    }

    /// Changes a bitmap of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn change_bitmap(
        &self,
        name: &str,
        bitmap: &str,
        change: &PatchBitmap,
    ) -> Result<BitmapInfo, ClientError> {
        read(&self.send(Method::PATCH, &bitmap_path(name, bitmap), &body(change)?)?)
    }

    /// Merges bitmaps of an export into one of them.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn merge_bitmaps(
        &self,
        name: &str,
        bitmap: &str,
        merge: &MergeBitmaps,
    ) -> Result<BitmapInfo, ClientError> {
        let path = format!("{}/merge", bitmap_path(name, bitmap));
        read(&self.send(Method::POST, &path, &body(merge)?)?)
    }

    /// Begins to move the disk of an export to another place.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn start_move(&self, name: &str, start: &StartMove) -> Result<MoveInfo, ClientError> {
        read(&self.send(Method::POST, &move_path(name), &body(start)?)?)
    }

    /// The move of the disk of an export, or the last one that has ended.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn disk_move(&self, name: &str) -> Result<MoveInfo, ClientError> {
        read(&self.send(Method::GET, &move_path(name), "")?)
    }

    /// Ends the move of the disk of an export, which stays where it is.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn cancel_move(&self, name: &str) -> Result<MoveInfo, ClientError> {
        read(&self.send(Method::DELETE, &move_path(name), "")?)
    }

    /// Begins to replicate the disk of an export to an export of another server.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn start_replication(
        &self,
        name: &str,
        start: &StartReplication,
    ) -> Result<ReplicationInfo, ClientError> {
        read(&self.send(Method::POST, &replication_path(name), &body(start)?)?)
    }

    /// The replication of the disk of an export, or the last one that has ended.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn replication(&self, name: &str) -> Result<ReplicationInfo, ClientError> {
        read(&self.send(Method::GET, &replication_path(name), "")?)
    }

    /// Ends the replication of the disk of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn stop_replication(&self, name: &str) -> Result<ReplicationInfo, ClientError> {
        read(&self.send(Method::DELETE, &replication_path(name), "")?)
    }

    /// Begins backups of an export and of those with it.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn start_backup(
        &self,
        name: &str,
        backup: &StartBackup,
    ) -> Result<Vec<BackupInfo>, ClientError> {
        let path = format!("{}/backup", export_path(name));
        read(&self.send(Method::POST, &path, &body(backup)?)?)
    }

    /// Ends the backups of an export and of those with it.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn end_backup(
        &self,
        name: &str,
        others: &EndBackup,
        end: BackupEnd,
    ) -> Result<(), ClientError> {
        let word = if end == BackupEnd::Commit { "commit" } else { "abort" };
        let path = format!("{}/backup/{word}", export_path(name));
        self.send(Method::POST, &path, &body(others)?).map(drop)
    }

    /// Closes a connection.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn disconnect(&self, id: u64) -> Result<(), ClientError> {
        self.send(Method::DELETE, &format!("/v1/connections/{id}"), "").map(drop)
    }

    /// Has a new program take over.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn upgrade(&self, upgrade: &UpgradeRequest) -> Result<UpgradeReport, ClientError> {
        read(&self.send(Method::POST, "/v1/upgrade", &body(upgrade)?)?)
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        read(&self.send(Method::GET, path, "")?)
    }

    /// Sends a request. Returns the body of its answer.
    fn send(&self, method: Method, path: &str, body: &str) -> Result<Bytes, ClientError> {
        let (host, token) = match &self.place {
            Place::Unix(_) => ("localhost".into(), None),
            Place::Tcp(_, _, authority, Proof::Token(token)) => {
                (authority.to_string_lossy(), Some(token.header()))
            }
            Place::Tcp(_, _, authority, _) => (authority.to_string_lossy(), None),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, &*host)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = request
            .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
            .map_err(|error| ClientError::Answer(error.to_string()))?;
        let late = |_| ClientError::Unreachable(io::ErrorKind::TimedOut.into());
        self.runtime.block_on(async {
            tokio::time::timeout(TIMEOUT, self.exchange(request)).await.map_err(late)?
        })
    }

    async fn connect(&self) -> io::Result<Pin<Box<dyn Stream>>> {
        match &self.place {
            Place::Unix(path) => Ok(Box::pin(UnixStream::connect(path).await?)),
            Place::Tcp(host, port, _, proof) => {
                let stream = TcpStream::connect((&**host, *port)).await?;
                let Proof::Certificate(credentials) = proof else { return Ok(Box::pin(stream)) };
                let (config, name) = credentials.config();
                Ok(Box::pin(TlsConnector::from(config).connect(name, stream).await?))
            }
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes, ClientError> {
        let lost = |error: hyper::Error| ClientError::Answer(error.to_string());
        let stream = self.connect().await.map_err(ClientError::Unreachable)?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        let connection = tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(lost)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| ClientError::Answer(error.to_string()))?.to_bytes();
        connection.abort();
        if status.is_success() {
            return Ok(body);
        }
        let why = serde_json::from_slice::<ErrorInfo>(&body).map(|info| info.error);
        Err(ClientError::Refused(why.unwrap_or_else(|_| status.to_string())))
    }
}

/// The path of export `name`; without a name that of the default export, as for clients of NBD.
fn export_path(name: &str) -> String {
    match name {
        "" => "/v1/exports/@0".into(),
        name => format!("/v1/exports/{}", utf8_percent_encode(name, PLAIN)),
    }
}

/// The path of the replication of the disk of an export.
fn replication_path(name: &str) -> String {
    format!("{}/replicate", export_path(name))
}

/// The path of the move of the disk of an export.
fn move_path(name: &str) -> String {
    format!("{}/move", export_path(name))
}

/// The path of a bitmap of an export.
fn bitmap_path(export: &str, bitmap: &str) -> String {
    format!("{}/bitmaps/{}", export_path(export), utf8_percent_encode(bitmap, PLAIN))
}

fn body(value: &impl Serialize) -> Result<String, ClientError> {
    serde_json::to_string(value).map_err(|error| ClientError::Answer(error.to_string()))
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(body).map_err(|error| ClientError::Answer(error.to_string()))
}
