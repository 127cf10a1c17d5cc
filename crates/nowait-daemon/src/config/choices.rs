//! The values of options that are one of some words.
//!
//! Invariant: a word in a file is that of the command line.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sandbox::Mode;

/// Whether images are read and written past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Direct {
    /// Always; an image whose file system cannot is refused.
    On,
    /// Never: through the page cache.
    Off,
    /// Where the file system can, else through the page cache with a warning.
    #[default]
    Auto,
}

impl From<Direct> for nowait::Direct {
    fn from(direct: Direct) -> Self {
        match direct {
            Direct::On => Self::On,
            Direct::Off => Self::Off,
            Direct::Auto => Self::Auto,
        }
    }
}

/// How requests get to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum QueueChoice {
    /// io_uring: many requests in one system call.
    Uring,
    /// Linux AIO, and plain reads and writes by a bounded number of threads; works everywhere.
    Threads,
}

/// Whether connections are encrypted by TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum TlsChoice {
    /// Never.
    Off,
    /// Where the client asks for it.
    On,
    /// Always; a client without TLS gets nothing.
    Require,
}

/// Whether the server confines itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum SandboxChoice {
    /// Confined as far as the kernel can do it.
    #[default]
    Auto,
    /// Or nothing is served: the kernel has to have landlock and seccomp.
    On,
    /// Not at all, for debuggers and profilers.
    Off,
}

impl SandboxChoice {
    /// How the process is confined; `None`: not at all.
    pub fn mode(self) -> Option<Mode> {
        match self {
            Self::Auto => Some(Mode::Auto),
            Self::On => Some(Mode::On),
            Self::Off => None,
        }
    }
}

/// A mechanism of the engine, of a disk, or of a frontend, that can be turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Mechanism {
    /// The short way of a request that is one transfer.
    Simple,
    /// Finishing a request on the thread that learns of its end.
    InlineCompletion,
    /// Having all transfers of one request under way together.
    Vectored,
    /// Reusing the memory of finished requests.
    Pool,
    /// Serving requests that touch by one transfer.
    Merge,
    /// Trying without waiting before handing a request to a worker thread.
    NowaitFirst,
    /// Handing requests to workers without a try for a while after many refusals.
    BackOff,
    /// Remembering which ranges of the image hold data.
    Hint,
    /// Making writes with FUA durable together where the kernel would sync for each.
    GroupSyncs,
    /// Allocating storage behind sequential writes into holes of a raw image.
    AllocateAhead,
    /// Moving data between storage and the users of a --ublk node without a copy.
    ZeroCopy,
}

impl Mechanism {
    /// Turns it off in `config`, if it is the engine's.
    pub fn turn_off(self, config: &mut nowait::Config) {
        *match self {
            Self::Simple => &mut config.simple,
            Self::InlineCompletion => &mut config.inline_completion,
            Self::Vectored => &mut config.vectored,
            Self::Pool => &mut config.pool,
            Self::Merge => &mut config.merge,
            Self::NowaitFirst => &mut config.nowait_first,
            Self::BackOff => &mut config.back_off,
            Self::GroupSyncs => &mut config.group_syncs,
            Self::Hint | Self::AllocateAhead | Self::ZeroCopy => return,
        } = false;
    }
}

/// A time after which something is told, or none: `500ms`, `10s`, `2m` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Threshold(pub Option<Duration>);

impl std::str::FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "a whole number of ms, s or m, such as 500ms, or off";
        if text == "off" {
            return Ok(Self(None));
        }
        let end = text.find(|c: char| !c.is_ascii_digit()).ok_or(FORM)?;
        let (number, unit) = text.split_at(end);
        let milliseconds = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            _ => return Err(FORM.into()),
        };
        let number: u32 = number.parse().map_err(|_| FORM)?;
        match Duration::from_millis(u64::from(number) * milliseconds) {
            Duration::ZERO => Err("at least 1ms (or off)".into()),
            time => Ok(Self(Some(time))),
        }
    }
}

impl TryFrom<String> for Threshold {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Threshold> for String {
    fn from(Threshold(time): Threshold) -> Self {
        match time.map(|time| time.as_millis()) {
            None => "off".into(),
            Some(ms) if ms.is_multiple_of(60_000) => format!("{}m", ms / 60_000),
            Some(ms) if ms.is_multiple_of(1000) => format!("{}s", ms / 1000),
            Some(ms) => format!("{ms}ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_a_number_with_a_unit_or_off() {
        let parsed = |text: &str| text.parse().map(|Threshold(time)| time);
        assert_eq!(parsed("500ms"), Ok(Some(Duration::from_millis(500))));
        assert_eq!(parsed("10s"), Ok(Some(Duration::from_secs(10))));
        assert_eq!(parsed("2m"), Ok(Some(Duration::from_secs(120))));
        assert_eq!(parsed("off"), Ok(None));
        for text in ["", "10", "s", "-1s", "0s", "1h", "1.5s", "99999999999s", "1 s"] {
            assert!(parsed(text).is_err(), "{text}");
        }
        for text in ["1ms", "1500ms", "90s", "2m", "4294967295m", "off"] {
            assert_eq!(String::from(text.parse::<Threshold>().unwrap()), text);
        }
    }
}
