//! A server from its plan to its last flush, in phases of which each consumes the one before it.
//!
//! Invariant: `Plan` → `Opened` → `Bound` → `Started` → `Confined` → `Serving` → `Flushed`: only the phase
//! before it makes a phase, so that nothing is opened after the sandbox, no thread starts before a fork, and a file with
//! the number of the process tells of sockets that are there. The exit status is 0 only if the last flush succeeded.

mod plan;
mod launching;
mod opened;
mod bound;
mod started;
mod confined;
mod serving;
mod flushed;
mod embedded;

use std::fmt;
use std::time::Duration;

use nowait_server::Listener;

use crate::config::ServeConfig;
use crate::endpoints::signals::Ending;
use crate::error::CliError;
use crate::process;
use crate::process::systemd;
use crate::upgrade::receiver::Receiver;
pub use embedded::EmbeddedServer;

use bound::Bound;
use confined::Confined;
use flushed::Flushed;
use opened::Opened;
use plan::Plan;
use serving::Serving;
use started::Started;

/// The timeout for requests in flight after the signal to stop and, if it expires, for the flush
/// after them.
/// Beyond it: a warning says how many requests are left.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The exit status where an image cannot be opened or is in use (`EX_NOINPUT` of sysexits.h), and of a server that was
/// handed sockets and cannot serve them for any reason, so that a service manager can recognise a failure that a
/// restart does not fix.
const CANNOT_OPEN: u8 = 66;

/// The words of a server for the user who starts it. Messages while it serves go to the log.
pub trait Output {
    /// Clients can connect: `lines` say where, or one that is a JSON object. Not called where a service manager has
    /// handed over the sockets, nor by a program that takes over, unless it is JSON.
    fn ready(&self, lines: &str);

    /// A hint.
    fn note(&self, text: fmt::Arguments<'_>);
}

/// The data of every phase.
struct Context<'a> {
    config: &'a ServeConfig,
    output: &'a dyn Output,
    /// The end of a server in a process that does other work, too; `None` for one in a process of its own.
    embedded: Option<Ending>,
    /// The connection to the program that this one takes over from, if it does.
    receiver: Option<&'a mut Receiver>,
    /// The sockets that were handed over, until clients can connect.
    waiting: &'a mut Vec<Listener>,
}

/// Serves the images of `config`, or the default image, until a signal stops the server; then this process ends, with
/// status 0, without a return. To be called once, while the process has one thread.
///
/// # Errors
/// An image cannot be opened or is in use, an address is in use, the queues cannot be created or
/// fail, or the last flush failed.
pub fn run(config: &ServeConfig, output: &dyn Output) -> Result<(), CliError> {
    // First of all: what another program hands over, and the images, may be more than the soft limit.
    let descriptors = process::raise_descriptor_limit();
    let mut receiver = Receiver::of_this_process()?;
    let mut waiting = Vec::new();
    let receiver_of = receiver.as_mut();
    let context =
        Context { config, output, embedded: None, receiver: receiver_of, waiting: &mut waiting };
    let Err(error) = Plan::of(context, descriptors).and_then(serve) else {
        // Without destructors: a request that never ends would block its worker, and the worker the end
        // of this process; and what another process has taken over stays.
        process::end(0);
    };
    if let Some(receiver) = &receiver {
        receiver.fail(&error);
    }
    if waiting.is_empty() {
        return Err(error);
    }
    // The sockets stay with the service manager, which starts a server for the next client.
    Listener::reject(&waiting, systemd::REJECTED);
    Err(error.with_status(CANNOT_OPEN))
}

/// Serves by `plan` until the server has stopped.
fn serve(plan: Plan<'_>) -> Result<(), CliError> {
    let opened = Opened::of(plan)?;
    let bound = Bound::of(opened)?;
    let started = Started::of(bound)?;
    let confined = Confined::of(started)?;
    let serving = Serving::of(confined)?;
    Flushed::of(serving)?.end()
}
