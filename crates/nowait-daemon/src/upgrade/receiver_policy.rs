//! Validates what the old program hands over against the new program's own configuration.
//!
//! Invariant: the command line comes from the launcher, which a server that was taken over cannot change, and neither can it
//! change the file of `--config`. No image, directory, URI or socket is opened, made or removed that neither the command line names nor `--allow-dir` or `--allow-uri` allow. The
//! images that it names are the files that these were when the server was started.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{env, fs, iter};

use crate::error::{CliError, without_secrets};
use nowait_image::{ChainOptions, Format, Image, file_in};
use nowait_nbd::Address;
use nowait_remote::Location;
use nowait_server::BitmapSpec;

use crate::config::ServeConfig;
use crate::config::control_address::ControlAddress;
use crate::config::device_options::DeviceOptions;
use crate::config::export_spec::NamedExport;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::default_image;
use crate::upgrade::messages::{ExportState, ListenerState};

/// The variables of the environment with the files of the images: each as `DEVICE:INODE ` in hexadecimal, or a space if there was no file.
const FILES: &str = "NOWAIT_UPGRADE_FILES_";
/// Maximum number of files in one variable, whose length the kernel limits to 128 KiB (execve(2), `MAX_ARG_STRLEN`).
const FILES_OF_VARIABLE: usize = 2000;

/// The device and the inode of a file.
type FileNumbers = (u64, u64);

/// The images that `config` name, with absolute paths.
///
/// # Errors
/// The default image is unknown.
fn images(config: &ServeConfig) -> Result<Vec<PathBuf>, CliError> {
    let given = config.exports().map_err(CliError::new)?;
    match given.is_empty() {
        true => Ok(vec![default_image::image()?]),
        false => Ok(given.iter().map(NamedExport::full_name).collect()),
    }
}

/// The variables for the launcher, from which the programs that it starts have them. None if this process has them already,
/// from such a launcher.
pub(crate) fn files_of_images(config: &ServeConfig) -> Vec<(String, String)> {
    if env::var_os(format!("{FILES}0")).is_some() {
        return Vec::new();
    }
    let told = |image: &PathBuf| {
        let mut found = fs::metadata(file_in(image)).ok();
        if !config.read_only && found.as_ref().is_some_and(fs::Metadata::is_file) {
            // An overlay file system makes a copy, another file, when it is opened for writing.
            let written = fs::OpenOptions::new().write(true).open(image);
            found = written.and_then(|file| file.metadata()).ok().or(found);
        }
        found.map(|it| format!("{:x}:{:x}", it.dev(), it.ino())).unwrap_or_default() + " "
    };
    // Where the default image is unknown the server does not start either.
    let images = images(config).unwrap_or_default();
    let variables = images.chunks(FILES_OF_VARIABLE).map(|part| part.iter().map(told).collect());
    variables.enumerate().map(|(n, files)| (format!("{FILES}{n}"), files)).collect()
}

fn parse_numbers(text: &str) -> Option<FileNumbers> {
    let (device, inode) = text.split_once(':')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(device)?, number(inode)?))
}

/// The rules that a server's command line sets for a hand-over.
pub(crate) struct ReceiverPolicy<'a> {
    config: &'a ServeConfig,
    /// The files of the images that it names by absolute paths, and those of URIs, which have none.
    images: HashMap<PathBuf, Option<FileNumbers>>,
    /// The directories of these images, without symbolic links.
    directories: HashSet<PathBuf>,
    places: AllowedPlaces,
}

impl<'a> ReceiverPolicy<'a> {
    /// The rules of `config`; `sockets` is the directory of default control sockets.
    ///
    /// # Errors
    /// The default image is unknown.
    pub(crate) fn of(config: &'a ServeConfig, sockets: Option<PathBuf>) -> Result<Self, CliError> {
        let variables = (0..).map_while(|n| env::var(format!("{FILES}{n}")).ok());
        let places = AllowedPlaces::of(config, sockets);
        Self::with_files(config, places, &variables.collect::<String>())
    }

    fn with_files(
        config: &'a ServeConfig,
        places: AllowedPlaces,
        files: &str,
    ) -> Result<Self, CliError> {
        let images = images(config)?;
        let directory =
            |image: &PathBuf| Some(file_in(image).canonicalize().ok()?.parent()?.to_owned());
        let directories = images.iter().filter_map(directory).collect();
        let files = files.split(' ').map(parse_numbers).chain(iter::repeat(None));
        Ok(Self { config, images: images.into_iter().zip(files).collect(), directories, places })
    }

    /// The file of the image of `state`, if the command line names that and allows to open it so. Else it must be an image
    /// that was added.
    fn given_file(&self, state: &ExportState) -> Option<Option<FileNumbers>> {
        let format = self.config.format.map(Format::name);
        let is_as_given =
            state.format.as_deref() == format && (state.read_only || !self.config.read_only);
        self.images.get(Path::new(&state.image)).filter(|_| is_as_given).copied()
    }

    /// The options for opening the image of `state`, which has passed [`ReceiverPolicy::check`].
    pub(crate) fn options(&self, state: &ExportState, options: ChainOptions) -> ChainOptions {
        let is_path = Location::parse(&state.image).is_ok_and(|location| location.path().is_some());
        let no_links = self.given_file(state).is_none() && is_path;
        ChainOptions { no_links, ..options }
    }

    /// Checks what was `opened` as the image of `state`: a server that was taken over may have put something else in its
    /// place.
    ///
    /// # Errors
    /// One line that names it.
    pub(crate) fn check_opened(&self, state: &ExportState, opened: &Image) -> Result<(), CliError> {
        match self.given_file(state).flatten() {
            Some(file) if opened.top_file() != Some(file) => {
                let why = "another file has taken its place since the server was started";
                Err(CliError::at(state.image.as_ref(), why))
            }
            _ => Ok(()),
        }
    }

    /// Checks what is told at the beginning: the exports, the sockets of NBD, that of the control interface, and the
    /// numbers of block devices, each with the index of its export.
    ///
    /// # Errors
    /// One line that names what is not allowed.
    pub(crate) fn check<'b>(
        &self,
        exports: &[ExportState],
        mut listeners: impl Iterator<Item = &'b ListenerState>,
        control: Option<&ListenerState>,
        nodes: &[(usize, u32)],
    ) -> Result<(), CliError> {
        exports.iter().try_for_each(|state| self.check_export(state))?;
        listeners.try_for_each(|state| self.check_listener(state))?;
        control.map_or(Ok(()), |state| self.check_control(state))?;
        self.check_nodes(exports, nodes)
    }

    /// Checks the block devices: each is that of an export that has one by the command line, with the number that this
    /// gives, if it does.
    fn check_nodes(&self, exports: &[ExportState], nodes: &[(usize, u32)]) -> Result<(), CliError> {
        let mut given = self.config.nodes().map_err(CliError::new)?;
        nodes.iter().try_for_each(|(at, id)| {
            let number = exports.get(*at).and_then(|export| given.remove(&export.name));
            let is_allowed = number.is_some_and(|number| number.is_none_or(|it| it == *id));
            require(is_allowed, "block device", id)
        })
    }

    fn check_control(&self, state: &ListenerState) -> Result<(), CliError> {
        let path = state.path.as_ref().map(|path| ControlAddress::Unix(path.into()));
        let is_it = path.is_some() && path.as_ref() == self.config.control_socket();
        require(is_it && state.temporary.is_none(), "control socket", &state.path)
    }

    /// Checks the socket of a disk of virtual machines.
    ///
    /// # Errors
    /// One line that names it.
    pub(crate) fn check_device(&self, state: &ListenerState) -> Result<(), CliError> {
        let given =
            |path: &Path| self.config.devices().into_iter().any(|it| it.sockets().contains(&path));
        let allowed =
            |path: &Path| path.to_str().is_some_and(|path| self.places.socket(path).is_ok());
        let is_it =
            state.path.as_ref().map(Path::new).is_some_and(|path| given(path) || allowed(path));
        require(is_it && state.temporary.is_none(), "socket", &state.path)
    }

    /// Checks the socket `path` of VMMs, which is connected to.
    ///
    /// # Errors
    /// One line that names it.
    pub(crate) fn check_vmm(&self, path: &OsStr) -> Result<(), CliError> {
        let given = |it: &dyn DeviceOptions| it.sockets_of_clients().contains(&Path::new(path));
        let is_it = self.config.devices().into_iter().any(given);
        require(is_it, "socket of a VMM", path)
    }

    fn check_export(&self, state: &ExportState) -> Result<(), CliError> {
        let ExportState { image, backing_dirs, backing, .. } = state;
        // Without symbolic links, as it was when it was added.
        let is_real = |name| self.places.image(name).is_ok_and(|real| real.as_os_str() == image);
        let is_allowed = self.given_file(state).is_some() || image.to_str().is_some_and(is_real);
        require(is_allowed, "image", image)?;
        let bitmaps = state.bitmaps.len();
        require(bitmaps <= BitmapSpec::MAX_OF_EXPORT, "number of bitmaps", &bitmaps)?;
        let is_other = |directory: &&OsString| !self.allows_backing_dir(directory.as_ref());
        let other = backing_dirs.iter().find(is_other);
        require(other.is_none(), "directory", &other)?;
        let other = backing.iter().find(|name| !self.allows_backing(name));
        require(other.is_none(), "image below", &other)
    }

    /// Whether images may stand on files in `directory`: a snapshot has that of the image below it.
    fn allows_backing_dir(&self, directory: &Path) -> bool {
        let given = &self.config.backing_dir;
        let Ok(real) = directory.canonicalize() else {
            return given.iter().any(|it| it == directory);
        };
        let is_real = |it: &PathBuf| it.canonicalize().is_ok_and(|it| it == real);
        let is_above = |it: &PathBuf| it.canonicalize().is_ok_and(|it| real.starts_with(it));
        self.directories.contains(&real)
            || given.iter().any(is_real)
            || self.config.allow_dir.iter().any(is_above)
    }

    /// Whether images may stand on the storage `name`.
    fn allows_backing(&self, name: &str) -> bool {
        self.config.backing.iter().any(|it| it.to_string() == name)
            || self.images.contains_key(Path::new(name))
            || self.places.backing(name).is_ok()
    }

    fn check_listener(&self, state: &ListenerState) -> Result<(), CliError> {
        let ListenerState { path, is_own, temporary, .. } = state;
        let Some(path) = path.as_ref().map(Path::new) else {
            return require(temporary.is_none(), "directory", temporary);
        };
        let given = self.config.nbd.clone();
        let is_default =
            given.is_empty() && is_default_socket(path, temporary.as_ref().map(Path::new));
        let is_given = temporary.is_none() && given.contains(&Address::Unix(path.into()));
        // The path of a socket that is not removed at the end is only shown.
        let is_foreign = temporary.is_none() && !is_own;
        require(is_default || is_given || is_foreign, "socket", path)
    }
}

/// Whether [`default_image::socket`] may have made `path`, in the directory `temporary` if it has one of its own.
fn is_default_socket(path: &Path, temporary: Option<&Path>) -> bool {
    let directory = match temporary {
        Some(directory) => default_image::is_temporary(directory).then(|| directory.to_owned()),
        None => default_image::directory_of_sockets(),
    };
    path.extension().is_some_and(|extension| extension == "sock")
        && path.parent() == directory.as_deref()
}

fn require(
    is_allowed: bool,
    what: &str,
    it: &(impl std::fmt::Debug + ?Sized),
) -> Result<(), CliError> {
    match is_allowed {
        true => Ok(()),
        false => Err(CliError::new(format!(
            "the running program names a {what} that its command line does not allow: {}",
            without_secrets(&format!("{it:?}"))
        ))),
    }
}

#[cfg(test)]
#[cfg(feature = "control")]
mod tests {
    use std::os::unix::fs::symlink;

    use nowait_control::PatchExport;
    use tempfile::TempDir;

    use super::*;
    use crate::config::config_file;
    use crate::upgrade::messages::BitmapMessage;

    /// A directory with a directory for images that are added, with one of them.
    fn directory() -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("images")).unwrap();
        for name in ["disk", "neighbour", "images/added"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        symlink("../neighbour", directory.path().join("images/link")).unwrap();
        directory
    }

    /// A server of `disk` in `directory` with more of a file, `keys` and exports, in which DIR stands for `directory`.
    fn config(directory: &TempDir, keys: &str) -> ServeConfig {
        let (keys, exports) = keys.split_at(keys.find("[[").unwrap_or(keys.len()));
        let all = format!("{keys}\n[[export]]\nimage = 'DIR/disk'\n{exports}");
        config_file::parse(&all.replace("DIR", directory.path().to_str().unwrap())).unwrap()
    }

    fn path(directory: &TempDir, name: &str) -> OsString {
        directory.path().join(name).into()
    }

    fn export(image: OsString) -> ExportState {
        ExportState {
            name: String::new(),
            description: None,
            image,
            format: None,
            settled_raw: false,
            read_only: false,
            backing_dirs: Vec::new(),
            backing: Vec::new(),
            changes: PatchExport::default(),
            bitmaps: Vec::new(),
            replication: None,
        }
    }

    fn socket(path: impl Into<OsString>, temporary: Option<&str>) -> ListenerState {
        let (path, temporary) = (Some(path.into()), temporary.map(OsString::from));
        ListenerState { path, host: String::new(), port: 0, is_own: true, temporary }
    }

    #[test]
    fn an_image_that_the_command_line_names_is_opened_as_that_says() {
        let directory = directory();
        let is_allowed = |options: &str, state: ExportState| {
            ReceiverPolicy::of(&config(&directory, options), None)
                .unwrap()
                .check_export(&state)
                .is_ok()
        };
        let disk = export(path(&directory, "disk"));
        assert!(is_allowed("", disk.clone()));
        assert!(is_allowed("read-only = true", ExportState { read_only: true, ..disk.clone() }));
        assert!(!is_allowed("read-only = true", disk.clone()), "opened for writing");
        let qcow2 = ExportState { format: Some("qcow2".into()), ..disk.clone() };
        assert!(!is_allowed("", qcow2.clone()), "a guest's header is read");
        assert!(is_allowed("format = 'qcow2'", qcow2));
        assert!(!is_allowed("", export(path(&directory, "neighbour"))));
        assert!(!is_allowed("", export(path(&directory, "images/added"))));
        assert!(!is_allowed("", export("nbd://localhost/".into())));
        assert!(!is_allowed("", export(path(&directory, "images/../disk"))));
    }

    #[test]
    fn an_image_that_was_added_is_where_images_may_be_added() {
        let directory = directory();
        let options = "read-only = true\nallow-dir = ['DIR/images']\nallow-uri = ['nbd://host/']";
        let config = config(&directory, options);
        let policy = ReceiverPolicy::of(&config, None).unwrap();
        let is_allowed = |image| policy.check_export(&export(image)).is_ok();
        assert!(is_allowed(path(&directory, "images/added")));
        assert!(is_allowed("nbd://host/disk".into()));
        assert!(!is_allowed("nbd://other/disk".into()));
        assert!(!is_allowed(path(&directory, "neighbour")));
        assert!(!is_allowed(path(&directory, "images/../neighbour")));
        assert!(!is_allowed(path(&directory, "images/link")), "a link that leads elsewhere");
    }

    #[test]
    fn an_image_stands_on_what_is_allowed() {
        let directory = directory();
        let options =
            "allow-dir = ['DIR/images']\nallow-uri = ['nbd://host/']\nbacking = ['nbd://below/']";
        let config = config(&directory, options);
        let policy = ReceiverPolicy::of(&config, None).unwrap();
        let added = export(path(&directory, "images/added"));
        for (backing_dir, is_allowed) in
            [("images", true), ("", true), ("images/..", true), ("..", false), ("/", false)]
        {
            let backing_dirs = vec![directory.path().join(backing_dir).into()];
            let state = ExportState { backing_dirs, ..added.clone() };
            assert_eq!(policy.check_export(&state).is_ok(), is_allowed, "{backing_dir}");
        }
        for (name, is_allowed) in [
            ("nbd://below/", true),
            ("nbd://host/base", true),
            ("nbd://other/", false),
            ("nbd+unix:///?socket=/run/s", false),
        ] {
            let state = ExportState { backing: vec![name.into()], ..added.clone() };
            assert_eq!(policy.check_export(&state).is_ok(), is_allowed, "{name}");
        }
    }

    #[test]
    fn an_export_has_as_many_bitmaps_as_it_may() {
        let directory = directory();
        let config = config(&directory, "");
        let policy = ReceiverPolicy::of(&config, None).unwrap();
        let bitmap = BitmapMessage::from(BitmapSpec::new("a".into()));
        for (count, is_allowed) in [(32, true), (33, false)] {
            let bitmaps = vec![bitmap.clone(); count];
            let state = ExportState { bitmaps, ..export(path(&directory, "disk")) };
            assert_eq!(policy.check_export(&state).is_ok(), is_allowed, "{count}");
        }
    }

    #[test]
    fn a_node_is_that_of_an_export_that_has_one_by_the_command_line() {
        let directory = directory();
        let options = "ublk = ['data=7', '']\n[[export]]\nname = 'data'\nimage = 'DIR/neighbour'\n\
                       [[export]]\nname = 'other'\nimage = 'DIR/x'";
        let config = config(&directory, options);
        let policy = ReceiverPolicy::of(&config, None).unwrap();
        let named =
            |name: &str| ExportState { name: name.into(), ..export(path(&directory, "disk")) };
        let exports = ["", "data", "other", "added"].map(named);
        for (nodes, is_allowed) in [
            (&[][..], true),
            (&[(0, 3)], true),
            (&[(1, 7)], true),
            (&[(0, 1 << 19), (1, 7)], true),
            (&[(1, 8)], false),
            (&[(2, 7)], false),
            (&[(3, 3)], false),
            (&[(4, 3)], false),
            (&[(0, 3), (0, 4)], false),
        ] {
            assert_eq!(policy.check_nodes(&exports, nodes).is_ok(), is_allowed, "{nodes:?}");
        }
    }

    #[test]
    fn only_the_own_sockets_are_removed() {
        let directory = directory();
        let arguments = config(
            &directory,
            "nbd = ['unix:DIR/nbd']\nvhost-user = ['DIR/vm', 'connect:DIR/vmm']\ncontrol = ['unix:DIR/control']",
        );
        let policy = ReceiverPolicy::of(&arguments, None).unwrap();
        let [nbd, vm, control, disk] =
            ["nbd", "vm", "control", "disk"].map(|name| socket(path(&directory, name), None));
        assert!(policy.check_listener(&nbd).is_ok());
        assert!(policy.check_device(&vm).is_ok());
        assert!(policy.check_control(&control).is_ok());
        for wrong in [&disk, &socket(path(&directory, "nbd"), Some("/tmp")), &control] {
            assert!(policy.check_listener(wrong).is_err(), "{wrong:?}");
            assert!(policy.check_device(wrong).is_err(), "{wrong:?}");
        }
        assert!(policy.check_control(&nbd).is_err());
        for (name, is_allowed) in [("vmm", true), ("vm", false), ("nbd", false)] {
            assert_eq!(policy.check_vmm(&path(&directory, name)).is_ok(), is_allowed, "{name}");
        }
        assert!(policy.check_device(&socket(path(&directory, "vmm"), None)).is_err());
        // A socket that is not removed is only a name, as of one that systemd has handed over.
        assert!(policy.check_listener(&ListenerState { is_own: false, ..disk }).is_ok());
        let arguments = config(&directory, "");
        let policy = ReceiverPolicy::of(&arguments, None).unwrap();
        let temporary = env::temp_dir().join("nowait-12-3");
        let temporary = temporary.to_str().unwrap();
        let is_allowed =
            |path: &str, temporary| policy.check_listener(&socket(path, Some(temporary))).is_ok();
        assert!(is_allowed(&format!("{temporary}/disk.sock"), temporary));
        assert!(!is_allowed(&format!("{temporary}/disk"), temporary));
        assert!(!is_allowed(&format!("{temporary}/../disk.sock"), temporary));
        assert!(!is_allowed("/other/disk.sock", "/other"));
        assert!(!is_allowed("/other/nowait-12-3/disk.sock", "/other/nowait-12-3"));
        assert!(policy.check_listener(&nbd).is_err(), "it has a default socket");
    }

    #[test]
    fn an_image_that_was_replaced_since_the_start_is_not_served() {
        let directory = directory();
        let arguments = config(&directory, "");
        let files: String =
            files_of_images(&arguments).into_iter().map(|(_, files)| files).collect();
        let policy =
            ReceiverPolicy::with_files(&arguments, AllowedPlaces::of(&arguments, None), &files)
                .unwrap();
        let state = export(path(&directory, "disk"));
        let open = || {
            let options = ChainOptions { format: Some(Format::Raw), ..ChainOptions::default() };
            let options = policy.options(&state, options);
            assert!(!options.no_links, "the user may name a link");
            nowait_image::open(Path::new(&state.image), &options).unwrap()
        };
        assert!(policy.check_opened(&state, &open()).is_ok());
        fs::remove_file(&state.image).unwrap();
        symlink("neighbour", &state.image).unwrap();
        assert!(policy.check_export(&state).is_ok());
        let refused = policy.check_opened(&state, &open()).unwrap_err().to_string();
        assert!(refused.contains("another file has taken its place"), "{refused}");
        let added = export(path(&directory, "images/added"));
        assert!(policy.options(&added, ChainOptions::default()).no_links);
    }

    #[test]
    fn the_files_of_many_images_fit_variables_of_the_environment() {
        let directory = directory();
        let arguments = config(
            &directory,
            &(0..4500)
                .map(|n| format!("[[export]]\nname = 'n{n}'\nimage = 'DIR/x'\n"))
                .collect::<String>(),
        );
        let variables = files_of_images(&arguments);
        assert_eq!(variables.len(), 3);
        assert!(variables.iter().all(|(_, files)| files.len() <= 2000 * 34));
        let files: String = variables.into_iter().map(|(_, files)| files).collect();
        let disk = fs::metadata(directory.path().join("disk")).unwrap();
        let policy =
            ReceiverPolicy::with_files(&arguments, AllowedPlaces::of(&arguments, None), &files)
                .unwrap();
        let given = policy.given_file(&export(path(&directory, "disk")));
        assert_eq!(given, Some(Some((disk.dev(), disk.ino()))));
        assert_eq!(policy.given_file(&export(path(&directory, "x"))), Some(None));
    }
}
