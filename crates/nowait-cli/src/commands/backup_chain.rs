//! `nowait backup` and `nowait restore`: chains of backups.
//!
//! Invariant: success is printed after all is durable. A damaged point is exit status 1 of `verify`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nowait::{BlockDevice, OpenOptions};
use nowait_backup::{
    Access, Chain, ChainPlace, Keys, ListedPoint, NewPoint, PointDisk, PointHealth, PointInfo,
    PointStorage,
};
use nowait_copy::{CopySource, CopyTarget, Error, Location, Options, REQUEST_BYTES};
use nowait_image::os_message;
use nowait_nbd::Address;
use nowait_server::{AnyExport, Export, Listener, Server};
use serde_json::{Value, json};

use crate::args::backup_args::{BackupArgs, ChainAction, IdentityArgs, NewPointArgs, RestoreArgs};
use crate::commands::copy::{Bar, cancel_on_signal, failed};
use crate::output;
use nowait_daemon::disks::waiting::{self, Waiting};
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::process::log;
use nowait_daemon::secrets;
use nowait_daemon::size::{human, short};

/// Requests of 1 MiB in flight.
const REQUESTS: usize = (8 << 20) / REQUEST_BYTES as usize;
/// Connections to a server that allows several.
const CONNECTIONS: usize = 4;
/// How soon a signal ends a server, and how long requests in flight may take then.
const SIGNAL_TIME: Duration = Duration::from_millis(50);
const CLOSE_TIME: Duration = Duration::from_secs(10);
/// The search for zeros, in bytes; blocks of a chain are larger.
const SPARSE_BYTES: usize = 4096;

/// Adds a point, or runs another action on a chain.
///
/// # Errors
/// A failure on either side, or an interruption.
pub(crate) fn run(args: &BackupArgs) -> Result<u8, CliError> {
    let new = &args.new;
    match &args.action {
        Some(ChainAction::List { directory, keys, json }) => {
            list(&open(directory, Access::List, &[], keys)?, *json).map(|()| 0)
        }
        Some(ChainAction::Verify { directory, point, keys, no_progress, json }) => {
            let chain = open(directory, Access::Read, &[], keys)?;
            verify(&chain, directory, *point, *no_progress, *json)
        }
        Some(ChainAction::Prune { directory, keep, keys, json }) => {
            let cancel = cancel_on_signal()?;
            let chain = open(directory, Access::Remove, &[], keys)?;
            let words = "interrupted: every point that stays can be restored; the next one goes on";
            let pruned = nowait_backup::prune(chain, keep.keep(), &cancel);
            let pruned = pruned.map_err(|error| cancelled(&error, words))?;
            let (before, after) = pruned.bytes;
            let text = match json {
                true => {
                    let said = json!({
                        "removed": pruned.removed,
                        "kept": pruned.kept,
                        "bytes_before": before,
                        "bytes": after,
                    });
                    format!("{said}\n")
                }
                false => format!(
                    "removed {} points, {} stay: {}, before {}\n",
                    pruned.removed.len(),
                    pruned.kept.len(),
                    human(after),
                    human(before)
                ),
            };
            output::print(text).map(|()| 0)
        }
        None => match (&new.disk, &new.directory) {
            (Some(disk), Some(directory)) => add(new, disk, directory).map(|()| 0),
            _ => Err(CliError::new("DISK and DIR are missing")),
        },
    }
}

/// Opens the chain at `place` with the keys that were given.
fn open(
    place: &ChainPlace,
    access: Access,
    recipients: &[String],
    keys: &IdentityArgs,
) -> Result<Chain, CliError> {
    if !keys.identity.is_empty() {
        secrets::keep_in_memory();
    }
    let keys = Keys::new(recipients, &keys.identity).map_err(|error| failed(&error))?;
    let store = match place {
        ChainPlace::Store(url) => Some(Location::Object(url.clone())),
        ChainPlace::Directory(_) => None,
    };
    let opened = waiting::on(&store, || Chain::open(place.clone(), access, keys));
    opened.map_err(|error| failed(&error))
}

/// A copy of all of `from` into `to`, with the defaults of this command.
fn options(from: CopySource, to: CopyTarget) -> Options {
    Options {
        connections: CONNECTIONS,
        requests: REQUESTS,
        sparse_bytes: SPARSE_BYTES,
        ..Options::new(from, to)
    }
}

/// The failure `error`; an interruption in these words.
fn cancelled(error: &Error, words: &str) -> CliError {
    match error {
        Error::Interrupted => CliError::new(words),
        other => failed(other),
    }
}

/// Copies with a progress bar.
fn copy(
    options: &Options,
    no_progress: bool,
    cancel: &AtomicBool,
) -> Result<nowait_copy::Report, Error> {
    if options.tls_certs.is_some() {
        secrets::keep_in_memory();
    }
    let bar = Bar::new(no_progress);
    let locations = match (&options.from, &options.to) {
        (CopySource::At(location), _) | (_, CopyTarget::At(location)) => Some(location),
        (CopySource::Disk(..), CopyTarget::Disk(..)) => None,
    };
    // Until the first data moves.
    let mut waiting = Some(Waiting::start(locations.into_iter().chain(&options.backings)));
    let copied = nowait_copy::copy(options, cancel, &mut |progress| {
        waiting = None;
        bar.show(progress);
    });
    bar.clear();
    copied
}

fn add(args: &NewPointArgs, disk: &Location, directory: &ChainPlace) -> Result<(), CliError> {
    let cancel = cancel_on_signal()?;
    let chain = open(directory, Access::Add, &args.recipient, &args.keys)?;
    let point = NewPoint::new(chain, args.contents()).map_err(|error| failed(&error))?;
    let to = CopyTarget::Disk(point.name(), point.clone());
    let options = Options {
        from_format: args.format,
        backing_dirs: args.others.backing_dir.clone(),
        backings: args.others.backing.clone(),
        data_files: args.others.data_file.clone(),
        remote: args.auth.options(),
        tls_certs: args.transfer.tls_certs.clone(),
        increment: point.increment(),
        ..options(CopySource::At(disk.clone()), to)
    };
    let report = copy(&options, args.transfer.no_progress, &cancel)
        .map_err(|error| cancelled(&error, "interrupted, there is no new point"))?;
    let Some(info) = point.made() else { return Err(CliError::new("there is no new point")) };
    let (disk, directory) = (disk.to_string(), directory.to_string());
    let seconds = report.elapsed.as_secs_f64();
    if args.transfer.json {
        let mut said = point_in_json(&info);
        said["disk"] = disk.into();
        said["directory"] = directory.into();
        said["seconds"] = seconds.into();
        said["resumed_bytes"] = point.resumed_bytes().into();
        return output::print(format!("{said}\n"));
    }
    let kind = match info.parent {
        Some(parent) => format!("changes since point {parent}"),
        None => "whole".into(),
    };
    let resumed = match point.resumed_bytes() {
        0 => String::new(),
        bytes => format!(" (of them {} by a backup that was interrupted)", human(bytes)),
    };
    output::print(format!(
        "backed up {} to {}: point {}, {kind}, of {}: {} in blocks of its own, {} stored{resumed}, in {seconds:.1} s\n",
        plain(&disk),
        plain(&directory),
        info.number,
        human(info.size),
        human(info.data_bytes),
        human(info.stored_bytes),
    ))
}

/// Restores a point.
///
/// # Errors
/// There is no such point, it is damaged, the target cannot be written, or an interruption.
pub(crate) fn restore(args: &RestoreArgs) -> Result<(), CliError> {
    let cancel = cancel_on_signal()?;
    let (place, number) = &args.from;
    let chain = open(place, Access::Read, &[], &args.keys)?;
    let disk = PointDisk::open(chain, *number).map_err(|error| failed(&error))?;
    if let Some(socket) = &args.serve {
        return serve(disk, socket, &cancel);
    }
    let Some(to) = &args.to else { return Err(CliError::new("TO is missing")) };
    let name = disk.name();
    let (to_format, to_format_given) = args.format();
    let options = Options {
        to_format,
        to_format_given,
        force: args.force,
        allow_mounted: args.allow_mounted,
        verify: args.verify,
        tls_certs: args.transfer.tls_certs.clone(),
        ..options(CopySource::Disk(name.clone(), disk), CopyTarget::At(to.clone()))
    };
    let report = copy(&options, args.transfer.no_progress, &cancel)
        .map_err(|error| cancelled(&error, "interrupted, nothing is restored"))?;
    let (to, seconds) = (to.to_string(), report.elapsed.as_secs_f64());
    if args.transfer.json {
        let said = json!({
            "from": name,
            "to": to,
            "to_format": to_format.name(),
            "size_bytes": report.size,
            "data_bytes": report.data,
            "zero_bytes": report.zero,
            "seconds": seconds,
            "verified": args.verify,
        });
        return output::print(format!("{said}\n"));
    }
    let verified = if args.verify { ", compared and found equal" } else { "" };
    output::print(format!(
        "restored {} to {}: {}, of them {} data, in {seconds:.1} s{verified}\n",
        plain(&name),
        plain(&to),
        human(report.size),
        human(report.data),
    ))
}

/// Serves `disk` to NBD clients of `socket` until `cancel` is set.
fn serve(disk: Arc<PointDisk>, socket: &Path, cancel: &AtomicBool) -> Result<(), CliError> {
    log::start(false);
    let name = disk.name();
    let failed = |error: &dyn std::fmt::Display| CliError::at(Path::new(&name), error);
    let listener = Listener::unix(socket).map_err(|error| {
        CliError::new(format!("{}: {}", plain(&socket.display().to_string()), os_message(&error)))
    })?;
    let storage = PointStorage::new(disk).map(Arc::new);
    let device = storage.and_then(|storage| BlockDevice::raw(storage, OpenOptions::default()));
    let device = Arc::new(device.map_err(|error| failed(&error))?);
    let export = AnyExport::new(Export::new(device, String::new(), name.clone()));
    let server = Server::start(vec![export], vec![listener], nowait_server::Options::default());
    let server = server.map_err(|error| failed(&error))?;
    let stop = server.shutdown_handle();
    output::print(format!("serving {}\n", Address::Unix(socket.to_owned()).uri("", false)))?;
    thread::scope(|scope| {
        scope.spawn(move || {
            while !cancel.load(Ordering::Relaxed) {
                thread::sleep(SIGNAL_TIME);
            }
            stop.stop();
        });
        let ended = server.run(CLOSE_TIME);
        // Where the server has ended by itself.
        cancel.store(true, Ordering::Relaxed);
        ended.map(drop).map_err(|error| failed(&error))
    })
}

fn point_in_json(info: &PointInfo) -> Value {
    json!({
        "point": info.number,
        "parent": info.parent,
        "time": info.time(),
        "size_bytes": info.size,
        "data_bytes": info.data_bytes,
        "stored_bytes": info.stored_bytes,
        "bitmap": info.bitmap,
    })
}

fn list(chain: &Chain, json: bool) -> Result<(), CliError> {
    let points = chain.points();
    if json {
        let object = |(number, point): &ListedPoint| match point {
            Ok(info) => point_in_json(info),
            Err(why) => json!({ "point": number, "damaged": why }),
        };
        let all: Vec<Value> = points.iter().map(object).collect();
        return output::print(format!("{}\n", json!({ "points": all })));
    }
    let line = |(number, point): &ListedPoint| match point {
        Ok(info) => {
            let kind = match info.parent {
                Some(parent) => format!("changes since {parent}"),
                None => "whole".into(),
            };
            format!(
                "{number:>7}  {:<20}  {:>10}  {:>10}  {:>10}  {kind}\n",
                info.time(),
                short(info.size),
                short(info.data_bytes),
                short(info.stored_bytes),
            )
        }
        Err(why) => format!("{number:>7}  damaged: {}\n", plain(why)),
    };
    let head = "  point  time                        size        data      stored  kind\n";
    output::print(
        std::iter::once(head.to_owned()).chain(points.iter().map(line)).collect::<String>(),
    )
}

fn verify(
    chain: &Chain,
    directory: &ChainPlace,
    point: Option<u32>,
    no_progress: bool,
    json: bool,
) -> Result<u8, CliError> {
    let cancel = cancel_on_signal()?;
    let bar = Bar::new(no_progress);
    let health = nowait_backup::verify(chain, point, &cancel, &mut |done, total| {
        bar.set("verifying", done, total);
    });
    bar.clear();
    let health = health.map_err(|error| cancelled(&error, "interrupted"))?;
    let sound = health.iter().all(PointHealth::is_sound);
    let text = match json {
        true => {
            let points: Vec<Value> = health.iter().map(health_in_json).collect();
            format!("{}\n", json!({ "sound": sound, "points": points }))
        }
        false => health.iter().map(health_in_words).collect(),
    };
    output::print(text)?;
    if sound {
        return Ok(0);
    }
    let damaged = health.iter().filter(|point| !point.is_sound()).count();
    let place = plain(&directory.to_string());
    Err(CliError::new(format!("{place}: {damaged} of {} points are damaged", health.len())))
}

fn health_in_json(health: &PointHealth) -> Value {
    let damage = health.damage.iter().map(|damage| {
        json!({
            "offset": damage.range.pos,
            "length": damage.range.len,
            "point": damage.point,
            "why": damage.why,
        })
    });
    json!({
        "point": health.number,
        "sound": health.is_sound(),
        "unusable": health.unusable,
        "damage": damage.collect::<Vec<_>>(),
    })
}

fn health_in_words(health: &PointHealth) -> String {
    let number = health.number;
    if health.is_sound() {
        return format!("point {number}: sound\n");
    }
    let unusable = health.unusable.iter().map(|why| format!("point {number}: {}\n", plain(why)));
    let damage = health.damage.iter().map(|damage| {
        format!(
            "point {number}: damaged at offset {}, length {}, in blocks of point {}: {}\n",
            damage.range.pos,
            damage.range.len,
            damage.point,
            plain(&damage.why)
        )
    });
    unusable.chain(damage).collect()
}
