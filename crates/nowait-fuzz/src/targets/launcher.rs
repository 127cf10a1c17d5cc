//! The messages of an upgrade from a server that was taken over: to its launcher, and to the program that takes over.
//!
//! Checked: no program but the server's own is started, and one at a time; only the recorded one gives credentials; no file is changed or removed that is not one of
//! the names that were recorded; no image, directory or socket is accepted that the command line does not give.

use nowait_daemon::fuzz::TakenOverServer;

use super::image::scratch;
use crate::target::{Check, Target};

pub(crate) const TARGET: Target = Target {
    name: "launcher",
    about: "messages of an upgrade from a server that was taken over",
    prepare,
    seeds,
    words: &[
        b"<DIR/disk>",
        b"<DIR/neighbour>",
        b"<DIR/images/link>",
        b"<DIR/images>",
        b"DIR/disk",
        b"DIR/neighbour",
        b"DIR/images/added",
        b"DIR/images/link",
        b"DIR/images/../neighbour",
        b"DIR/below",
        b"DIR/socket",
        b"DIR/control",
        b"DIR/pid",
        b"DIR/log",
        b"DIR/made",
        b"DIR",
        b"/",
        b"..",
        b"nbd://localhost/",
        b"\"Unix\":",
        b"null",
        b"true",
        b"\"qcow2\"",
        b"\"raw\"",
        b"[",
        b"]",
        b"\n",
        b"credentials --of me",
        b"/bin/sh",
        b"\"End\"",
        b"{\"Start\":{\"binary\":null}}",
        b"{\"Change\":\"OpenLog\"}",
        b"{\"Change\":\"AppearPidFile\"}",
        b"{\"Change\":\"RemovePidFile\"}",
        b"{\"Change\":{\"RemoveFile\":\"DIR/disk\"}}",
        b"{\"Change\":{\"RemoveDirectory\":\"DIR/images\"}}",
    ],
    longest: 4096,
    memory: 16 << 20,
};

fn prepare() -> Result<Check, String> {
    let scratch = scratch()?;
    let server = TakenOverServer::new(scratch.path())?;
    Ok(Box::new(move |bytes| {
        // It is removed with the check.
        let _scratch = &scratch;
        server.receives(bytes)
    }))
}

fn seeds() -> Vec<Vec<u8>> {
    let export = |image: &str, format: &str| {
        format!(
            "{{\"name\":\"\",\"description\":null,\"image\":{image},\"format\":{format},\"read_only\":false,\
             \"backing_dirs\":[],\"backing\":[],\"changes\":{{}}}}"
        )
    };
    let socket = |path: &str| {
        format!("{{\"path\":{path},\"host\":\"\",\"port\":0,\"is_own\":true,\"temporary\":null}}")
    };
    let begin = |exports: &str, listeners: &str, control: &str| {
        format!(
            "{{\"protocol\":2,\"exports\":[{exports}],\"listeners\":[{listeners}],\"control\":{control},\
             \"control_tcp\":[],\"ublk\":null}}"
        )
    };
    let keep = "{\"Keep\":{\"names\":{\"files\":[[\"DIR/disk\",1,1]],\"directories\":[],\"pid_file\":null,\
         \"log_file\":null},\"command\":\"/bin/sh\"}}";
    let remove =
        "{\"Change\":{\"RemoveFile\":\"DIR/socket\"}}\n{\"Change\":{\"RemoveFile\":\"DIR/disk\"}}";
    let start = "{\"Start\":{\"binary\":</bin/true>}}\n{\"Start\":{\"binary\":null}}\n\"End\"";
    [
        begin(&export("<DIR/disk>", "\"raw\""), &socket("<DIR/socket>"), &socket("<DIR/control>")),
        begin(&export("<DIR/images/added>", "\"raw\""), "", "null"),
        begin(&export("<DIR/images/link>", "null"), "", "null"),
        keep.to_owned(),
        remove.to_owned(),
        start.to_owned(),
        "credentials --of me\n/bin/sh -c credentials\ncredentials --of me ; sh".to_owned(),
        "{\"Change\":\"AppearPidFile\"}\n{\"Change\":\"RemovePidFile\"}".to_owned(),
    ]
    .map(String::into_bytes)
    .into()
}
