//! The thread that serves the control interface.
//!
//! Invariant: only the user of the server, and root, are answered. Connections, the time of a
//! request's head and of an answer that is not read, and the threads for what may block are bounded.

use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, oneshot};
use tokio_io_timeout::TimeoutStream;

use crate::controlled_server::ControlledServer;
use crate::events::Events;
use crate::routes;

/// The most connections at once; further ones wait.
const MAX_CONNECTIONS: usize = 64;
/// The most threads for requests that may block.
const MAX_BLOCKING_THREADS: usize = 4;
/// How long a client may take to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may leave an answer unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest head of a request, in bytes: the name of an export may have 4096, which are three
/// times as many when they are percent-encoded.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// How long clients may take to leave a server that ends.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a connection that could not be accepted.
const BACK_OFF: Duration = Duration::from_millis(100);

/// The running control interface of a server. It ends when this is dropped.
pub struct HttpServer {
    stop: Option<oneshot::Sender<Duration>>,
    thread: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// Answers the clients of `listener` on a new thread.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: the thread or its descriptors could not be made.
    pub fn start(listener: StdListener, server: Arc<dyn ControlledServer>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(MAX_BLOCKING_THREADS)
            .thread_name("nowait-control")
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            UnixListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("nowait-control".into());
        let thread = thread.spawn(move || run(runtime, listener, server, stopped))?;
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

fn run(
    runtime: Runtime,
    listener: UnixListener,
    server: Arc<dyn ControlledServer>,
    stopped: oneshot::Receiver<Duration>,
) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let events = Events::new();
    runtime.spawn(events.clone().run(server.clone()));
    let router = routes::router(server, events);
    let accepting = runtime.spawn(accept_all(listener, router, permits.clone()));
    runtime.block_on(async {
        if let Ok(timeout) = stopped.await {
            accepting.abort();
            let all_left = permits.acquire_many(MAX_CONNECTIONS as u32);
            // Those that stay have no request that is answered.
            let _ = tokio::time::timeout(timeout, all_left).await;
        }
    });
    // What blocks on another thread may block for good.
    runtime.shutdown_background();
}

async fn accept_all(listener: UnixListener, router: Router, permits: Arc<Semaphore>) {
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("control socket: cannot accept a connection: {error}");
                tokio::time::sleep(BACK_OFF).await;
                continue;
            }
        };
        if !is_allowed(&stream) {
            tracing::warn!("control socket: another user's connection was closed");
            continue;
        }
        let service = TowerToHyperService::new(router.clone());
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(WRITE_TIMEOUT));
        let stream = TokioIo::new(Box::pin(stream));
        tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(stream, service);
            // A client that breaks the protocol or leaves ends its own connection only.
            let _ = connection.await;
            drop(permit);
        });
    }
}

/// Whether the client is the user of this process, or root.
fn is_allowed(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
