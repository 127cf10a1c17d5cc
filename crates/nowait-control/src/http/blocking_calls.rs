//! Calls that may block, on threads of their own.
//!
//! Invariant: the thread that answers clients has a lower priority than those that serve disks, and these calls have not:
//! an upgrade, during which clients wait, is one. (A thread inherits its priority, and only root may raise one.)

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use rustix::process::{getpriority_process, setpriority_process};
use tokio::sync::{Semaphore, oneshot};

/// Maximum number of calls that run at the same time.
/// Beyond it: a further one waits.
const MAX_CALLS: usize = 4;
/// The nice value of the thread that answers clients is higher by this than that of the others (nice(2); 19 is the
/// highest).
const NICER: i32 = 10;

type Call = Box<dyn FnOnce() + Send>;

static CALLS: Semaphore = Semaphore::const_new(MAX_CALLS);
/// To the thread that starts those for calls.
static STARTER: OnceLock<Sender<Call>> = OnceLock::new();

/// Has calls of this process on threads with the priority of the calling thread, from now on.
///
/// # Errors
/// `EAGAIN`, `ENOMEM`: no thread can be started.
pub(crate) fn start() -> io::Result<()> {
    if STARTER.get().is_some() {
        return Ok(());
    }
    let (sender, calls) = channel::<Call>();
    let start_all = move || {
        for call in calls {
            // Without a thread the call is dropped, which its caller sees.
            let _ = thread::Builder::new().name("nowait-control".into()).spawn(call);
        }
    };
    thread::Builder::new().name("control-calls".into()).spawn(start_all)?;
    // Another thread may have been faster; then this one's ends.
    let _ = STARTER.set(sender);
    Ok(())
}

/// Lowers the priority of the calling thread for good.
pub(crate) fn lower_priority() {
    // Where it is forbidden clients of disks may wait a little longer.
    let _ = getpriority_process(None)
        .and_then(|nice| setpriority_process(None, (nice + NICER).min(19)));
}

/// The result of `call`; `None` if it panics, or no thread can be started.
pub(crate) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    // It is never closed.
    let permit = CALLS.acquire().await.ok()?;
    let call = move || {
        let _permit = permit;
        call()
    };
    let Some(starter) = STARTER.get() else {
        return tokio::task::spawn_blocking(call).await.ok();
    };
    let (sender, result) = oneshot::channel();
    let call: Call = Box::new(move || {
        // The client may have left.
        let _ = sender.send(call());
    });
    starter.send(call).ok()?;
    result.await.ok()
}
