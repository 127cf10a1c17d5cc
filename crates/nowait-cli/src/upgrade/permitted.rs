//! What a program that takes over believes of what the old one tells: nothing that its own command line does not allow.
//!
//! Invariant: the command line comes from the launcher, which a server that was taken over cannot change. No image, directory,
//! URI or socket is opened, made or removed that neither the command line names nor `--allow-dir` or `--allow-uri` allow.

use std::env;
use std::path::{Path, PathBuf};

use nowait_cli::error::{CliError, without_secrets};
use nowait_image::Format;
use nowait_nbd::Address;

use crate::allowed_places::AllowedPlaces;
use crate::args::ServeArgs;
use crate::args::control_args::ControlAddress;
use crate::default_image;
use crate::running_server::full_name;
use crate::upgrade::messages::{ExportState, ListenerState};
use crate::upgrade::take_over::TakeOver;
use crate::vhost_user_spec::DevicePlace;

/// What the command line of a server allows.
pub(crate) struct Permitted<'a> {
    args: &'a ServeArgs,
    /// The images that it names, with absolute paths.
    images: Vec<PathBuf>,
    places: AllowedPlaces,
}

impl<'a> Permitted<'a> {
    /// What `args` allow.
    ///
    /// # Errors
    /// The default image is unknown.
    pub(crate) fn of(args: &'a ServeArgs) -> Result<Self, CliError> {
        let given = args.exports().map_err(CliError::new)?;
        let images = match given.is_empty() {
            true => vec![default_image::image()?],
            false => given.iter().map(full_name).collect(),
        };
        Ok(Self { args, images, places: AllowedPlaces::of(args) })
    }

    /// Checks all that is told at the beginning.
    ///
    /// # Errors
    /// One line that names what is not allowed.
    pub(crate) fn check(&self, take_over: &TakeOver) -> Result<(), CliError> {
        let TakeOver { exports, listeners, control, ublk, .. } = take_over;
        exports.iter().try_for_each(|state| self.check_export(state))?;
        listeners.iter().try_for_each(|(state, _)| self.check_listener(state))?;
        control.iter().try_for_each(|(state, _)| self.check_control(state))?;
        require(ublk.is_none() || self.args.ublk.ublk.is_some(), "block device", ublk)
    }

    fn check_control(&self, state: &ListenerState) -> Result<(), CliError> {
        let path = state.path.as_ref().map(|path| ControlAddress::Unix(path.into()));
        let is_it = path.is_some() && path.as_ref() == self.args.control.unix();
        require(is_it && state.temporary.is_none(), "control socket", &state.path)
    }

    /// Checks the socket of a disk of virtual machines.
    ///
    /// # Errors
    /// One line that names it.
    pub(crate) fn check_device(&self, state: &ListenerState) -> Result<(), CliError> {
        let given = |path: &Path| {
            self.args
                .vhost_user
                .sockets
                .iter()
                .any(|it| it.socket == DevicePlace::Path(path.into()))
        };
        let allowed =
            |path: &Path| path.to_str().is_some_and(|path| self.places.socket(path).is_ok());
        let is_it =
            state.path.as_ref().map(Path::new).is_some_and(|path| given(path) || allowed(path));
        require(is_it && state.temporary.is_none(), "socket", &state.path)
    }

    fn check_export(&self, state: &ExportState) -> Result<(), CliError> {
        let ExportState { image, format, read_only, backing_dirs, backing, .. } = state;
        let as_given = self.images.iter().any(|given| given.as_os_str() == image)
            && *format == self.args.format.map(|format| Format::name(format).to_owned())
            && (*read_only || !self.args.read_only);
        // Without symbolic links, as it was when it was added.
        let is_real =
            |name: &str| self.places.image(name).is_ok_and(|real| real.as_os_str() == image);
        let added = || image.to_str().is_some_and(is_real);
        require(as_given || added(), "image", image)?;
        let other =
            backing_dirs.iter().find(|directory| !self.allows_backing_dir(directory.as_ref()));
        require(other.is_none(), "directory", &other)?;
        let other = backing.iter().find(|name| !self.allows_backing(name));
        require(other.is_none(), "image below", &other)
    }

    /// Whether images may stand on files in `directory`: a snapshot has that of the image below it.
    fn allows_backing_dir(&self, directory: &Path) -> bool {
        let Ok(real) = directory.canonicalize() else {
            return self.args.others.backing_dir.iter().any(|it| it == directory);
        };
        let parents = self
            .images
            .iter()
            .filter_map(|image| image.canonicalize().ok()?.parent().map(Path::to_owned));
        let given = self.args.others.backing_dir.iter().filter_map(|it| it.canonicalize().ok());
        let mut allowed =
            self.args.control.allow_dir.iter().filter_map(|it| it.canonicalize().ok());
        given.chain(parents).any(|it| it == real) || allowed.any(|it| real.starts_with(it))
    }

    /// Whether images may stand on the storage `name`.
    fn allows_backing(&self, name: &str) -> bool {
        let given = self.args.others.backing.iter().any(|it| it.to_string() == name);
        given
            || self.images.iter().any(|image| image.to_str() == Some(name))
            || self.places.backing(name).is_ok()
    }

    fn check_listener(&self, state: &ListenerState) -> Result<(), CliError> {
        let ListenerState { path, is_own, temporary, .. } = state;
        let Some(path) = path.as_ref().map(Path::new) else {
            return require(temporary.is_none(), "directory", temporary);
        };
        let given = self.args.addresses.listens();
        let is_default =
            given.is_empty() && is_default_socket(path, temporary.as_ref().map(Path::new));
        let is_given = temporary.is_none() && given.contains(&Address::Unix(path.into()));
        // What is not removed is only a name.
        let is_foreign = temporary.is_none() && !is_own;
        require(is_default || is_given || is_foreign, "socket", path)
    }
}

/// Whether [`default_image::socket`] may have made `path`, in the directory `temporary` if it has one of its own.
fn is_default_socket(path: &Path, temporary: Option<&Path>) -> bool {
    let directory = match temporary {
        Some(directory) => default_image::is_temporary(directory).then(|| directory.to_owned()),
        None => default_image::runtime_directory(env::var_os("XDG_RUNTIME_DIR")),
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
mod tests {
    use std::ffi::OsString;
    use std::fs;
    use std::os::unix::fs::symlink;

    use clap::Parser;
    use nowait_control::PatchExport;
    use tempfile::TempDir;

    use super::*;
    use crate::args::{Cli, Command};

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

    /// A server of `disk` in `directory` with more `options`, in which DIR stands for `directory`.
    fn args(directory: &TempDir, options: &str) -> Box<ServeArgs> {
        let all = format!("nowait serve DIR/disk {options}");
        let all = all.replace("DIR", directory.path().to_str().unwrap());
        match Cli::try_parse_from(all.split_whitespace()).unwrap().command {
            Command::Serve(args) => args,
            _ => panic!("another command"),
        }
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
            read_only: false,
            backing_dirs: Vec::new(),
            backing: Vec::new(),
            changes: PatchExport::default(),
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
            Permitted::of(&args(&directory, options)).unwrap().check_export(&state).is_ok()
        };
        let disk = export(path(&directory, "disk"));
        assert!(is_allowed("", disk.clone()));
        assert!(is_allowed("--read-only", ExportState { read_only: true, ..disk.clone() }));
        assert!(!is_allowed("--read-only", disk.clone()), "opened for writing");
        let qcow2 = ExportState { format: Some("qcow2".into()), ..disk.clone() };
        assert!(!is_allowed("", qcow2.clone()), "a guest's header is read");
        assert!(is_allowed("--format qcow2", qcow2));
        assert!(!is_allowed("", export(path(&directory, "neighbour"))));
        assert!(!is_allowed("", export(path(&directory, "images/added"))));
        assert!(!is_allowed("", export("nbd://localhost/".into())));
        assert!(!is_allowed("", export(path(&directory, "images/../disk"))));
    }

    #[test]
    fn an_image_that_was_added_is_where_images_may_be_added() {
        let directory = directory();
        let options = "--read-only --allow-dir DIR/images --allow-uri nbd://host/";
        let args = args(&directory, options);
        let permitted = Permitted::of(&args).unwrap();
        let is_allowed = |image| permitted.check_export(&export(image)).is_ok();
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
        let options = "--allow-dir DIR/images --allow-uri nbd://host/ --backing nbd://below/";
        let args = args(&directory, options);
        let permitted = Permitted::of(&args).unwrap();
        let added = export(path(&directory, "images/added"));
        for (backing_dir, is_allowed) in
            [("images", true), ("", true), ("images/..", true), ("..", false), ("/", false)]
        {
            let backing_dirs = vec![directory.path().join(backing_dir).into()];
            let state = ExportState { backing_dirs, ..added.clone() };
            assert_eq!(permitted.check_export(&state).is_ok(), is_allowed, "{backing_dir}");
        }
        for (name, is_allowed) in [
            ("nbd://below/", true),
            ("nbd://host/base", true),
            ("nbd://other/", false),
            ("nbd+unix:///?socket=/run/s", false),
        ] {
            let state = ExportState { backing: vec![name.into()], ..added.clone() };
            assert_eq!(permitted.check_export(&state).is_ok(), is_allowed, "{name}");
        }
    }

    #[test]
    fn only_the_own_sockets_are_removed() {
        let directory = directory();
        let arguments =
            args(&directory, "--nbd unix:DIR/nbd --vhost-user DIR/vm --control unix:DIR/control");
        let permitted = Permitted::of(&arguments).unwrap();
        let [nbd, vm, control, disk] =
            ["nbd", "vm", "control", "disk"].map(|name| socket(path(&directory, name), None));
        assert!(permitted.check_listener(&nbd).is_ok());
        assert!(permitted.check_device(&vm).is_ok());
        assert!(permitted.check_control(&control).is_ok());
        for wrong in [&disk, &socket(path(&directory, "nbd"), Some("/tmp")), &control] {
            assert!(permitted.check_listener(wrong).is_err(), "{wrong:?}");
            assert!(permitted.check_device(wrong).is_err(), "{wrong:?}");
        }
        assert!(permitted.check_control(&nbd).is_err());
        // A socket that is not removed is only a name, as of one that systemd has handed over.
        assert!(permitted.check_listener(&ListenerState { is_own: false, ..disk }).is_ok());
        let arguments = args(&directory, "");
        let permitted = Permitted::of(&arguments).unwrap();
        let temporary = env::temp_dir().join("nowait-12-3");
        let temporary = temporary.to_str().unwrap();
        let is_allowed = |path: &str, temporary| {
            permitted.check_listener(&socket(path, Some(temporary))).is_ok()
        };
        assert!(is_allowed(&format!("{temporary}/disk.sock"), temporary));
        assert!(!is_allowed(&format!("{temporary}/disk"), temporary));
        assert!(!is_allowed(&format!("{temporary}/../disk.sock"), temporary));
        assert!(!is_allowed("/home/user/disk.sock", "/home/user"));
        assert!(!is_allowed("/home/user/nowait-12-3/disk.sock", "/home/user/nowait-12-3"));
        assert!(permitted.check_listener(&nbd).is_err(), "it has a default socket");
    }
}
