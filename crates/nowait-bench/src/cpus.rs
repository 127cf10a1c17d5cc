//! The processors of the client and of the server, so that neither takes time from the other.
//!
//! Invariant: either each has its own processor, or neither is pinned and the report states it.

use std::{fmt, io};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// The processors of client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Client and server on two different processors (numbers as in /proc/cpuinfo). A server of
    /// several queues has a second one, if there is a third.
    Apart { client: usize, server: usize, second: Option<usize> },
    /// This process may use one processor only.
    Shared,
}

/// Text: `client on CPU 0, server on CPU 1`.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Apart { client, server, .. } => {
                write!(f, "client on CPU {client}, server on CPU {server}")
            }
            Placement::Shared => f.write_str("only one CPU, so client and server share it"),
        }
    }
}

impl Placement {
    /// The first two processors that this process may use.
    pub(crate) fn choose() -> Result<Placement, Error> {
        let allowed = sched_getaffinity(None)
            .map_err(io::Error::from)
            .map_err(Error::system("asking for the processors of this process"))?;
        let mut usable = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        Ok(match (usable.next(), usable.next()) {
            (Some(client), Some(server)) => {
                Placement::Apart { client, server, second: usable.next() }
            }
            _ => Placement::Shared,
        })
    }

    /// The line of a report about servers with several queues; empty if it is as with one.
    pub(crate) fn of_several_queues(self) -> String {
        match self {
            Placement::Apart { server, second: Some(second), .. } => {
                format!("server on CPUs {server} and {second}\n")
            }
            Placement::Apart { second: None, .. } | Placement::Shared => String::new(),
        }
    }

    /// Pins the calling thread to the processor of the client.
    pub(crate) fn pin_to_client_cpu(self) -> io::Result<()> {
        match self {
            Placement::Apart { client, .. } => pin_this_thread(&[client]),
            Placement::Shared => Ok(()),
        }
    }

    /// Pins the calling thread, and all threads and processes that it starts from now on, to the
    /// processor of the server, or for several `queues` to both of its processors.
    pub(crate) fn pin_to_server_cpus(self, queues: usize) -> io::Result<()> {
        match self {
            Placement::Apart { server, second, .. } => {
                let second = second.filter(|_| queues > 1);
                pin_this_thread(&[server, second.unwrap_or(server)])
            }
            Placement::Shared => Ok(()),
        }
    }
}

fn pin_this_thread(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    Ok(sched_setaffinity(None, &set)?)
}
