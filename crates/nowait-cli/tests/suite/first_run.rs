//! The first commands of a new user.

use std::fs;

use crate::common::{GIB, MIB, Scratch, Server, accepted, allocated, refusal};

#[test]
fn serve_without_an_image_makes_a_sparse_gibibyte_and_uses_it_again() {
    let home = Scratch::new();
    let server = Server::start_without_image(&home);
    let mut client = server.connect();
    assert_eq!(client.size, GIB);
    client.write(MIB, b"kept").expect("a writable disk");
    drop(client);
    server.stop();

    let again = Server::start_without_image(&home);
    assert_eq!(again.connect().read(MIB, 4).expect("bytes"), b"kept");
    again.stop();
}

#[test]
fn create_makes_a_sparse_image_and_never_overwrites_one() {
    let scratch = Scratch::new();
    let path = scratch.join("new.img");
    let create = ["create", path.to_str().expect("a name in UTF-8"), "3M"];
    accepted(&create);
    assert_eq!(fs::metadata(&path).expect("the new image").len(), 3 * MIB);
    assert!(allocated(&path) < MIB);
    fs::write(&path, b"precious").expect("the image");
    refusal(&create).says(&["new.img"]);
    assert_eq!(fs::read(&path).expect("the image"), b"precious");
}

#[test]
fn info_prints_the_size_as_json() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 3 * MIB);
    let printed = accepted(&["info", image.to_str().expect("a name in UTF-8"), "--json"]);
    let printed: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(printed["size_bytes"], 3 * MIB);
}

#[test]
fn with_json_the_ready_line_is_an_event_with_the_addresses() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), &["--json"]);
    assert!(server.uri().starts_with("nbd+unix:///"), "{}", server.uri());
    assert_eq!(server.connect().size, MIB);
    server.stop();
}
