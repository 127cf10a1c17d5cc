//! Files and ports that a server that serves may still open, as its sandbox is told.
//!
//! Invariant: everything that a running server opens, makes or removes by path is listed here; what a
//! client or a control request names is listed only if the user has given its directory. What it removes itself is
//! recorded name by name, and no directory is given for it.

use std::path::{Path, PathBuf};

use crate::error::CliError;
use crate::process::log;
use crate::sandbox::{self, FileAccess};
use nowait_nbd::{Address, TlsParams};
use nowait_remote::Location;
use tracing::info;

use crate::config::control_address::ControlAddress;
use crate::config::{Encryption, ServeConfig};
use crate::control::control_socket;
use crate::devices::Devices;
use crate::disks::default_image::DefaultSocket;
use crate::disks::open_disk::OpenedDisk;
use crate::process::owned_paths::OwnedPaths;
use crate::renewed_files;

/// Files by which the kernel tells of devices, of mounts and of this process.
const KERNEL_FILES: [&str; 6] =
    ["/proc/self", "/proc/swaps", "/sys/block", "/sys/class", "/sys/dev", "/sys/devices"];
/// Files that tell one block device from others.
const FILES_OF_DEVICES: [&str; 2] = ["/dev/disk", "/proc/sys/kernel/random/boot_id"];
/// Where the certificates of authorities are, in Debian, Fedora and others.
const AUTHORITY_DIRECTORIES: [&str; 5] = [
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];
/// The variables that say where they are instead.
const AUTHORITY_VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Confines this process to `files`, and to those of `devices`.
///
/// # Errors
/// Like [`sandbox::enter`].
pub(crate) fn enter(
    config: &ServeConfig,
    mut files: FileAccess,
    devices: &Devices,
) -> Result<(), CliError> {
    let Some(mode) = config.sandbox.mode() else { return Ok(()) };
    log::connect();
    devices.add_files(&mut files);
    let in_force = sandbox::enter(mode, &files)?;
    info!("sandbox: {in_force}");
    Ok(())
}

/// The files that the server of `config` opens, creates and removes while it serves `all`.
pub(crate) fn needed_files(config: &ServeConfig, all: &[OpenedDisk]) -> FileAccess {
    let mut files = FileAccess::default();
    KERNEL_FILES.iter().for_each(|path| files.read(path));
    files.write("/dev/null");
    images(config, all, &mut files);
    if config.connects_to_clients() {
        files.connect_sockets();
    }
    if let Encryption::Offered(directory) | Encryption::Required { directory, .. } =
        config.encryption()
    {
        renewed_directory(directory, &mut files);
    }
    config.control_tls_certs.iter().for_each(|it| renewed_directory(it, &mut files));
    files
}

fn images(config: &ServeConfig, all: &[OpenedDisk], files: &mut FileAccess) {
    let named = config.backing.iter().cloned();
    let given =
        all.iter().filter_map(|opened| Location::parse(&opened.named.image.clone().into()).ok());
    named.chain(given).for_each(|location| remote(&location, files));
    config.cache.iter().for_each(|cache| files.change(&cache.directory));
    config.http_auth.iter().for_each(|path| renewed_file(path, files));
    for opened in all {
        let image = &opened.named.image;
        if Location::parse(&image.into()).is_ok_and(|location| location.path().is_none()) {
            continue;
        }
        // A snapshot and a resize reopen the image.
        match opened.image.is_read_only() {
            true => files.read(image),
            false => files.write(image),
        }
        // And the images below it, which may be beside it.
        if !opened.image.format().is_raw() {
            files.read(directory_of(image));
        }
        // The bitmaps of a raw disk are changed by their name.
        let place = opened.image.bitmaps_place().map(|place| place.path());
        place.into_iter().for_each(|bitmaps| files.write(bitmaps));
        opened.options.backing_dirs.iter().for_each(|directory| files.read(directory));
    }
    config.backing_dir.iter().for_each(|directory| files.read(directory));
    config.data_file.iter().for_each(|file| files.write(file));
    if let Some(directory) = &config.bitmap_dir {
        files.change(directory);
        FILES_OF_DEVICES.iter().for_each(|path| files.read(path));
    }
    config.allow_dir.iter().for_each(|directory| {
        files.change(directory);
        files.make_sockets(directory);
    });
    // The storages of URIs that are named later.
    config.allow_uri.iter().filter_map(|uri| uri.location().ok()).for_each(|location| {
        remote(&location, files);
        named_later(&location, files);
    });
    // An export that is added may have sockets.
    if !(config.allow_dir.is_empty() && config.allow_uri.is_empty()) {
        control_socket::directory().iter().for_each(|directory| files.make_sockets(directory));
    }
}

/// Files that the connections to `location` need.
fn remote(location: &Location, files: &mut FileAccess) {
    match location {
        Location::File(_) => {}
        // A connection that is lost is made again, to an address that is known.
        Location::Nbd(uri) => match uri.address {
            Address::Tcp { port, .. } => files.connect(port),
            Address::Unix(_) => files.connect_sockets(),
        },
        // The addresses of its names come from the launcher.
        Location::Object(url) => {
            let (ports, credentials) = url.needs();
            // Redirects have led to other ports when it was opened, and will again.
            let ports = ports.into_iter().chain(nowait_remote::redirect_ports());
            ports.for_each(|port| files.connect(port));
            credentials.iter().for_each(|path| renewed_file(path, files));
        }
        // Its library's threads have begun, and take none of the signals by which threads are restricted.
        Location::Rbd(_) => files.allow_all("the threads of Ceph's library cannot be restricted"),
    }
}

/// Files that opening `location` needs, its connections aside.
fn named_later(location: &Location, files: &mut FileAccess) {
    match location {
        Location::Nbd(uri) => {
            if let TlsParams::Tls { certificates: Some(directory), .. } = &uri.security {
                renewed_directory(directory, files);
            }
        }
        Location::Object(_) => {
            AUTHORITY_DIRECTORIES.iter().for_each(|path| files.read(path));
            let named = AUTHORITY_VARIABLES.into_iter().filter_map(std::env::var_os);
            for path in named.map(PathBuf::from) {
                match path.is_dir() {
                    true => renewed_directory(&path, files),
                    false => renewed_file(&path, files),
                }
            }
        }
        Location::File(_) | Location::Rbd(_) => {}
    }
}

/// The names that the server of `config` removes at its end: those of its sockets, which are bound already (`listens` and
/// `default_socket`).
pub(crate) fn owned_paths(
    config: &ServeConfig,
    listens: &[Address],
    default_socket: Option<&DefaultSocket>,
) -> OwnedPaths {
    let mut names = OwnedPaths::default();
    let nbd = listens.iter().filter_map(|listen| match listen {
        Address::Unix(path) => Some(path.clone()),
        Address::Tcp { .. } => None,
    });
    let devices = config.devices().into_iter().flat_map(|devices| devices.sockets());
    let control = match config.control_socket() {
        Some(ControlAddress::Off | ControlAddress::Tcp { .. }) => None,
        Some(ControlAddress::Unix(path)) => Some(path.clone()),
        None => control_socket::of_this_process(),
    };
    let files = nbd.chain(devices.map(Path::to_owned)).chain(control);
    files.for_each(|path| names.file(&path));
    default_socket.and_then(DefaultSocket::temporary).iter().for_each(|path| names.directory(path));
    names
}

/// The directory of the file that `path` leads to.
fn directory_of(path: &Path) -> PathBuf {
    path.canonicalize().map_or_else(|_| directory_with(path), |real| directory_with(&real))
}

/// The directory with the entry `path`.
fn directory_with(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.parent().map_or_else(|| path.clone(), Path::to_owned)
}

/// The file `path` may be read, and what replaces it.
fn renewed_file(path: &Path, files: &mut FileAccess) {
    files.read(path);
    let directories = renewed_files::directories_of_file(path);
    directories.iter().for_each(|directory| files.read(directory));
    if directories.is_empty() {
        let path = path.display();
        info!(
            "{path}: a file that replaces it later cannot be read in the sandbox (put it in a directory of its own)"
        );
    }
}

/// The files in `directory` may be read, and those that replace them.
fn renewed_directory(directory: &Path, files: &mut FileAccess) {
    renewed_files::paths_of_directory(directory).iter().for_each(|it| files.read(it));
}

#[cfg(test)]
#[cfg(all(feature = "object-stores", feature = "control"))]
mod tests {
    use nowait_image::Format;
    use std::fs;

    use nowait_image::ChainOptions;
    use nowait_image::create::{CreateOptions, create};

    use super::*;
    use crate::config::config_file;
    use crate::config::export_spec::NamedExport;
    use crate::process::owned_paths::Change;

    fn parsed(text: &str) -> ServeConfig {
        config_file::parse(text).unwrap()
    }

    #[test]
    fn no_directory_is_given_for_the_sockets_the_pid_file_the_log_file_and_the_token() {
        let directory = tempfile::tempdir().unwrap();
        let [nbd, vmm, pid, log] = ["nbd", "vmm", "pid", "log"].map(|name| {
            let path = directory.path().join(name);
            fs::write(&path, "").unwrap();
            path.to_str().unwrap().to_owned()
        });
        let config = parsed(&format!(
            "nbd = ['unix:{nbd}']\nvhost-user = ['{vmm}']\npid-file = '{pid}'\nlog-file = '{log}'\n\
             control = ['tcp:127.0.0.1:0']\n"
        ));
        let files = |config: &ServeConfig| format!("{:?}", needed_files(config, &[]));
        assert_eq!(files(&config), files(&parsed("")));
        let names = owned_paths(&config, &[Address::Unix(nbd.clone().into())], None);
        names.change(&Change::RemoveFile(nbd.into())).unwrap();
        names.change(&Change::RemoveFile(vmm.into())).unwrap();
        names.change(&Change::RemoveFile(log.into())).unwrap_err();
    }

    #[test]
    fn a_file_with_tokens_gives_its_own_directory_and_never_a_home_directory_or_one_of_the_root() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().canonicalize().unwrap();
        let home = std::env::home_dir().unwrap();
        for (parent, is_given) in [(&*own, true), (&home, false), (Path::new("/etc"), false)] {
            let file = parent.join("token");
            let config = parsed(&format!("http-auth = '{}'", file.display()));
            let mut expected = needed_files(&parsed(""), &[]);
            expected.read(&file);
            if is_given {
                expected.read(parent);
            }
            assert_eq!(format!("{:?}", needed_files(&config, &[])), format!("{expected:?}"));
        }
    }

    #[test]
    fn an_image_is_written_to_and_beside_it_only_the_bitmaps_of_a_raw_one() {
        let directory = tempfile::tempdir().unwrap();
        for (format, writable) in [Format::Raw, Format::Qcow2].into_iter().zip([true, false]) {
            let image = directory.path().join(format.name());
            create(&image, &CreateOptions::new(format, Some(1 << 20))).unwrap();
            let options =
                ChainOptions { format: Some(format), writable, ..ChainOptions::default() };
            let named = NamedExport { name: String::new(), image: image.clone() };
            let opened = OpenedDisk::open(named, options, None).unwrap();
            let config = parsed(&format!("[[export]]\nimage = '{}'", image.display()));
            let (mut files, mut expected) = (FileAccess::default(), FileAccess::default());
            images(&config, &[opened], &mut files);
            match writable {
                true => {
                    expected.write(&image);
                    expected.write(directory.path().join("raw.bitmaps.qcow2"));
                }
                false => expected.read(&image),
            }
            if format == Format::Qcow2 {
                expected.read(directory.path().canonicalize().unwrap());
            }
            assert_eq!(format!("{files:?}"), format!("{expected:?}"));
        }
    }
}
