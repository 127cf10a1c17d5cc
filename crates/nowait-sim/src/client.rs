//! A simulated NBD client: one connection, from its greeting to its end.
//!
//! Invariant: a request begins when its header was sent; each request that is sent completely is
//! answered once, before the server closes the connection (NBD proto.md, "NBD_CMD_DISC").

use std::collections::VecDeque;
use std::ops::ControlFlow::{Break, Continue};

use nowait::sim::{ClientEnd, Random};
use nowait::{ByteRange, Flags, Op};
use nowait_nbd::{
    self as nbd, Fields, Info, InfoOption, MetaContextOption, OptionReplyHeader, ReplyHeader,
    ReplyMode, RequestHeader,
};

use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::pattern;
use crate::pattern::Value;
use crate::reply::Answer;
use crate::scenario::{DisconnectKind, RequestSpec};

/// The limit of unanswered requests of a client.
const REQUESTS: usize = 24;
/// The metadata context of block-status requests.
const CONTEXT: &str = "base:allocation";

/// A request whose header was not sent yet.
struct Queued {
    /// Bytes of the connection up to the end of the request's header.
    begins: u64,
    /// Bytes of the connection up to the end of the request.
    ends: u64,
    cookie: u64,
    spec: RequestSpec,
    value: Value,
    answer: Answer,
}

/// A request whose header was sent.
struct Sent {
    /// Bytes of the connection up to the end of the request.
    ends: u64,
    cookie: u64,
    flight: InFlight,
    answer: Answer,
}

/// A client.
pub struct Client {
    socket: ClientEnd,
    /// The server thread that owns the connection, and the connection's id there.
    pub owner: (usize, u64),
    mode: ReplyMode,
    no_zeroes: bool,
    greeted: bool,
    /// Options of the handshake that are not answered.
    options: VecDeque<u32>,
    /// The id of the block-status context, once the server has sent it.
    context: Option<u32>,
    /// The send buffer; its first `sent` bytes were sent.
    out: Vec<u8>,
    sent: usize,
    /// Bytes that were sent before those of `out`.
    before: u64,
    queued: VecDeque<Queued>,
    in_flight: Vec<Sent>,
    input: Vec<u8>,
    cookies: u64,
    disconnect_kind: Option<DisconnectKind>,
    is_over: bool,
}

impl Client {
    /// A client at `socket`, which chooses the export of that name.
    pub fn new(socket: ClientEnd, owner: (usize, u64), export: &str, random: &mut Random) -> Self {
        let all = [ReplyMode::Simple, ReplyMode::Structured, ReplyMode::Extended];
        let mode = random.pick(&all).unwrap_or(ReplyMode::Simple);
        let mut client = Self {
            socket,
            owner,
            mode,
            no_zeroes: random.below(2) == 0,
            greeted: false,
            options: VecDeque::new(),
            context: None,
            out: Vec::new(),
            sent: 0,
            before: 0,
            queued: VecDeque::new(),
            in_flight: Vec::new(),
            input: Vec::new(),
            cookies: random.next(),
            disconnect_kind: None,
            is_over: false,
        };
        client.negotiate(export, random);
        client
    }

    /// Queues the client's side of the handshake.
    fn negotiate(&mut self, export: &str, random: &mut Random) {
        let flags = if self.no_zeroes { nbd::FLAG_NO_ZEROES } else { 0 } | nbd::FLAG_FIXED_NEWSTYLE;
        self.out.extend(u32::from(flags).to_be_bytes());
        match self.mode {
            ReplyMode::Simple => {}
            ReplyMode::Structured => self.option(nbd::OPT_STRUCTURED_REPLY, &[]),
            ReplyMode::Extended => self.option(nbd::OPT_EXTENDED_HEADERS, &[]),
        }
        if self.mode != ReplyMode::Simple && random.below(4) > 0 {
            self.option(
                nbd::OPT_SET_META_CONTEXT,
                &MetaContextOption { export, queries: vec![CONTEXT] }.encode(),
            );
        }
        match self.mode {
            ReplyMode::Simple | ReplyMode::Structured if random.below(4) == 0 => {
                self.option(nbd::OPT_EXPORT_NAME, export.as_bytes());
            }
            _ => {
                let option = InfoOption { export, ..InfoOption::default() };
                self.option(nbd::OPT_GO, &option.encode());
            }
        }
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        self.options.push_back(option);
        self.out.extend(nbd::option(option, data));
    }

    /// Whether the client may send another request.
    pub fn may_ask(&self) -> bool {
        self.disconnect_kind.is_none() && self.queued.len() + self.in_flight.len() < REQUESTS
    }

    /// Whether no option and no request is unanswered, and the client is not disconnecting.
    pub fn is_idle(&self) -> bool {
        self.disconnect_kind.is_none()
            && self.options.is_empty()
            && self.queued.is_empty()
            && self.in_flight.is_empty()
    }

    /// Whether the connection is closed.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Bytes that are not sent yet.
    pub fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// When the oldest request in flight began.
    pub fn oldest(&self) -> Time {
        self.in_flight.iter().map(|sent| sent.flight.began).min().unwrap_or(Time::MAX)
    }

    /// Queues a request.
    pub fn ask(&mut self, mut spec: RequestSpec, oracle: &mut Oracle, random: &mut Random) {
        if spec.op == Op::Status && self.context.is_none() {
            spec.op = Op::Read;
        }
        let RequestSpec { op, flags, range, .. } = spec;
        let (command, rare) = match op {
            Op::Read if self.mode == ReplyMode::Simple => (nbd::CMD_READ, 0),
            Op::Read => (nbd::CMD_READ, nbd::CMD_FLAG_DF),
            Op::Write => (nbd::CMD_WRITE, 0),
            Op::Flush => (nbd::CMD_FLUSH, 0),
            Op::Discard => (nbd::CMD_TRIM, 0),
            Op::Zero => (nbd::CMD_WRITE_ZEROES, 0),
            Op::Status => (nbd::CMD_BLOCK_STATUS, nbd::CMD_FLAG_REQ_ONE),
        };
        let one_piece = rare > 0 && random.below(4) == 0;
        let mut bits = if one_piece { rare } else { 0 };
        let choices = [
            (Flags::DSYNC, nbd::CMD_FLAG_FUA),
            (Flags::NO_UNMAP, nbd::CMD_FLAG_NO_HOLE),
            (Flags::FAST_ZERO, nbd::CMD_FLAG_FAST_ZERO),
        ];
        for (_, bit) in choices.into_iter().filter(|(flag, _)| flags.contains(*flag)) {
            bits |= bit;
        }
        self.cookies = self.cookies.wrapping_add(1);
        let request_range = if op == Op::Flush { ByteRange::default() } else { range };
        self.head(command, bits, request_range);
        let value = oracle.value_for(op);
        let begins = self.before + self.out.len() as u64;
        if op == Op::Write {
            let from = self.out.len();
            self.out.resize(from + range.len as usize, 0);
            pattern::fill(self.out.get_mut(from..).unwrap_or_default(), range.pos, value);
        }
        let ends = self.before + self.out.len() as u64;
        let answer = Answer::to(op, range, self.context.unwrap_or_default(), one_piece);
        let cookie = self.cookies;
        self.queued.push_back(Queued { begins, ends, cookie, spec, value, answer });
    }

    fn head(&mut self, command: u16, flags: u16, range: ByteRange) {
        // With extended headers, some clients do not set CMD_FLAG_PAYLOAD_LEN for a write.
        let says_so = self.mode == ReplyMode::Extended
            && command == nbd::CMD_WRITE
            && self.cookies.is_multiple_of(2);
        let payload = if says_so { nbd::CMD_FLAG_PAYLOAD_LEN } else { 0 };
        let header = RequestHeader {
            flags: flags | payload,
            command,
            cookie: self.cookies,
            offset: range.pos,
            length: range.len,
        };
        let (bytes, len) = header.encode(self.mode);
        self.out.extend(bytes.iter().take(len));
    }

    /// Bytes that were sent.
    fn through(&self) -> u64 {
        self.before + self.sent as u64
    }

    /// Sends at most `limit` bytes. No request in flight began before `oldest`. Returns the number
    /// of requests that have begun.
    pub fn send(&mut self, limit: usize, oracle: &mut Oracle, oldest: Time) -> u64 {
        let to = (self.sent + limit.min(self.unsent())).min(self.out.len());
        let part = self.out.get(self.sent..to).unwrap_or_default();
        // An error is seen by the next receive.
        let taken = if part.is_empty() { 0 } else { self.socket.send(part).unwrap_or(0) };
        self.sent += taken;
        let through = self.through();
        let mut begun = 0;
        while self.queued.front().is_some_and(|queued| queued.begins <= through) {
            let Some(queued) = self.queued.pop_front() else { break };
            let Queued { ends, cookie, spec, value, answer, .. } = queued;
            let flight = oracle.begin(spec, value, oldest);
            self.in_flight.push(Sent { ends, cookie, flight, answer });
            begun += 1;
        }
        if self.sent == self.out.len() {
            self.before += self.sent as u64;
            self.out.clear();
            self.sent = 0;
        }
        begun
    }

    /// Disconnects, unless the client does so already. After an abrupt disconnect the client must
    /// be dropped; its unanswered requests are returned.
    pub fn disconnect(&mut self, how: DisconnectKind) -> Vec<InFlight> {
        match (how, self.disconnect_kind) {
            (DisconnectKind::Abrupt, _) => {
                self.socket.shutdown(true);
                self.is_over = true;
                return self.take_unanswered();
            }
            (_, Some(_)) => return Vec::new(),
            (DisconnectKind::Goodbye, None) => {
                self.head(nbd::CMD_DISC, 0, ByteRange::default());
            }
            (DisconnectKind::HalfClose, None) => {
                self.out.truncate(self.sent);
                self.queued.clear();
                self.socket.shutdown(false);
            }
        }
        self.disconnect_kind = Some(how);
        Vec::new()
    }

    /// The requests that are unanswered when the connection is closed.
    pub fn take_unanswered(&mut self) -> Vec<InFlight> {
        self.in_flight.drain(..).map(|sent| sent.flight).collect()
    }

    /// Receives at most as much as `scratch` holds, and checks the answers against the oracle.
    ///
    /// # Errors
    /// An answer violates the contract or the protocol.
    pub fn receive(&mut self, scratch: &mut [u8], oracle: &mut Oracle) -> Result<(), Violation> {
        match self.socket.receive(scratch) {
            Ok(0) => return self.end(),
            Ok(got) => {
                self.input.extend_from_slice(scratch.get(..got).unwrap_or_default());
            }
            // No bytes have arrived.
            Err(_) => return Ok(()),
        }
        let input = std::mem::take(&mut self.input);
        let mut rest = input.as_slice();
        while self.parse_next(&mut rest, oracle)? {}
        let used = input.len() - rest.len();
        self.input = input;
        self.input.drain(..used);
        Ok(())
    }

    /// Handles the end of the stream: the server has closed the connection.
    fn end(&mut self) -> Result<(), Violation> {
        self.is_over = true;
        let through = self.through();
        let whole = self.in_flight.iter().filter(|sent| sent.ends <= through);
        let lost: Vec<_> = whole.map(|sent| sent.flight.spec).collect();
        match self.disconnect_kind {
            None => Err(Violation::new("a connection was closed that its client uses".to_owned())),
            Some(how) if !lost.is_empty() => {
                Err(Violation::new(format!("C41: lost after {how:?}: {lost:?}")))
            }
            Some(_) if !self.input.is_empty() => {
                Err(Violation::new(format!("the last reply is cut short: {:02x?}", self.input)))
            }
            Some(_) => Ok(()),
        }
    }

    /// Parses the next message; false when it has not arrived completely.
    fn parse_next(&mut self, input: &mut &[u8], oracle: &mut Oracle) -> Result<bool, Violation> {
        if !self.greeted {
            let Some((greeting, rest)) = input.split_first_chunk() else { return Ok(false) };
            *input = rest;
            self.greeted = true;
            return match nbd::parse_greeting(greeting) {
                Some(_) => Ok(true),
                None => Err(Violation::new(format!("no greeting: {greeting:02x?}"))),
            };
        }
        if let Some(&option) = self.options.front() {
            let mut rest = *input;
            let agreed = match option {
                nbd::OPT_EXPORT_NAME => self.read_export(&mut rest, oracle),
                _ => self.read_option(&mut rest, option, oracle),
            };
            return match agreed {
                Ok(()) => {
                    *input = rest;
                    Ok(true)
                }
                Err(Some(wrong)) => Err(wrong),
                Err(None) => Ok(false),
            };
        }
        self.read_reply(input, oracle)
    }

    /// Parses the answer to `OPT_EXPORT_NAME`. The error is `None` when it has not arrived
    /// completely.
    fn read_export(&mut self, input: &mut &[u8], oracle: &Oracle) -> Result<(), Option<Violation>> {
        let mut fields = Fields(input);
        let size = fields.u64().ok_or(None)?;
        let padding = if self.no_zeroes { 0 } else { nbd::EXPORT_NAME_PADDING_BYTES };
        fields.take(2 + padding).ok_or(None)?;
        *input = fields.0;
        self.options.pop_front();
        check_size(size, oracle)
    }

    /// Parses a reply to `option`.
    fn read_option(
        &mut self,
        input: &mut &[u8],
        option: u32,
        oracle: &Oracle,
    ) -> Result<(), Option<Violation>> {
        let wrong = |what| Err(Some(Violation::new(format!("option {option}: {what}"))));
        let (head, rest) = input.split_first_chunk().ok_or(None)?;
        let Some(head) = OptionReplyHeader::parse(head).filter(|head| head.option == option) else {
            return wrong(format!("answered by {head:02x?}"));
        };
        let (data, rest) = rest.split_at_checked(head.length as usize).ok_or(None)?;
        *input = rest;
        let kind = head.kind;
        match (kind, option) {
            (nbd::REP_ACK, _) => {
                self.options.pop_front();
            }
            (nbd::REP_META_CONTEXT, nbd::OPT_SET_META_CONTEXT) => self.context = Fields(data).u32(),
            (nbd::REP_INFO, nbd::OPT_GO) => match Info::parse(data) {
                Some(Info::Export { size, .. }) => check_size(size, oracle)?,
                Some(_) => {}
                None => return wrong(format!("answered by information {data:02x?}")),
            },
            _ => return wrong(format!("answered by type {kind:x}")),
        }
        Ok(())
    }

    fn read_reply(&mut self, input: &mut &[u8], oracle: &mut Oracle) -> Result<bool, Violation> {
        let head = ReplyHeader::parse(self.mode, input)
            .map_err(|magic| Violation::new(format!("reply: no head: {:?}", (magic, self.mode))))?;
        let Some(head) = head else { return Ok(false) };
        let found = self.in_flight.iter().position(|sent| sent.cookie == head.0.cookie());
        let through = self.through();
        let Some((index, sent)) = found.and_then(|at| Some((at, self.in_flight.get_mut(at)?)))
        else {
            return Err(Violation::new(format!(
                "C41: a reply to nothing that was asked: {head:?}"
            )));
        };
        match sent.answer.take(self.mode, head, input)? {
            Break(()) => return Ok(false),
            Continue((taken, last)) => {
                *input = input.get(taken..).unwrap_or_default();
                if last {
                    let Sent { flight, answer, ends, .. } = self.in_flight.swap_remove(index);
                    if answer.errno.is_none() && ends > through {
                        return Err(Violation::new(
                            "done before all of its payload came".to_owned(),
                        ));
                    }
                    check_answer(&flight, answer, oracle)?;
                }
            }
        }
        Ok(true)
    }
}

fn check_size(size: u64, oracle: &Oracle) -> Result<(), Option<Violation>> {
    match size == oracle.size() {
        true => Ok(()),
        false => {
            Err(Some(Violation::new(format!("the export has {size} bytes, a client is told"))))
        }
    }
}

fn check_answer(flight: &InFlight, answer: Answer, oracle: &mut Oracle) -> Result<(), Violation> {
    let RequestSpec { op, range, .. } = flight.spec;
    let outside = op != Op::Flush && flight.inside.len < range.len;
    match answer.errno {
        Some(errno) if outside => oracle.refused(flight, errno, true),
        Some(libc::EINVAL) => oracle.invalid(flight),
        Some(libc::EPERM) => oracle.not_permitted(flight, false),
        Some(errno) => oracle.failed(flight, errno),
        None => {
            oracle.done(flight, if op == Op::Flush { 0 } else { range.len })?;
            match op {
                Op::Read => oracle.found(range.pos, &answer.bytes, flight.began),
                Op::Status => oracle.status(flight, answer.extents),
                _ => Ok(()),
            }
        }
    }
}
