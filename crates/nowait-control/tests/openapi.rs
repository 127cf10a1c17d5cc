//! The paths, methods and fields of `docs/control.openapi.json` are those of the interface.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait_control::{
    AddBitmap, AddExport, AddFrontend, BackupInfo, BitmapInfo, BucketInfo, BucketLimit, Client,
    ClientError, ConnectionInfo, EndBackup, ErrnoInfo, ExportHistory, FrontendInfo, HistoryInfo,
    HttpListener, HttpServer, LatencyInfo, LimitsInfo, MergeBitmaps, MoveInfo, NbdServerInfo,
    OperationInfo, PastErrors, PatchBitmap, PatchExport, RemovedExport, ReplicationInfo,
    SeriesInfo, ServerInfo, SnapshotReport, SnapshotRequest, StartBackup, StartMove,
    StartReplication, Statistics, StoreInfo, UpgradeReport, UpgradeRequest,
};
use nowait_server::BackupEnd;
use nowait_testkit::recording_server::RecordingServer;
use serde::Serialize;
use serde_json::Value;

struct Running {
    server: Arc<RecordingServer>,
    socket: PathBuf,
    _http: HttpServer,
    _directory: tempfile::TempDir,
}

fn run() -> Running {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control");
    // After an upgrade that succeeds the interface is another program's.
    let server = Arc::new(RecordingServer::refusing(&["change", "upgrade"]));
    let listener = HttpListener::Unix(UnixListener::bind(&socket).unwrap());
    let http = HttpServer::start(vec![listener], server.clone()).unwrap();
    Running { server, socket, _http: http, _directory: directory }
}

fn document() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/control.openapi.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The status of the answer to a request without a body.
fn status_of(socket: &Path, method: &str, path: &str) -> u16 {
    let mut stream = UnixStream::connect(socket).unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    // The stream of events has no end.
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
}

#[test]
fn each_path_of_the_document_has_exactly_its_methods() {
    let running = run();
    let document = document();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path =
            path.replace("{name}", "a%2Fb%20c").replace("{id}", "1").replace("{bitmap}", "x");
        for method in ["get", "post", "put", "patch", "delete"] {
            let status = status_of(&running.socket, &method.to_uppercase(), &path);
            let is_there = methods.get(method).is_some();
            assert_eq!(status != 405, is_there, "{method} {path}: {status}");
            assert_ne!(status, 404, "{method} {path}");
        }
    }
    assert_eq!(status_of(&running.socket, "GET", "/v1/nothing"), 404);
}

fn fields(value: &impl Serialize) -> BTreeSet<String> {
    let value = serde_json::to_value(value).unwrap();
    value.as_object().unwrap().keys().cloned().collect()
}

/// The schemas of backups and their fields.
fn backup_schemas() -> [(&'static str, BTreeSet<String>); 3] {
    let text = || Some(String::new());
    let backup = BackupInfo { bitmap: text(), failure: text(), ..BackupInfo::default() };
    let start = StartBackup {
        name: text(),
        bitmap: text(),
        only_dirty: true,
        discards: true,
        scratch: text(),
        max_scratch_bytes: Some(1),
        with: vec![String::new()],
    };
    let end = EndBackup { with: vec![String::new()] };
    [("Backup", fields(&backup)), ("StartBackup", fields(&start)), ("EndBackup", fields(&end))]
}

/// The schemas of moves and replications, and their fields.
fn move_schemas() -> [(&'static str, BTreeSet<String>); 4] {
    let (text, notes) = (|| Some(String::new()), vec![String::new()]);
    let info = MoveInfo { failure: text(), pause_ms: Some(1.0), notes, ..MoveInfo::default() };
    let start = StartMove {
        format: text(),
        overwrite_device: true,
        max_pause_ms: Some(1),
        rate_bytes: Some(1),
        ..StartMove::default()
    };
    let replication = ReplicationInfo {
        instant_unix_seconds: Some(1.0),
        last_error: text(),
        ..ReplicationInfo::default()
    };
    let every = StartReplication {
        every_seconds: Some(1),
        rate_bytes: Some(1),
        resume: true,
        ..StartReplication::default()
    };
    [
        ("Move", fields(&info)),
        ("StartMove", fields(&start)),
        ("Replication", fields(&replication)),
        ("StartReplication", fields(&every)),
    ]
}

/// The schemas of dirty bitmaps and their fields.
fn bitmap_schemas() -> [(&'static str, BTreeSet<String>); 4] {
    let (granularity_bytes, enabled, persistent) = (Some(1), Some(true), Some(true));
    let add = AddBitmap { granularity_bytes, enabled, persistent, ..AddBitmap::default() };
    let info = BitmapInfo { persistent: true, inconsistent: true, ..BitmapInfo::default() };
    [
        ("Bitmap", fields(&info)),
        ("AddBitmap", fields(&add)),
        ("PatchBitmap", fields(&PatchBitmap { enabled: Some(true) })),
        ("MergeBitmaps", fields(&MergeBitmaps::default())),
    ]
}

#[test]
fn the_fields_of_the_document_are_those_that_are_sent_and_taken() {
    let connection = ConnectionInfo { export: Some(String::new()), ..ConnectionInfo::default() };
    let text = Some(String::new());
    let socket = AddFrontend::VhostUser(String::new());
    let frontends = vec![socket.clone()];
    let add = AddExport {
        format: text.clone(),
        description: text,
        backing: vec![String::new()],
        frontends,
        ..AddExport::default()
    };
    let latency = Some(LatencyInfo::default());
    let operation = OperationInfo {
        latency: latency.clone(),
        device_latency: latency,
        ..OperationInfo::default()
    };
    let limit = BucketLimit::default();
    let limits = LimitsInfo { ops: Some(limit), bandwidth: Some(limit) };
    let patch = PatchExport {
        shrink: true,
        size_bytes: Some(1),
        limits: Some(limits),
        connection_limits: Some(limits),
        weight: Some(1),
        read_only: Some(true),
    };
    let bucket = BucketInfo { below_seconds: Some(1.0), requests: 1 };
    let document = document();
    for (schema, fields) in [
        ("Server", fields(&ServerInfo::default())),
        ("Statistics", fields(&Statistics::default())),
        ("History", fields(&HistoryInfo::default())),
        ("ExportHistory", fields(&ExportHistory::default())),
        ("Series", fields(&SeriesInfo::default())),
        ("PastErrors", fields(&PastErrors::default())),
        ("RemovedExport", fields(&RemovedExport::default())),
        ("Export", fields(&RecordingServer::only_export())),
        ("Frontend", fields(&FrontendInfo::default())),
        ("Operation", fields(&operation)),
        ("Latency", fields(&LatencyInfo::default())),
        ("Bucket", fields(&bucket)),
        ("Store", fields(&StoreInfo::default())),
        ("NbdServer", fields(&NbdServerInfo::default())),
        ("Limits", fields(&limits)),
        ("BucketLimit", fields(&limit)),
        ("Errno", fields(&ErrnoInfo::default())),
        ("Connection", fields(&connection)),
        ("UpgradeRequest", fields(&UpgradeRequest { binary: Some(String::new()) })),
        ("UpgradeReport", fields(&UpgradeReport::default())),
        ("AddExport", fields(&add)),
        ("AddFrontend", fields(&socket)),
        ("PatchExport", fields(&patch)),
        ("SnapshotRequest", fields(&SnapshotRequest::default())),
        ("SnapshotReport", fields(&SnapshotReport::default())),
    ]
    .into_iter()
    .chain(bitmap_schemas())
    .chain(backup_schemas())
    .chain(move_schemas())
    {
        let known = document["components"]["schemas"][schema]["properties"].as_object().unwrap();
        assert_eq!(known.keys().cloned().collect::<BTreeSet<_>>(), fields, "{schema}");
    }
}

#[test]
fn the_client_asks_for_what_its_methods_say() {
    let running = run();
    let client = Client::new(&running.socket).unwrap();
    let name = RecordingServer::only_export().name;
    client.flush(&name).unwrap();
    client.snapshot(&name, &SnapshotRequest { overlay: "/o".into() }).unwrap();
    client.remove(&name, false).unwrap();
    client.remove("@3", true).unwrap();
    client.disconnect(9).unwrap();
    client.bitmaps(&name).unwrap();
    client.add_bitmap(&name, &AddBitmap { name: "x".into(), ..AddBitmap::default() }).unwrap();
    client.change_bitmap(&name, "x/y", &PatchBitmap { enabled: Some(false) }).unwrap();
    client.merge_bitmaps(&name, "x", &MergeBitmaps { sources: vec!["y".into()] }).unwrap();
    client.clear_bitmap(&name, "ä %").unwrap();
    client.remove_bitmap("@3", "x").unwrap();
    let backup = StartBackup { bitmap: Some("x".into()), ..StartBackup::default() };
    client.start_backup(&name, &backup).unwrap();
    let both = EndBackup { with: vec!["@4".into()] };
    client.end_backup(&name, &both, BackupEnd::Commit).unwrap();
    client.end_backup("@4", &EndBackup::default(), BackupEnd::Abort).unwrap();
    client.start_move(&name, &StartMove { target: "/t".into(), ..StartMove::default() }).unwrap();
    client.disk_move(&name).unwrap();
    client.cancel_move("@3").unwrap();
    let start = StartReplication { target: "nbd://h/".into(), ..StartReplication::default() };
    client.start_replication(&name, &start).unwrap();
    client.replication(&name).unwrap();
    client.stop_replication("@3").unwrap();
    let add = AddExport { name: "x".into(), path: "/y".into(), ..AddExport::default() };
    client.add(&add).unwrap();
    let patch = PatchExport { size_bytes: Some(5), ..PatchExport::default() };
    let refused = client.change(&name, &patch).unwrap_err();
    assert!(matches!(refused, ClientError::Refused(why) if why == "no"));
    let missing = client.flush("other").unwrap_err();
    assert!(matches!(missing, ClientError::Refused(why) if why == "there is no such export"));
    let expected = [
        "flush 3",
        "snapshot 3 {\"overlay\":\"/o\"}",
        "remove 3 false",
        "remove 3 true",
        "disconnect 9",
        "bitmaps 3",
        "add_bitmap 3 {\"name\":\"x\"}",
        "change_bitmap 3 \"x/y\" {\"enabled\":false}",
        "merge_bitmaps 3 \"x\" {\"sources\":[\"y\"]}",
        "clear_bitmap 3 \"ä %\"",
        "remove_bitmap 3 \"x\"",
        "start_backup [3] {\"bitmap\":\"x\"}",
        "end_backup [3,4] \"Commit\"",
        "end_backup [4] \"Abort\"",
        "start_move 3 {\"target\":\"/t\"}",
        "disk_move 3",
        "cancel_move 3",
        "start_replication 3 {\"target\":\"nbd://h/\"}",
        "replication 3",
        "stop_replication 3",
        "add {\"name\":\"x\",\"path\":\"/y\",\"read_only\":false}",
        "change 3 {\"size_bytes\":5}",
    ];
    assert_eq!(running.server.take_notes(), expected);
    drop(running);
    assert!(matches!(client.server(), Err(ClientError::Unreachable(_))));
}

#[test]
fn the_backups_of_255_others_begin_and_end_with_one_and_those_of_256_do_not() {
    let running = run();
    let client = Client::new(&running.socket).unwrap();
    let others = |count: u64| -> Vec<_> { (1..=count).map(|id| format!("@{id}")).collect() };
    let start = |with| client.start_backup("@0", &StartBackup { with, ..StartBackup::default() });
    let end = |with| client.end_backup("@0", &EndBackup { with }, BackupEnd::Commit);
    start(others(255)).unwrap();
    end(others(255)).unwrap();
    let all = (0..256).collect::<Vec<u64>>();
    let ids = serde_json::to_string(&all).unwrap();
    let with = serde_json::to_string(&others(255)).unwrap();
    let asked =
        [format!("start_backup {ids} {{\"with\":{with}}}"), format!("end_backup {ids} \"Commit\"")];
    assert_eq!(running.server.take_notes(), asked);
    for refused in [start(others(256)).unwrap_err(), end(others(256)).unwrap_err()] {
        let ClientError::Refused(why) = refused else { panic!("{refused:?}") };
        assert_eq!(why, "at most 255 backups begin or end with another one");
    }
    assert_eq!(running.server.take_notes(), [""; 0]);
}
