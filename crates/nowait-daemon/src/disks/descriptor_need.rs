//! The descriptors that the images of a server need, compared with the limit of the process.
//!
//! Invariant: a start that is refused for them has opened no image.

use rustix::process::{Resource, getrlimit};

use crate::config::ServeConfig;
use crate::config::export_spec::NamedExport;
use crate::error::CliError;

/// Descriptors of an export that stands on a raw file; all other local images need more.
const OF_EXPORT: u64 = 2;
/// Descriptors of a serving thread: its ring, and how it is woken up.
const OF_THREAD: u64 = 4;
/// Descriptors of the rest of a server at least: standard streams, launcher, a socket.
const OF_SERVER: u64 = 10;

/// Compares what `exports` of `config` need at least with the limit, which has been raised.
///
/// # Errors
/// One line that says how many are needed, and which limit has room for the connections, too.
pub(crate) fn check(config: &ServeConfig, exports: &[NamedExport]) -> Result<(), CliError> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let local = exports.iter().filter(|export| !export.is_remote()).count() as u64;
    match refusal(local, config.threads(), config.max_connections, limit) {
        Some(why) => Err(CliError::new(why)),
        None => Ok(()),
    }
}

fn refusal(exports: u64, threads: u16, connections: u32, limit: u64) -> Option<String> {
    let needed = exports * OF_EXPORT + u64::from(threads) * OF_THREAD + OF_SERVER;
    let with_connections = needed + u64::from(connections);
    (needed > limit).then(|| {
        format!(
            "{exports} exports need {needed} descriptors at least, and the limit of this process is {limit} \
             (raise it with 'ulimit -Hn {with_connections}', or LimitNOFILE={with_connections} in a unit)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_too_low_is_told_with_one_that_is_enough() {
        assert_eq!(refusal(10_000, 2, 1024, 20_018), None);
        let why = refusal(10_000, 2, 1024, 20_017).unwrap();
        assert!(why.starts_with("10000 exports need 20018 descriptors at least"), "{why}");
        assert!(
            why.contains("is 20017 (") && why.ends_with("LimitNOFILE=21042 in a unit)"),
            "{why}"
        );
        assert_eq!(refusal(0, 256, 1 << 20, u64::MAX), None);
        assert_eq!(refusal(1, 1, 1, 16), None);
        assert!(refusal(1, 1, 1, 15).is_some());
    }
}
