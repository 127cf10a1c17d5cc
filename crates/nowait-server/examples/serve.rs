//! Serves a disk image to NBD clients until the last one has left: `serve IMAGE SOCKET`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nowait_image::ChainOptions;
use nowait_server::{AnyExport, ExportOptions, Listener, Options, Server};

pub(crate) fn serve(image: &Path, socket: &Path) -> Result<(), Box<dyn Error>> {
    let options = ChainOptions { writable: true, ..ChainOptions::default() };
    let image = nowait_image::open(image, &options)?;
    let export = AnyExport::of_image(&image, ExportOptions::default());
    let server = Server::start(vec![export], vec![Listener::unix(socket)?], Options::default())?;
    server.stop_after_last_client();
    let left = server.run(Duration::from_secs(10))?.unfinished;
    if left == 0 { image.close() } else { image.flush() }.map_err(Into::into)
}

fn main() -> Result<(), Box<dyn Error>> {
    match &std::env::args_os().skip(1).map(PathBuf::from).collect::<Vec<_>>()[..] {
        [image, socket] => serve(image, socket),
        _ => Err("give an IMAGE and a SOCKET".into()),
    }
}
