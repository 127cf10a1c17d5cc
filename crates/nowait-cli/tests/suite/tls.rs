//! TLS: external clients, invalid certificates, and bytes that are not TLS.
//!
//! Invariant: data are compared with bytes that were not transferred by the server; every
//! certificate is made by the test.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConnection, StreamOwned, SupportedProtocolVersion};

use crate::common::{
    Finished, KIB, MIB, Scratch, Server, accepted, refusal, require_qemu, require_tool, tool,
};
use crate::log_messages::await_line;
use nowait_testkit::certificates::{Authority, Flaw, Role, client_of};
use nowait_testkit::nbd::{
    Client, Command, Mode, OPT_GO, OPT_STARTTLS, OPT_STRUCTURED_REPLY, REP_ACK, REP_ERR_TLS_REQD,
    RawRequest, export_request, go, greet, is_refusal, read_option_reply, read_size, send_option,
};

/// A server with certificates, and the certificate directory of a client.
struct Fixture {
    server: Server,
    authority: Authority,
    /// The client's trusted authority, and its own certificate.
    client: Scratch,
    image: std::path::PathBuf,
    scratch: Scratch,
    _certs: Scratch,
}

impl Fixture {
    /// Serves 16 MiB with `--tls-certs` and `extra`.
    fn new(extra: &[&str]) -> Self {
        let authority = Authority::new("the authority");
        let (certs, client, scratch) = (Scratch::new(), Scratch::new(), Scratch::new());
        for directory in [certs.path(), client.path()] {
            authority.trusted_in(directory);
        }
        authority.certify(certs.path(), Role::Server, Flaw::None);
        authority.certify(client.path(), Role::Client, Flaw::None);
        authority.revoke(certs.path());
        let image = scratch.sparse("disk.img", 16 * MIB);
        let server = serve(&image, &certs, extra);
        Self { server, authority, client, image, scratch, _certs: certs }
    }

    /// The server's URIs for a client with the certificates in `directory`.
    fn uris_with(&self, directory: &Scratch) -> Vec<String> {
        let with = |uri: &String| {
            assert!(uri.starts_with("nbds"), "{uri}");
            let mark = if uri.contains('?') { '&' } else { '?' };
            format!("{uri}{mark}tls-certificates={}", directory.path().display())
        };
        self.server.uris().iter().map(with).collect()
    }

    /// A client on the Unix socket, after STARTTLS.
    fn connect(&self) -> Secret<UnixStream> {
        let mut stream = greet(&self.server.socket()).expect("a greeting");
        starttls(&mut stream);
        secret(stream, self.client.path())
    }

    /// Checks that a new connection is still served.
    fn ends_well(self) {
        let mut newcomer = self.connect();
        assert_eq!(go(&mut newcomer).expect("an export"), 16 * MIB);
        self.server.stop();
    }
}

fn serve(image: &Path, certs: &Scratch, extra: &[&str]) -> Server {
    let certs = certs.path().to_str().expect("a name in UTF-8");
    let fixed = ["--json", "--nbd", "tcp:localhost:0", "--tls-certs", certs];
    Server::start(image, &[&fixed, extra].concat())
}

type Secret<S> = StreamOwned<ClientConnection, S>;

fn starttls(stream: &mut UnixStream) {
    send_option(stream, OPT_STARTTLS, &[]).expect("a socket");
    assert_eq!(read_option_reply(stream).expect("a reply"), (REP_ACK, vec![]));
}

/// A TLS client that trusts the authority in `directory` and has no certificate.
fn secret<S: Read + Write>(stream: S, directory: &Path) -> Secret<S> {
    secret_by(rustls::ALL_VERSIONS, stream, directory)
}

/// [`secret`] with only `versions` of TLS.
fn secret_by<S: Read + Write>(
    versions: &[&'static SupportedProtocolVersion],
    stream: S,
    directory: &Path,
) -> Secret<S> {
    let root = CertificateDer::from_pem_file(directory.join("ca-cert.pem")).expect("a root");
    StreamOwned::new(client_of(root, versions), stream)
}

/// Runs nbdinfo on `uri`: returns the line with the protocol, or the error.
fn nbdinfo(uri: &str) -> Result<String, String> {
    let output = tool("nbdinfo").arg(uri).output().expect("timeout(1)");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout).lines().next().unwrap_or_default().to_owned()),
        false => Err(text(&output.stderr)),
    }
}

#[test]
fn the_log_names_a_client_by_its_certificate_and_a_refused_client() {
    let fixture = Fixture::new(&["--tls-verify-peer", "--verbose"]);
    let copy = fixture.scratch.join("copy.img");
    let (from, to) = (fixture.server.uri(), copy.to_str().expect("a name in UTF-8"));
    accepted(&["copy", from, to, "--tls-certs", fixture.client.path().to_str().expect("UTF-8")]);
    let line = await_line(&fixture.server, "has opened export");
    assert!(
        line.ends_with(r#" has opened export "" by TLS, with the certificate of CN=client"#),
        "{line}"
    );
    // Without a certificate.
    let mut stream = fixture.connect();
    go(&mut stream).expect_err("a refusal");
    let line = await_line(&fixture.server, "TLS has failed");
    assert!(line.contains("client (uid ") && line.contains("certificate"), "{line}");
    fixture.server.stop();
}

#[test]
fn nbdinfo_and_nbdcopy_go_through_tls_over_unix_sockets_and_tcp() {
    nowait_testkit::needs!(require_tool("nbdinfo") && require_tool("nbdcopy"));
    for variant in [&[][..], &["--queue", "threads"], &["--direct", "off", "--queues", "3"]] {
        println!("serve {variant:?}");
        let fixture = Fixture::new(variant);
        let uris = fixture.uris_with(&fixture.client);
        assert_eq!(uris.len(), 2);
        assert!(uris[0].starts_with("nbds+unix:///?") && uris[1].starts_with("nbds://localhost:"));
        for (n, uri) in uris.iter().enumerate() {
            let printed = nbdinfo(uri).expect("an answer");
            assert!(printed.contains("with TLS") && !printed.contains("without"), "{printed}");
            let source = fixture.scratch.random(&format!("source{n}"), 16 * MIB, n as u64);
            let back = fixture.scratch.join(&format!("back{n}"));
            tool("nbdcopy").arg("--flush").arg(&source).arg(uri).succeeds();
            tool("nbdcopy").arg(uri).arg(&back).succeeds();
            let source = fs::read(source).expect("the source");
            assert!(source == fs::read(&fixture.image).expect("the image"), "copied in");
            assert!(source == fs::read(back).expect("the copy"), "copied out");
        }
        fixture.server.stop();
    }
}

#[test]
fn qemu_goes_through_tls() {
    nowait_testkit::needs!(require_qemu());
    let fixture = Fixture::new(&["--tls-verify-peer"]);
    let source = fixture.scratch.random("source", 16 * MIB, 9);
    let (_, port) =
        fixture.server.uris()[1].trim_end_matches('/').rsplit_once(':').expect("a port");
    let object =
        format!("tls-creds-x509,id=tls,endpoint=client,dir={}", fixture.client.path().display());
    let address = [
        format!("driver=nbd,server.type=inet,server.host=localhost,server.port={port}"),
        format!("driver=nbd,server.type=unix,server.path={}", fixture.server.socket().display()),
    ];
    let tls = ["tls-creds=tls", "tls-creds=tls,tls-hostname=localhost"];
    for (address, tls) in address.iter().zip(tls) {
        let options = format!("{address},{tls}");
        tool("qemu-img")
            .args(["convert", "-n", "--object", &object, "--target-image-opts"])
            .arg(&source)
            .arg(format!("driver=raw,file.{}", options.replace(',', ",file.")))
            .succeeds();
        assert!(fs::read(&fixture.image).expect("the image") == fs::read(&source).expect("bytes"));
        let printed = tool("qemu-io")
            .args(["--object", &object, "--image-opts", &options])
            .args(["-c", "write -f -P 0x5a 1001 3M", "-c", "read -P 0x5a 1001 3M"])
            .args(["-c", "write -z 64k 64k", "-c", "read -P 0 64k 64k", "-c", "flush"])
            .succeeds();
        assert!(!printed.contains("failed"), "{printed}");
        tool("qemu-io").args(["--image-opts", address, "-c", "read 0 512"]).fails();
    }
    fixture.server.stop();
}

#[test]
fn a_verified_client_is_one_whose_certificate_is_good_and_of_the_right_authority() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let fixture = Fixture::new(&["--tls-verify-peer"]);
    let stranger = Authority::new("a stranger");
    let none = Scratch::new();
    let [wrong, expired, revoked, server] = [
        (&stranger, Role::Client, Flaw::None),
        (&fixture.authority, Role::Client, Flaw::Expired),
        (&fixture.authority, Role::Client, Flaw::Revoked),
        (&fixture.authority, Role::Server, Flaw::None),
    ]
    .map(|(authority, role, flaw)| {
        let directory = Scratch::new();
        authority.certify(directory.path(), role, flaw);
        directory
    });
    // A server's certificate is not valid for a client.
    for end in ["cert", "key"] {
        let path = |name: &str| server.join(&format!("{name}-{end}.pem"));
        fs::rename(path("server"), path("client")).expect("a file");
    }
    for directory in [&none, &wrong, &expired, &revoked, &server] {
        fixture.authority.trusted_in(directory.path());
    }
    for n in [0, 1] {
        let try_with = |directory| nbdinfo(&fixture.uris_with(directory)[n]);
        try_with(&fixture.client).expect("the good one gets in");
        for (name, directory) in [
            ("no", &none),
            ("a stranger's", &wrong),
            ("an expired", &expired),
            ("a revoked", &revoked),
            ("a server's", &server),
        ] {
            assert!(try_with(directory).is_err(), "{name} certificate gets in");
        }
        try_with(&fixture.client).expect("the good one gets in again");
    }
    fixture.server.stop();
}

#[test]
fn a_server_with_an_invalid_certificate_is_refused_by_its_clients_and_continues() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let authority = Authority::new("the authority");
    let (certs, client, scratch) = (Scratch::new(), Scratch::new(), Scratch::new());
    authority.trusted_in(client.path());
    let image = scratch.sparse("disk.img", MIB);
    let attempt = |server: &Server| {
        let with = format!("tls-certificates={}", client.path().display());
        nbdinfo(&format!("{}?{with}", server.uris()[1]))
    };
    for (signer, flaw) in [(&Authority::new("a stranger"), Flaw::None), (&authority, Flaw::Expired)]
    {
        signer.certify(certs.path(), Role::Server, flaw);
        let server = serve(&image, &certs, &[]);
        for _ in 0..3 {
            attempt(&server).expect_err("the client is to refuse");
        }
        server.stop();
    }
    authority.certify(certs.path(), Role::Server, Flaw::None);
    let server = serve(&image, &certs, &[]);
    attempt(&server).expect("the certificate is good");
    server.stop();
}

#[test]
fn nbd_must_a_plain_client_gets_only_the_error_that_tls_is_required() {
    let fixture = Fixture::new(&[]);
    let mut stream = greet(&fixture.server.socket()).expect("a greeting");
    for option in [OPT_GO, OPT_STRUCTURED_REPLY, 0x7777] {
        send_option(&mut stream, option, &[0; 6]).expect("a socket");
        assert_eq!(read_option_reply(&mut stream).expect("a reply").0, REP_ERR_TLS_REQD);
    }
    starttls(&mut stream);
    let mut client = secret(stream, fixture.client.path());
    assert_eq!(go(&mut client).expect("an export"), 16 * MIB);
    let refused =
        Client::connect(&fixture.server.socket(), Mode::Simple).err().expect("no plain client");
    assert!(refused.to_string().contains("80000005"), "{refused}");
    fixture.ends_well();
}

/// NBD proto.md, "TLS versions": TLS 1.2 MUST be supported, later ones SHOULD be.
#[test]
fn nbd_must_tls_1_2_and_1_3_are_spoken() {
    let fixture = Fixture::new(&[]);
    for version in [&TLS12, &TLS13] {
        let mut stream = greet(&fixture.server.socket()).expect("a greeting");
        starttls(&mut stream);
        let mut client = secret_by(&[version], stream, fixture.client.path());
        assert_eq!(go(&mut client).expect("an export"), 16 * MIB);
        assert!(read(&mut client, 0, 70_000).expect("bytes") == vec![0; 70_000]);
        assert_eq!(client.conn.protocol_version(), Some(version.version));
    }
    fixture.ends_well();
}

#[test]
fn reads_through_tls_send_holes_as_holes_in_every_mode_that_can() {
    let fixture = Fixture::new(&[]);
    let mut expected = vec![0; 16 << 20];
    for at in (0..8).map(|n| (2 * n + 1) << 20) {
        expected[at..at + 100_000].fill(0x5a);
    }
    let mut writer = Client::over(fixture.connect(), "", Mode::Extended).expect("a connection");
    for at in (0..8).map(|n| (2 * n + 1) << 20) {
        writer.write(at, &[0x5a; 100_000]).expect("a write");
    }
    for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
        let mut client = Client::over(fixture.connect(), "", mode).expect("a connection");
        for (offset, len) in [(0, 4 << 20), (777, 3_000_000), (10 << 20, 6 << 20), (5000, 512)] {
            let before = client.hole_bytes;
            let bytes = client.read(offset as u64, len as u32).expect("bytes");
            assert!(bytes == expected[offset..offset + len], "{mode:?}, {len} at {offset}");
            let hole_bytes = client.hole_bytes - before;
            assert_eq!(hole_bytes > len as u64 / 2, mode != Mode::Simple, "{hole_bytes} of {len}");
        }
        client.call(&Command::Flush).expect("a flush");
    }
    fixture.ends_well();
}

#[test]
fn with_optional_tls_clients_are_served_with_and_without_it() {
    let fixture = Fixture::new(&["--tls", "on"]);
    for uri in fixture.server.uris() {
        assert!(uri.starts_with("nbd://") || uri.starts_with("nbd+unix:"), "{uri}");
    }
    let mut plain = fixture.server.connect();
    plain.write(4096, &[7; 4096]).expect("a write");
    let mut client = fixture.connect();
    go(&mut client).expect("an export");
    assert!(read(&mut client, 4096, 4096).expect("bytes") == [7; 4096]);
    fixture.ends_well();
}

#[test]
fn without_tls_starttls_is_refused_and_the_handshake_continues() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), &[]);
    let mut stream = greet(&server.socket()).expect("a greeting");
    send_option(&mut stream, OPT_STARTTLS, &[]).expect("a socket");
    assert!(is_refusal(read_option_reply(&mut stream).expect("a reply").0));
    assert_eq!(go(&mut stream).expect("an export"), MIB);
    server.stop();
}

/// Reads with no other request in flight; the reply is a simple one.
fn read(client: &mut (impl Read + Write), offset: u64, len: u32) -> io::Result<Vec<u8>> {
    client.write_all(&RawRequest::read(offset, len).bytes())?;
    let mut reply = vec![0; 16 + len as usize];
    client.read_exact(&mut reply)?;
    assert_eq!(reply[4..8], [0; 4], "an error");
    Ok(reply.split_off(16))
}

#[test]
fn a_tls_session_moves_to_the_threads_of_the_chosen_export() {
    let other = Scratch::new();
    let bytes = fs::read(other.random("other.img", MIB, 4)).expect("the other image");
    let named = format!("other={}", other.join("other.img").display());
    let fixture = Fixture::new(&["--queues", "2", &named, "--export", "first"]);
    for together in [true, false] {
        let mut client = fixture.connect();
        let mut choice = Vec::new();
        send_option(&mut choice, OPT_GO, &export_request("other")).expect("a vector");
        let request = RawRequest::read(MIB - 70_000, 70_000).bytes();
        let (now, later) = request.split_at(if together { request.len() } else { 9 });
        client.write_all(&[&choice, now].concat()).expect("a socket");
        assert_eq!(read_size(&mut client).expect("an export"), MIB);
        client.write_all(later).expect("a socket");
        let mut reply = vec![0; 16 + 70_000];
        client.read_exact(&mut reply).expect("a reply");
        assert!(reply[16..] == bytes[bytes.len() - 70_000..]);
    }
    fixture.ends_well();
}

#[test]
fn nbd_must_a_disconnect_is_answered_by_close_notify() {
    let fixture = Fixture::new(&[]);
    let mut client = fixture.connect();
    go(&mut client).expect("an export");
    read(&mut client, 0, 512).expect("bytes");
    client.write_all(&RawRequest::disconnect().bytes()).expect("a socket");
    // Without close_notify, rustls would report an error (RFC 8446, section 6.1).
    assert_eq!(client.read(&mut [0; 1]).expect("an orderly end"), 0);
    fixture.ends_well();
}

#[test]
fn requests_before_close_notify_are_answered() {
    let fixture = Fixture::new(&[]);
    let mut client = fixture.connect();
    go(&mut client).expect("an export");
    for n in 0..40 {
        client.write_all(&RawRequest::read(n * KIB, 64 << 10).bytes()).expect("a socket");
    }
    client.conn.send_close_notify();
    client.flush().expect("a socket");
    let mut replies = Vec::new();
    client.read_to_end(&mut replies).expect("an orderly end");
    assert_eq!(replies.len(), 40 * (16 + (64 << 10)));
    fixture.ends_well();
}

#[test]
fn a_write_that_is_cut_off_within_its_payload_changes_no_byte() {
    let fixture = Fixture::new(&[]);
    for orderly in [true, false] {
        let mut client = fixture.connect();
        go(&mut client).expect("an export");
        client.write_all(&RawRequest::write(0, 100_000).bytes()).expect("a socket");
        client.write_all(&[0x77; 99_999]).expect("a socket");
        if orderly {
            client.conn.send_close_notify();
        }
        client.flush().expect("a socket");
        client.sock.shutdown(std::net::Shutdown::Write).expect("a socket");
        let mut sink = Vec::new();
        client.read_to_end(&mut sink).expect("an orderly end");
        assert!(sink.is_empty(), "an answer to half a request");
    }
    assert!(fs::read(&fixture.image).expect("the image").iter().all(|&byte| byte == 0));
    fixture.ends_well();
}

#[test]
fn nbd_must_plaintext_after_starttls_is_never_treated_as_received_through_tls() {
    let mut options = Vec::new();
    send_option(&mut options, OPT_STARTTLS, &[]).expect("a vector");
    let end = options.len();
    send_option(&mut options, OPT_STRUCTURED_REPLY, &[]).expect("a vector");
    let fixture = Fixture::new(&["--tls", "on"]);
    for cut in [end, end + 1, end + 16, options.len()] {
        let mut stream = greet(&fixture.server.socket()).expect("a greeting");
        stream.write_all(&options[..cut]).expect("a socket");
        let (kind, _) = read_option_reply(&mut stream).expect("a reply");
        assert_eq!(kind, REP_ACK);
        // The connection may have ended already.
        let _ = stream.write_all(&options[cut..]);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        // No bytes, or a TLS alert: in no case a reply to the option.
        assert!(rest.len() <= 7, "{rest:?}");
        assert!(rest.first().is_none_or(|&kind| kind == 21), "{rest:?}");
    }
    fixture.ends_well();
}

#[test]
fn nbd_must_invalid_bytes_in_place_of_tls_end_the_connection() {
    let fixture = Fixture::new(&[]);
    for rubbish in [vec![0; 64], b"GET / HTTP/1.0\r\n\r\n".to_vec(), vec![0x16; 100_000]] {
        let mut stream = greet(&fixture.server.socket()).expect("a greeting");
        starttls(&mut stream);
        // The server may close the connection before all bytes are sent.
        let _ = stream.write_all(&rubbish);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.len() <= 7, "{} bytes in answer to rubbish", rest.len());
    }
    fixture.ends_well();
}

/// A stream that sends its bytes one at a time.
struct Drop(UnixStream);

impl Write for Drop {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(&bytes[..bytes.len().min(1)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Read for Drop {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

#[test]
fn a_tls_client_that_sends_byte_by_byte_is_served() {
    let fixture = Fixture::new(&["--queues", "1"]);
    let mut stream = greet(&fixture.server.socket()).expect("a greeting");
    starttls(&mut stream);
    let mut slow = secret(Drop(stream), fixture.client.path());
    assert_eq!(go(&mut slow).expect("an export"), 16 * MIB);
    assert!(read(&mut slow, 0, 70_000).expect("bytes") == vec![0; 70_000]);
    fixture.ends_well();
}

#[test]
fn a_tls_handshake_that_stops_anywhere_blocks_no_other_client() {
    let fixture = Fixture::new(&["--queues", "1"]);
    let mut hello = Vec::new();
    let mut client = secret(io::empty(), fixture.client.path());
    client.conn.write_tls(&mut hello).expect("a vector");
    let mut silent = Vec::new();
    for sent in [0, 1, 4, 5, 100, hello.len() - 1, hello.len()] {
        let mut stream = greet(&fixture.server.socket()).expect("a greeting");
        starttls(&mut stream);
        stream.write_all(&hello[..sent]).expect("a socket");
        silent.push(stream);
        let mut other = fixture.connect();
        go(&mut other).expect("an export");
        read(&mut other, 0, 4096).expect("bytes");
    }
    fixture.ends_well();
}

#[test]
fn a_tls_client_that_never_reads_its_answers_blocks_no_other_client() {
    let fixture = Fixture::new(&["--queues", "1"]);
    let mut silent = fixture.connect();
    go(&mut silent).expect("an export");
    for _ in 0..64 {
        silent.write_all(&RawRequest::read(0, 1 << 20).bytes()).expect("room for requests");
    }
    let mut other = fixture.connect();
    go(&mut other).expect("an export");
    for n in 0..100 {
        read(&mut other, n * 4096, 4096).expect("bytes");
    }
    drop(silent);
    fixture.ends_well();
}

#[test]
fn unusable_certificates_are_refused_in_one_line_that_names_the_file() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let certs = Scratch::new();
    let listen = format!("unix:{}", scratch.join("socket").display());
    let (image, directory) =
        (image.to_str().expect("UTF-8"), certs.path().to_str().expect("UTF-8"));
    let arguments =
        ["serve", image, "--nbd", &listen, "--tls-certs", directory, "--tls-verify-peer"];
    let authority = Authority::new("the authority");
    refusal(&arguments).says(&["server-cert.pem", "no such file"]);
    authority.certify(certs.path(), Role::Server, Flaw::None);
    refusal(&arguments).says(&["ca-cert.pem", "no such file"]);
    authority.trusted_in(certs.path());
    fs::write(certs.join("ca-crl.pem"), "no list").expect("a file");
    refusal(&arguments).says(&["ca-crl.pem"]);
    authority.revoke(certs.path());
    let key = fs::read(certs.join("server-key.pem")).expect("the key");
    fs::write(certs.join("server-key.pem"), &key[..40]).expect("a file");
    refusal(&arguments).says(&["server-key.pem"]);
    authority.certify(certs.path(), Role::Server, Flaw::None);
    fs::write(certs.join("server-key.pem"), &key).expect("a file");
    refusal(&arguments).says(&["server-key.pem", "not the key of server-cert.pem"]);
    fs::remove_file(certs.join("server-key.pem")).expect("a file");
    fs::create_dir(certs.join("server-key.pem")).expect("a directory");
    refusal(&arguments).says(&["server-key.pem", "directory"]);
}

#[test]
fn options_that_would_weaken_tls_are_wrong_usage() {
    for wrong in [
        &["--tls", "require"][..],
        &["--tls", "on"],
        &["--tls", "perhaps"],
        &["--tls-verify-peer"],
        &["--tls-verify-peer", "--tls-certs", "d", "--tls", "on"],
        &["--tls-verify-peer", "--tls-certs", "d", "--tls", "off"],
    ] {
        let refused = refusal(&[&["serve", "a.img"], wrong].concat());
        assert_eq!(refused.code, 2, "{wrong:?}: {}", refused.error);
    }
}
