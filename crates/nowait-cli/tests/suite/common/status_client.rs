//! An NBD client that asks for block status in contexts of its choice.
//!
//! Invariant: it has no code in common with the server; a reply that breaks the protocol fails the test.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nowait_testkit::nbd::*;

/// Extents of one context: bytes and flags.
pub(crate) type Extents = Vec<(u64, u64)>;

/// A connection with contexts.
pub(crate) struct StatusClient {
    stream: UnixStream,
    mode: Mode,
    /// The names of the contexts by their ids.
    pub(crate) contexts: BTreeMap<u32, String>,
    cookie: u64,
}

fn array<const N: usize>(stream: &mut impl Read) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).expect("a server that answers");
    bytes
}

/// The data of an option about the contexts of export `name` that `queries` ask for.
fn context_request(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
    let count = (queries.len() as u32).to_be_bytes().to_vec();
    let queries = queries.iter().map(|query| text(query));
    [text(name), count].into_iter().chain(queries).collect::<Vec<_>>().concat()
}

impl StatusClient {
    /// A client of export `name` that selects the contexts `queries`.
    pub(crate) fn connect(socket: &Path, name: &str, mode: Mode, queries: &[&str]) -> Self {
        let mut stream = greet(socket).expect("a server");
        let option = match mode {
            Mode::Extended => OPT_EXTENDED_HEADERS,
            _ => OPT_STRUCTURED_REPLY,
        };
        let mut ask = |option, data: &[u8]| {
            send_option(&mut stream, option, data).expect("a server that takes options");
            let mut replies = Vec::new();
            loop {
                let (kind, data) = read_option_reply(&mut stream).expect("a reply");
                match kind {
                    REP_ACK => return replies,
                    REP_META_CONTEXT | REP_INFO => replies.push(data),
                    kind => panic!("refused by {kind:#x}"),
                }
            }
        };
        ask(option, &[]);
        let selected = ask(OPT_SET_META_CONTEXT, &context_request(name, queries));
        let context = |data: Vec<u8>| {
            let (id, name) = data.split_first_chunk().expect("an id");
            (u32::from_be_bytes(*id), String::from_utf8(name.to_vec()).expect("a name"))
        };
        let contexts = selected.into_iter().map(context).collect();
        ask(OPT_GO, &export_request(name));
        Self { stream, mode, contexts, cookie: 0 }
    }

    /// The extents of each context from `offset` on, or the error.
    pub(crate) fn status(
        &mut self,
        offset: u64,
        len: u64,
        flags: u16,
    ) -> Result<BTreeMap<u32, Extents>, u32> {
        self.cookie += 1;
        let is_extended = self.mode == Mode::Extended;
        let magic = if is_extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let (kind, cookie) = (BLOCK_STATUS, self.cookie);
        let short = RawRequest { magic, flags, kind, cookie, offset, len: len as u32 };
        let mut request = short.bytes();
        if is_extended {
            request.splice(24.., len.to_be_bytes());
        }
        self.stream.write_all(&request).expect("a server that takes requests");
        let (mut all, mut error) = (BTreeMap::new(), None);
        loop {
            let magic = u32::from_be_bytes(array(&mut self.stream));
            assert_eq!(magic, if is_extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC });
            let flags = u16::from_be_bytes(array(&mut self.stream));
            let kind = u16::from_be_bytes(array(&mut self.stream));
            assert_eq!(u64::from_be_bytes(array(&mut self.stream)), self.cookie);
            let bytes = match is_extended {
                true => {
                    assert_eq!(u64::from_be_bytes(array(&mut self.stream)), offset);
                    u64::from_be_bytes(array(&mut self.stream))
                }
                false => u32::from_be_bytes(array(&mut self.stream)).into(),
            };
            let mut payload = vec![0; bytes as usize];
            self.stream.read_exact(&mut payload).expect("a whole chunk");
            let (head, rest) = payload.split_first_chunk().expect("an id or an error");
            let number = u32::from_be_bytes(*head);
            match kind {
                BLOCK_STATUS_CHUNK | BLOCK_STATUS_EXT => {
                    assert_eq!(kind == BLOCK_STATUS_EXT, is_extended);
                    let before = all.insert(number, extents(rest, is_extended));
                    assert_eq!(before, None, "one chunk for a context");
                }
                ERROR => error = Some(number),
                kind => panic!("a chunk of type {kind}"),
            }
            if flags & CHUNK_DONE != 0 {
                break;
            }
        }
        match error {
            Some(error) => Err(error),
            None => {
                assert!(all.keys().eq(self.contexts.keys()), "a chunk for each context");
                Ok(all)
            }
        }
    }

    /// Whether each unit of `unit` bytes is dirty in `size` bytes of the export, by the context whose name ends with
    /// `context`.
    pub(crate) fn dirty(&mut self, context: &str, size: u64, unit: u64, flags: u16) -> Vec<bool> {
        let is_it = |(_, name): &(&u32, &String)| name.ends_with(context);
        let id = *self.contexts.iter().find(is_it).expect("a context of that name").0;
        let mut units = Vec::new();
        while (units.len() as u64) * unit < size {
            let at = units.len() as u64 * unit;
            let all = self.status(at, size - at, flags).expect("a map");
            let extents = &all[&id];
            assert!(flags & REQ_ONE == 0 || extents.len() == 1, "{extents:?}");
            assert!(extents.iter().map(|(len, _)| len).sum::<u64>() <= size - at);
            for (len, flags) in extents {
                assert!(*flags <= 1 && len.is_multiple_of(unit), "{extents:?}");
                units.resize(units.len() + (len / unit) as usize, *flags == 1);
            }
        }
        units
    }
}

fn extents(bytes: &[u8], is_extended: bool) -> Extents {
    let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("4 bytes"));
    let long = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("8 bytes"));
    if is_extended {
        let (count, rest) = bytes.split_at(4);
        assert_eq!(word(count) as usize * 16, rest.len());
        return rest.chunks(16).map(|it| (long(&it[..8]), long(&it[8..]))).collect();
    }
    bytes.chunks(8).map(|it| (word(&it[..4]).into(), word(&it[4..]).into())).collect()
}
