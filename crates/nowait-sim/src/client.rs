//! A client of an NBD server: one connection, from its greeting to its end.
//!
//! Invariant: a request has begun when its head was sent, and not before; each that is sent to its
//! end is answered once, and before the server closes the connection (NBD proto.md,
//! "NBD_CMD_DISC").
//! Knows: pattern, model, scenario, judge, reply. Known by: server.

use std::collections::VecDeque;
use std::ops::ControlFlow::{Break, Continue};

use nowait::sim::{Far, Random};
use nowait::{Flags, Op, Range};
use nowait_nbd as nbd;

use crate::judge::{Flight, Judge};
use crate::model::{Time, Wrong};
use crate::pattern::{self, Value};
use crate::reply::{Answer, Dialect, Head, u32_of, u64_of};
use crate::scenario::{Asked, Leaving};

/// Requests of a client at most that are not answered.
const REQUESTS: usize = 24;
/// What block status requests are about.
const CONTEXT: &str = "base:allocation";
/// Bytes of the greeting.
const GREETING_BYTES: usize = 18;
/// What follows the flags of an export for clients that have not asked to leave it out.
const PADDING_BYTES: usize = 124;

/// A request whose head was not sent.
struct Queued {
    /// Bytes of the connection up to the end of its head.
    begins: u64,
    /// The same up to its own end.
    ends: u64,
    cookie: u64,
    asked: Asked,
    value: Value,
    answer: Answer,
}

/// A request that has begun.
struct Sent {
    /// Bytes of the connection up to its end.
    ends: u64,
    cookie: u64,
    flight: Flight,
    answer: Answer,
}

/// A client.
pub struct Client {
    socket: Far,
    /// The thread that serves it, and the connection's name there.
    pub home: (usize, u64),
    dialect: Dialect,
    no_zeroes: bool,
    greeted: bool,
    /// Options of the handshake that are not answered.
    options: VecDeque<u32>,
    /// The id of the context for block status, once it is known.
    context: Option<u32>,
    /// What is to be sent; the first `sent` bytes were.
    out: Vec<u8>,
    sent: usize,
    /// Bytes that were sent before those.
    before: u64,
    queued: VecDeque<Queued>,
    flights: Vec<Sent>,
    input: Vec<u8>,
    cookies: u64,
    leaving: Option<Leaving>,
    is_over: bool,
}

impl Client {
    /// A client at `socket`.
    #[must_use]
    pub fn new(socket: Far, home: (usize, u64), random: &mut Random) -> Self {
        let all = [Dialect::Simple, Dialect::Structured, Dialect::Extended];
        let dialect = random.pick(&all).unwrap_or(Dialect::Simple);
        let mut client = Self {
            socket,
            home,
            dialect,
            no_zeroes: random.below(2) == 0,
            greeted: false,
            options: VecDeque::new(),
            context: None,
            out: Vec::new(),
            sent: 0,
            before: 0,
            queued: VecDeque::new(),
            flights: Vec::new(),
            input: Vec::new(),
            cookies: random.next(),
            leaving: None,
            is_over: false,
        };
        client.negotiate(random);
        client
    }

    /// Queues the client's side of the handshake.
    fn negotiate(&mut self, random: &mut Random) {
        let flags = if self.no_zeroes { nbd::FLAG_NO_ZEROES } else { 0 } | nbd::FLAG_FIXED_NEWSTYLE;
        self.out.extend(u32::from(flags).to_be_bytes());
        match self.dialect {
            Dialect::Simple => {}
            Dialect::Structured => self.option(nbd::OPT_STRUCTURED_REPLY, &[]),
            Dialect::Extended => self.option(nbd::OPT_EXTENDED_HEADERS, &[]),
        }
        if self.dialect != Dialect::Simple && random.below(4) > 0 {
            // No name, one query.
            let mut data = [0, 0, 0, 0, 0, 0, 0, 1].to_vec();
            data.extend((CONTEXT.len() as u32).to_be_bytes());
            data.extend(CONTEXT.as_bytes());
            self.option(nbd::OPT_SET_META_CONTEXT, &data);
        }
        match self.dialect {
            Dialect::Simple | Dialect::Structured if random.below(4) == 0 => {
                self.option(nbd::OPT_EXPORT_NAME, &[]);
            }
            // No name, and nothing asked about it.
            _ => self.option(nbd::OPT_GO, &[0; 6]),
        }
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        self.options.push_back(option);
        self.out.extend(nbd::OPTION_MAGIC.to_be_bytes());
        self.out.extend(option.to_be_bytes());
        self.out.extend((data.len() as u32).to_be_bytes());
        self.out.extend(data);
    }

    /// Whether it takes another request.
    #[must_use]
    pub fn may_ask(&self) -> bool {
        self.leaving.is_none() && self.queued.len() + self.flights.len() < REQUESTS
    }

    /// Whether it has nothing to wait for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.leaving.is_none()
            && self.options.is_empty()
            && self.queued.is_empty()
            && self.flights.is_empty()
    }

    /// Whether the server has closed the connection, as it was to.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Bytes that are not sent yet.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// When the oldest request in flight began.
    #[must_use]
    pub fn oldest(&self) -> Time {
        self.flights.iter().map(|sent| sent.flight.began).min().unwrap_or(Time::MAX)
    }

    /// Queues a request.
    pub fn ask(&mut self, mut asked: Asked, judge: &mut Judge, random: &mut Random) {
        if asked.op == Op::Status && self.context.is_none() {
            asked.op = Op::Read;
        }
        let Asked { op, flags, range, .. } = asked;
        let (command, rare) = match op {
            Op::Read if self.dialect == Dialect::Simple => (nbd::CMD_READ, 0),
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
        for (_, bit) in choices.into_iter().filter(|(flag, _)| flags.has(*flag)) {
            bits |= bit;
        }
        self.cookies = self.cookies.wrapping_add(1);
        let place = if op == Op::Flush { Range::default() } else { range };
        self.head(command, bits, place);
        let value = judge.value_for(op);
        let begins = self.before + self.out.len() as u64;
        if op == Op::Write {
            let from = self.out.len();
            self.out.resize(from + range.len as usize, 0);
            pattern::fill(self.out.get_mut(from..).unwrap_or_default(), range.pos, value);
        }
        let ends = self.before + self.out.len() as u64;
        let answer = Answer::to(op, range, self.context.unwrap_or_default(), one_piece);
        let cookie = self.cookies;
        self.queued.push_back(Queued { begins, ends, cookie, asked, value, answer });
    }

    fn head(&mut self, command: u16, flags: u16, range: Range) {
        if self.dialect != Dialect::Extended {
            let length = range.len as u32;
            self.out.extend(nbd::request(command, flags, self.cookies, range.pos, length));
            return;
        }
        // Some clients do not say that a payload follows a write.
        let says_so = command == nbd::CMD_WRITE && self.cookies.is_multiple_of(2);
        let payload = if says_so { nbd::CMD_FLAG_PAYLOAD_LEN } else { 0 };
        self.out.extend(nbd::EXTENDED_REQUEST_MAGIC.to_be_bytes());
        self.out.extend((flags | payload).to_be_bytes());
        self.out.extend(command.to_be_bytes());
        self.out.extend(self.cookies.to_be_bytes());
        self.out.extend(range.pos.to_be_bytes());
        self.out.extend(range.len.to_be_bytes());
    }

    /// Bytes that were sent.
    fn through(&self) -> u64 {
        self.before + self.sent as u64
    }

    /// Sends at most `limit` bytes. Nothing in flight began before `oldest`. Returns how many
    /// requests have begun.
    pub fn send(&mut self, limit: usize, judge: &mut Judge, oldest: Time) -> u64 {
        let to = (self.sent + limit.min(self.unsent())).min(self.out.len());
        let part = self.out.get(self.sent..to).unwrap_or_default();
        // An error shows when it receives.
        let taken = if part.is_empty() { 0 } else { self.socket.send(part).unwrap_or(0) };
        self.sent += taken;
        let through = self.through();
        let mut begun = 0;
        while self.queued.front().is_some_and(|queued| queued.begins <= through) {
            let Some(queued) = self.queued.pop_front() else { break };
            let Queued { ends, cookie, asked, value, answer, .. } = queued;
            let flight = judge.begin(asked, value, oldest);
            self.flights.push(Sent { ends, cookie, flight, answer });
            begun += 1;
        }
        if self.sent == self.out.len() {
            self.before += self.sent as u64;
            self.out.clear();
            self.sent = 0;
        }
        begun
    }

    /// Leaves as told, unless it does so already. It is to be dropped if it is gone at once; what
    /// it leaves behind is returned then.
    pub fn leave(&mut self, how: Leaving) -> Vec<Flight> {
        match (how, self.leaving) {
            (Leaving::Abrupt, _) => {
                self.socket.shutdown(true);
                self.is_over = true;
                return self.left_behind();
            }
            (_, Some(_)) => return Vec::new(),
            (Leaving::Goodbye, None) => {
                self.head(nbd::CMD_DISC, 0, Range::default());
            }
            (Leaving::HalfClose, None) => {
                self.out.truncate(self.sent);
                self.queued.clear();
                self.socket.shutdown(false);
            }
        }
        self.leaving = Some(how);
        Vec::new()
    }

    /// What the server has not answered when it has closed the connection.
    pub fn left_behind(&mut self) -> Vec<Flight> {
        self.flights.drain(..).map(|sent| sent.flight).collect()
    }

    /// Receives at most as much as `scratch` holds, and judges what has been answered.
    ///
    /// # Errors
    /// What is not as it may be.
    pub fn receive(&mut self, scratch: &mut [u8], judge: &mut Judge) -> Result<(), Wrong> {
        match self.socket.receive(scratch) {
            Ok(0) => return self.end(),
            Ok(got) => {
                self.input.extend_from_slice(scratch.get(..got).unwrap_or_default());
            }
            // Nothing is there yet.
            Err(_) => return Ok(()),
        }
        let input = std::mem::take(&mut self.input);
        let mut rest = input.as_slice();
        while self.understand(&mut rest, judge)? {}
        let used = input.len() - rest.len();
        self.input = input;
        self.input.drain(..used);
        Ok(())
    }

    /// The server has closed the connection.
    fn end(&mut self) -> Result<(), Wrong> {
        self.is_over = true;
        let through = self.through();
        let whole = self.flights.iter().filter(|sent| sent.ends <= through);
        let lost: Vec<_> = whole.map(|sent| sent.flight.asked).collect();
        match self.leaving {
            None => Err(Wrong::new("a connection was closed that its client uses".to_owned())),
            Some(how) if !lost.is_empty() => {
                Err(Wrong::new(format!("C41: lost after {how:?}: {lost:?}")))
            }
            Some(_) if !self.input.is_empty() => {
                Err(Wrong::new(format!("the last reply is cut short: {:02x?}", self.input)))
            }
            Some(_) => Ok(()),
        }
    }

    /// Takes the next message; false when not all of it has come.
    fn understand(&mut self, input: &mut &[u8], judge: &mut Judge) -> Result<bool, Wrong> {
        if !self.greeted {
            let Some((greeting, rest)) = input.split_at_checked(GREETING_BYTES) else {
                return Ok(false);
            };
            *input = rest;
            self.greeted = true;
            let wanted = [nbd::INIT_MAGIC.to_be_bytes(), nbd::OPTION_MAGIC.to_be_bytes()].concat();
            return match greeting.starts_with(&wanted) {
                true => Ok(true),
                false => Err(Wrong::new(format!("no greeting: {greeting:02x?}"))),
            };
        }
        if let Some(&option) = self.options.front() {
            let mut rest = *input;
            let agreed = match option {
                nbd::OPT_EXPORT_NAME => self.read_export(&mut rest, judge),
                _ => self.read_option(&mut rest, option, judge),
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
        self.read_reply(input, judge)
    }

    /// The answer to `OPT_EXPORT_NAME`. The error is `None` when it has not all come.
    fn read_export(&mut self, input: &mut &[u8], judge: &Judge) -> Result<(), Option<Wrong>> {
        let size = u64_of(input).ok_or(None)?;
        let padding = if self.no_zeroes { 0 } else { PADDING_BYTES };
        *input = input.get(2 + padding..).ok_or(None)?;
        self.options.pop_front();
        check_size(size, judge)
    }

    /// A reply to `option`.
    fn read_option(
        &mut self,
        input: &mut &[u8],
        option: u32,
        judge: &Judge,
    ) -> Result<(), Option<Wrong>> {
        let wrong = |what| Err(Some(Wrong::new(format!("option {option}: {what}"))));
        let (magic, about) = (u64_of(input).ok_or(None)?, u32_of(input).ok_or(None)?);
        let (kind, len) = (u32_of(input).ok_or(None)?, u32_of(input).ok_or(None)?);
        let (mut data, rest) = input.split_at_checked(len as usize).ok_or(None)?;
        *input = rest;
        if magic != nbd::OPTION_REPLY_MAGIC || about != option {
            return wrong(format!("answered by {magic:x} about {about}"));
        }
        match (kind, option) {
            (nbd::REP_ACK, _) => {
                self.options.pop_front();
            }
            (nbd::REP_META_CONTEXT, nbd::OPT_SET_META_CONTEXT) => self.context = u32_of(&mut data),
            (nbd::REP_INFO, nbd::OPT_GO) => {
                if let Some((kind, mut info)) = data.split_first_chunk()
                    && u16::from_be_bytes(*kind) == nbd::INFO_EXPORT
                {
                    check_size(u64_of(&mut info).unwrap_or_default(), judge)?;
                }
            }
            _ => return wrong(format!("answered by type {kind:x}")),
        }
        Ok(())
    }

    fn read_reply(&mut self, input: &mut &[u8], judge: &mut Judge) -> Result<bool, Wrong> {
        let Some(head) = Head::read(self.dialect, input)? else { return Ok(false) };
        let known = self.flights.iter().position(|sent| sent.cookie == head.cookie);
        let through = self.through();
        let Some((index, sent)) = known.and_then(|at| Some((at, self.flights.get_mut(at)?))) else {
            return Err(Wrong::new(format!("C41: a reply to nothing that was asked: {head:?}")));
        };
        match sent.answer.take(self.dialect, &head, input)? {
            Break(()) => return Ok(false),
            Continue((taken, last)) => {
                *input = input.get(taken..).unwrap_or_default();
                if last {
                    let Sent { flight, answer, ends, .. } = self.flights.swap_remove(index);
                    if answer.errno.is_none() && ends > through {
                        return Err(Wrong::new("done before all of its payload came".to_owned()));
                    }
                    judge_answer(&flight, answer, judge)?;
                }
            }
        }
        Ok(true)
    }
}

fn check_size(size: u64, judge: &Judge) -> Result<(), Option<Wrong>> {
    match size == judge.size() {
        true => Ok(()),
        false => Err(Some(Wrong::new(format!("the export has {size} bytes, a client is told")))),
    }
}

fn judge_answer(flight: &Flight, answer: Answer, judge: &mut Judge) -> Result<(), Wrong> {
    let Asked { op, range, .. } = flight.asked;
    let outside = op != Op::Flush && flight.inside.len < range.len;
    match answer.errno {
        Some(errno) if outside => judge.refused(flight, errno, true),
        Some(libc::EINVAL) => judge.invalid(flight),
        Some(errno) => judge.failed(flight, errno),
        None => {
            judge.done(flight, if op == Op::Flush { 0 } else { range.len })?;
            match op {
                Op::Read => judge.found(range.pos, &answer.bytes, flight.began),
                Op::Status => judge.status(flight, answer.spans),
                _ => Ok(()),
            }
        }
    }
}
