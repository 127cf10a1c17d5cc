//! Where clients of a server connect: sockets that are bound for it, and those handed over.
//!
//! Invariant: a socket that is bound here and has a path is removed at the end; one that was handed
//! over is not.

pub(crate) mod tls_files;
pub(crate) mod reload;
pub mod signals;
pub(crate) mod ready_lines;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use nowait_nbd::Address;
use nowait_server::{AnyExport, Listener};

use crate::config::ServeConfig;
use crate::config::export_spec::ExportIndices;
use crate::config::start_bitmap::StartBitmap;
use crate::devices::Devices;
use crate::disks::default_image::{self, DefaultSocket};
use crate::disks::open_disk::OpenedDisk;
use crate::endpoints::signals::Ending;
use crate::error::{CliError, bind_failure, os_message};
use crate::upgrade::messages::ListenerState;
use crate::upgrade::receiver::ReceivedListener;

/// The bound sockets of a server, and what is removed with them.
pub(crate) struct Endpoints {
    pub(crate) listeners: Vec<Listener>,
    /// The addresses of all, those that were handed over first.
    pub(crate) listens: Vec<Address>,
    /// How many were handed over.
    pub(crate) inherited: usize,
    /// The socket of a server without an address.
    pub(crate) default_socket: Option<Arc<DefaultSocket>>,
    /// All sockets, for a program that takes over.
    pub(crate) states: Vec<(ListenerState, OwnedFd)>,
}

impl Endpoints {
    /// The sockets `handed` over by another process, or else those of [`Endpoints::bind`].
    ///
    /// # Errors
    /// An address is in use or cannot be bound; there are not enough descriptors.
    pub(crate) fn open(
        config: &ServeConfig,
        image: &Path,
        has_devices: bool,
        inherited: Vec<(Listener, Address)>,
        handed: Option<Vec<ReceivedListener>>,
        ending: &Ending,
    ) -> Result<Self, CliError> {
        match handed {
            Some(handed) => Self::taken_over(handed, ending),
            None => Self::bind(config, image, has_devices, inherited, ending),
        }
    }

    /// Binds the addresses of `config` beside the `inherited` ones; the default one for `image` if
    /// there are none and clients have no other way (`has_devices`).
    ///
    /// # Errors
    /// An address is in use or cannot be bound.
    fn bind(
        config: &ServeConfig,
        image: &Path,
        has_devices: bool,
        inherited: Vec<(Listener, Address)>,
        ending: &Ending,
    ) -> Result<Self, CliError> {
        let given = config.nbd.clone();
        let needs_socket = given.is_empty() && inherited.is_empty() && !has_devices;
        let default_socket = needs_socket.then(|| default_image::socket(image)).transpose()?;
        let default_socket = default_socket.map(Arc::new);
        default_socket.iter().for_each(|socket| ending.removes(socket));
        let listens = match &default_socket {
            Some(socket) => std::slice::from_ref(&socket.listen),
            None => &given[..],
        };
        let count = inherited.len();
        let (listeners, listens) = bind(inherited, listens)?;
        Self::of(listeners, listens, count, default_socket)
    }

    /// The sockets that another process has handed over: nothing is bound.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: there are not enough descriptors.
    fn taken_over(mut handed: Vec<ReceivedListener>, ending: &Ending) -> Result<Self, CliError> {
        handed.sort_by_key(|handed| handed.listener.is_own());
        let inherited = handed.iter().filter(|handed| !handed.listener.is_own()).count();
        let default_socket = handed.iter().find_map(|handed| {
            let temporary = handed.temporary.clone()?;
            Some(Arc::new(DefaultSocket::handed_over(handed.address.clone(), temporary)))
        });
        default_socket.iter().for_each(|socket| ending.removes(socket));
        let (listeners, listens) =
            handed.into_iter().map(|handed| (handed.listener, handed.address)).unzip();
        Self::of(listeners, listens, inherited, default_socket)
    }

    fn of(
        listeners: Vec<Listener>,
        listens: Vec<Address>,
        inherited: usize,
        default_socket: Option<Arc<DefaultSocket>>,
    ) -> Result<Self, CliError> {
        let directory = default_socket.as_ref().and_then(|socket| socket.temporary());
        let state = |(listener, address): (&Listener, &Address)| {
            let temporary = directory.filter(|_| listener.is_own());
            ListenerState::of(listener, address, temporary)
        };
        let states = listeners.iter().zip(&listens).map(state).collect::<io::Result<_>>();
        let states = states.map_err(|error| CliError::new(os_message(&error)))?;
        Ok(Self { listeners, listens, inherited, default_socket, states })
    }
}

/// Binds every address. Returns the inherited listeners first, then the new ones in their order.
fn bind(
    inherited: Vec<(Listener, Address)>,
    listens: &[Address],
) -> Result<(Vec<Listener>, Vec<Address>), CliError> {
    let (mut listeners, mut bound_to): (Vec<_>, Vec<_>) = inherited.into_iter().unzip();
    for listen in listens {
        let bound = match listen {
            Address::Unix(path) => Listener::unix(path).map(|listener| vec![listener]),
            Address::Tcp { host, port } => Listener::tcp(host, *port),
        };
        let bound = bound.map_err(|error| bind_failure(listen, &error))?;
        bound_to.push(match (listen, bound.first().and_then(Listener::tcp_address)) {
            (Address::Tcp { host, .. }, Some(address)) => {
                Address::Tcp { host: host.clone(), port: address.port() }
            }
            (listen, _) => listen.clone(),
        });
        listeners.extend(bound);
    }
    Ok((listeners, bound_to))
}

/// The exports of `all`, each with its devices and dirty bitmaps, which come later if they are those of another program.
///
/// # Errors
/// A socket of a device cannot be bound; a bitmap names an export that is missing, or cannot be added.
pub(crate) fn exports_of(
    config: &ServeConfig,
    all: &[OpenedDisk],
    devices: &mut Devices,
    takes_over: bool,
) -> Result<Vec<AnyExport>, CliError> {
    let mut bitmaps = vec![Vec::new(); all.len()];
    if !takes_over && !config.bitmap.is_empty() {
        let named = ExportIndices::of(all.iter().map(|opened| &opened.named));
        for bitmap in &config.bitmap {
            let at = bitmap.export_of(&named).map_err(CliError::new)?;
            bitmaps.get_mut(at).into_iter().for_each(|its| its.push(bitmap));
        }
    }
    let export = |(at, (opened, bitmaps)): (usize, (&OpenedDisk, Vec<&StartBitmap>))| {
        let export = match takes_over {
            true => opened.export(),
            false => opened.export_with_stored_bitmaps(),
        };
        bitmaps.into_iter().try_fold(devices.add_to(at, export)?, |export, bitmap| {
            let failed = |error| CliError::new(format!("--bitmap {bitmap}: {error}"));
            let spec = bitmap.spec();
            // One that is stored in the image is the one that is meant.
            match export.has_bitmap(&spec.name) {
                true => Ok(export),
                false => export.with_bitmap(&spec).map_err(failed),
            }
        })
    };
    all.iter().zip(bitmaps).enumerate().map(export).collect()
}
