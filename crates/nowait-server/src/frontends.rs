//! All frontends of a thread.
//!
//! Invariant: numbers of members, tokens and tags end with the kind of their frontend, so that none gets
//! the events and completions of another.

use std::sync::Arc;
use std::time::Instant;

use nowait::{Completion, Error, IoQueue, Token};

use crate::frontend::Frontend;
use crate::frontend_kind::FrontendKind;
use crate::loop_context::{KIND_BITS, LoopContext};
use crate::member::Member;
use crate::nbd::connection_channel::ConnectionChannel;
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::thread_handle::ThreadHandle;
use crate::ublk::ublk_channel::UblkChannel;
use crate::ublk::ublk_frontend::UblkFrontend;
use crate::vhost_user::queue_channel::QueueChannel;
use crate::vhost_user::vhost_frontend::VhostFrontend;

/// The frontends of a thread. Tests put others into their places.
pub(crate) struct Frontends<N = NbdFrontend, V = VhostFrontend, U = UblkFrontend> {
    pub(crate) nbd: N,
    pub(crate) vhost: V,
    pub(crate) ublk: U,
}

/// Calls the frontend of a number, within its place; the number is one of the frontend then.
macro_rules! of_number {
    ($self:ident, $context:ident, $number:ident, $frontend:ident => $call:expr) => {{
        let kind = ($number as u64) & KINDS;
        let $number = $number >> KIND_BITS;
        $context.inside(kind, |$context| match kind {
            NBD => {
                let $frontend = &mut $self.nbd;
                $call
            }
            VHOST => {
                let $frontend = &mut $self.vhost;
                $call
            }
            _ => {
                let $frontend = &mut $self.ublk;
                $call
            }
        })
    }};
}

/// Calls each frontend within its place.
macro_rules! each {
    ($self:ident, $context:ident, $frontend:ident => $call:expr) => {{
        $context.inside(NBD, |$context| {
            let $frontend = &mut $self.nbd;
            $call
        });
        $context.inside(VHOST, |$context| {
            let $frontend = &mut $self.vhost;
            $call
        });
        $context.inside(UBLK, |$context| {
            let $frontend = &mut $self.ublk;
            $call
        });
    }};
}

const NBD: u64 = FrontendKind::Nbd as u64;
const VHOST: u64 = FrontendKind::VhostUser as u64;
const UBLK: u64 = FrontendKind::Ublk as u64;
const KINDS: u64 = (1 << KIND_BITS) - 1;
const _: () = assert!(FrontendKind::ALL.len() as u64 <= KINDS + 1);

impl<Q, N, V, U> Frontend<Q> for Frontends<N, V, U>
where
    Q: IoQueue,
    N: Frontend<Q>,
    V: Frontend<Q>,
    U: Frontend<Q>,
{
    fn begin(&mut self, context: &mut LoopContext<Q>) -> Result<(), Error> {
        context.inside(NBD, |context| self.nbd.begin(context))?;
        context.inside(VHOST, |context| self.vhost.begin(context))?;
        context.inside(UBLK, |context| self.ublk.begin(context))
    }

    fn on_wake(&mut self, context: &mut LoopContext<Q>) {
        each!(self, context, frontend => frontend.on_wake(context));
    }

    #[inline]
    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, bits: i32) {
        of_number!(self, context, token, frontend => frontend.on_event(context, token, bits));
    }

    fn after_events(&mut self, context: &mut LoopContext<Q>) {
        each!(self, context, frontend => frontend.after_events(context));
    }

    #[inline]
    fn kind(&self, member: usize) -> FrontendKind {
        match member as u64 & KINDS {
            NBD => FrontendKind::Nbd,
            VHOST => FrontendKind::VhostUser,
            _ => FrontendKind::Ublk,
        }
    }

    #[inline]
    fn is_limited(&self, member: usize) -> bool {
        let number = member >> KIND_BITS;
        member as u64 & KINDS != NBD || self.nbd.is_limited(number)
    }

    #[inline]
    fn member(&mut self, member: usize) -> Option<&mut Member> {
        let number = member >> KIND_BITS;
        match member as u64 & KINDS {
            NBD => self.nbd.member(number),
            VHOST => self.vhost.member(number),
            _ => self.ublk.member(number),
        }
    }

    #[inline]
    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        of_number!(self, context, member, frontend => frontend.service(context, member))
    }

    fn send_answers(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        of_number!(self, context, member, frontend => frontend.send_answers(context, member))
    }

    #[inline]
    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    ) {
        of_number!(self, context, member, frontend => {
            frontend.complete(context, member, key, completion);
        });
    }

    fn end_iteration(&mut self, context: &mut LoopContext<Q>) {
        context.inside(VHOST, |context| self.vhost.end_iteration(context));
        context.inside(UBLK, |context| self.ublk.end_iteration(context));
    }

    fn has_work(&self) -> bool {
        self.nbd.has_work() || self.ublk.has_work()
    }

    #[inline]
    fn deadline(&self) -> Option<Instant> {
        self.nbd.deadline()
    }

    fn expire(&mut self, context: &mut LoopContext<Q>, now: Instant) {
        context.inside(NBD, |context| self.nbd.expire(context, now));
    }

    fn watch_memory(&mut self, context: &LoopContext<Q>, now: Instant) {
        self.nbd.watch_memory(context, now);
    }

    #[inline]
    fn has_arrived(&self) -> bool {
        self.vhost.has_arrived()
    }

    fn poll(&mut self, context: &mut LoopContext<Q>) {
        context.inside(NBD, |context| self.nbd.poll(context));
    }

    fn before_sleep(&mut self, context: &mut LoopContext<Q>) -> bool {
        let nbd = context.inside(NBD, |context| self.nbd.before_sleep(context));
        let vhost = context.inside(VHOST, |context| self.vhost.before_sleep(context));
        nbd || vhost
    }

    fn begin_shutdown(&mut self, context: &mut LoopContext<Q>) {
        each!(self, context, frontend => frontend.begin_shutdown(context));
    }

    fn change_pause(&mut self, context: &mut LoopContext<Q>, export: u32) {
        context.inside(NBD, |context| self.nbd.change_pause(context, export));
    }
}

/// Ways from other threads to a thread.
#[derive(Clone)]
pub(crate) struct ThreadChannels {
    pub(crate) connections: Arc<ConnectionChannel>,
    pub(crate) queues: Arc<QueueChannel>,
    pub(crate) ublk: Arc<UblkChannel>,
}

impl ThreadChannels {
    /// The empty channels of a thread.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for its wake-up.
    pub(crate) fn new() -> Result<Self, Error> {
        let thread = Arc::new(ThreadHandle::new()?);
        Ok(Self {
            connections: Arc::new(ConnectionChannel::new(thread.clone())),
            queues: Arc::new(QueueChannel::new(thread.clone())),
            ublk: Arc::new(UblkChannel::new(thread)),
        })
    }

    /// The thread.
    pub(crate) fn thread(&self) -> &Arc<ThreadHandle> {
        self.connections.thread()
    }
}
