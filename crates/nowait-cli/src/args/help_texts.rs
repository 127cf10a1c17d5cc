//! Texts that `--help` prints after the options of a command.
//!
//! Invariant: each text ends with the exit statuses.

/// Of `nowait`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  nowait serve                        try it out: a 1 GiB disk on a private socket
  nowait create disk.img 10G          make an image
  nowait serve disk.img               serve it
  nowait info disk.img                look at it
  nowait check disk.qcow2             look for damage in it
  nowait copy disk.img copy.img       copy it
  nowait backup disk.img backups      keep it as it is now, and restore it to any such point
  nowait resize disk.qcow2 +10G       make it larger
  nowait status                       what the running servers have done
  nowait top                          what one does now
  nowait commit overlay.qcow2         put what an overlay has into its backing file

'nowait COMMAND --help' is the manual of a command.

Exit status:
  0   success
  1   failure; one line on standard error says of what, and what to do
  2   wrong command line ('check' has 64 for it, and 2 and 3 for what it finds)";

/// Of `nowait serve`.
pub(super) const SERVE_AFTER_HELP: &str = "\
Examples:
  Serve an image on a socket of its own, and start a virtual machine on it:
    nowait serve disk.img --nbd unix:/run/disk.sock
    qemu-system-x86_64 -drive 'file=nbd+unix:///?socket=/run/disk.sock,format=raw,if=virtio'

  Serve what is in a qcow2 image, with its backing file in another directory:
    nowait serve overlay.qcow2 --backing-dir /srv/golden

  Serve a block device to this host, and have it as /dev/nbd0:
    nowait serve /dev/vdb --nbd tcp:127.0.0.1:10809 --io-flusher
    nbd-client 127.0.0.1 10809 /dev/nbd0

  Have an image as a block device, without a network in between (as root):
    nowait serve disk.img --ublk

  Serve a golden image read-only under a name, at two addresses:
    nowait serve golden.img --read-only --export golden \\
        --nbd unix:/run/golden.sock --nbd 'tcp:[::1]:10809'
    qemu-img convert -O qcow2 'nbd://[::1]:10809/golden' copy.qcow2

  Serve two disks at one address; the first is what a client gets that names none:
    nowait serve root=root.img data=/dev/vdc --nbd unix:/run/disks.sock
    qemu-img info 'nbd+unix:///data?socket=/run/disks.sock'

  Serve it to other machines, encrypted, to clients with a certificate only:
    nowait serve disk.img --nbd tcp:0.0.0.0:10809 --tls-certs /etc/pki/nbd --tls-verify-peer
    nbdinfo 'nbds://server.example/?tls-certificates=/etc/pki/client'

  Read the options from a file, and look at those in effect (docs/operating.md has an example):
    nowait serve --config /etc/nowait/disks.toml --threads 4
    nowait serve --config /etc/nowait/disks.toml --threads 4 --print-config

  Measure what two of the mechanisms are worth:
    nowait serve disk.img --off simple,pool

Environment:
  XDG_STATE_HOME    where the default image is kept
  XDG_RUNTIME_DIR   where the default socket and the control socket are made
  RUNTIME_DIRECTORY the same in a unit of systemd with RuntimeDirectory=
  LISTEN_FDS        sockets handed over, to serve on (with LISTEN_PID, as by systemd)
  NOTIFY_SOCKET     whom to tell of READY, STATUS, RELOADING and STOPPING
  WATCHDOG_USEC     how often to tell it that all threads work (with WATCHDOG_PID)
  JOURNAL_STREAM    where messages begin with their priority for the journal

Options of qemu-nbd:
  -k -p -b -r -e -x -D -f -v and their long names mean what they mean there, but
  a port needs an address. -t and -A change nothing: a server goes on when clients
  have left, and tells which image of a chain has what. -c and -d are refused, with
  what to do instead.

Exit status:
  0   stopped by a signal, by its last client or with its parent, everything flushed
  1   the address is taken, TLS is not possible with the files given, there is no sandbox
      for --sandbox on, or storage has failed; or a second signal terminated it unflushed
  2   wrong command line, or the file of --config cannot be read or has a mistake
  66  an IMAGE cannot be opened or is in use
  70  a mistake of this program: one line says where";

/// Of `nowait export backup start`.
pub(super) const BACKUP_START_AFTER_HELP: &str = "\
Examples:
  Copy a disk as it is now:
    nowait serve vm=disk.img --allow-dir . --nbd unix:/tmp/nbd &
    nowait export backup start vm
    nowait copy 'nbd+unix:///vm.backup?socket=/tmp/nbd' copy.img && nowait export backup commit vm

  Keep points of it, of which each later one reads only what has changed:
    nowait export bitmap add vm nightly
    nowait export backup start vm --bitmap nightly
    nowait backup 'nbd+unix:///vm.backup?socket=/tmp/nbd' points --bitmap nightly &&
      nowait export backup commit vm || nowait export backup abort vm

Exit status:
  0   all backups have begun
  1   none has; one line on standard error says why
  2   wrong command line";

/// Of `nowait export move`.
pub(super) const MOVE_AFTER_HELP: &str = "\
Examples:
  nowait serve vm=disk.img --allow-dir . --allow-uri nbd://storage.example/ &
  nowait export move vm vm.qcow2
  nowait export move vm nbd://storage.example/vm --detach    returns; the move goes on
  nowait export list --json                                  what is left to copy: \"moving\"
  nowait export move vm --cancel

Exit status:
  0   the disk has moved; with --detach, the move has begun; with --cancel, it is cancelled
  1   the disk is where it was; one line on standard error says why
  2   wrong command line";
