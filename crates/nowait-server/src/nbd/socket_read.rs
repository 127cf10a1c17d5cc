//! Receives bytes from a connection's socket, and passes them on.
//!
//! Invariant: received bytes are parsed or kept as unparsed input.

use std::io::IoSliceMut;

use nowait::IoQueue;
use rustix::io::Errno;

use crate::loop_context::LoopContext;
use crate::nbd::connection::Connection;
use crate::nbd::negotiate::Handshakes;
use crate::nbd::session::{Phase, ReadState};
use crate::nbd::submit::{ParseProgress, Requests};
use crate::nbd::tls_session::Transport;
use crate::nbd::write_split::IncomingSplitWrite;

/// Bytes received with one system call, beside the payload of a large write.
/// Beyond it: the socket is not read.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;

/// The buffer that all connections of a thread receive into.
pub(crate) struct ReadBuffers {
    received: Vec<u8>,
    /// The decrypted contents of `received`, for TLS.
    plaintext: Vec<u8>,
}

impl Default for ReadBuffers {
    fn default() -> Self {
        Self { received: vec![0; RECEIVE_BYTES], plaintext: Vec::new() }
    }
}

/// State that the connections of a thread share.
pub(crate) struct SharedState {
    pub(crate) requests: Requests,
    pub(crate) handshakes: Handshakes,
    /// Keeps its memory for the next input that is parsed again.
    pub(crate) parsed_again: Vec<u8>,
}

impl Connection {
    /// Receives once and parses the bytes. Returns whether there were any.
    pub(crate) fn receive<Q: IoQueue>(
        &mut self,
        shared: &mut SharedState,
        buffers: &mut ReadBuffers,
        context: &mut LoopContext<Q>,
    ) -> bool {
        // The end of the input is read after the requests that wait for the export.
        let waits = self.waits_for.is_some();
        if self.session.input != ReadState::Open || !self.readable || waits {
            return false;
        }
        let received = match self.transport {
            Transport::Plain => self.receive_plain(shared, buffers, context),
            Transport::Tls(_) => self.receive_encrypted(shared, buffers, context),
        };
        match received {
            Ok(0) => self.session.end_input(),
            Ok(_) => return true,
            Err(Errno::AGAIN) => self.readable = false,
            Err(Errno::INTR) => {}
            Err(error) => self.lose(error),
        }
        false
    }

    fn receive_plain<Q: IoQueue>(
        &mut self,
        shared: &mut SharedState,
        buffers: &mut ReadBuffers,
        context: &mut LoopContext<Q>,
    ) -> Result<usize, Errno> {
        let scratch = &mut buffers.received[..];
        let session = &mut self.session;
        let unparsed_len = session.unparsed.len();
        scratch[..unparsed_len].copy_from_slice(&session.unparsed);
        let mut none = [];
        let missing = session.payload.as_mut().map_or(&mut none[..], |p| p.missing());
        let to_payload = missing.len().min(context.quantum as usize);
        // The next requests are received into `scratch` only together with the last bytes of the payload: bytes
        // that follow earlier are payload themselves.
        let more = session.incoming_split.as_ref().is_some_and(IncomingSplitWrite::has_more);
        let end = if more || to_payload < missing.len() { unparsed_len } else { RECEIVE_BYTES };
        let mut pieces = [
            IoSliceMut::new(&mut missing[..to_payload]),
            IoSliceMut::new(&mut scratch[unparsed_len..end]),
        ];
        let room = to_payload + end - unparsed_len;
        let got = self.socket.receive(&mut pieces)?;
        if got == 0 {
            return Ok(0);
        }
        session.unparsed.clear();
        let direct = got.min(to_payload);
        if let Some(payload) = &mut session.payload {
            payload.filled += direct;
        }
        self.received(got, room);
        let input = &scratch[..unparsed_len + got - direct];
        // Halves help only if the first one is answered immediately.
        let half = match context.completes_inline {
            true => self.session.half_batch_len(input),
            false => usize::MAX,
        };
        self.parse(shared, context, input, half);
        Ok(got)
    }

    /// `receive_plain` for a TLS connection.
    fn receive_encrypted<Q: IoQueue>(
        &mut self,
        shared: &mut SharedState,
        buffers: &mut ReadBuffers,
        context: &mut LoopContext<Q>,
    ) -> Result<usize, Errno> {
        if self.transport.has_ended() {
            return Ok(0);
        }
        let ReadBuffers { received, plaintext } = buffers;
        let got = self.socket.receive(&mut [IoSliceMut::new(received)])?;
        if got > 0 {
            self.received(got, RECEIVE_BYTES);
            plaintext.clear();
            plaintext.append(&mut self.session.unparsed);
            self.decrypt(&received[..got], plaintext);
            self.parse(shared, context, plaintext, usize::MAX);
        }
        Ok(got)
    }

    /// Parses again the input of a blocked connection.
    pub(crate) fn retry_parse<Q: IoQueue>(
        &mut self,
        shared: &mut SharedState,
        context: &mut LoopContext<Q>,
    ) {
        if self.session.input == ReadState::Blocked {
            self.session.input = ReadState::Open;
            let mut input = std::mem::take(&mut shared.parsed_again);
            std::mem::swap(&mut input, &mut self.session.unparsed);
            self.parse(shared, context, &input, usize::MAX);
            input.clear();
            shared.parsed_again = input;
        }
    }

    /// Parses `input`. After `bytes` bytes it stops at the next boundary of a header or a payload;
    /// the rest goes into the unparsed input.
    pub(crate) fn parse<Q: IoQueue>(
        &mut self,
        shared: &mut SharedState,
        context: &mut LoopContext<Q>,
        mut input: &[u8],
        bytes: usize,
    ) {
        let all = input.len();
        loop {
            let progress = match (&self.session.phase, self.session.input) {
                (_, ReadState::Eof | ReadState::Aborted) => return,
                (Phase::Handshake(_), _) => self.negotiate(&mut shared.handshakes, input),
                (&Phase::Chosen(negotiated), _) => {
                    self.open(&shared.handshakes, context, negotiated)
                }
                // It leaves at the end of this service, with its unparsed input.
                (Phase::Transmission(_), _) if self.waits_for.is_some() => ParseProgress::NeedMore,
                (&Phase::Transmission(transmission), _) => {
                    self.take_next(&mut shared.requests, context, transmission, input)
                }
            };
            match progress {
                ParseProgress::Bytes(count) => {
                    input = input.get(count..).unwrap_or_default();
                    if all - input.len() >= bytes && self.session.input == ReadState::Open {
                        self.session.unparsed.extend_from_slice(input);
                        self.session.input = ReadState::Blocked;
                        self.member.quantum.halve();
                        return;
                    }
                }
                ParseProgress::NeedMore => {
                    self.session.unparsed.extend_from_slice(input);
                    return;
                }
                ParseProgress::Blocked => {
                    self.session.unparsed.extend_from_slice(input);
                    self.session.input = ReadState::Blocked;
                    if !self.is_busy() {
                        context.block(self.number, &mut self.member);
                    }
                    return;
                }
            }
        }
    }
}
