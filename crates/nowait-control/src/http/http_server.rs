//! The thread that serves the control interface.
//!
//! Invariant: connections, the time of a request's head and of an answer that is not read, and the
//! threads for what may block are bounded. Clients of one socket keep none out at another one.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::Extension;
use axum::{Router, middleware};
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{oneshot, watch};

use crate::controlled_server::ControlledServer;
use crate::http::blocking_calls;
use crate::http::bounds::{MAX_HEAD_BYTES, prevent_caching};
use crate::http::connection_slots::{ConnectionSlot, ConnectionSlots};
use crate::http::events::Events;
use crate::http::history::History;
use crate::http::http_line_endings::LineEndingCheck;
use crate::http::http_listener::{Accepted, Acceptor, HttpListener};
use crate::http::routes::{self, Accepting};

/// How long a client may take to send the head of a request.
/// Beyond it: the connection is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long clients may take to leave a server that ends.
/// Beyond it: they are disconnected.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a connection that could not be accepted.
const BACK_OFF: Duration = Duration::from_millis(100);

/// The running control interface of a server. It ends when this is dropped.
pub struct HttpServer {
    stop: Option<oneshot::Sender<Duration>>,
    thread: Option<JoinHandle<()>>,
}

/// A socket with what its clients are answered by, and its places.
struct Endpoint {
    acceptor: Acceptor,
    router: Router,
    slots: Arc<ConnectionSlots>,
    /// Whether connections are accepted at the moment.
    accepts: watch::Receiver<bool>,
}

impl HttpServer {
    /// Answers the clients of `listeners` on a new thread.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: the thread or its descriptors could not be made.
    pub fn start(
        listeners: Vec<HttpListener>,
        server: Arc<dyn ControlledServer>,
    ) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        blocking_calls::start()?;
        let accepting = Accepting::new(watch::Sender::new(true));
        let endpoints = {
            let _inside = runtime.enter();
            let events = Events::new();
            runtime.spawn(events.clone().run(server.clone()));
            let history = History::default();
            runtime.spawn(history.clone().run(server.clone()));
            let router = routes::router(server, events, history, accepting.clone());
            let endpoint = |listener: HttpListener| {
                let (acceptor, router) = listener.accept_by(&router)?;
                let (slots, accepts) = (ConnectionSlots::new(), accepting.subscribe());
                Ok(Endpoint { acceptor, router, slots, accepts })
            };
            listeners.into_iter().map(endpoint).collect::<io::Result<Vec<_>>>()?
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("nowait-control".into());
        let thread = thread.spawn(move || run(runtime, endpoints, stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl HttpServer {
    /// Accepts no more connections, and waits a moment until the clients that are connected have
    /// their answers and leave.
    pub fn finish(mut self) {
        if let Some(stop) = self.stop.take() {
            // The thread may have ended with a panic, which was reported.
            let _ = stop.send(FINISH_TIMEOUT);
        }
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

fn run(runtime: Runtime, endpoints: Vec<Endpoint>, stopped: oneshot::Receiver<Duration>) {
    blocking_calls::lower_priority();
    let all: Vec<_> = endpoints.iter().map(|endpoint| endpoint.slots.clone()).collect();
    let spawn = |endpoint| runtime.spawn(accept_all(endpoint));
    let accepting: Vec<_> = endpoints.into_iter().map(spawn).collect();
    runtime.block_on(async {
        if let Ok(timeout) = stopped.await {
            accepting.iter().for_each(tokio::task::JoinHandle::abort);
            let all_left = async {
                for slots in &all {
                    slots.all_left().await;
                }
            };
            // Those that stay have no request that is answered.
            let _ = tokio::time::timeout(timeout, all_left).await;
        }
    });
    // A call that blocks on another thread may block for good.
    runtime.shutdown_background();
}

async fn accept_all(endpoint: Endpoint) {
    let Endpoint { acceptor, router, slots, mut accepts } = endpoint;
    let time = acceptor.authentication_timeout();
    loop {
        let authenticated = match time {
            None => Some(slots.authenticated().await),
            Some(_) => None,
        };
        let Some(accepted) = accept(&acceptor, &mut accepts).await else { return };
        let accepted = match accepted {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                tracing::warn!("control socket: another user's connection was closed");
                continue;
            }
            Err(error) => {
                tracing::warn!("control socket: cannot accept a connection: {error}");
                tokio::time::sleep(BACK_OFF).await;
                continue;
            }
        };
        let slot = authenticated.unwrap_or_else(|| slots.unauthenticated());
        let router = router.clone().layer(Extension(slot.clone()));
        tokio::spawn(async move {
            let time = time.unwrap_or_default();
            select(pin!(talk(accepted, &slot, router)), pin!(slot.lost(time))).await;
        });
        // Its first bytes are processed before a newer connection may take its slot.
        tokio::task::yield_now().await;
    }
}

/// The next connection, at a moment at which connections are accepted; `None` if there will be none
/// any more.
async fn accept(
    acceptor: &Acceptor,
    accepts: &mut watch::Receiver<bool>,
) -> Option<io::Result<Accepted>> {
    loop {
        accepts.wait_for(|accepts| *accepts).await.ok()?;
        let stops = accepts.wait_for(|accepts| !accepts);
        match select(pin!(acceptor.accept()), pin!(stops)).await {
            Either::Left((accepted, _)) => return Some(accepted),
            Either::Right((stopped, _)) => drop(stopped.ok()?),
        }
    }
}

/// Answers the requests of one client.
async fn talk(accepted: Accepted, slot: &ConnectionSlot, router: Router) {
    if let Some(stream) = accepted.stream(slot).await {
        answer_all(stream, router).await;
    }
}

/// Answers the requests on `stream`.
pub(crate) async fn answer_all(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
) {
    let router = router.layer(middleware::map_response(prevent_caching));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(
            TokioIo::new(LineEndingCheck::new(stream)),
            TowerToHyperService::new(router),
        );
    // A client that breaks the protocol or leaves ends its own connection only.
    let _ = connection.await;
}
