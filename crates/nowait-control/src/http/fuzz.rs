//! The interface without a socket, for fuzz targets.
//!
//! Invariant: time is the runtime's own, which passes only while all wait: what is answered depends
//! on the bytes alone.

use std::sync::Arc;
use std::time::Duration;

use axum::middleware;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::runtime::Builder;

use crate::controlled_server::ControlledServer;
use crate::http::events::Events;
use crate::http::history::History;
use crate::http::http_server::answer_all;
use crate::http::routes::{self, Accepting};
use crate::http::token::{Token, token_first};

/// The bytes on their way in one direction.
const IN_FLIGHT: usize = 16 << 10;
/// When a client leaves: later than each time limit of a request.
const PATIENCE: Duration = Duration::from_secs(300);

/// Answers of `server` to a client that sends `pieces` and then waits; with a `token`, that is
/// asked for.
pub fn converse<'a>(
    server: Arc<dyn ControlledServer>,
    token: Option<Token>,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Vec<u8> {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let Ok(runtime) = runtime else { return Vec::new() };
    let mut router =
        routes::router(server, Events::new(), History::default(), Accepting::default());
    if let Some(token) = token {
        router = router.layer(middleware::from_fn_with_state(token, token_first));
    }
    let mut answers = Vec::new();
    runtime.block_on(async {
        let (near, far) = duplex(IN_FLIGHT);
        let (mut reader, mut writer) = tokio::io::split(near);
        let serving = tokio::spawn(answer_all(far, router));
        let sends = async {
            for piece in pieces {
                // The server may have closed it.
                let _ = writer.write_all(piece).await;
                tokio::task::yield_now().await;
            }
            std::future::pending::<()>().await;
        };
        let receives = async {
            // A stream of events has no end.
            let _ = tokio::time::timeout(PATIENCE, reader.read_to_end(&mut answers)).await;
        };
        tokio::select! { () = sends => {}, () = receives => {} }
        serving.abort();
    });
    runtime.shutdown_background();
    answers
}
