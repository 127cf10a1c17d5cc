//! Clients for servers that speak HTTP/1.1, and for those that speak HTTP/2 only.
//!
//! Invariant: HTTP/1.1 is tried first, with a connection for each request in flight; a server that refuses it gets the same
//! requests by HTTP/2, with the same bounds.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::http::uri::Authority;
use hyper::{Response, Uri, Version};
use hyper_util::client::legacy::connect::Connect;
use hyper_util::client::legacy::{Builder, Client, Error as ClientError};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::client::{HttpRequest, HttpRequestBody};
use rustls::AlertDescription;

/// A connection that nothing uses is closed after this time.
const IDLE: Duration = Duration::from_secs(60);
/// A connection of HTTP/2, which many requests share, is given up when the server has sent nothing for the first time, and then
/// not answered a ping for the second.
const SILENCE: Duration = Duration::from_secs(10);
const PING_TIME: Duration = Duration::from_secs(10);
/// Maximum bytes of all headers of an answer by HTTP/2.
const HEADER_BYTES: u32 = 16 << 10;
/// Maximum number of servers of which it is known that they speak HTTP/2 only; others are asked for both versions again.
const SERVERS: usize = 64;

/// Maker of connections.
pub(super) trait Connections: Connect + Clone + fmt::Debug + Send + Sync + 'static {}
impl<C: Connect + Clone + fmt::Debug + Send + Sync + 'static> Connections for C {}

/// Makes requests by the version of HTTP that the server speaks.
#[derive(Clone, Debug)]
pub(super) struct Clients<C> {
    http1: Client<C, HttpRequestBody>,
    http2: Option<Http2<C>>,
}

/// A client that offers HTTP/2 to servers.
#[derive(Clone, Debug)]
struct Http2<C> {
    client: Client<C, HttpRequestBody>,
    /// The servers that speak nothing else.
    servers: Arc<Mutex<HashSet<Authority>>>,
}

impl<C> Http2<C> {
    fn servers(&self) -> MutexGuard<'_, HashSet<Authority>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_for(&self, uri: &Uri) -> bool {
        uri.authority().is_some_and(|authority| self.servers().contains(authority))
    }

    fn remember(&self, uri: &Uri) {
        let mut servers = self.servers();
        if servers.len() < SERVERS {
            servers.extend(uri.authority().cloned());
        }
    }
}

fn builder() -> Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    builder.pool_idle_timeout(IDLE).pool_timer(TokioTimer::new());
    builder
}

impl<C: Connections> Clients<C> {
    /// Makes requests by HTTP/1.1 on connections of `http1`, and by what the server chooses on those of `http2`, if it speaks
    /// no HTTP/1.1.
    pub(super) fn new(http1: C, http2: Option<C>) -> Self {
        let http2 = http2.map(|connections| {
            let mut builder = builder();
            builder
                .timer(TokioTimer::new())
                .http2_max_header_list_size(HEADER_BYTES)
                // Until the server has said how many requests it takes at a time.
                .http2_initial_max_send_streams(1)
                .http2_keep_alive_interval(SILENCE)
                .http2_keep_alive_timeout(PING_TIME)
                .http2_keep_alive_while_idle(true);
            Http2 { client: builder.build(connections), servers: Arc::default() }
        });
        Self { http1: builder().build(http1), http2 }
    }

    /// # Errors
    /// Like [`Client::request`].
    pub(super) async fn request(
        &self,
        request: HttpRequest,
    ) -> Result<Response<Incoming>, ClientError> {
        let is_encrypted = request.uri().scheme_str() == Some("https");
        let Some(http2) = self.http2.as_ref().filter(|_| is_encrypted) else {
            return self.http1.request(request).await;
        };
        if http2.is_for(request.uri()) {
            return http2.client.request(request).await;
        }
        let again = request.clone();
        let error = match self.http1.request(request).await {
            Err(error) if may_speak_http2(&error) => error,
            answered => return answered,
        };
        let uri = again.uri().clone();
        match http2.client.request(again).await {
            Ok(answer) => {
                if answer.version() == Version::HTTP_2 {
                    http2.remember(&uri);
                }
                Ok(answer)
            }
            // The server has said that it speaks another version: what is wrong with that is the reason.
            Err(other) if says_no_http1(&error) => Err(other),
            Err(_) => Err(error),
        }
    }
}

/// The innermost reason of an error: that of the socket or of TLS.
pub(super) fn innermost(error: &ClientError) -> &(dyn std::error::Error + 'static) {
    let mut reason: &(dyn std::error::Error + 'static) = error;
    loop {
        // An error of a socket does not name as its source what it wraps, and one in words has no kind of its own.
        let wrapped = reason.downcast_ref::<io::Error>().and_then(|it| it.get_ref());
        let wrapped = wrapped.filter(|it| it.is::<io::Error>() || it.is::<rustls::Error>());
        let wrapped = wrapped.map(|it| it as &(dyn std::error::Error + 'static));
        match wrapped.or_else(|| reason.source()) {
            Some(inner) => reason = inner,
            None => return reason,
        }
    }
}

/// Whether the server has refused HTTP/1.1 in the handshake of TLS.
pub(super) fn says_no_http1(error: &ClientError) -> bool {
    let alert = rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol);
    innermost(error).downcast_ref() == Some(&alert)
}

/// Whether a server that speaks HTTP/2 only may be the reason: it has refused HTTP/1.1, has closed the connection in the
/// handshake, or its answer is not HTTP/1.1.
fn may_speak_http2(error: &ClientError) -> bool {
    let closed = |error: &io::Error| {
        matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)
    };
    let reason = innermost(error);
    let is_closed = error.is_connect() && reason.downcast_ref().is_some_and(closed);
    let source = std::error::Error::source(error).and_then(|it| it.downcast_ref());
    let is_no_http1 = source.is_some_and(hyper::Error::is_parse);
    says_no_http1(error) || is_closed || is_no_http1
}

#[cfg(test)]
mod tests {
    use futures_util::future::{join, join_all};
    use nowait_testkit::certificates::{self_signed, server_of};
    use nowait_testkit::web_server::{Http1Refusal, Lie, WebServer};
    use nowait_testkit::{KIB, MIB};
    use rustls::RootCertStore;
    use tokio::runtime::{self, Runtime};

    use super::*;
    use crate::object::fault::Fault;
    use crate::object::http_client::Connector;
    use crate::object::store::{Object, Timeouts, Version};

    const BYTES: u64 = 4 * MIB;
    const LONG: Duration = Duration::from_secs(60);

    /// A server of an object, and a client that trusts it.
    struct Site {
        server: WebServer,
        object: Object,
        runtime: Runtime,
        bytes: Vec<u8>,
    }

    impl Site {
        /// The server speaks `protocols`; an answer is late after `silence`.
        fn new(protocols: &[&[u8]], silence: Duration) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut roots = RootCertStore::empty();
            roots.add(self_signed(directory.path())).unwrap();
            let bytes: Vec<u8> = (0..BYTES).map(|n| (n % 251) as u8).collect();
            let server = WebServer::start(bytes.clone(), "/disk.img");
            let mut tls = Arc::unwrap_or_clone(server_of(directory.path()));
            tls.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            server.script().tls = Some(Arc::new(tls));
            let connector = Connector::trusting(roots, true, silence, None).unwrap();
            let url = server.url().replace("http://127.0.0.1", "https://localhost");
            let timeouts = Timeouts { silence, all: 2 * silence, minimum_rate: 64 << 10 };
            let object = Object::over(&url.parse().unwrap(), timeouts, connector).unwrap();
            let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
            Self { server, object, runtime, bytes }
        }

        fn probe(&self) -> Result<Version, Fault> {
            self.runtime.block_on(self.object.probe(LONG))
        }

        async fn read_later(&self, version: &Version, pos: u64, len: u64) -> Result<(), Fault> {
            let mut progress = self.object.progress(LONG);
            let data = self.object.read(version, (pos, len), &mut progress).await?;
            assert!(data == self.bytes[pos as usize..][..len as usize], "{pos}+{len}");
            Ok(())
        }

        fn read(&self, version: &Version, pos: u64, len: u64) -> Result<(), Fault> {
            self.runtime.block_on(self.read_later(version, pos, len))
        }

        /// The connections of HTTP/2, and the requests on all.
        fn counts(&self) -> (usize, usize) {
            let script = self.server.script();
            (script.http2_connections, script.requests.len())
        }
    }

    fn http2() -> Site {
        Site::new(&[b"h2"], LONG)
    }

    /// A site whose answers are late soon.
    fn hasty() -> Site {
        Site::new(&[b"h2"], Duration::from_secs(3))
    }

    #[test]
    fn a_server_that_speaks_http_2_only_is_read_on_one_connection() {
        let site = http2();
        let version = site.probe().unwrap();
        assert_eq!(version.size(), BYTES);
        for (pos, len) in [(0, 1), (0, BYTES), (BYTES - 1, 1), (12_345, 700 * KIB)] {
            site.read(&version, pos, len).unwrap();
        }
        assert_eq!(site.counts(), (1, 5));
        let script = site.server.script();
        assert!(script.accepted.iter().all(|it| it.as_deref() == Some("identity")));
    }

    #[test]
    fn http_2_is_tried_however_a_server_refuses_http_1_1() {
        for refusal in [Http1Refusal::Alert, Http1Refusal::Close, Http1Refusal::Frames] {
            let site = http2();
            site.server.script().http1_refusal = refusal;
            let version = site.probe().unwrap();
            site.read(&version, 0, BYTES).unwrap();
            assert_eq!(site.server.script().requests.len(), 2, "{refusal:?}");
            // It is remembered: another connection is not made.
            site.server.script().tls = None;
            site.read(&version, 0, BYTES).unwrap();
        }
    }

    #[test]
    fn http_1_1_is_spoken_where_a_server_has_both_versions_or_names_none() {
        for protocols in [&[b"h2".as_slice(), b"http/1.1"][..], &[]] {
            let site = Site::new(protocols, LONG);
            let version = site.probe().unwrap();
            site.read(&version, 0, BYTES).unwrap();
            assert_eq!(site.counts(), (0, 2));
        }
    }

    #[test]
    fn a_server_that_speaks_neither_version_is_told_of() {
        let site = Site::new(&[b"h3"], LONG);
        let Err(Fault::Refused(why)) = site.probe() else { panic!("another fault") };
        assert!(why.contains("speaks neither HTTP/1.1 nor HTTP/2"), "{why}");
    }

    #[test]
    fn no_more_requests_are_made_at_a_time_than_the_server_takes() {
        for most in [1, 3] {
            let site = http2();
            site.server.script().max_streams = Some(most);
            site.server.script().delay = Duration::from_millis(20);
            let version = site.probe().unwrap();
            let reads = (0..16).map(|n| site.read_later(&version, n * 64 * KIB, 64 * KIB));
            let read = site.runtime.block_on(join_all(reads));
            read.into_iter().for_each(|read| read.unwrap());
            assert_eq!(site.counts(), (1, 17));
            assert!(site.server.script().most_streams <= most as usize);
        }
        let site = hasty();
        site.server.script().max_streams = Some(0);
        let fault = site.probe().unwrap_err();
        assert!(matches!(fault, Fault::Transient(_)), "{fault:?}");
    }

    #[test]
    fn an_answer_that_is_reset_cut_or_on_a_connection_that_ends_may_be_asked_for_again() {
        let site = http2();
        let version = site.probe().unwrap();
        let lies = [
            Lie::Reset(7),
            Lie::Reset(11),
            Lie::Cut(0),
            Lie::Cut(5000),
            Lie::GoAway,
            Lie::HangUp,
            Lie::Status(500, "", ""),
            Lie::Longer(1),
            Lie::Header("content-length: 7\r\n"),
        ];
        for (n, lie) in (0..).zip(lies) {
            site.server.script().lies.push_back(lie.clone());
            let fault = site.read(&version, n * KIB, 100 * KIB).unwrap_err();
            assert!(matches!(fault, Fault::Transient(_)), "{lie:?}: {fault:?}");
            let text = fault.text();
            assert!(text.lines().count() == 1 && !text.contains("localhost"), "{lie:?}: {text}");
            site.read(&version, n * KIB, 100 * KIB).unwrap();
        }
        // The run of the open, and the ones after the two that have expired.
        assert_eq!(site.counts().0, 3);
    }

    #[test]
    fn an_answer_that_stops_or_drips_is_late_and_holds_up_no_other_one() {
        let site = hasty();
        let version = site.probe().unwrap();
        for lie in [Lie::Stall(5000), Lie::Drip, Lie::Slow(1000)] {
            site.server.script().lies.push_back(lie.clone());
            let others = async {
                // Requests are made in their order.
                tokio::task::yield_now().await;
                for n in 0..8 {
                    site.read_later(&version, n * 64 * KIB, 64 * KIB).await.unwrap();
                }
            };
            let late = site.read_later(&version, 0, BYTES);
            let (late, ()) = site.runtime.block_on(join(late, others));
            let fault = late.unwrap_err();
            let text = fault.text();
            assert!(text.contains("of an answer came within 3.0 s"), "{lie:?}: {text}");
        }
        assert_eq!(site.counts().0, 1);
    }

    #[test]
    fn headers_of_an_answer_are_bounded() {
        let site = http2();
        let version = site.probe().unwrap();
        let header = |bytes: usize| Lie::Header(format!("x-y: {}\r\n", "z".repeat(bytes)).leak());
        site.server.script().lies.push_back(header(HEADER_BYTES as usize - 1000));
        site.read(&version, 0, 1).unwrap();
        site.server.script().lies.push_back(header(HEADER_BYTES as usize));
        site.read(&version, 0, 1).unwrap_err();
        site.read(&version, 0, 1).unwrap();
    }

    #[test]
    fn a_connection_that_has_gone_silent_is_given_up_and_another_one_made() {
        let site = hasty();
        let version = site.probe().unwrap();
        site.server.script().lies.push_back(Lie::Silence);
        let failed = (0..20).take_while(|_| site.read(&version, 0, KIB).is_err()).count();
        assert!((1..20).contains(&failed), "{failed}");
        assert_eq!(site.counts().0, 2);
    }
}
