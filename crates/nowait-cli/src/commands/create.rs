//! `nowait create`: creates a new image.
//!
//! Invariant: as in nowait_image::create.

use nowait_image::create::{CreateOptions, create};
use nowait_remote::Location;
use serde_json::json;

use crate::args::change_args::{CreateArgs, Preallocate};
use crate::output;
use nowait_daemon::disks::waiting;
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::human;

pub(crate) fn run(args: &CreateArgs) -> Result<(), CliError> {
    let location = args.backing.as_ref().map(|name| Location::parse_backing(&name.clone().into()));
    let location = location.transpose().map_err(|error| CliError::at(&args.image, error))?;
    let urls: Vec<_> = location.into_iter().filter(|it| it.path().is_none()).collect();
    let remote = args.auth.options();
    let open = || nowait_remote::open_backings(&urls, &remote);
    let storages = waiting::on(&urls, open);
    let options = CreateOptions {
        backing_storages: storages.map_err(|error| CliError::of_image(&error))?,
        backing: args.backing.clone(),
        backing_format: args.backing_format,
        backing_dirs: args.backing_dir.clone(),
        data_files: args.data_file.clone(),
        cluster_bytes: args.cluster_size,
        preallocation: args.preallocation.what(),
        features: args.features(),
        ..CreateOptions::new(args.format(), args.size)
    };
    let size = create(&args.image, &options).map_err(|error| CliError::of_image(&error))?;
    let text = if args.json { in_json(args, size) } else { in_words(args, size) };
    output::print(
        text + "
",
    )
}

fn in_json(args: &CreateArgs, size: u64) -> String {
    let image = args.image.to_string_lossy();
    json!({ "image": image, "format": args.format().name(), "size_bytes": size }).to_string()
}

fn in_words(args: &CreateArgs, size: u64) -> String {
    let kind = match args.format() {
        raw if raw.is_raw() => String::new(),
        format => format!("{}, ", format.name()),
    };
    let space = match args.preallocation {
        Preallocate::Off => "sparse",
        Preallocate::Metadata => "sparse with all tables",
        Preallocate::Falloc => "all its space reserved",
    };
    let on = args.backing.as_ref().map_or(String::new(), |b| format!(", on {}", b.display()));
    plain(&format!("created {}: {}, {kind}{space}{on}", args.image.display(), human(size)))
}
