//! A server in the process of the tests.

use std::fs;

use nowait_daemon::config::config_file;
use nowait_daemon::serve::EmbeddedServer;

use crate::common::{MIB, Scratch, Server, text};

#[test]
fn servers_in_one_process_have_their_own_disks_and_locks_and_end_when_they_are_dropped() {
    let scratch = Scratch::new();
    let images = ["one.img", "two.img"].map(|name| scratch.sparse(name, MIB));
    let servers = images.each_ref().map(|image| Server::start(image, ""));
    for (n, server) in (1..).zip(&servers) {
        server.connect().write(0, &[n; 4096]).expect("a write");
    }
    let why = Server::refusal(&images[0], "");
    assert!(why.contains("one.img: another process has it open for writing"), "{why}");
    let [one, two] = servers;
    one.stop();
    assert_eq!(two.connect().read(0, 4096).expect("the other one goes on"), [2; 4096]);
    let again = Server::start(&images[0], "");
    assert_eq!(again.connect().read(0, 4096).expect("what was written"), [1; 4096]);
    let (socket, image) = (two.socket(), fs::read(&images[1]).expect("the image"));
    drop(two);
    assert!(!socket.exists() && image[..4096] == [2; 4096]);
}

#[test]
fn what_is_about_the_process_is_refused_and_a_failure_is_told_before_anything_is_served() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let refused = |options: &str| {
        let export = format!("{options}\n[[export]]\nimage = '{}'", text(&image));
        let config = config_file::parse(&export).expect("a configuration");
        EmbeddedServer::start(config).err().expect("a refusal").to_string()
    };
    for (options, named) in [
        ("fork = true", "--fork "),
        ("exit-with-parent = true", "--exit-with-parent "),
        ("pid-file = '/pid'", "--pid-file "),
        ("log-file = '/log'", "--log-file "),
        ("io-flusher = true", "--io-flusher "),
        ("ublk = ['']", "--ublk "),
        ("sandbox = 'on'", "--sandbox on "),
        ("vhost-user = ['fd:7']", "--vhost-user fd:NUMBER "),
        ("poll = true\nqueue = 'threads'", "--poll does not go with --queue"),
        ("nbd = ['unix:/no/such/directory/socket']", "/no/such/directory/socket"),
    ] {
        let why = refused(options);
        assert!(why.starts_with(named) || why.contains("/no/such"), "{options}: {why}");
    }
}
