//! A proxy that makes tunnels (CONNECT), all of them to one local server.
//!
//! Invariant: it shares no code with the client; each connection has two threads, which end with it.

use std::io::{self, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use crate::web_request::Request;

/// A method with its target, and the header Proxy-Authorization.
type Asked = (String, Option<String>);

/// A running proxy. Its thread lives as long as the process.
pub struct WebProxy {
    port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl WebProxy {
    /// Starts a proxy whose tunnels lead to `port` of the loopback interface, whatever they are asked
    /// for. With a `password` it refuses those who do not send it (the header Proxy-Authorization).
    ///
    /// # Panics
    /// There is no port.
    pub fn start(port: u16, password: Option<&'static str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let own = listener.local_addr().expect("an address").port();
        let proxy = Self { port: own, asked: Arc::default() };
        let asked = proxy.asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let asked = asked.clone();
                std::thread::spawn(move || tunnel(stream, port, password, &asked));
            }
        });
        proxy
    }

    /// HOST:PORT of the proxy.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The methods and targets that were asked for, and their header Proxy-Authorization.
    pub fn asked(&self) -> Vec<(String, Option<String>)> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn tunnel(
    mut client: TcpStream,
    port: u16,
    password: Option<&str>,
    asked: &Mutex<Vec<Asked>>,
) -> Option<()> {
    let request = Request::read(&mut BufReader::with_capacity(1, &client))?;
    let given = request.header("proxy-authorization").map(str::to_owned);
    let is_known = password.is_none_or(|password| given.as_deref() == Some(password));
    let target = format!("{} {}", request.method, request.path);
    asked.lock().unwrap_or_else(PoisonError::into_inner).push((target, given));
    let status = if is_known { "200 Connected" } else { "407 Who is it" };
    write!(client, "HTTP/1.1 {status}\r\n\r\n").ok().filter(|()| is_known)?;
    let mut server = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let (mut from, mut to) = (server.try_clone().ok()?, client.try_clone().ok()?);
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let _ = io::copy(&mut client, &mut server);
    server.shutdown(Shutdown::Both).ok()
}
