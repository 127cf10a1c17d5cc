//! The addresses of the control interface, as they are given.
//!
//! Invariant: as for the addresses of [`listen_address`].

use std::ffi::OsString;
use std::path::PathBuf;

use nowait_nbd::Address;

use crate::config::listen_address;

/// Where the control interface is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlAddress {
    /// Nowhere.
    Off,
    /// At this path.
    Unix(PathBuf),
    /// At this host, without brackets, and port; port 0 is any free one.
    Tcp {
        /// A name or an address.
        host: String,
        /// The port; 0 is any free one.
        port: u16,
    },
}

impl ControlAddress {
    /// Whether it is on TCP.
    pub fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp { .. })
    }

    /// Parses `unix:PATH`, `tcp:HOST:PORT` or `off`.
    ///
    /// # Errors
    /// A message with what is wrong.
    pub fn parse(text: &OsString) -> Result<Self, String> {
        const FORM: &str = "unix:PATH, tcp:HOST:PORT, or off";
        let Some(plain) = text.to_str() else { return Err(format!("it is not text, but {FORM}")) };
        match plain {
            "off" => Ok(Self::Off),
            _ if nowait_control::DISABLED.is_some() => {
                Err(nowait_control::DISABLED.unwrap_or_default().into())
            }
            _ if plain.starts_with("unix:") || plain.starts_with("tcp:") => {
                Ok(match listen_address::parse(plain)? {
                    Address::Unix(path) => Self::Unix(path),
                    Address::Tcp { host, port } => Self::Tcp { host, port },
                })
            }
            _ => Err(FORM.into()),
        }
    }

    /// The text from which it is parsed.
    ///
    /// # Errors
    /// Its path is not UTF-8.
    pub fn text(&self) -> Result<String, String> {
        match self.clone() {
            Self::Off => Ok("off".into()),
            Self::Unix(path) => listen_address::text(&Address::Unix(path)),
            Self::Tcp { host, port } => listen_address::text(&Address::Tcp { host, port }),
        }
    }
}
