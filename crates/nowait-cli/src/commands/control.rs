//! `nowait status`, `nowait export` and `nowait connections`: what a running server tells at its
//! control socket, and its changes.
//!
//! Invariant: a change is made to the server that the user names, or to the only one there is.

use nowait_control::{
    AddExport, AddFrontend, Client, ClientError, ConnectionInfo, ExportInfo, LimitsInfo,
    PatchExport, SnapshotReport, SnapshotRequest, UpgradeReport, UpgradeRequest,
};
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::{human, short};
use serde_json::json;

use crate::args::change_args::Change;
use crate::args::control_args::{
    ConnectionsArgs, ExportAction, ExportCommand, ServerArgs, StatusArgs,
};
use crate::args::upgrade_args::UpgradeArgs;
use crate::commands::{backups, bitmaps, moves, replications};
use crate::control_client::{
    absolute, ask, at, failed, image_name, no_server, print_json, tell, the_client,
};
use crate::output;
use nowait_daemon::control::control_socket;

/// Shows the servers.
///
/// # Errors
/// No server runs, or the one that was named does not answer.
pub(crate) fn status(args: &StatusArgs) -> Result<(), CliError> {
    let ServerArgs { control, json, .. } = &args.server;
    let clients = match control {
        Some(_) => vec![the_client(&args.server)?],
        None => control_socket::all().iter().map(|path| at(path)).collect::<Result<_, _>>()?,
    };
    let (mut all, mut text, mut refused) = (Vec::new(), String::new(), None);
    for client in &clients {
        let place = client.place();
        let told = client.server().and_then(|server| Ok((server, client.exports()?)));
        match told {
            Ok((server, exports)) => {
                let seconds = server.uptime_seconds as u64;
                text += &format!(
                    "server {}, up {}, {} of {} connections, {}\n",
                    server.pid,
                    duration(seconds),
                    server.connections,
                    server.max_connections,
                    plain(&place.to_string_lossy()),
                );
                let warning = |why: &String| format!("warning: {}\n", plain(why));
                text.extend(server.warnings.iter().map(warning));
                text += &table(&exports);
                all.push(json!({
                    "control": place.to_string_lossy(),
                    "server": server,
                    "exports": exports,
                }));
            }
            // One that ends at this moment.
            Err(error) => refused = Some(failed(place, &error)),
        }
    }
    match refused {
        Some(error) if all.is_empty() => Err(error),
        _ if all.is_empty() => Err(no_server()),
        _ if *json => print_json(&all),
        _ => output::print(text),
    }
}

/// Lists or changes exports.
///
/// # Errors
/// No server or more than one runs, or it has refused.
pub(crate) fn export(command: &ExportCommand) -> Result<(), CliError> {
    match &command.action {
        ExportAction::List { server } => ask(server, Client::exports, |exports| table(exports)),
        ExportAction::Add { name, image, format, read_only, backing, vhost_user, server } => {
            let frontends =
                vhost_user.iter().map(|socket| absolute(socket).map(AddFrontend::VhostUser));
            let export = AddExport {
                name: name.clone(),
                path: image_name(image)?,
                backing: backing.clone(),
                frontends: frontends.collect::<Result<_, _>>()?,
                format: format.map(|format| format.name().to_owned()),
                read_only: *read_only,
                description: None,
            };
            let line = |export: &ExportInfo| {
                let places = export.places.iter().map(|place| format!("serving {place}\n"));
                places.collect()
            };
            ask(server, |client| client.add(&export), line)
        }
        ExportAction::Remove { name, force, server } => {
            tell(server, |client| client.remove(name, *force))
        }
        ExportAction::Resize { name, change, shrink, server } => {
            let resize = |client: &Client| {
                let size_bytes = Some(new_size(client, name, *change)?);
                let shrink = *shrink;
                client.change(name, &PatchExport { size_bytes, shrink, ..PatchExport::default() })
            };
            ask(server, resize, |export| format!("{}\n", human(export.size_bytes)))
        }
        ExportAction::Snapshot { name, overlay, server } => {
            let request = SnapshotRequest { overlay: absolute(overlay)? };
            ask(server, |client| client.snapshot(name, &request), snapshot_line)
        }
        ExportAction::Limit { name, clear, limits, server } => {
            let limit = |client: &Client| {
                let before = if *clear { ExportInfo::default() } else { find(client, name)? };
                let given = [limits.limits(), limits.limits_per_client()].map(LimitsInfo::from);
                let [all, each] = [before.limits, before.connection_limits];
                let change = PatchExport {
                    limits: Some(given[0].or(all)),
                    connection_limits: Some(given[1].or(each)),
                    ..PatchExport::default()
                };
                client.change(name, &change)
            };
            let line = |export: &ExportInfo| match limits_of(export) {
                limits if limits.is_empty() => "no limits\n".to_owned(),
                limits => format!("{limits}\n"),
            };
            ask(server, limit, line)
        }
        ExportAction::Weight { name, weight, server } => {
            let change = PatchExport { weight: Some(*weight), ..PatchExport::default() };
            let line = |export: &ExportInfo| format!("weight {}\n", export.weight);
            ask(server, |client| client.change(name, &change), line)
        }
        ExportAction::ReadOnly { name, read_only, server } => {
            let change = PatchExport { read_only: Some(*read_only), ..PatchExport::default() };
            tell(server, |client| client.change(name, &change).map(drop))
        }
        ExportAction::Bitmap(command) => bitmaps::run(command),
        ExportAction::Backup(command) => backups::run(command),
        ExportAction::Move(command) => moves::run(command),
        ExportAction::Replicate(command) => replications::run(command),
        ExportAction::Flush { name, server } => tell(server, |client| client.flush(name)),
    }
}

/// Lists connections, or closes one.
///
/// # Errors
/// Like [`export`].
pub(crate) fn connections(args: &ConnectionsArgs) -> Result<(), CliError> {
    match args.close {
        Some(id) => tell(&args.server, |client| client.disconnect(id)),
        None => ask(&args.server, Client::connections, |all| connection_table(all)),
    }
}

/// Exchanges the program of a server.
///
/// # Errors
/// Like [`export`].
pub(crate) fn upgrade(args: &UpgradeArgs) -> Result<(), CliError> {
    let binary = args.binary.as_deref().map(|path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let text = path.to_str().map(str::to_owned);
        text.ok_or_else(|| CliError::at(&path, "a path that is not text cannot be sent"))
    });
    let request = UpgradeRequest { binary: binary.transpose()? };
    let words = |report: &UpgradeReport| {
        let UpgradeReport { pid, version, pause_ms, connections, closed } = report;
        let left = match closed {
            0 => String::new(),
            count => format!(", {count} closed"),
        };
        format!(
            "nowait {} serves as process {pid}: {connections} connections handed over{left}, a pause of {pause_ms:.1} ms\n",
            plain(version)
        )
    };
    ask(&args.server, |client| client.upgrade(&request), words)
}

fn snapshot_line(report: &SnapshotReport) -> String {
    let SnapshotReport { image, backing, pause_ms } = report;
    format!(
        "{} is unchanged from now on, {} is written to (a pause of {pause_ms:.1} ms)\n",
        plain(backing),
        plain(image)
    )
}

/// The export `name`, or `@ID`; the default export without a name.
fn find(client: &Client, name: &str) -> Result<ExportInfo, ClientError> {
    let is_it = |export: &ExportInfo| match name {
        "" => export.id == 0,
        name => export.name == name || format!("@{}", export.id) == name,
    };
    let export = client.exports()?.into_iter().find(is_it);
    export.ok_or(ClientError::Refused("there is no such export".into()))
}

/// The limits of `export` in words; empty without any.
fn limits_of(export: &ExportInfo) -> String {
    let words = |limits: &LimitsInfo, whose: &str| {
        let requests = limits.ops.map(|limit| format!("{} requests/s", limit.per_second()));
        let bytes = limits.bandwidth.map(|limit| format!("{}/s", short(limit.per_second())));
        let both: Vec<_> = requests.into_iter().chain(bytes).collect();
        (!both.is_empty()).then(|| format!("{whose}{}", both.join(" and ")))
    };
    let all = words(&export.limits, "");
    let each = words(&export.connection_limits, "each client ");
    all.into_iter().chain(each).collect::<Vec<_>>().join(", ")
}

fn new_size(client: &Client, name: &str, change: Change) -> Result<u64, ClientError> {
    if let Change::To(size) = change {
        return Ok(size);
    }
    let export = find(client, name)?;
    let refused = || ClientError::Refused("a disk cannot have that size".into());
    change.of(export.size_bytes).ok_or_else(refused)
}

fn table(exports: &[ExportInfo]) -> String {
    let line = |export: &ExportInfo| {
        let (mut requests, mut bytes, mut errors) = (0, 0, 0);
        let operations = export.frontends.values().flat_map(|frontend| &frontend.operations);
        for (operation, totals) in operations {
            requests += totals.requests;
            errors += totals.errors;
            if matches!(operation.as_str(), "read" | "write") {
                bytes += totals.bytes;
            }
        }
        let name =
            if export.name.is_empty() { format!("@{}", export.id) } else { export.name.clone() };
        let mode = if export.read_only { "ro" } else { "rw" };
        let limits = match limits_of(export) {
            limits if limits.is_empty() => limits,
            limits => format!("  {:<16} limited to {limits}\n", ""),
        };
        format!(
            "  {:<16} {:>10} {mode} {:>8} {:>9} {requests:>12} {:>10} {errors:>7}  {}\n{limits}",
            plain(&name),
            short(export.size_bytes),
            export.members,
            export.in_flight,
            short(bytes),
            plain(&export.image),
        )
    };
    let head = "  export                 size    clients in flight     requests      moved  errors  image\n";
    std::iter::once(head.to_owned()).chain(exports.iter().map(line)).collect()
}

fn connection_table(connections: &[ConnectionInfo]) -> String {
    let line = |connection: &ConnectionInfo| {
        let export = connection.export.as_deref().map_or("(handshake)".into(), |name| {
            if name.is_empty() { "(default)".into() } else { plain(name) }
        });
        let tls = if connection.tls { "tls" } else { "-" };
        format!(
            "{:>6} {:<11} {:<16} {tls:<4} {:>10}  {}\n",
            connection.id,
            plain(&connection.frontend),
            export,
            duration(connection.age_seconds as u64),
            plain(&connection.peer),
        )
    };
    let head = "    id frontend    export           tls         for  client\n";
    std::iter::once(head.to_owned()).chain(connections.iter().map(line)).collect()
}

/// A time in words, to two units.
pub(crate) fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_at_most_two_units() {
        let words: Vec<_> = [0, 59, 60, 3661, 90_000].into_iter().map(duration).collect();
        assert_eq!(words, ["0 s", "59 s", "1 min 0 s", "1 h 1 min", "1 d 1 h"]);
    }
}
