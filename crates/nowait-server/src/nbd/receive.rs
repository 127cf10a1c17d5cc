//! Bytes from the sockets.
//!
//! Invariant: what is received is parsed or kept for the next time; an end that was not reported is
//! found before the thread sleeps.
//! Knows: breaks, conn, cut, tls, turn, parse. Known by: nobody (turn calls it).

use std::io::IoSliceMut;

use nowait::{Map, Queue};

use super::breaks::{self, Mistake};
use super::conn::Input;
use super::cut::Coming;
use super::tls::Channel;
use super::turn::{RECEIVE_BYTES, Thread};

impl<Q: Queue, M: Map> Thread<Q, M> {
    /// Before the thread sleeps: whoever was read from and may have ended since is read from again.
    /// Returns whether there is somebody.
    ///
    /// A multishot poll of Linux 6.18 sometimes says nothing of a shutdown(2) that comes while it
    /// says that the last bytes have come, and there is no other report.
    pub(crate) fn read_once_more(&mut self) -> bool {
        let mut any = false;
        if breaks::makes(Mistake::TrustReports) {
            return any;
        }
        while let Some(index) = self.read_from.pop() {
            let Some(conn) = self.conns.get_mut(index) else { continue };
            // One that is stalled is read from when that is over.
            conn.readable |= std::mem::take(&mut conn.may_have_ended);
            if conn.readable && conn.input == Input::Open {
                self.touch(index);
                any = true;
            }
        }
        any
    }

    /// A read has brought all that was there.
    fn has_read_all(&mut self, index: usize) {
        if let Some(conn) = self.conns.get_mut(index)
            && !conn.readable
            && !std::mem::replace(&mut conn.may_have_ended, true)
        {
            self.read_from.push(index);
        }
    }

    /// Receives once and parses what came.
    pub(crate) fn receive(&mut self, index: usize) {
        let Some(conn) = self.conns.get_mut(index) else { return };
        if conn.input != Input::Open || !conn.readable {
            return;
        }
        if let Channel::Tls(_) = conn.channel {
            return self.receive_sealed(index);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let stashed = conn.stash.len();
        scratch[..stashed].copy_from_slice(&conn.stash);
        conn.stash.clear();
        let mut none = [];
        let missing = conn.payload.as_mut().map_or(&mut none[..], |p| p.missing());
        let to_payload = missing.len().min(self.portion as usize);
        // What follows the payload is received only with the last of it, and not if it is payload.
        let more = conn.coming.as_ref().is_some_and(Coming::has_more);
        let end = if more || to_payload < missing.len() { stashed } else { RECEIVE_BYTES };
        let mut pieces = [
            IoSliceMut::new(&mut missing[..to_payload]),
            IoSliceMut::new(&mut scratch[stashed..end]),
        ];
        let room = to_payload + end - stashed;
        match conn.socket.receive(&mut pieces) {
            Ok(0) => {
                conn.input = Input::Ended;
                conn.payload = None;
            }
            Ok(got) => {
                conn.received(got, room);
                self.last_heard = index;
                let direct = got.min(to_payload);
                if let Some(payload) = &mut conn.payload {
                    payload.filled += direct;
                }
                self.has_read_all(index);
                let received = &scratch[..stashed + got - direct];
                let half = self.half_of(index, received);
                self.parse(index, received, half);
            }
            Err(rustix::io::Errno::AGAIN) => {
                conn.stash.extend_from_slice(&scratch[..stashed]);
                conn.readable = false;
            }
            Err(rustix::io::Errno::INTR) => conn.stash.extend_from_slice(&scratch[..stashed]),
            Err(_) => conn.break_off(),
        }
        self.scratch = scratch;
    }

    /// As `receive`, where all that comes is TLS.
    fn receive_sealed(&mut self, index: usize) {
        let Some(conn) = self.conns.get_mut(index) else { return };
        let received = match conn.channel.has_ended() {
            true => Ok(0),
            false => conn.socket.receive(&mut [IoSliceMut::new(&mut self.scratch)]),
        };
        match received {
            Ok(0) => {
                conn.input = Input::Ended;
                conn.payload = None;
            }
            Ok(got) => {
                conn.received(got, RECEIVE_BYTES);
                self.last_heard = index;
                let mut opened = std::mem::take(&mut self.opened);
                opened.clear();
                opened.append(&mut conn.stash);
                conn.open(&self.scratch[..got], &mut opened);
                self.has_read_all(index);
                self.parse(index, &opened, usize::MAX);
                self.opened = opened;
            }
            Err(rustix::io::Errno::AGAIN) => conn.readable = false,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => conn.break_off(),
        }
    }
}
