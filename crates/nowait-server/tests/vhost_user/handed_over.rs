//! Guests of a server that another one takes over, with the same devices.
//!
//! Invariant: the guest and its VMM see a pause and nothing else, whether the other server goes on or
//! this one does.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nowait_testkit::{BOUND, wait_until};
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use crate::driver::*;
use crate::scene::{SIZE, Scene};

const SECTOR: u32 = 512;
const SHORT: Duration = Duration::from_millis(30);
/// A read of sector 3.
fn read_three(driver: &mut Driver) {
    assert_eq!(driver.request(READ, 3, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    assert_eq!(driver.read(DATA, 512), [4; 512]);
}

/// The capacity in the configuration of the device, in sectors.
fn capacity(driver: &mut Driver) -> u64 {
    let (_, bytes) = driver.vmm.get_config(0, 8, VhostUserConfigFlags::empty(), &[0; 8]).unwrap();
    u64::from_le_bytes(bytes.try_into().unwrap())
}

#[test]
fn a_guest_goes_on_at_the_server_that_takes_over_and_so_does_its_vmm() {
    let mut scene = Scene::new();
    let asked = VhostUserInflight { num_queues: 1, queue_size: QUEUE_SIZE, ..Default::default() };
    let (layout, file) = {
        let mut driver = Driver::connect(&scene.sockets[0]);
        driver.vmm.get_inflight_fd(&asked).unwrap()
    };
    let mut driver = Driver::connect_with(&scene.sockets[0], Some((layout, file)));
    let (mut told, channel) = UnixStream::pair().unwrap();
    driver.vmm.set_backend_request_fd(&channel).unwrap();
    for round in 0..3u8 {
        read_three(&mut driver);
        let parked = scene.exports.pause(BOUND).unwrap();
        let before = driver.used_index();
        driver.write(DATA, &[200 + round; 512]);
        driver.prepare(0, WRITE, 8, &[(DATA, SECTOR)]);
        driver.offer(0);
        driver.kick();
        std::thread::sleep(SHORT);
        assert_eq!(driver.used_index(), before, "it is served");
        scene.succeed(parked);
        assert_eq!(driver.used(), (0, 1));
        let image = std::fs::read(&scene.image).unwrap();
        assert_eq!(image[8 * 512..9 * 512], [200 + round; 512]);
        // Messages with and without an answer, and with an acknowledgement.
        assert_eq!(capacity(&mut driver), SIZE / 512);
        assert_eq!(driver.stop(), u32::from(driver.used_index()));
        driver.start();
        read_three(&mut driver);
    }
    let mut other = Driver::connect(&scene.sockets[1]);
    read_three(&mut other);
    let id = scene.exports.list()[0].0;
    scene.exports.grow(id, 2 * SIZE).unwrap();
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut told, &mut message).unwrap();
    assert_eq!(message[..4], 2u32.to_ne_bytes(), "CONFIG_CHANGE_MSG");
    assert_eq!(capacity(&mut driver), 2 * SIZE / 512);
    drop(driver);
    let mut next = Driver::connect(&scene.sockets[0]);
    read_three(&mut next);
}

#[test]
fn messages_that_come_during_the_exchange_are_handled_by_the_server_that_goes_on() {
    let mut scene = Scene::new();
    let sockets = scene.sockets.clone();
    let mut driver = Driver::connect(&sockets[0]);
    for goes_on in [true, false] {
        let parked = scene.exports.pause(BOUND).unwrap();
        drop(parked.devices(BOUND).unwrap());
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| capacity(&mut driver));
            let connecting = scope.spawn(|| Driver::connect(&sockets[1]));
            std::thread::sleep(SHORT);
            assert!(!asking.is_finished() && !connecting.is_finished(), "it is answered");
            if goes_on {
                drop(parked);
            } else {
                scene.succeed(parked);
            }
            assert_eq!(asking.join().unwrap(), SIZE / 512);
            read_three(&mut connecting.join().unwrap());
        });
        read_three(&mut driver);
    }
}

#[test]
fn a_device_that_was_stopped_stays_so_until_it_is_reset() {
    let mut scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    driver.set_available(QUEUE_SIZE + 1);
    driver.kick();
    driver.await_breakdown();
    scene.succeed(scene.exports.pause(BOUND).unwrap());
    driver.kick();
    std::thread::sleep(SHORT);
    assert_eq!(driver.used_index(), 0);
    driver.reset();
    read_three(&mut driver);
}

#[test]
fn a_connection_with_a_part_of_a_message_is_closed_and_the_others_are_handed_over() {
    let mut scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let mut half = UnixStream::connect(&scene.sockets[1]).unwrap();
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    half.write_all(&get_features[..5]).unwrap();
    wait_until("the connection", || scene.exports.connections().len() == 2);
    std::thread::sleep(SHORT);
    scene.succeed(scene.exports.pause(BOUND).unwrap());
    assert_eq!(std::io::Read::read(&mut half, &mut [0]).unwrap_or(0), 0, "it is not closed");
    read_three(&mut driver);
    // Its socket is served again.
    let vmm = Frontend::from_stream(UnixStream::connect(&scene.sockets[1]).unwrap(), 1);
    assert!(vmm.get_features().is_ok());
}
