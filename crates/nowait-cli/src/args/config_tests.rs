//! Files for `--config`: each option has a key, and what is printed is read as the same.

use clap::CommandFactory;

use super::*;
use nowait_daemon::config::{ServeConfig, config_file};

/// Options that are not keys: they are about the file, or do nothing.
const NO_KEYS: [&str; 5] = ["help", "config", "print-config", "persistent", "allocation-depth"];
/// Options that are another spelling of one with a key.
const SPELLINGS: [(&str, &str); 3] = [("socket", "nbd"), ("port", "nbd"), ("bind", "nbd")];
/// A command line with each option, beside those whose values are words.
const EXAMPLES: [&str; 48] = [
    "a=a.img ./b=c n=nbd://h/x",
    "--format qcow2",
    "--backing-dir d --backing-dir e",
    "--backing nbd://h/b",
    "--data-file d",
    "--nbd unix:/a --nbd tcp:[::1]:1",
    "--socket /a",
    "--port 1 --bind ::1",
    "--bind h",
    "--ublk",
    "a b=b --ublk=b=3 --ublk",
    "--vhost-user /a --vhost-user fd:3 --vhost-user connect:/b",
    "b=b --vhost-user b=/a",
    "--bitmap day --bitmap =a=b",
    "a b=b --bitmap b=day",
    "--bitmap-dir d",
    "--export e",
    "a --export e --description d",
    "--description d",
    "--tls-certs d",
    "--tls-verify-peer --tls-certs d",
    "--control unix:/a --control tcp:h:1",
    "--control off",
    "--control-token t --control tcp:h:1",
    "--control-tls-certs d --control tcp:h:1",
    "--allow-dir d",
    "--allow-uri nbd://h/ --allow-uri nbd://h/x",
    "--limit-iops 1",
    "--limit-bandwidth 1536K",
    "--limit-iops-per-client 7",
    "--limit-bandwidth-per-client 1025",
    "--exit-with-last-client",
    "--exit-with-parent",
    "--fork",
    "--pid-file p",
    "--log-file l",
    "--slow-requests off",
    "--slow-requests 1500ms",
    "--reconnect 0",
    "--minimum-rate 0",
    "--remote-memory 8M",
    "--read-only --allow-mounted --io-flusher",
    "--block-size 4K",
    "--threads 256",
    "--max-connections 1048576",
    "--poll",
    "--json --verbose",
    "--off zero-copy --off simple,pool",
];
#[cfg(feature = "object-stores")]
const OF_OBJECTS: [&str; 4] = [
    "--cache d,size=1G s3://bucket/key --read-only --export e",
    "--record r",
    "--prefetch p --cache ./none",
    "--http-auth a",
];
#[cfg(not(feature = "object-stores"))]
const OF_OBJECTS: [&str; 0] = [];
/// Options of a build with object stores.
const NEED_OBJECTS: [&str; 4] = ["cache", "record", "prefetch", "http-auth"];

fn configured(line: &str) -> ServeConfig {
    let line = format!("nowait serve {line}");
    let parsed = Cli::try_parse_from(line.split_whitespace());
    match parsed.unwrap_or_else(|error| panic!("{line}: {error}")).command {
        Command::Serve(args) => args.config().unwrap_or_else(|error| panic!("{line}: {error}")),
        other => panic!("{other:?}"),
    }
}

/// The text of `config`, which is read as the same.
fn round_trip(config: &ServeConfig, line: &str) -> String {
    let text = config_file::text(config).unwrap();
    assert_eq!(config_file::parse(&text).as_ref(), Ok(config), "{line}:\n{text}");
    text
}

fn has_key(text: &str, key: &str) -> bool {
    text.lines().any(|line| line.starts_with(&format!("{key} = ")) || line == format!("[[{key}]]"))
}

fn lines_of<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    text.lines().filter(|line| has_key(line, key)).collect()
}

#[test]
fn every_option_of_serve_has_a_key_and_what_is_printed_is_read_as_the_same() {
    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let mut lines: Vec<String> =
        EXAMPLES.iter().chain(&OF_OBJECTS).map(|it| it.to_string()).collect();
    // Words: each value of the option.
    for argument in serve.get_arguments() {
        let words = argument.get_possible_values();
        let Some(name) = argument.get_long().filter(|_| argument.get_action().takes_values())
        else {
            continue;
        };
        lines.extend(words.iter().map(|word| {
            let more = if name == "tls" && word.get_name() != "off" { "--tls-certs d" } else { "" };
            format!("--{name} {} {more}", word.get_name())
        }));
    }
    for argument in serve.get_arguments() {
        let name = argument.get_long().unwrap_or("export");
        let left_out = cfg!(not(feature = "object-stores")) && NEED_OBJECTS.contains(&name);
        if NO_KEYS.contains(&name) || left_out {
            continue;
        }
        let option = format!("--{name}");
        let is_in = |line: &&String| line.split([' ', '=']).any(|word| word == option);
        let examples: Vec<&String> = lines.iter().filter(is_in).collect();
        assert!(!examples.is_empty(), "{option} has no example here");
        let spelling = SPELLINGS.iter().find(|(spelling, _)| *spelling == name);
        let key = spelling.map_or(name, |(_, key)| *key);
        let default = config_file::text(&ServeConfig::default()).unwrap();
        let mut is_changed = false;
        for line in examples {
            let text = round_trip(&configured(line), line);
            assert!(has_key(&text, key), "{line}: no key {key} in\n{text}");
            is_changed |= lines_of(&text, key) != lines_of(&default, key);
        }
        assert!(is_changed, "{option} does not reach the configuration");
    }
    for line in &lines {
        round_trip(&configured(line), line);
    }
}

#[test]
fn options_go_over_a_file_add_to_it_and_turn_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nowait.toml");
    let text = "max-connections = 7\nthreads = 2\nread-only = true\nnbd = ['unix:/a']\noff = ['pool']\n\
                tls-certs = 'd'\n[[export]]\nname = 'one'\nimage = 'a'\n";
    std::fs::write(&path, text).unwrap();
    let over = |line: &str| configured(&format!("--config {} {line}", path.display()));
    let plain = over("");
    assert_eq!(plain, config_file::parse(text).unwrap());
    let changed = over("b --threads 3 --nbd unix:/b --off hint --json --tls on --export two");
    assert_eq!((changed.threads, changed.max_connections), (Some(3), 7));
    assert!(changed.read_only && changed.json && !plain.json);
    assert_eq!((plain.nbd.len(), changed.nbd.len(), changed.off.len()), (1, 2, 2));
    let names = changed.exports().unwrap().into_iter().map(|named| named.name);
    assert_eq!(names.collect::<Vec<_>>(), ["two", "b"]);
    round_trip(&changed, "the whole");
}

#[test]
fn rules_about_several_options_hold_for_a_file_and_the_command_line_together() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nowait.toml");
    let refused = |text: &str, line: &str| {
        std::fs::write(&path, text).unwrap();
        let line = format!("nowait serve --config {} {line}", path.display());
        Cli::try_parse_from(line.split_whitespace()).unwrap().command.check().unwrap_err()
    };
    for (text, line, why) in [
        ("exit-with-parent = true", "--fork", "--fork does not go with --exit-with-parent"),
        ("queue = 'uring'", "--poll", "--poll does not go with --queue"),
        ("exit-with-last-client = true", "-t", "--persistent does not go with"),
        ("tls = 'on'", "", "--tls-certs is missing"),
        ("tls-certs = 'd'", "--tls off", "does not go with --tls off"),
        ("control = ['off']", "--control unix:/a", "takes one of unix:PATH and off"),
        ("format = 'raw'", "--backing-dir d", "does not go with format raw"),
        ("[[export]]\nname = 'a'", "b", "the default image is served alone"),
        ("[[export]]\nimage = 'a'", "./a --ublk=x=", "no image has the name 'x'"),
        ("[[export]]\nname = 'a'\nimage = 'a'", "a=b", "have one name, 'a'"),
    ] {
        let refusal = refused(text, line);
        assert!(refusal.contains(why), "{text} {line}: {refusal}");
    }
    // A server that could write to its own file would choose what its successor does.
    let place = directory.path().to_str().unwrap();
    let own = format!("allow-dir = ['{place}']");
    assert!(refused(&own, "").contains("whose files this server may change"));
    std::fs::write(&path, own).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let line = format!("nowait serve --config {}", link.display());
    let linked = Cli::try_parse_from(line.split_whitespace()).unwrap().command.check();
    assert!(linked.unwrap_err().contains("whose files this server may change"));
    assert!(
        configured(&format!("--config {} --sandbox off", path.display())).sandbox.mode().is_none()
    );
}

#[test]
fn the_example_is_a_file_also_with_all_that_it_leaves_out() {
    let example = include_str!("../../../../contrib/nowait.toml");
    let config = config_file::parse(example).unwrap();
    assert_eq!(config.check(), Ok(()));
    assert!(!config.export.is_empty());
    let is_left_out = |line: &&str| line.starts_with('#') && !line.starts_with("# ");
    let left_out: Vec<&str> = example.lines().filter(is_left_out).collect();
    let command = Cli::command();
    let names = command.find_subcommand("serve").unwrap().get_arguments();
    for name in names.filter_map(|argument| argument.get_long()) {
        let is_there = |line: &str| line.trim_start_matches('#').starts_with(&format!("{name} = "));
        let is_other = SPELLINGS.iter().any(|(spelling, _)| *spelling == name);
        let is_table = name == "export";
        let is_no_key = NO_KEYS.contains(&name) || is_other || is_table;
        assert!(is_no_key || example.lines().any(is_there), "the example does not have {name}");
    }
    for line in left_out {
        let key = line.trim_start_matches('#');
        let needs_objects = NEED_OBJECTS.iter().any(|name| key.starts_with(name));
        if cfg!(feature = "object-stores") || !needs_objects {
            config_file::parse(key).unwrap_or_else(|why| panic!("{line}: {why:?}"));
        }
    }
}
