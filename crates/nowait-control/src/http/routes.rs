//! The paths of the control interface and what they do.
//!
//! Invariant: bodies are bounded ([`bounds`]); an answer that is not 2xx is JSON with one line
//! that says why. What may block runs on a thread for that.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, FromRequestParts, Path, RawQuery, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use nowait_server::BackupEnd;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::api::{AddExport, PatchExport, SnapshotRequest, UpgradeRequest};
use crate::backup_api::{EndBackup, StartBackup};
use crate::bitmap_api::{AddBitmap, MergeBitmaps, PatchBitmap};
use crate::controlled_server::{ControlError, ControlledServer};
use crate::counted_api::ServerInfo;
use crate::http::blocking_calls::blocking;
use crate::http::events::Events;
use crate::http::history::History;
use crate::http::origin::own_origin_first;
use crate::http::refusal::refuse;
use crate::http::{bounds, metrics, page};
use crate::move_api::{StartMove, StartReplication};

/// The most exports whose backups begin or end together with that of another one.
/// Beyond it: 400 (`Invalid`), none begins or ends.
const MAX_TOGETHER: usize = 255;

type Server = Arc<dyn ControlledServer>;
type Answer = Result<Response, ControlError>;
/// Whether the interface accepts connections.
pub(crate) type Accepting = Arc<watch::Sender<bool>>;

/// The service for all paths.
pub(crate) fn router(
    server: Server,
    events: Events,
    history: History,
    accepting: Accepting,
) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(metrics))
        .route("/v1/server", get(info))
        .route("/v1/events", get(follow))
        .route("/v1/history", get(past))
        .route("/v1/exports", get(list).post(add))
        .route("/v1/exports/{name}", get(show).delete(remove).patch(change))
        .route("/v1/exports/{name}/flush", post(flush))
        .route("/v1/exports/{name}/snapshot", post(snapshot))
        .route("/v1/exports/{name}/backup", get(backup).post(start_backup))
        .route("/v1/exports/{name}/backup/commit", post(commit_backup))
        .route("/v1/exports/{name}/backup/abort", post(abort_backup))
        .route("/v1/exports/{name}/move", get(disk_move).post(start_move).delete(cancel_move))
        .route(
            "/v1/exports/{name}/replicate",
            get(replication).post(start_replication).delete(stop_replication),
        )
        .route("/v1/exports/{name}/bitmaps", get(bitmaps).post(add_bitmap))
        .route("/v1/exports/{name}/bitmaps/{bitmap}", delete(remove_bitmap).patch(change_bitmap))
        .route("/v1/exports/{name}/bitmaps/{bitmap}/clear", post(clear_bitmap))
        .route("/v1/exports/{name}/bitmaps/{bitmap}/merge", post(merge_bitmaps))
        .route(
            "/v1/connections",
            get(|State(server): State<Server>| on_thread(move || json(server.connections()))),
        )
        .route("/v1/connections/{id}", delete(disconnect))
        .route("/v1/upgrade", post(upgrade))
        .fallback(|| async {
            ControlError::NotFound("there is no such path".into()).into_response()
        })
        .method_not_allowed_fallback(|| async {
            refuse(StatusCode::METHOD_NOT_ALLOWED, "this path has no such method")
        })
        .layer(middleware::from_fn(bounds::body_first))
        .layer(middleware::from_fn(own_origin_first))
        .layer(middleware::from_fn(bounds::head_first))
        .layer(Extension(events))
        .layer(Extension(history))
        .layer(Extension(accepting))
        .with_state(server)
}

fn json(value: impl Serialize) -> Answer {
    Ok(axum::Json(value).into_response())
}

/// The part of the path that names what a request is for.
struct Part(String);

impl<S: Send + Sync> FromRequestParts<S> for Part {
    type Rejection = ControlError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ControlError> {
        let part = Path::<String>::from_request_parts(parts, state).await;
        let part = part.map_err(|rejection| ControlError::Invalid(rejection.body_text()))?;
        Ok(Self(part.0))
    }
}

/// Runs what may block.
async fn on_thread(act: impl FnOnce() -> Answer + Send + 'static) -> Answer {
    let failed = || ControlError::Failed("the request has panicked, or got no thread".into());
    blocking(act).await.ok_or_else(failed)?
}

/// Runs what may block, and whose answer says nothing more.
async fn done(act: impl FnOnce() -> Result<(), ControlError> + Send + 'static) -> Answer {
    on_thread(|| act().map(|()| StatusCode::NO_CONTENT.into_response())).await
}

/// Runs what may block and makes or begins something; the answer is what that is.
async fn made<T: Serialize>(
    status: StatusCode,
    act: impl FnOnce() -> Result<T, ControlError> + Send + 'static,
) -> Answer {
    on_thread(move || Ok((status, axum::Json(act()?)).into_response())).await
}

async fn info(State(server): State<Server>, Extension(events): Extension<Events>) -> Answer {
    on_thread(move || json(ServerInfo { event_subscribers: events.subscribers(), ..server.info() }))
        .await
}

/// The events from now on, until the client leaves or does not read.
async fn follow(Extension(events): Extension<Events>) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/event-stream")];
    match events.subscribe() {
        Some(stream) => (headers, Body::from_stream(stream)).into_response(),
        None => refuse(StatusCode::SERVICE_UNAVAILABLE, "too many clients follow the events"),
    }
}

async fn past(Extension(history): Extension<History>) -> Answer {
    on_thread(move || json(history.info())).await
}

async fn metrics(State(server): State<Server>) -> Answer {
    on_thread(move || {
        let text = metrics::text_of(server.info(), server.exports());
        let text = text.map_err(|error| ControlError::Failed(error.to_string()))?;
        Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
    })
    .await
}

async fn list(State(server): State<Server>) -> Answer {
    on_thread(move || json(server.exports())).await
}

async fn show(State(server): State<Server>, Part(name): Part) -> Answer {
    on_thread(move || json(server.export(find(&server, &name)?)?)).await
}

async fn add(State(server): State<Server>, body: Bytes) -> Answer {
    let export: AddExport = parse(&body)?;
    made(StatusCode::CREATED, move || server.add(export)).await
}

async fn remove(
    State(server): State<Server>,
    Part(name): Part,
    RawQuery(query): RawQuery,
) -> Answer {
    let hard = match query.as_deref() {
        None | Some("" | "mode=safe") => false,
        Some("mode=hard") => true,
        Some(_) => return Err(ControlError::Invalid("the mode is 'safe' or 'hard'".into())),
    };
    done(move || server.remove(find(&server, &name)?, hard)).await
}

async fn change(State(server): State<Server>, Part(name): Part, body: Bytes) -> Answer {
    let changes: PatchExport = parse(&body)?;
    on_thread(move || json(server.change(find(&server, &name)?, changes)?)).await
}

async fn flush(State(server): State<Server>, Part(name): Part) -> Answer {
    done(move || server.flush(find(&server, &name)?)).await
}

async fn snapshot(State(server): State<Server>, Part(name): Part, body: Bytes) -> Answer {
    let request: SnapshotRequest = parse(&body)?;
    on_thread(move || json(server.snapshot(find(&server, &name)?, request)?)).await
}

async fn backup(State(server): State<Server>, Part(name): Part) -> Answer {
    let none = || ControlError::NotFound("it has no backup".into());
    on_thread(move || json(server.export(find(&server, &name)?)?.backup.ok_or_else(none)?)).await
}

/// The numbers of the export called `name` and of those `with` it.
fn find_all(server: &Server, name: String, with: &[String]) -> Result<Vec<u64>, ControlError> {
    if with.len() > MAX_TOGETHER {
        let why = format!("at most {MAX_TOGETHER} backups begin or end with another one");
        return Err(ControlError::Invalid(why));
    }
    let all = std::iter::once(&name).chain(with);
    all.map(|name| find(server, name)).collect()
}

async fn start_backup(State(server): State<Server>, Part(name): Part, body: Bytes) -> Answer {
    let backup: StartBackup = parse_or_default(&body)?;
    made(StatusCode::CREATED, move || {
        server.start_backup(&find_all(&server, name, &backup.with)?, backup)
    })
    .await
}

async fn commit_backup(state: State<Server>, name: Part, body: Bytes) -> Answer {
    end_backup(state, name, &body, BackupEnd::Commit).await
}

async fn abort_backup(state: State<Server>, name: Part, body: Bytes) -> Answer {
    end_backup(state, name, &body, BackupEnd::Abort).await
}

async fn end_backup(
    State(server): State<Server>,
    Part(name): Part,
    body: &Bytes,
    end: BackupEnd,
) -> Answer {
    let others: EndBackup = parse_or_default(body)?;
    done(move || server.end_backup(&find_all(&server, name, &others.with)?, end)).await
}

async fn start_move(State(server): State<Server>, Part(name): Part, body: Bytes) -> Answer {
    let start: StartMove = parse(&body)?;
    made(StatusCode::ACCEPTED, move || server.start_move(find(&server, &name)?, start)).await
}

async fn disk_move(State(server): State<Server>, Part(name): Part) -> Answer {
    on_thread(move || json(server.disk_move(find(&server, &name)?)?)).await
}

async fn cancel_move(State(server): State<Server>, Part(name): Part) -> Answer {
    on_thread(move || json(server.cancel_move(find(&server, &name)?)?)).await
}

async fn start_replication(State(server): State<Server>, Part(name): Part, body: Bytes) -> Answer {
    let start: StartReplication = parse(&body)?;
    made(StatusCode::ACCEPTED, move || server.start_replication(find(&server, &name)?, start)).await
}

async fn replication(State(server): State<Server>, Part(name): Part) -> Answer {
    on_thread(move || json(server.replication(find(&server, &name)?)?)).await
}

async fn stop_replication(State(server): State<Server>, Part(name): Part) -> Answer {
    on_thread(move || json(server.stop_replication(find(&server, &name)?)?)).await
}

/// The parts of the path that name an export and a bitmap of it.
struct BitmapPath(String, String);

impl<S: Send + Sync> FromRequestParts<S> for BitmapPath {
    type Rejection = ControlError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ControlError> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let path = path.map_err(|rejection| ControlError::Invalid(rejection.body_text()))?;
        Ok(Self(path.0.0, path.0.1))
    }
}

async fn bitmaps(State(server): State<Server>, Part(name): Part) -> Answer {
    on_thread(move || json(server.bitmaps(find(&server, &name)?)?)).await
}

async fn add_bitmap(State(server): State<Server>, Part(name): Part, body: Bytes) -> Answer {
    let bitmap: AddBitmap = parse(&body)?;
    made(StatusCode::CREATED, move || server.add_bitmap(find(&server, &name)?, bitmap)).await
}

async fn remove_bitmap(
    State(server): State<Server>,
    BitmapPath(name, bitmap): BitmapPath,
) -> Answer {
    done(move || server.remove_bitmap(find(&server, &name)?, &bitmap)).await
}

async fn clear_bitmap(
    State(server): State<Server>,
    BitmapPath(name, bitmap): BitmapPath,
) -> Answer {
    done(move || server.clear_bitmap(find(&server, &name)?, &bitmap)).await
}

async fn change_bitmap(
    State(server): State<Server>,
    BitmapPath(name, bitmap): BitmapPath,
    body: Bytes,
) -> Answer {
    let change: PatchBitmap = parse(&body)?;
    on_thread(move || json(server.change_bitmap(find(&server, &name)?, &bitmap, change)?)).await
}

async fn merge_bitmaps(
    State(server): State<Server>,
    BitmapPath(name, bitmap): BitmapPath,
    body: Bytes,
) -> Answer {
    let merge: MergeBitmaps = parse(&body)?;
    on_thread(move || json(server.merge_bitmaps(find(&server, &name)?, &bitmap, merge)?)).await
}

async fn disconnect(State(server): State<Server>, Part(id): Part) -> Answer {
    let wrong = |_| ControlError::Invalid("the id of a connection is a number".into());
    let id: u64 = id.parse().map_err(wrong)?;
    done(move || server.disconnect(id)).await
}

/// The sockets of the interface are the new program's, too: connections that come meanwhile are for
/// it, or for this one if it goes on.
async fn upgrade(
    State(server): State<Server>,
    Extension(accepting): Extension<Accepting>,
    body: Bytes,
) -> Answer {
    let request: UpgradeRequest = parse_or_default(&body)?;
    accepting.send_replace(false);
    let upgraded = on_thread(move || json(server.upgrade(request)?)).await;
    if upgraded.is_err() {
        accepting.send_replace(true);
    }
    upgraded
}

/// The number of the export called `name`, or, if there is none, the number N of `@N`.
fn find(server: &Server, name: &str) -> Result<u64, ControlError> {
    let number = || name.strip_prefix('@').and_then(|number| number.parse().ok());
    let none = || ControlError::NotFound("there is no such export".into());
    server.find(name).or_else(number).ok_or_else(none)
}

/// The content of a body that may be empty.
fn parse_or_default<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T, ControlError> {
    if body.is_empty() { Ok(T::default()) } else { parse(body) }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ControlError> {
    // serde takes the values of an array for those of the fields, in their order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(ControlError::Invalid("the body is not a JSON object".into()));
    }
    serde_json::from_slice(body).map_err(|error| ControlError::Invalid(error.to_string()))
}
