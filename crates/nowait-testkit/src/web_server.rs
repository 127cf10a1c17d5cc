//! A server of one object, by HTTP/1.1, or where its TLS offers nothing else by HTTP/2.
//!
//! Invariant: it shares no code with the client; each connection has a thread, which lives as long.

use std::io::{BufReader, Read, Write};
use std::net::TcpListener;
#[cfg(feature = "tls")]
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[cfg(feature = "http2")]
use crate::http2_store;
use crate::web_request::Request;
use crate::web_script::answer_of;
pub use crate::web_script::{Http1Refusal, Lie, Script};

/// A running server. Its thread lives as long as the process.
pub struct WebServer {
    port: u16,
    script: Arc<Mutex<Script>>,
}

impl WebServer {
    /// Serves `object` at `path`, which begins with a slash, on a port of the loopback interface.
    ///
    /// # Panics
    /// There is no port.
    pub fn start(object: Vec<u8>, path: &str) -> Self {
        Self::start_at("127.0.0.1:0", object, path)
    }

    /// Like [`WebServer::start`], at the address and port `address` of the loopback interface.
    ///
    /// # Panics
    /// It is in use.
    pub fn start_at(address: &str, object: Vec<u8>, path: &str) -> Self {
        let listener = TcpListener::bind(address).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let date = "Tue, 01 Jul 2025 10:00:00 GMT".into();
        let script =
            Script { object, path: path.into(), tag: "\"one\"".into(), date, ..Script::default() };
        let script = Arc::new(Mutex::new(script));
        let server = Self { port, script: script.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = script.clone();
                std::thread::spawn(move || {
                    #[cfg(feature = "http2")]
                    let Some(stream) = http2_store::serve(stream, &script) else { return };
                    #[cfg(feature = "tls")]
                    let Some(stream) = encrypted(stream, &script) else { return };
                    serve(stream, &script);
                });
            }
        });
        server
    }

    /// The URL without a path.
    pub fn root(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The URL of the object.
    pub fn url(&self) -> String {
        format!("{}{}", self.root(), self.script().path)
    }

    /// Looks at the script, or changes it.
    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all ranges that were asked for.
    pub fn asked_bytes(&self) -> u64 {
        self.script().ranges.iter().flatten().map(|(start, end)| end - start).sum()
    }
}

/// A connection, in TLS if the script says so.
#[cfg(feature = "tls")]
fn encrypted(stream: TcpStream, script: &Mutex<Script>) -> Option<Box<dyn ReadWrite>> {
    let config = script.lock().unwrap_or_else(PoisonError::into_inner).tls.clone();
    let Some(config) = config else { return Some(Box::new(stream)) };
    let session = rustls::ServerConnection::new(config).ok()?;
    Some(Box::new(rustls::StreamOwned::new(session, stream)))
}

/// The stream of a connection.
trait ReadWrite: Read + Write {}
impl<S: Read + Write> ReadWrite for S {}

/// Answers the requests of one connection.
fn serve(stream: impl ReadWrite, script: &Mutex<Script>) {
    let mut reader = BufReader::new(stream);
    while let Some(request) = Request::read(&mut reader) {
        let (answer, lie, delay) = answer_of(&request, script);
        std::thread::sleep(delay);
        let stream = reader.get_mut();
        let sent = match lie {
            Some(Lie::HangUp) => return,
            Some(Lie::Cut(bytes) | Lie::Closed(bytes)) => {
                let _ = stream.write_all(&answer[..bytes.min(answer.len())]);
                return;
            }
            Some(Lie::Stall(bytes)) => {
                let _ = stream.write_all(&answer[..bytes.min(answer.len())]);
                std::thread::sleep(Duration::from_secs(60));
                return;
            }
            Some(Lie::Drip) => answer.iter().try_for_each(|byte| {
                std::thread::sleep(Duration::from_millis(50));
                stream.write_all(&[*byte])
            }),
            Some(Lie::Slow(bytes)) => {
                let head = answer.windows(4).position(|it| it == b"\r\n\r\n").unwrap_or(0) + 4;
                let (head, body) = answer.split_at(head.min(answer.len()));
                let parts = std::iter::once(head).chain(body.chunks(bytes.max(1)));
                parts.into_iter().try_for_each(|part| {
                    std::thread::sleep(Duration::from_millis(50));
                    stream.write_all(part)
                })
            }
            Some(Lie::EndlessHeader) => loop {
                if stream.write_all(&[b'a'; 4096]).is_err() {
                    return;
                }
            },
            _ => stream.write_all(&answer),
        };
        if sent.is_err() {
            return;
        }
    }
}
