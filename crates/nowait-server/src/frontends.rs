//! The table of frontends: what a server has of each kind on a thread, and with an export.
//!
//! Invariant: numbers of members, tokens and tags end with the kind of their frontend, so that none gets
//! the events and completions of another.

pub(crate) mod export_device;
mod vhost_export;
mod ublk_export;

use std::sync::Arc;
use std::time::Instant;

use nowait::{Completion, Error, IoQueue, Token};

use crate::frontend::Frontend;
use crate::frontend_kind::FrontendKind;
use crate::loop_context::LoopContext;
use crate::member::Member;
use crate::nbd::connection_channel::ConnectionChannel;
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::nbd::negotiate::ExportDirectory;
use crate::nbd::write_split::SplitPolicy;
use crate::net::acceptor::Acceptor;
use crate::net::connection_limit::ConnectionLimit;
use crate::server_options::Options;
use crate::thread_handle::ThreadHandle;
use crate::ublk::ublk_channel::UblkChannel;
use crate::ublk::ublk_frontend::UblkFrontend;
use crate::vhost_user::queue_channel::QueueChannel;
use crate::vhost_user::vhost_frontend::VhostFrontend;

/// A row for each kind: its field, its frontend on a thread with the parameter for another one in its place, and its channel
/// from other threads. `$d` is a dollar, for the macros that are made of the rows.
macro_rules! table {
    ($d:tt $($kind:ident: $field:ident, $parameter:ident = $frontend:ty, $channel:ty;)*) => {
        /// The frontends of a thread. Tests put others into their places.
        pub(crate) struct Frontends<$($parameter = $frontend),*> {
            $(pub(crate) $field: $parameter,)*
        }

        /// Ways from other threads to a thread.
        #[derive(Clone)]
        pub(crate) struct ThreadChannels {
            thread: Arc<ThreadHandle>,
            $(pub(crate) $field: Arc<$channel>,)*
        }

        impl ThreadChannels {
            /// The empty channels of a thread.
            ///
            /// # Errors
            /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for its wake-up.
            pub(crate) fn new() -> Result<Self, Error> {
                let thread = Arc::new(ThreadHandle::new()?);
                Ok(Self { $($field: Arc::new(<$channel>::new(thread.clone())),)* thread })
            }
        }

        /// Calls the frontend of a number, within its place; the number is one of the frontend then.
        macro_rules! of_number {
            ($d self:ident, $d context:ident, $d number:ident, $d it:ident => $d call:expr) => {{
                let kind = FrontendKind::of_number($d number as u64);
                let $d number = $d number >> FrontendKind::BITS;
                $d context.inside(kind, |$d context| match kind {
                    $(FrontendKind::$kind => {
                        let $d it = &mut $d self.$field;
                        $d call
                    })*
                })
            }};
            ($d self:ident, $d number:ident, ($d($d borrow:tt)+) $d it:ident => $d call:expr) => {{
                let kind = FrontendKind::of_number($d number as u64);
                let $d number = $d number >> FrontendKind::BITS;
                match kind {
                    $(FrontendKind::$kind => {
                        let $d it = $d($d borrow)+ $d self.$field;
                        $d call
                    })*
                }
            }};
        }

        /// Calls each frontend, within its place if there is a context.
        macro_rules! each {
            ($d self:ident, $d context:ident, $d it:ident => $d call:expr) => {
                $($d context.inside(FrontendKind::$kind, |$d context| {
                    let $d it = &mut $d self.$field;
                    $d call
                });)*
            };
            ($d self:ident, ($d($d borrow:tt)+) $d it:ident => $d call:expr) => {
                $({
                    let $d it = $d($d borrow)+ $d self.$field;
                    $d call
                })*
            };
        }
    };
}

table! { $
    Nbd: nbd, N = NbdFrontend, ConnectionChannel;
    VhostUser: vhost, V = VhostFrontend, QueueChannel;
    Ublk: ublk, U = UblkFrontend, UblkChannel;
}

impl Frontends {
    /// The frontends of the thread of `channels`, of a server with the exports of `directory`.
    pub(crate) fn new(
        channels: &ThreadChannels,
        directory: Arc<dyn ExportDirectory>,
        limit: Arc<ConnectionLimit>,
        options: &Options,
    ) -> Self {
        let Options { tls, split_bytes, config, .. } = options.clone();
        let split = SplitPolicy { fragment_bytes: split_bytes, strict: config.strict };
        let acceptor = Acceptor::new(Vec::new(), limit);
        Self {
            nbd: NbdFrontend::new(directory, channels.nbd.clone(), acceptor, tls, split),
            vhost: VhostFrontend::new(channels.vhost.clone()),
            ublk: UblkFrontend::new(channels.ublk.clone()),
        }
    }
}

impl ThreadChannels {
    /// The thread.
    pub(crate) fn thread(&self) -> &Arc<ThreadHandle> {
        &self.thread
    }
}

impl<Q, N, V, U> Frontend<Q> for Frontends<N, V, U>
where
    Q: IoQueue,
    N: Frontend<Q>,
    V: Frontend<Q>,
    U: Frontend<Q>,
{
    fn begin(&mut self, context: &mut LoopContext<Q>) -> Result<(), Error> {
        let mut begun = Ok(());
        each!(self, context, frontend => if begun.is_ok() {
            begun = frontend.begin(context);
        });
        begun
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
        FrontendKind::of_number(member as u64)
    }

    #[inline]
    fn is_limited(&self, member: usize) -> bool {
        of_number!(self, member, (&) frontend => frontend.is_limited(member))
    }

    #[inline]
    fn member(&mut self, member: usize) -> Option<&mut Member> {
        of_number!(self, member, (&mut) frontend => frontend.member(member))
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
        each!(self, context, frontend => frontend.end_iteration(context));
    }

    fn has_work(&self) -> bool {
        let mut has_work = false;
        each!(self, (&) frontend => has_work = has_work || frontend.has_work());
        has_work
    }

    #[inline]
    fn deadline(&self) -> Option<Instant> {
        let mut first = None;
        each!(self, (&) frontend => first = earlier(first, frontend.deadline()));
        first
    }

    fn expire(&mut self, context: &mut LoopContext<Q>, now: Instant) {
        each!(self, context, frontend => frontend.expire(context, now));
    }

    fn watch_memory(&mut self, context: &LoopContext<Q>, now: Instant) {
        each!(self, (&mut) frontend => frontend.watch_memory(context, now));
    }

    #[inline]
    fn has_arrived(&self) -> bool {
        let mut has_arrived = false;
        each!(self, (&) frontend => has_arrived = has_arrived || frontend.has_arrived());
        has_arrived
    }

    fn poll(&mut self, context: &mut LoopContext<Q>) {
        each!(self, context, frontend => frontend.poll(context));
    }

    fn before_sleep(&mut self, context: &mut LoopContext<Q>) -> bool {
        let mut has_work = false;
        each!(self, context, frontend => has_work |= frontend.before_sleep(context));
        has_work
    }

    fn begin_shutdown(&mut self, context: &mut LoopContext<Q>) {
        each!(self, context, frontend => frontend.begin_shutdown(context));
    }

    fn change_pause(&mut self, context: &mut LoopContext<Q>, exports: &[u32]) {
        each!(self, context, frontend => frontend.change_pause(context, exports));
    }
}

/// The first of two times, of which there may be none.
#[inline(always)]
fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        _ => one.or(other),
    }
}
