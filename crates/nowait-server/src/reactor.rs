//! A serving thread from its start to its exit: its engine, and its event loop with all frontends.
//!
//! Invariant: a thread that could not start has told so; one that has started exits when the server stops,
//! or tells that its queue has failed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use nowait::{AnyQueue, Engine, Error, Operation};

use crate::event_loop::EventLoop;
use crate::frontends::Frontends;
use crate::net::listener::Listener;
use crate::server_options::Options;
use crate::threads::{Shared, ThreadContext, ThreadEvent};

/// Starts the threads, of which the first one accepts connections from `listeners`, and the
/// devices of the exports. Returns when they serve.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a thread or its queue could not be started; others may run.
/// Errors of a driver.
pub(crate) fn start(shared: &Arc<Shared>, listeners: Vec<Listener>) -> Result<(), Error> {
    let (started, all_started) = channel();
    for (number, channels) in (0..).zip(&shared.channels) {
        let started = Some(started.clone());
        let (server, channels) = (shared.clone(), channels.clone());
        let context = ThreadContext { shared: server, number, channels, started };
        let thread = std::thread::Builder::new().name(format!("nowait-{number}"));
        shared.running.fetch_add(1, Ordering::AcqRel);
        if let Err(error) = thread.spawn(move || run(context)) {
            shared.running.fetch_sub(1, Ordering::AcqRel);
            return Err(Error::from_io(&error, Operation::SetUp));
        }
    }
    drop(started);
    all_started.iter().collect::<Result<(), _>>()?;
    shared.listen(listeners);
    shared.registry.all().iter().try_for_each(|export| shared.begin_devices(export))
}

/// Serves until the server stops.
fn run(context: ThreadContext) {
    let shared = context.shared.clone();
    let event = match catch_unwind(AssertUnwindSafe(|| serve(context))) {
        Ok(Ok(())) => ThreadEvent::ThreadExited,
        // The panic hook has written a message to standard error.
        Ok(Err(_)) | Err(_) => ThreadEvent::ThreadFailed,
    };
    shared.running.fetch_sub(1, Ordering::AcqRel);
    shared.send(event);
}

/// Opens the queue of the thread, and serves.
///
/// # Errors
/// The queue has failed. (A thread that cannot start reports that to `started`.)
fn serve(mut context: ThreadContext) -> Result<(), Error> {
    let started = context.started.take();
    let begun = event_loop(&context);
    let (result, event_loop) = match begun {
        Ok(event_loop) => (Ok(()), Some(event_loop)),
        Err(error) => (Err(error), None),
    };
    // The receiver may not wait any more.
    started.map(|started| started.send(result));
    let Some(mut event_loop) = event_loop else { return Ok(()) };
    let number = context.number;
    drop(context);
    event_loop.run().inspect_err(|error| tracing::error!("thread {number}: {error}"))
}

fn event_loop(context: &ThreadContext) -> Result<EventLoop<Frontends, AnyQueue>, Error> {
    let Options { kind, config, .. } = context.shared.options;
    let queue = kind.open(config.slots)?;
    if let Some(error) = queue.refusal() {
        context.shared.warn_no_io_uring(error);
    }
    let (workers, budget) = (context.shared.workers.clone(), &context.shared.budget);
    let engine = Engine::sharing(queue, workers, config, budget)?;
    EventLoop::new(context, engine, context.frontends())
}
