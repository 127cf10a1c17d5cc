//! Opens an image and its backing chain with the options of the command line.
//!
//! Invariant: an image on a file system without locks is used with a warning.

use std::io::{self, Write};

use nowait_image::{Chain, ChainOptions, Warning};
use nowait_remote::Location;

use crate::args::image_args::ImageArgs;
use nowait_daemon::disks::waiting;
use nowait_daemon::error::CliError;

/// Opens the chain, locked as `options` require; the format and the allowed directories are from
/// `args`.
pub(crate) fn open(args: &ImageArgs, options: ChainOptions) -> Result<Chain, CliError> {
    let remote = args.auth.options();
    let given = &args.others.backing;
    let backings = waiting::on(given, || nowait_remote::open_backings(given, &remote));
    let options = ChainOptions {
        backing_storages: backings.map_err(|error| CliError::of_image(&error))?,
        format: args.format,
        backing_dirs: args.others.backing_dir.clone(),
        data_files: args.others.data_file.clone(),
        ..options
    };
    let location = Location::parse(&args.image.clone().into());
    let chain = match location.map_err(|error| CliError::at(&args.image, error))? {
        Location::File(_) => Chain::open(&args.image, &options),
        // The offline tools change files only.
        _ if options.writable => {
            return Err(CliError::at(&args.image, "only files and block devices are changed"));
        }
        location => {
            let open = || nowait_remote::open_storage(&location, true, &remote);
            let storage = waiting::on([&location], open);
            let storage = storage.map_err(|error| CliError::of_image(&error))?;
            Chain::open_storage(&args.image, storage, &options)
        }
    };
    let chain = chain.map_err(|error| CliError::of_image(&error))?;
    for warning in chain.warnings() {
        let Warning::NotLocked(path) = warning else { continue };
        let path = path.display();
        let _ = writeln!(
            io::stderr(),
            "nowait: warning: {path}: the file system does not support locks"
        );
    }
    Ok(chain)
}
