//! A service that gives keys of a store for a token, as those of clouds do.
//!
//! Invariant: the keys of an answer are over already, so that each request to the store needs others.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use crate::web_request::Request;

/// A running service. Its thread lives as long as the process.
pub struct TokenService {
    port: u16,
    tokens: Arc<Mutex<Vec<String>>>,
}

impl TokenService {
    /// Answers on a port of the loopback interface with the access key `key` and `secret`.
    ///
    /// # Panics
    /// There is no port.
    pub fn start(key: &str, secret: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let tokens = Arc::<Mutex<Vec<String>>>::default();
        let (seen, key, secret) = (tokens.clone(), key.to_owned(), secret.to_owned());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, key, secret) = (seen.clone(), key.clone(), secret.clone());
                std::thread::spawn(move || serve(stream, &seen, &key, &secret));
            }
        });
        Self { port, tokens }
    }

    /// Its URL without a path.
    pub fn root(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The token of the last request.
    pub fn last_token(&self) -> Option<String> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner).last().cloned()
    }
}

fn serve(stream: TcpStream, seen: &Mutex<Vec<String>>, key: &str, secret: &str) {
    let mut reader = BufReader::new(stream);
    while let Some(request) = Request::read(&mut reader) {
        let form = String::from_utf8_lossy(&request.body);
        let query = request.query();
        let mut fields = query.split('&').chain(form.split('&'));
        let field = fields.find_map(|it| {
            it.split_once("WebIdentityToken=").or(it.split_once("client_assertion="))
        });
        let token = field.map(|(_, token)| token).or(request.header("authorization"));
        seen.lock().unwrap_or_else(PoisonError::into_inner).extend(token.map(str::to_owned));
        let end = "2025-07-01T10:00:00Z";
        let body = match (request.method.as_str(), query) {
            ("GET", _) => format!(
                r#"{{"AccessKeyId":"{key}","SecretAccessKey":"{secret}","Token":"t","Expiration":"{end}"}}"#
            ),
            (_, "") => r#"{"access_token":"t","expires_in":0}"#.into(),
            _ => format!(
                "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>\
                 <AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>\
                 <SessionToken>t</SessionToken><Expiration>{end}</Expiration></Credentials>\
                 </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
            ),
        };
        let len = body.len();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {len}\r\n\r\n{body}");
        if reader.get_mut().write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}
