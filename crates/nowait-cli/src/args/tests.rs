//! The command line of each command: what is taken, and what is refused with which words.

use clap::CommandFactory;
use clap::error::ErrorKind;
use nowait_nbd::Address;
use nowait_server::BlockSize;
use std::path::PathBuf;

use super::*;
use crate::args::backup_args::ChainAction;
use nowait_daemon::config::choices::{Direct, Mechanism, QueueChoice};
use nowait_daemon::config::export_spec::{MAX_NAME_BYTES, NamedExport};
use nowait_daemon::config::{MOST_BY_DEFAULT, ServeConfig};

fn parse(line: &str) -> Result<Command, clap::Error> {
    Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command)
}

fn configured(line: &str) -> Result<ServeConfig, String> {
    match parse(line).unwrap() {
        Command::Serve(args) => args.config(),
        other => panic!("{other:?}"),
    }
}

fn serve(line: &str) -> ServeConfig {
    configured(line).unwrap()
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn serve_needs_nothing() {
    let args = serve("nowait serve");
    assert_eq!((args.exports().unwrap(), args.default_name()), (vec![], ""));
    assert_eq!(args, ServeConfig::default());
    assert_eq!(args.nbd, []);
    assert_eq!((args.direct, args.queue, args.format), (Direct::Auto, None, None));
    assert!(args.backing_dir.is_empty() && args.data_file.is_empty());
    assert!(!args.read_only && !args.json && !args.verbose);
}

#[test]
fn serve_takes_every_option() {
    let args = serve(
        "nowait serve disk.img --format qcow2 --backing-dir d --data-file f --nbd unix:/a --nbd tcp:h:1 --export e \
         --read-only --direct on --queues 3 --queue threads --json --verbose \
         --max-connections 7",
    );
    let named = NamedExport { name: "e".into(), image: "disk.img".into() };
    assert_eq!(args.exports().unwrap(), [named]);
    let tcp = Address::Tcp { host: "h".into(), port: 1 };
    assert_eq!(args.nbd, [Address::Unix("/a".into()), tcp]);
    assert_eq!((args.threads(), args.max_connections), (3, 7));
    assert_eq!((args.direct, args.queue), (Direct::On, Some(QueueChoice::Threads)));
    assert_eq!(args.format, Some(nowait_image::Format::Qcow2));
    assert_eq!(args.backing_dir, [PathBuf::from("d")]);
    assert_eq!(args.data_file, [PathBuf::from("f")]);
    assert!(args.read_only && args.json && args.verbose);
}

#[test]
fn a_command_line_of_qemu_nbd_means_what_it_means_there() {
    let line = "nowait serve -t -r -e 4 -x name -D text -f raw -A -v -k /a -b ::1 -p 7 disk.img";
    let args = serve(line);
    let named = NamedExport { name: "name".into(), image: "disk.img".into() };
    assert_eq!(args.exports().unwrap(), [named]);
    let tcp = Address::Tcp { host: "::1".into(), port: 7 };
    assert_eq!(args.nbd, [Address::Unix("/a".into()), tcp]);
    assert_eq!((args.max_connections, args.export[0].description.as_deref()), (4, Some("text")));
    assert_eq!(args.format, Some(nowait_image::Format::Raw));
    assert!(args.read_only && args.verbose);
    let long = serve(
        "nowait serve --persistent --read-only --shared=4 --export-name=name \
         --description=text --format=raw --allocation-depth --verbose --socket=/a --bind=[::1] \
         --port=7 --pid-file=/p disk.img",
    );
    assert_eq!(long.nbd, args.nbd);
    assert_eq!(long.pid_file, Some("/p".into()));
    let alone = configured("nowait serve -p 10809 disk.img");
    assert!(alone.unwrap_err().contains("--bind HOST"));
    let default = Address::Tcp { host: "h".into(), port: 10809 };
    assert_eq!(serve("nowait serve -b h").nbd, [default]);
}

#[test]
fn ublk_is_given_once_for_each_image() {
    let nodes = |line: &str| {
        let args = configured(&format!("nowait serve {line}"))?;
        Ok::<_, String>(args.nodes().unwrap().into_iter().collect::<Vec<_>>())
    };
    let node = |name: &str, id| (name.to_owned(), id);
    assert_eq!(nodes("").unwrap(), []);
    assert_eq!(nodes("--ublk").unwrap(), [node("", None)]);
    assert_eq!(nodes("--ublk --export e a.img").unwrap(), [node("e", None)]);
    assert_eq!(
        nodes("--ublk a.img b=b.img --ublk=b=3").unwrap(),
        [node("", None), node("b", Some(3))]
    );
    assert_eq!(nodes("--ublk= --ublk=4 a=a b=b").unwrap(), [node("a", None), node("b", Some(4))]);
    for (line, why) in [
        ("--ublk --ublk", "2 nodes for 1 images"),
        ("a.img --ublk=b=", "no image has the name 'b'"),
        ("a=a b=b --ublk=a= --ublk=a=1", "has a node already"),
        ("--ublk --queue threads", "--ublk needs io_uring"),
    ] {
        assert!(nodes(line).unwrap_err().contains(why), "{line}");
    }
}

#[test]
fn a_block_has_512_or_4096_bytes() {
    let block = |given: &str| {
        let parsed = parse(&format!("nowait serve a --block-size {given}"));
        parsed.map(|command| match command {
            Command::Serve(args) => args.config().unwrap().block_size.map(BlockSize::bytes),
            other => panic!("{other:?}"),
        })
    };
    for (given, bytes) in [("512", 512), ("4096", 4096), ("4K", 4096), ("4k", 4096), ("512b", 512)]
    {
        assert_eq!(block(given).unwrap(), Some(bytes), "{given}");
    }
    for given in ["0", "1", "511", "1024", "8K", "4096.5", "4M", "x"] {
        assert_eq!(block(given).unwrap_err().exit_code(), 2, "{given}");
    }
    assert_eq!(serve("nowait serve a").block_size, None);
}

#[test]
fn without_queues_there_is_at_least_one() {
    assert!((1..=MOST_BY_DEFAULT).contains(&serve("nowait serve").threads()));
    assert_eq!(serve("nowait serve --threads 9").threads(), 9);
}

#[test]
fn off_disables_only_the_named_mechanisms() {
    let all = nowait::Config::default();
    assert_eq!(serve("nowait serve").engine(), all);
    let expected = nowait::Config { simple: false, ..all };
    for some in ["--off simple,hint", "--off hint --off simple"] {
        let some = serve(&format!("nowait serve {some}"));
        assert_eq!(some.engine(), expected);
        assert!(!some.is_on(Mechanism::Hint) && some.is_on(Mechanism::AllocateAhead));
    }
    let off = "inline-completion,vectored,pool,merge,nowait-first,back-off,group-syncs";
    let some = serve(&format!("nowait serve --off {off}"));
    let expected = nowait::Config {
        group_syncs: false,
        inline_completion: false,
        vectored: false,
        pool: false,
        merge: false,
        nowait_first: false,
        back_off: false,
        ..all
    };
    assert_eq!(some.engine(), expected);
    let one = serve("nowait serve --off allocate-ahead");
    assert_eq!(one.engine(), all);
    assert!(one.is_on(Mechanism::Hint) && !one.is_on(Mechanism::AllocateAhead));
}

#[test]
fn an_invalid_value_is_a_usage_error_with_the_reason() {
    let long = format!("nowait serve --export {}", "x".repeat(MAX_NAME_BYTES + 1));
    for (line, why) in [
        ("nowait create a 1G --format vmdk", "raw and qcow2"),
        ("nowait create a 1G --cluster-size 3000", "a power of two"),
        ("nowait create a 1G --preallocation full", "metadata"),
        ("nowait resize a -x", "as in 512M"),
        ("nowait resize a +", "as in 512M"),
        ("nowait serve a --format vdi", "raw, qcow2, vmdk and vhdx"),
        ("nowait serve --nbd udp:a", "begins with unix: or tcp:"),
        ("nowait serve --queues 0", "1..=256"),
        ("nowait serve --queues 257", "1..=256"),
        ("nowait serve --max-connections 0", "1..=1048576"),
        ("nowait serve --off everything", "nowait-first"),
        ("nowait serve --queue aio", "threads"),
        ("nowait resize a 0", "at least one byte"),
        ("nowait serve a=", "the image is missing"),
        ("nowait check a --format vdi", "raw, qcow2, vmdk and vhdx"),
        (long.as_str(), "4097 bytes, the protocol allows 4096"),
    ] {
        let error = parse(line).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
        assert!(error.to_string().contains(why), "{line}: {error}");
    }
}

#[test]
fn a_name_that_is_given_twice_is_a_usage_error() {
    let error = configured("nowait serve a=x a=y").unwrap_err();
    assert!(error.contains("have one name, 'a'"), "{error}");
}

#[test]
fn a_missing_argument_is_a_usage_error() {
    for line in ["nowait create", "nowait create disk.img", "nowait info", "nowait map"] {
        let error = parse(line).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument, "{line}");
        assert_eq!(error.exit_code(), 2, "{line}");
    }
    assert_eq!(parse("nowait").unwrap_err().exit_code(), 2);
}

#[test]
fn a_backup_has_a_disk_and_a_directory_or_an_action_on_a_chain() {
    let backup = |line: &str| match parse(line) {
        Ok(Command::Backup(args)) => args,
        other => panic!("{line}: {other:?}"),
    };
    let new = backup("nowait backup disk.img list --json");
    assert!(new.action.is_none() && new.new.disk.is_some());
    assert_eq!(new.new.directory, Some("list".into()));
    let keep = |line: &str| match &backup(line).action {
        Some(ChainAction::Prune { keep, .. }) => keep.keep(),
        other => panic!("{line}: {other:?}"),
    };
    let all = keep("nowait backup prune d --keep 1 --keep-daily 2 --keep-weekly 3");
    assert_eq!((all.last, all.daily, all.weekly), (1, 2, 3));
    assert_eq!(keep("nowait backup prune d --keep-daily 2").last, 0);
    assert!(backup("nowait backup list d").new.disk.is_none());
    for line in [
        "nowait backup",
        "nowait backup disk.img",
        "nowait backup list",
        "nowait backup prune d",
        "nowait backup prune d --keep 0",
        "nowait backup nbd://h/e d --bitmap b --whole",
        "nowait backup verify d x",
        "nowait restore d",
        "nowait restore d to --serve s",
        "nowait restore d --serve s --verify",
        "nowait restore d --serve s --force",
        "nowait restore d --serve s --json",
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
    for line in ["nowait backup disk.img d --bitmap b", "nowait backup disk.img d --tls-certs c"] {
        assert!(parse(line).unwrap().check().is_err(), "{line}");
    }
    assert_eq!(parse("nowait backup nbd://h/e d --bitmap b").unwrap().check(), Ok(()));
}

#[test]
fn a_point_is_named_behind_its_directory() {
    let point = |text: &str| match parse(&format!("nowait restore {text} to")).unwrap() {
        Command::Restore(args) => (args.from.0.to_string(), args.from.1),
        other => panic!("{other:?}"),
    };
    assert_eq!(point("a/b"), ("a/b".into(), None));
    assert_eq!(point("a/b@12"), ("a/b".into(), Some(12)));
    assert_eq!(point("a@b@12"), ("a@b".into(), Some(12)));
    assert_eq!(point("a@b"), ("a@b".into(), None));
    assert_eq!(point("a@4294967296"), ("a@4294967296".into(), None));
    if cfg!(feature = "object-stores") {
        assert_eq!(point("s3://b/f@12"), ("s3://b/f".into(), Some(12)));
        assert_eq!(point("s3://b/f/"), ("s3://b/f".into(), None));
    }
}
