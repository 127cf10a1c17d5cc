//! An NBD server with scripted answers, which may break the protocol.
//!
//! Invariant: the server serves one connection and ends with it.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use nowait_nbd::{
    self as nbd, ChunkPosition, ExtentList, Info, OptionHeader, ReplyEncoder, ReplyHeader,
    ReplyMode,
};

pub(crate) const READ: u16 = nbd::CMD_READ;
pub(crate) const WRITE: u16 = nbd::CMD_WRITE;
pub(crate) const BLOCK_STATUS: u16 = nbd::CMD_BLOCK_STATUS;
/// The id of the context.
const CONTEXT: u32 = 7;
const TRANSMISSION_FLAGS: u16 = nbd::FLAG_HAS_FLAGS | nbd::FLAG_SEND_FLUSH;
const MODE: ReplyMode = ReplyMode::Structured;

pub(crate) use nowait_nbd::RequestHeader as Request;

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
            if request.command == nbd::CMD_DISC {
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
    nbd::greeting(nbd::FLAG_FIXED_NEWSTYLE | nbd::FLAG_NO_ZEROES).to_vec()
}

/// A reply to an option.
pub(crate) fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    nbd::option_reply(&mut bytes, option, kind, &[data]);
    bytes
}

/// `INFO_EXPORT` in answer to GO.
pub(crate) fn export_info(size: u64) -> Vec<u8> {
    let info = Info::Export { size, flags: TRANSMISSION_FLAGS };
    option_reply(nbd::OPT_GO, nbd::REP_INFO, &info.encode())
}

/// Receives an option and returns its number.
pub(crate) fn receive_option(stream: &mut UnixStream) -> io::Result<u32> {
    let mut head = [0; OptionHeader::BYTES];
    stream.read_exact(&mut head)?;
    let OptionHeader { option, length } = OptionHeader::parse(&head).expect("an option");
    stream.read_exact(&mut vec![0; length as usize])?;
    Ok(option)
}

fn negotiate(stream: &mut UnixStream, size: u64) -> io::Result<()> {
    stream.write_all(&greeting())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let option = receive_option(stream)?;
        let more = match option {
            nbd::OPT_STRUCTURED_REPLY => Vec::new(),
            nbd::OPT_SET_META_CONTEXT => {
                let data = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
                option_reply(option, nbd::REP_META_CONTEXT, &data)
            }
            _ => export_info(size),
        };
        stream.write_all(&[more, option_reply(option, nbd::REP_ACK, &[])].concat())?;
        if option == nbd::OPT_GO {
            return Ok(());
        }
    }
}

fn receive(stream: &mut UnixStream) -> io::Result<Request> {
    let mut head = [0; nbd::REQUEST_BYTES];
    stream.read_exact(&mut head)?;
    let request = Request::parse(MODE, &head).expect("a request");
    if request.command == WRITE {
        io::copy(&mut stream.take(request.length), &mut io::sink())?;
    }
    Ok(request)
}

/// The correct answer: all of the export is data, the bytes of a read are `fill`.
pub(crate) fn correct_answer(request: &Request, fill: u8) -> Vec<u8> {
    let answer = ReplyEncoder::to(MODE, request);
    let (head, payload) = match request.command {
        READ => {
            let head = answer.data(ChunkPosition::Last, request.offset, request.length as u32);
            (head, vec![fill; request.length as usize])
        }
        BLOCK_STATUS => {
            let mut extents = ExtentList::with_capacity(MODE, 1);
            extents.push(request.length, 0);
            (answer.status(ChunkPosition::Last, CONTEXT, &extents), extents.into_bytes())
        }
        _ => (answer.none(), Vec::new()),
    };
    [head.as_slice(), &payload].concat()
}

/// Answers a request with `error`: an error chunk that is not the last one, and a last chunk.
pub(crate) fn failure(request: &Request, error: u32) -> Vec<u8> {
    let payload = [&error.to_be_bytes()[..], &3u16.to_be_bytes(), b"bad"].concat();
    let (kind, cookie, length) = (nbd::REPLY_TYPE_ERROR, request.cookie, payload.len() as u64);
    let chunk = ReplyHeader::Chunk { flags: 0, kind, cookie, length }.encode(MODE, request.offset);
    let none = ReplyEncoder::to(MODE, request).none();
    [chunk.as_slice(), &payload, none.as_slice()].concat()
}
