//! The engines of this thread: the one that its files share, and those that single files have.
//!
//! Invariant: files keep their engine; so each engine ends with its last file, also while the
//! thread ends.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use crate::api::local_file::local_engine::LocalEngine;
use crate::api::local_file::shared_engine::SharedEngine;
use crate::api::process_workers::process_workers;
use crate::block::block_map::BlockMap;
use crate::engine::Engine;
use crate::queue::auto::QueueKind;
use crate::threads::fork_mark;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};

#[derive(Default)]
struct ThreadEngines {
    all: Vec<Weak<SharedEngine>>,
    /// The one that files share.
    shared: Weak<SharedEngine>,
}

thread_local! {
    static ENGINES: RefCell<ThreadEngines> = RefCell::default();
}

/// Adds an engine to those of this thread.
///
/// # Errors
/// `ECANCELED`: the thread is ending.
pub(crate) fn register(engine: Box<dyn LocalEngine>) -> Result<Rc<SharedEngine>, Error> {
    let engine = Rc::new(SharedEngine::new(engine));
    let registered = ENGINES.try_with(|engines| {
        let all = &mut engines.borrow_mut().all;
        all.retain(|engine| engine.strong_count() > 0);
        all.push(Rc::downgrade(&engine));
    });
    registered.map_err(|_| Error::new(libc::ECANCELED, Operation::SetUp))?;
    Ok(engine)
}

/// The engine that the files of this thread share, made if there is none, or if its queue has
/// failed.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made. `ECANCELED`: the thread is ending.
pub(crate) fn shared() -> Result<Rc<SharedEngine>, Error> {
    let shared = ENGINES.try_with(|engines| engines.borrow().shared.upgrade()).ok().flatten();
    // The engine of a parent process is not this one's; a new one is refused, too.
    let own = shared.filter(|engine| !engine.has_failed() && !fork_mark::is_child());
    if let Some(engine) = own {
        return Ok(engine);
    }
    let config = Config::default();
    let queue = QueueKind::Auto.open(config.slots)?;
    let engine: Engine<_, dyn BlockMap> = Engine::new(queue, process_workers(), config)?;
    let engine = register(Box::new(engine))?;
    let _ = ENGINES.try_with(|engines| engines.borrow_mut().shared = Rc::downgrade(&engine));
    Ok(engine)
}

/// The engine with this index among those of this thread; `Some(None)` if it has ended.
fn engine(index: usize) -> Option<Option<Rc<SharedEngine>>> {
    let get = |engines: &RefCell<ThreadEngines>| engines.borrow().all.get(index).map(Weak::upgrade);
    ENGINES.try_with(get).ok().flatten()
}

/// The engines of this thread that files use, one after the other. None is borrowed meanwhile, so
/// that tasks which are woken may open and close files.
pub(crate) fn engines() -> impl Iterator<Item = Rc<SharedEngine>> {
    (0..).map_while(engine).flatten()
}
