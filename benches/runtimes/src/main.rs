//! Reads or writes files by one runtime, for `nowait bench library`:
//!
//! `nowait-runtimes RUNTIME DIRECTORY BLOCK DEPTH FILES SECONDS read|write|scan`
//!
//! The directory has files of one size, named 0, 1 and so on, of which the first FILES are opened. DEPTH requests of
//! BLOCK bytes are in flight, at random places of random files; `scan` reads each file once from its begin to its end,
//! one block after the other. Then there is one line of JSON: the requests that were done, the seconds that they took, and
//! the seconds of processor time of this process.
//!
//! Invariant: a transfer that fails, or is cut short, is an error; so every request that is counted was done.

mod load;
mod runtimes;
mod library;

use std::process::ExitCode;
use std::{env, io};

use load::{Figures, Load};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const USAGE: &str =
    "usage: nowait-runtimes RUNTIME DIRECTORY BLOCK DEPTH FILES SECONDS read|write|scan";
const LOCK: &str = include_str!("../Cargo.lock");

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    if args == ["--version"] {
        println!("{}", versions());
        return ExitCode::SUCCESS;
    }
    let Some((runtime, load)) =
        args.split_first().and_then(|(runtime, rest)| Some((runtime.as_str(), Load::parse(rest)?)))
    else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match measure(runtime, &load) {
        Ok(Figures { requests, seconds, cpu_seconds }) => {
            println!(
                r#"{{"requests":{requests},"seconds":{seconds:.6},"cpu_seconds":{cpu_seconds:.6}}}"#
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("nowait-runtimes: {runtime}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(runtime: &str, load: &Load) -> io::Result<Figures> {
    // Every file takes a descriptor or two.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    match runtime {
        "LocalAsyncFile" => library::local(load),
        "LocalAsyncFile, tokio" => library::local_on_tokio(load),
        "AsyncFile" => library::any_thread(load),
        "BlockingFile" => library::blocking(load),
        "compio" => runtimes::compio(load),
        "glommio" => runtimes::glommio(load),
        "monoio" => runtimes::monoio(load),
        "tokio-uring" => runtimes::tokio_uring(load),
        "spawn_blocking" => runtimes::spawn_blocking(load),
        "pread" => runtimes::threads(load),
        _ => Err(io::Error::other("there is none of this name")),
    }
}

/// The other runtimes with their versions, as they were locked.
fn versions() -> String {
    let version = |name: &str| {
        let (_, rest) = LOCK.split_once(&format!("name = \"{name}\"\nversion = \""))?;
        Some(format!("{name} {}", rest.split_once('"')?.0))
    };
    let names = ["compio", "glommio", "monoio", "tokio-uring", "tokio"];
    names.into_iter().filter_map(version).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const ALL: [&str; 10] = [
        "LocalAsyncFile",
        "LocalAsyncFile, tokio",
        "AsyncFile",
        "BlockingFile",
        "compio",
        "glommio",
        "monoio",
        "tokio-uring",
        "spawn_blocking",
        "pread",
    ];

    /// Two files of 1 MiB, and the load by `words` on them.
    fn load(words: &str) -> (tempfile::TempDir, Load) {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for name in ["0", "1"] {
            let file = File::create(directory.path().join(name)).unwrap();
            file.write_all_at(&vec![1; 1 << 20], 0).unwrap();
        }
        let path = directory.path().to_str().unwrap().to_owned();
        let words = [path].into_iter().chain(words.split(' ').map(str::to_owned));
        let load = Load::parse(&words.collect::<Vec<_>>()).unwrap();
        (directory, load)
    }

    #[test]
    fn every_runtime_reads_and_writes() {
        for words in ["4096 3 2 0.02 read", "4096 3 2 0.02 write"] {
            let (_directory, load) = load(words);
            for runtime in ALL {
                let figures = measure(runtime, &load).map_err(|e| format!("{runtime}: {e}"));
                assert!(figures.unwrap().requests >= 3, "{runtime}");
            }
        }
    }

    #[test]
    fn a_scan_reads_each_block_once() {
        let (_directory, load) = load("8192 1 2 60 scan");
        for runtime in ["LocalAsyncFile", "AsyncFile", "BlockingFile", "pread"] {
            assert_eq!(measure(runtime, &load).unwrap().requests, 2 * 128, "{runtime}");
        }
    }

    #[test]
    fn wrong_arguments_are_refused_and_versions_are_those_of_the_lock_file() {
        for words in
            ["d 0 1 1 1 read", "d 4095 1 1 1 read", "d 4096 0 1 1 read", "d 4096 1 0 1 read"]
                .into_iter()
                .chain([
                    "d 4096 1 1 x read",
                    "d 4096 1 1 1 erase",
                    "d 4096 1 1 1",
                    "d 4096 2 1 1 scan",
                ])
        {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            assert!(Load::parse(&words).is_none(), "{words:?}");
        }
        assert!(versions().starts_with("compio 0."), "{}", versions());
        let (_directory, load) = load("4096 1 3 1 read");
        assert!(measure("pread", &load).is_err_and(|e| e.to_string().contains("2: ")));
        assert!(measure("none", &load).is_err());
    }
}
