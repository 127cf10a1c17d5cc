//! The example serves images of both formats to a client that shares no code with the server.

#[path = "../examples/serve.rs"]
#[expect(dead_code, reason = "the tests call what its `main` calls")]
mod serve;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use nowait_image::create::{CreateOptions, create};
use nowait_image::{Chain, ChainOptions, ChainReader, Format};

const BLOCK: usize = 4096;
const EPERM: u32 = 1;
const BOUND: Duration = Duration::from_secs(60);

/// A client of the default export at `socket`, as soon as that exists.
fn client(socket: &Path) -> UnixStream {
    let begun = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < BOUND, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 1], &[0; 4]].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// Writes `bytes` at `pos`, and returns the error of the reply.
fn write(stream: &mut UnixStream, pos: u64, bytes: &[u8]) -> u32 {
    let (pos, len) = (pos.to_be_bytes(), (bytes.len() as u32).to_be_bytes());
    let header = [&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1][..], &[7; 8], &pos, &len].concat();
    stream.write_all(&[&header, bytes].concat()).unwrap();
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    u32::from_be_bytes(reply[4..8].try_into().unwrap())
}

/// Serves `image` to a client that writes a block and its beginning, and returns the errors.
fn served(image: &Path, beginning: &[u8]) -> (u32, u32) {
    let socket = image.with_extension("socket");
    let (served, listening) = (image.to_owned(), socket.clone());
    let server =
        thread::spawn(move || serve::serve(&served, &listening).map_err(|error| error.to_string()));
    let mut stream = client(&socket);
    let errors = (write(&mut stream, BLOCK as u64, &[5; BLOCK]), write(&mut stream, 0, beginning));
    drop(stream);
    server.join().unwrap().unwrap();
    errors
}

#[test]
fn a_program_of_a_few_lines_serves_raw_and_qcow2_images() {
    let scratch = tempfile::tempdir().unwrap();
    let raw = scratch.path().join("raw");
    fs::write(&raw, [1; 4 * BLOCK]).unwrap();
    assert_eq!(served(&raw, b"QFI\xfb"), (0, EPERM), "a guessed raw disk never becomes qcow2");
    let bytes = fs::read(&raw).unwrap();
    assert!(bytes[..BLOCK] == [1; BLOCK] && bytes[BLOCK..2 * BLOCK] == [5; BLOCK]);
    let qcow2 = scratch.path().join("qcow2");
    create(&qcow2, &CreateOptions::new(Format::Qcow2, Some(1 << 20))).unwrap();
    assert_eq!(served(&qcow2, b"QFI\xfb"), (0, 0));
    let chain = Chain::open(&qcow2, &ChainOptions::default()).unwrap();
    let mut bytes = [0; 2 * BLOCK];
    ChainReader::new(chain.layers()).unwrap().read_at(0, &mut bytes).unwrap();
    assert!(bytes.starts_with(b"QFI\xfb\0") && bytes[BLOCK..] == [5; BLOCK]);
}
