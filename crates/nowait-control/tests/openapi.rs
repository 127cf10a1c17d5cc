//! The paths, methods and fields of `docs/control.openapi.json` are those of the interface.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nowait_control::{
    AddBitmap, AddExport, AddFrontend, BackupInfo, BitmapInfo, BucketInfo, BucketLimit, Client,
    ClientError, ConnectionInfo, ControlError, ControlledServer, EndBackup, ErrnoInfo,
    ExportHistory, ExportInfo, FrontendInfo, HistoryInfo, HttpListener, HttpServer, LatencyInfo,
    LimitsInfo, MergeBitmaps, MoveInfo, NbdServerInfo, OperationInfo, PastErrors, PatchBitmap,
    PatchExport, RemovedExport, ReplicationInfo, SeriesInfo, ServerInfo, SnapshotReport,
    SnapshotRequest, StartBackup, StartMove, StartReplication, Statistics, StoreInfo,
    UpgradeReport, UpgradeRequest,
};
use nowait_server::BackupEnd;
use serde::Serialize;
use serde_json::Value;

/// A server without disks, which notes what it is asked to do.
#[derive(Default)]
struct Noting(Mutex<Vec<String>>);

impl Noting {
    fn note(&self, what: String) {
        self.0.lock().unwrap().push(what);
    }
}

fn export() -> ExportInfo {
    let (backup, moving) = (Some(BackupInfo::default()), Some(MoveInfo::default()));
    let replication = Some(ReplicationInfo::default());
    ExportInfo { id: 3, name: "a/b c".into(), backup, moving, replication, ..ExportInfo::default() }
}

impl ControlledServer for Noting {
    fn info(&self) -> ServerInfo {
        ServerInfo::default()
    }

    fn exports(&self) -> Vec<ExportInfo> {
        vec![export()]
    }

    fn find(&self, name: &str) -> Option<u64> {
        (name == "a/b c").then_some(3)
    }

    fn export(&self, id: u64) -> Result<ExportInfo, ControlError> {
        match id {
            3 => Ok(export()),
            _ => Err(ControlError::NotFound("there is no such export".into())),
        }
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        Vec::new()
    }

    fn add(&self, export: AddExport) -> Result<ExportInfo, ControlError> {
        self.note(format!("add {} {}", export.name, export.path));
        Ok(ExportInfo::default())
    }

    fn remove(&self, id: u64, hard: bool) -> Result<(), ControlError> {
        self.note(format!("remove {id} {hard}"));
        Ok(())
    }

    fn change(&self, id: u64, change: PatchExport) -> Result<ExportInfo, ControlError> {
        self.note(format!("change {id} {:?}", change.size_bytes));
        Err(ControlError::Conflict("no".into()))
    }

    fn flush(&self, id: u64) -> Result<(), ControlError> {
        self.note(format!("flush {id}"));
        Ok(())
    }

    fn snapshot(&self, id: u64, request: SnapshotRequest) -> Result<SnapshotReport, ControlError> {
        self.note(format!("snapshot {id} {}", request.overlay));
        Ok(SnapshotReport::default())
    }

    fn bitmaps(&self, id: u64) -> Result<Vec<BitmapInfo>, ControlError> {
        self.note(format!("bitmaps {id}"));
        Ok(Default::default())
    }

    fn add_bitmap(&self, id: u64, bitmap: AddBitmap) -> Result<BitmapInfo, ControlError> {
        self.note(format!("add_bitmap {id} {}", bitmap.name));
        Ok(Default::default())
    }

    fn remove_bitmap(&self, id: u64, name: &str) -> Result<(), ControlError> {
        self.note(format!("remove_bitmap {id} {name}"));
        Ok(())
    }

    fn clear_bitmap(&self, id: u64, name: &str) -> Result<(), ControlError> {
        self.note(format!("clear_bitmap {id} {name}"));
        Ok(())
    }

    fn change_bitmap(
        &self,
        id: u64,
        name: &str,
        change: PatchBitmap,
    ) -> Result<BitmapInfo, ControlError> {
        self.note(format!("change_bitmap {id} {name} {:?}", change.enabled));
        Ok(Default::default())
    }

    fn merge_bitmaps(
        &self,
        id: u64,
        name: &str,
        merge: MergeBitmaps,
    ) -> Result<BitmapInfo, ControlError> {
        self.note(format!("merge_bitmaps {id} {name} {:?}", merge.sources));
        Ok(Default::default())
    }

    fn start_backup(
        &self,
        ids: &[u64],
        backup: StartBackup,
    ) -> Result<Vec<BackupInfo>, ControlError> {
        self.note(format!("start_backup {ids:?} {:?}", backup.bitmap));
        Ok(Default::default())
    }

    fn end_backup(&self, ids: &[u64], end: BackupEnd) -> Result<(), ControlError> {
        self.note(format!("end_backup {ids:?} {end:?}"));
        Ok(())
    }

    fn start_move(&self, id: u64, start: StartMove) -> Result<MoveInfo, ControlError> {
        self.note(format!("start_move {id} {}", start.target));
        Ok(Default::default())
    }

    fn disk_move(&self, id: u64) -> Result<MoveInfo, ControlError> {
        self.note(format!("disk_move {id}"));
        Ok(Default::default())
    }

    fn cancel_move(&self, id: u64) -> Result<MoveInfo, ControlError> {
        self.note(format!("cancel_move {id}"));
        Ok(Default::default())
    }

    fn start_replication(
        &self,
        id: u64,
        start: StartReplication,
    ) -> Result<ReplicationInfo, ControlError> {
        self.note(format!("start_replication {id} {}", start.target));
        Ok(Default::default())
    }

    fn replication(&self, id: u64) -> Result<ReplicationInfo, ControlError> {
        self.note(format!("replication {id}"));
        Ok(Default::default())
    }

    fn stop_replication(&self, id: u64) -> Result<ReplicationInfo, ControlError> {
        self.note(format!("stop_replication {id}"));
        Ok(Default::default())
    }

    fn disconnect(&self, id: u64) -> Result<(), ControlError> {
        self.note(format!("disconnect {id}"));
        Ok(())
    }

    fn upgrade(&self, upgrade: UpgradeRequest) -> Result<UpgradeReport, ControlError> {
        self.note(format!("upgrade {:?}", upgrade.binary));
        // After a success the interface is another program's.
        Err(ControlError::Conflict("no".into()))
    }
}

struct Running {
    server: Arc<Noting>,
    socket: PathBuf,
    _http: HttpServer,
    _directory: tempfile::TempDir,
}

fn run() -> Running {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control");
    let server = Arc::new(Noting::default());
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
        ("Export", fields(&export())),
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
    let name = export().name;
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
    let asked = running.server.0.lock().unwrap().clone();
    let expected = [
        "flush 3",
        "snapshot 3 /o",
        "remove 3 false",
        "remove 3 true",
        "disconnect 9",
        "bitmaps 3",
        "add_bitmap 3 x",
        "change_bitmap 3 x/y Some(false)",
        "merge_bitmaps 3 x [\"y\"]",
        "clear_bitmap 3 ä %",
        "remove_bitmap 3 x",
        "start_backup [3] Some(\"x\")",
        "end_backup [3, 4] Commit",
        "end_backup [4] Abort",
        "start_move 3 /t",
        "disk_move 3",
        "cancel_move 3",
        "start_replication 3 nbd://h/",
        "replication 3",
        "stop_replication 3",
        "add x /y",
        "change 3 Some(5)",
    ];
    assert_eq!(asked, expected);
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
    let asked = [format!("start_backup {all:?} None"), format!("end_backup {all:?} Commit")];
    assert_eq!(*running.server.0.lock().unwrap(), asked);
    for refused in [start(others(256)).unwrap_err(), end(others(256)).unwrap_err()] {
        let ClientError::Refused(why) = refused else { panic!("{refused:?}") };
        assert_eq!(why, "at most 255 backups begin or end with another one");
    }
    assert_eq!(running.server.0.lock().unwrap().len(), 2);
}
