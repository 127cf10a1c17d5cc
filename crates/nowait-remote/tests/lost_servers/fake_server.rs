//! A server with a volatile cache that dies, lies or changes as a test says.
//!
//! Invariant: what is not flushed is lost when it dies. It answers by simple replies only.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use nowait_nbd as nbd;
use nowait_nbd::{NbdUri, ReplyMode, RequestHeader};
use tempfile::TempDir;

/// How the server behaves; a test changes it at any time.
#[derive(Clone, Debug)]
pub(crate) struct Behaviour {
    pub(crate) size: u64,
    pub(crate) flags: u16,
    /// The server dies instead of answering when it has answered as many requests.
    pub(crate) answers: u64,
    /// It dies whenever something is asked.
    pub(crate) never_answers: bool,
    /// Writes fail with this error, unless it is 0.
    pub(crate) write_error: u32,
    /// The next flush fails with this error, unless it is 0.
    pub(crate) flush_error: u32,
    /// The bytes of the next answer, whatever was asked.
    pub(crate) lie: Option<Vec<u8>>,
    /// Connections are closed immediately.
    pub(crate) absent: bool,
    /// The handshake comes byte by byte, and never ends.
    pub(crate) drips: bool,
}

struct State {
    behaviour: Behaviour,
    durable: Vec<u8>,
    cached: Vec<u8>,
    connections: u32,
}

pub(crate) struct FakeServer {
    state: Arc<Mutex<State>>,
    socket: PathBuf,
    _directory: TempDir,
}

pub(crate) const ALL_FLAGS: u16 =
    nbd::FLAG_HAS_FLAGS | nbd::FLAG_SEND_FLUSH | nbd::FLAG_SEND_FUA | nbd::FLAG_SEND_WRITE_ZEROES;

impl FakeServer {
    pub(crate) fn start(size: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let behaviour = Behaviour {
            size,
            flags: ALL_FLAGS,
            answers: u64::MAX,
            never_answers: false,
            write_error: 0,
            flush_error: 0,
            lie: None,
            absent: false,
            drips: false,
        };
        let bytes = vec![0; size as usize];
        let state = State { behaviour, durable: bytes.clone(), cached: bytes, connections: 0 };
        let state = Arc::new(Mutex::new(state));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = shared.clone();
                std::thread::spawn(move || serve(stream, &state));
            }
        });
        Self { state, socket, _directory: directory }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.lock().behaviour);
    }

    pub(crate) fn uri(&self) -> NbdUri {
        format!("nbd+unix:///disk?socket={}", self.socket.display()).parse().unwrap()
    }

    /// The bytes that the death of the server does not lose.
    pub(crate) fn durable(&self) -> Vec<u8> {
        self.lock().durable.clone()
    }

    /// Connections that have come so far.
    pub(crate) fn connections(&self) -> u32 {
        self.lock().connections
    }
}

fn serve(mut stream: UnixStream, state: &Mutex<State>) {
    {
        let mut state = state.lock().unwrap();
        if state.behaviour.absent {
            return;
        }
        state.connections += 1;
        if state.behaviour.drips {
            drop(state);
            return drip(stream);
        }
    }
    // Any error is the end of the connection.
    let _ = negotiate(&mut stream, state).and_then(|()| while_alive(&mut stream, state));
}

/// A greeting, and option replies that have no end.
fn drip(mut stream: UnixStream) {
    let mut bytes = nbd::INIT_MAGIC.to_be_bytes().to_vec();
    bytes.extend(nbd::OPTION_MAGIC.to_be_bytes());
    for byte in bytes.into_iter().chain(std::iter::repeat(3)) {
        std::thread::sleep(std::time::Duration::from_millis(100));
        if stream.write_all(&[byte]).is_err() {
            return;
        }
    }
}

fn read<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn negotiate(stream: &mut UnixStream, state: &Mutex<State>) -> io::Result<()> {
    let mut greeting = nbd::INIT_MAGIC.to_be_bytes().to_vec();
    greeting.extend(nbd::OPTION_MAGIC.to_be_bytes());
    greeting.extend((nbd::FLAG_FIXED_NEWSTYLE | nbd::FLAG_NO_ZEROES).to_be_bytes());
    stream.write_all(&greeting)?;
    read::<4>(stream)?;
    loop {
        read::<8>(stream)?;
        let option = u32::from_be_bytes(read(stream)?);
        let len = u32::from_be_bytes(read(stream)?);
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = nbd::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        let named = data.get(4..8) == Some(b"disk");
        match option {
            nbd::OPT_GO if named => {
                let (size, flags) = {
                    let state = state.lock().unwrap();
                    (state.behaviour.size, state.behaviour.flags)
                };
                let mut info = nbd::INFO_EXPORT.to_be_bytes().to_vec();
                info.extend(size.to_be_bytes());
                info.extend(flags.to_be_bytes());
                reply(nbd::REP_INFO, &info)?;
                return reply(nbd::REP_ACK, &[]);
            }
            nbd::OPT_GO => reply(nbd::REP_ERR_UNKNOWN, &[])?,
            _ => reply(nbd::REP_ERR_UNSUP, &[])?,
        }
    }
}

fn while_alive(stream: &mut UnixStream, state: &Mutex<State>) -> io::Result<()> {
    loop {
        let header = read::<28>(stream)?;
        let header = RequestHeader::parse(ReplyMode::Simple, &header).expect("a request");
        let mut payload = vec![0; header.payload(ReplyMode::Simple) as usize];
        stream.read_exact(&mut payload)?;
        let mut state = state.lock().unwrap();
        if state.behaviour.answers == 0 || state.behaviour.never_answers {
            state.behaviour.answers = u64::MAX;
            state.cached = state.durable.clone();
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        state.behaviour.answers -= 1;
        if let Some(lie) = state.behaviour.lie.take() {
            stream.write_all(&lie)?;
            continue;
        }
        let (error, data) = state.answer(header, &payload);
        drop(state);
        let mut reply = nbd::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend(error.to_be_bytes());
        reply.extend(header.cookie.to_be_bytes());
        reply.extend(data);
        stream.write_all(&reply)?;
    }
}

impl State {
    fn answer(&mut self, header: RequestHeader, payload: &[u8]) -> (u32, Vec<u8>) {
        let range = header.offset as usize..(header.offset + header.length) as usize;
        let is_change = [nbd::CMD_WRITE, nbd::CMD_WRITE_ZEROES].contains(&header.command);
        if is_change && self.behaviour.write_error != 0 {
            return (self.behaviour.write_error, Vec::new());
        }
        match header.command {
            nbd::CMD_READ => return (0, self.cached[range].to_vec()),
            nbd::CMD_WRITE => self.cached[range.clone()].copy_from_slice(payload),
            nbd::CMD_WRITE_ZEROES => self.cached[range.clone()].fill(0),
            nbd::CMD_FLUSH if self.behaviour.flush_error != 0 => {
                return (std::mem::take(&mut self.behaviour.flush_error), Vec::new());
            }
            nbd::CMD_FLUSH => self.durable = self.cached.clone(),
            other => panic!("command {other}"),
        }
        if is_change && header.flags & nbd::CMD_FLAG_FUA != 0 {
            self.durable[range.clone()].copy_from_slice(&self.cached[range]);
        }
        (0, Vec::new())
    }
}
