//! The second phase: images, keys, and the processes and threads that begin before them.
//!
//! Invariant: a fork, if there is one, is the first of it.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use nowait::Uring;
use nowait_nbd::Address;
use nowait_server::{Credentials, Listener, QueueKind, Tls};
use rustix::process::Rlimit;
use tracing::{info, warn};

use crate::config::ServeConfig;
use crate::config::choices::QueueChoice;
use crate::config::export_spec::NamedExport;
use crate::control::control_socket;
use crate::disks::default_image;
use crate::disks::descriptor_need;
use crate::disks::open_disk::{self, Common, OpenedDisk, open_all};
use crate::endpoints::signals::Ending;
use crate::endpoints::tls_files::{self, TlsFiles};
use crate::error::{CliError, os_message};
use crate::process::background::Detached;
use crate::process::io_flusher;
use crate::process::lifetime::Parent;
use crate::process::systemd;
use crate::serve::launching::{Changer, Launchers, launchers};
use crate::serve::plan::Plan;
use crate::serve::{CANNOT_OPEN, Context};
use crate::summary;
use crate::upgrade::launcher::Launcher;
use crate::upgrade::receiver::{SavedClients, SavedState};
use crate::upgrade::receiver_policy::ReceiverPolicy;

/// A server whose images are open.
pub(super) struct Opened<'a> {
    pub(super) context: Context<'a>,
    pub(super) images: Images,
    pub(super) tls: Tls,
    pub(super) tls_files: Option<(TlsFiles, Credentials)>,
    pub(super) kind: QueueKind,
    pub(super) connections: HashMap<i32, UnixStream>,
    pub(super) inherited: Vec<(Listener, Address)>,
    pub(super) detached: Detached,
    pub(super) ending: Ending,
    /// The process that starts the next program, or why there is none.
    pub(super) launcher: Result<Arc<Launcher>, String>,
    pub(super) changer: Option<Changer>,
    /// Private: no other module makes one.
    _made_here: (),
}

/// The images that are served.
pub(super) struct Images {
    /// At least one.
    pub(super) all: Vec<OpenedDisk>,
    /// None was given.
    pub(super) is_default: bool,
    /// The clients of another program, if this one takes over.
    pub(super) adopted: Option<SavedClients>,
    pub(super) common: Common,
}

impl Images {
    /// The path or URI of the first one, by which the server is called in errors.
    pub(super) fn path(&self) -> &Path {
        self.all.first().map_or(Path::new(""), |first| &first.named.image)
    }
}

impl<'a> Opened<'a> {
    /// Opens what `plan` needs before its sockets, in the background if that is asked for.
    ///
    /// # Errors
    /// One line that names what cannot be had.
    pub(super) fn of(plan: Plan<'a>) -> Result<Self, CliError> {
        let Plan { context, descriptors, parent, connections, inherited, .. } = plan;
        let config = context.config;
        let (detached, ending, (launcher, changer)) = match &context.embedded {
            Some(ending) => {
                let none = (Err("this server is a part of another program".into()), None);
                (Detached::not(), ending.clone(), none)
            }
            None => own_process(&context, descriptors, &parent)?,
        };
        let (tls, tls_files) = tls_files::read(config)?;
        let images = open(&context)?;
        if images.all.is_empty() {
            return Err(CliError::new("there is no export to serve"));
        }
        let kind = if config.poll { polled_queue(&images.all)? } else { queue_kind(config)? };
        Ok(Self {
            context,
            images,
            tls,
            tls_files,
            kind,
            connections,
            inherited,
            detached,
            ending,
            launcher,
            changer,
            _made_here: (),
        })
    }
}

/// Prepares a process that does nothing but serve. A service manager is notified from now on.
fn own_process(
    context: &Context<'_>,
    descriptors: Rlimit,
    parent: &Parent,
) -> Result<(Detached, Ending, Launchers), CliError> {
    let config = context.config;
    // For all threads of this process and its successors.
    io_flusher::set_if_asked(config)?;
    let detached = Detached::detach(config.fork && context.receiver.is_none())?;
    systemd::connect();
    let ending = ending(config, parent, &detached)?;
    let launchers = launchers(config, descriptors, &detached)?;
    Ok((detached, ending, launchers))
}

/// The events that end the server of `config`: signals, and the end of its `parent` if it is asked to.
fn ending(config: &ServeConfig, parent: &Parent, detached: &Detached) -> Result<Ending, CliError> {
    let failed = |e| CliError::new(format!("cannot handle signals: {}", os_message(&e)));
    let ending = Ending::on_signal(detached).map_err(failed)?;
    if config.exit_with_parent {
        parent.end_with_it()?;
    }
    Ok(ending)
}

/// Opens the images of `config`, or those that another program hands over.
fn open(context: &Context<'_>) -> Result<Images, CliError> {
    let config = context.config;
    let exports = config.exports().map_err(CliError::new)?;
    let is_default = exports.is_empty();
    if let Some(receiver) = context.receiver.as_deref() {
        let policy = ReceiverPolicy::of(config, control_socket::directory())?;
        let SavedState { images, clients } = receiver.wait(&policy)?;
        let common = open_disk::common(config)?;
        let all = receiver.open(images, &common, &policy)?;
        return Ok(Images { all, is_default: false, adopted: Some(clients), common });
    }
    let exports = if is_default { vec![default_export(context)?] } else { exports };
    let opened = descriptor_need::check(config, &exports)
        .and_then(|()| open_disk::common(config))
        .and_then(|common| open_all(config, exports, &common).map(|all| (all, common)));
    let (all, common) = opened.map_err(|error| error.with_status(CANNOT_OPEN))?;
    Ok(Images { all, is_default, adopted: None, common })
}

fn default_export(context: &Context<'_>) -> Result<NamedExport, CliError> {
    let image = default_image::image()?;
    let note = format_args!("nowait: no image given, serving {}", image.display());
    context.output.note(note);
    Ok(NamedExport { name: context.config.default_name().to_owned(), image })
}

/// A queue that polls, if the devices of all images can be polled.
fn polled_queue(all: &[OpenedDisk]) -> Result<QueueKind, CliError> {
    for opened in all {
        let refusal = match opened.image.polling_refusal() {
            Ok(refusal) => refusal.map(String::from),
            Err(error) => Some(Uring::refusal(error)),
        };
        if let Some(refusal) = refusal {
            let what = format!("it cannot be polled: {refusal} (leave out --poll)");
            return Err(CliError::at(&opened.named.image, what));
        }
    }
    info!("every request is polled for");
    Ok(QueueKind::Polled)
}

/// The requested queue, or one that works on this system.
fn queue_kind(config: &ServeConfig) -> Result<QueueKind, CliError> {
    if config.queue == Some(QueueChoice::Threads) {
        return Ok(QueueKind::Threads);
    }
    let error = match Uring::new() {
        Ok(ring) => {
            info!("io_uring: {}", ring.offered());
            info!("registered buffers: {}", summary::registrable());
            let must = config.queue.is_some() || config.needs_ring().is_some();
            return Ok(if must { QueueKind::Uring } else { QueueKind::Auto });
        }
        Err(error) => Uring::refusal(error),
    };
    if let Some(option) = config.needs_ring() {
        return Err(CliError::new(format!("{error}: {option} needs it")));
    }
    if config.queue.is_some() {
        let what = format!("{error}: try --queue threads");
        return Err(CliError::new(what));
    }
    warn!("{error}: serving with threads");
    Ok(QueueKind::Threads)
}
