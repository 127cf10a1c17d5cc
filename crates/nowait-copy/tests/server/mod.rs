//! An NBD server with scripted answers, which may break the protocol.
//!
//! Invariant: the server serves one connection and ends with it.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const BLOCK_STATUS: u16 = 7;
const DISCONNECT: u16 = 2;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
/// Has flags, flush.
const TRANSMISSION_FLAGS: u16 = 0b101;

/// A received request.
pub(crate) struct Request {
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// The bytes of an answer; `None` ends the connection.
pub(crate) type Answer = Option<Vec<u8>>;

/// Starts a server on a Unix socket in `directory`, with an export of `size` bytes. Returns its
/// URI.
pub(crate) fn serve(
    directory: &Path,
    size: u64,
    mut answer: impl FnMut(&Request) -> Answer + Send + 'static,
) -> String {
    listen(directory, move |stream| {
        negotiate(stream, size)?;
        loop {
            let request = receive(stream)?;
            if request.command == DISCONNECT {
                return Ok(());
            }
            match answer(&request) {
                Some(bytes) => stream.write_all(&bytes)?,
                None => return Ok(()),
            }
        }
    })
}

/// Listens on a socket in `directory` and passes the first connection to `handle`. Returns its URI.
pub(crate) fn listen(
    directory: &Path,
    mut handle: impl FnMut(&mut UnixStream) -> io::Result<()> + Send + 'static,
) -> String {
    let socket: PathBuf = directory.join("socket");
    let listener = UnixListener::bind(&socket).expect("a socket of one's own");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        // The client may disconnect at any time.
        let _ = handle(&mut stream);
    });
    format!("nbd+unix:///?socket={}", socket.display())
}

/// The first 18 bytes of a fixed newstyle server.
pub(crate) fn greeting() -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &3u16.to_be_bytes()].concat()
}

/// A reply to an option.
pub(crate) fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// `INFO_EXPORT` in answer to GO.
pub(crate) fn export_info(size: u64) -> Vec<u8> {
    let data = [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &TRANSMISSION_FLAGS.to_be_bytes()];
    option_reply(OPT_GO, REP_INFO, &data.concat())
}

/// Receives an option and returns its number.
pub(crate) fn receive_option(stream: &mut UnixStream) -> io::Result<u32> {
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4 bytes"));
    let mut data = vec![0; number(12) as usize];
    stream.read_exact(&mut data)?;
    Ok(number(8))
}

fn negotiate(stream: &mut UnixStream, size: u64) -> io::Result<()> {
    stream.write_all(&greeting())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let option = receive_option(stream)?;
        let more = match option {
            OPT_STRUCTURED_REPLY => Vec::new(),
            OPT_SET_META_CONTEXT => {
                let data = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
                option_reply(option, REP_META_CONTEXT, &data)
            }
            _ => export_info(size),
        };
        stream.write_all(&[more, option_reply(option, REP_ACK, &[])].concat())?;
        if option == OPT_GO {
            return Ok(());
        }
    }
}

fn receive(stream: &mut UnixStream) -> io::Result<Request> {
    let mut head = [0; 28];
    stream.read_exact(&mut head)?;
    let u64_at = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().expect("8 bytes"));
    let request = Request {
        command: u16::from_be_bytes([head[6], head[7]]),
        cookie: u64_at(8),
        offset: u64_at(16),
        len: u64_at(20) as u32,
    };
    if request.command == WRITE {
        io::copy(&mut stream.take(u64::from(request.len)), &mut io::sink())?;
    }
    Ok(request)
}

/// The correct answer: all of the export is data, the bytes of a read are `fill`.
pub(crate) fn correct_answer(request: &Request, fill: u8) -> Vec<u8> {
    let chunk = |kind: u16, payload: &[u8]| {
        let mut bytes = 0x668e_33ef_u32.to_be_bytes().to_vec();
        bytes.extend(1u16.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(request.cookie.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        bytes
    };
    match request.command {
        READ => {
            let mut payload = request.offset.to_be_bytes().to_vec();
            payload.resize(8 + request.len as usize, fill);
            chunk(1, &payload)
        }
        BLOCK_STATUS => {
            let numbers = [7, request.len, 0];
            chunk(5, &numbers.map(u32::to_be_bytes).concat())
        }
        _ => chunk(0, &[]),
    }
}

/// Answers a request with `error`: an error chunk that is not the last one, and a last chunk.
pub(crate) fn failure(request: &Request, error: u32) -> Vec<u8> {
    let chunk = |flags: u16, kind: u16, payload: &[u8]| {
        let mut bytes = 0x668e_33ef_u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(request.cookie.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        bytes
    };
    let payload = [&error.to_be_bytes()[..], &3u16.to_be_bytes(), b"bad"].concat();
    [chunk(0, (1 << 15) + 1, &payload), chunk(1, 0, &[])].concat()
}
