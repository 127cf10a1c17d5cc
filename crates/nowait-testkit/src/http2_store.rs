//! The connections of a web server that speaks HTTP/2 only.
//!
//! Invariant: a request is answered as by HTTP/1.1, with the same lies; those about its framing say nothing here.

use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use h2::server::{Builder, Connection, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use hyper::body::Bytes;
use hyper::http::{Request as HeadRequest, Response};
use rustls::ServerConfig;
use rustls::server::Acceptor;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::sleep;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::web_request::Request;
use crate::web_script::{Http1Refusal, Lie, Script, answer_of};

/// The pause between two parts of a slow answer.
const PAUSE: Duration = Duration::from_millis(50);
/// A long time.
const LONG: Duration = Duration::from_secs(60);

type Shared = Arc<Mutex<Script>>;
type Tls = TlsStream<tokio::net::TcpStream>;

/// Serves a connection if the script has TLS with HTTP/2 only; else returns it.
pub(crate) fn serve(stream: TcpStream, script: &Shared) -> Option<TcpStream> {
    let config = script.lock().unwrap_or_else(PoisonError::into_inner).tls.clone();
    let config = config.filter(|config| config.alpn_protocols == [b"h2"]);
    let Some(config) = config else { return Some(stream) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    // A connection that ends is what the tests are about.
    let _ = runtime.block_on(connection(stream, config, script));
    None
}

async fn connection(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    script: &Shared,
) -> Result<(), io::Error> {
    stream.set_nonblocking(true)?;
    let stream = tokio::net::TcpStream::from_std(stream)?;
    let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let offered = hello.client_hello().alpn();
    let is_offered = offered.is_some_and(|mut names| names.any(|name| name == b"h2"));
    let refusal = script.lock().unwrap_or_else(PoisonError::into_inner).http1_refusal;
    let config = match (is_offered, refusal) {
        (true, _) | (false, Http1Refusal::Alert) => config,
        (false, Http1Refusal::Close) => return Ok(()),
        (false, Http1Refusal::Frames) => {
            let mut config = Arc::unwrap_or_clone(config);
            config.alpn_protocols.clear();
            Arc::new(config)
        }
    };
    let stream = hello.into_stream(config).await?;
    let mut builder = Builder::new();
    {
        let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
        script.http2_connections += 1;
        if let Some(most) = script.max_streams {
            builder.max_concurrent_streams(most);
        }
    }
    let connection = builder.handshake(stream).await.map_err(io::Error::other)?;
    requests(connection, script).await.map_err(io::Error::other)
}

async fn requests(
    mut connection: Connection<Tls, Bytes>,
    script: &Shared,
) -> Result<(), h2::Error> {
    let (lies, mut told) = unbounded_channel();
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let accepted = tokio::select! {
            accepted = connection.accept() => accepted,
            lie = told.recv() => match lie {
                Some(Lie::GoAway) => {
                    connection.abrupt_shutdown(Reason::NO_ERROR);
                    continue;
                }
                Some(Lie::Silence) => {
                    sleep(LONG).await;
                    return Ok(());
                }
                _ => return Ok(()),
            },
        };
        let Some(accepted) = accepted else { return Ok(()) };
        let (request, respond) = accepted?;
        let now_open = open.fetch_add(1, Ordering::Relaxed) + 1;
        {
            let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
            script.most_streams = script.most_streams.max(now_open);
        }
        let (script, lies, open) = (script.clone(), lies.clone(), open.clone());
        tokio::spawn(async move {
            // A stream that the client resets is what some tests are about.
            let _ = respond_to(request, respond, &script, &lies, &open).await;
        });
    }
}

async fn respond_to(
    request: HeadRequest<RecvStream>,
    mut respond: SendResponse<Bytes>,
    script: &Shared,
    lies: &UnboundedSender<Lie>,
    open: &AtomicUsize,
) -> Result<(), h2::Error> {
    let (head, mut body) = request.into_parts();
    let mut data = Vec::new();
    while let Some(part) = body.data().await {
        let part = part?;
        body.flow_control().release_capacity(part.len())?;
        data.extend_from_slice(&part);
    }
    let text =
        |value: &hyper::header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into();
    let headers = head.headers.iter().map(|(name, value)| (name.to_string(), text(value)));
    let mut headers: Vec<(String, String)> = headers.collect();
    let host = head.uri.authority().map_or("", |authority| authority.as_str());
    headers.push(("host".into(), host.to_owned()));
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let method = head.method.to_string();
    let (answer, lie, delay) = answer_of(&Request { method, path, headers, body: data }, script);
    sleep(delay).await;
    open.fetch_sub(1, Ordering::Relaxed);
    match lie {
        Some(lie @ (Lie::HangUp | Lie::GoAway | Lie::Silence)) => {
            let _ = lies.send(lie);
            // Its end is that of the connection.
            sleep(LONG).await;
            return Ok(());
        }
        Some(Lie::Reset(code)) => {
            respond.send_reset(code.into());
            return Ok(());
        }
        _ => {}
    }
    let (head, body) = parsed(&answer);
    let stream = respond.send_response(head, body.is_empty())?;
    if body.is_empty() { Ok(()) } else { send(stream, body, lie.as_ref()).await }
}

/// The head and the body of an answer in the bytes of HTTP/1.1.
fn parsed(answer: &[u8]) -> (Response<()>, Bytes) {
    let end = answer.windows(4).position(|it| it == b"\r\n\r\n").unwrap_or(answer.len());
    let (head, body) = answer.split_at(end);
    let head = String::from_utf8_lossy(head);
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or("500");
    let mut response = Response::builder().status(status);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        // HTTP/2 has none of these.
        if !["transfer-encoding", "connection"].contains(&name) {
            response = response.header(name, value.trim());
        }
    }
    let body = Bytes::copy_from_slice(body.get(4..).unwrap_or_default());
    (response.body(()).expect("an answer"), body)
}

async fn send(
    mut stream: SendStream<Bytes>,
    body: Bytes,
    lie: Option<&Lie>,
) -> Result<(), h2::Error> {
    let at_once = match lie {
        Some(Lie::Cut(bytes)) => {
            stream.send_data(body.slice(..body.len().min(*bytes)), false)?;
            // The bytes are to leave before.
            sleep(PAUSE).await;
            stream.send_reset(Reason::INTERNAL_ERROR);
            return Ok(());
        }
        Some(Lie::Stall(bytes)) => {
            stream.send_data(body.slice(..body.len().min(*bytes)), false)?;
            sleep(LONG).await;
            return Ok(());
        }
        Some(Lie::Drip) => 1,
        Some(Lie::Slow(bytes)) => *bytes,
        _ => return stream.send_data(body, true),
    };
    for part in body.chunks(at_once.max(1)) {
        sleep(PAUSE).await;
        stream.send_data(Bytes::copy_from_slice(part), false)?;
    }
    stream.send_data(Bytes::new(), true)
}
