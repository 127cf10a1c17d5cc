//! The command-line options for addresses to listen on.
//!
//! Invariant: an option of qemu-nbd has the meaning that it has there, or is refused.

use std::ffi::OsString;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nowait_nbd::{Address, DEFAULT_PORT};

use nowait_daemon::config::ServeConfig;
use nowait_daemon::config::listen_address;

/// Where to listen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Addresses")]
pub(crate) struct AddressArgs {
    /// Where to listen: unix:PATH or tcp:HOST:PORT; can be given more than once
    ///
    /// An IPv6 address goes into brackets: `tcp:[::1]:10809`. Port 0 is any free port; the URI
    /// tells which. Without TLS (see --tls-certs) there is neither encryption nor a password: a
    /// client that reaches the address has the disk. So listen on TCP on 127.0.0.1 or in a network you trust
    /// only.
    ///
    /// Sockets that a service manager hands over (LISTEN_FDS) are served too. Without them and
    /// without any address: a Unix socket named after IMAGE in $XDG_RUNTIME_DIR/nowait, else in a
    /// new temporary directory; only you can enter either. In a unit of systemd with
    /// RuntimeDirectory= it is there, and RuntimeDirectoryMode= and UMask= say who can connect.
    #[arg(long, value_name = "ADDRESS", value_parser = listen_address::parse)]
    nbd: Vec<Address>,

    /// Another way to write --nbd unix:PATH
    #[arg(short = 'k', long, value_name = "PATH")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|path: OsString| listen_address::unix(path.into())))]
    socket: Vec<Address>,

    /// With --bind, another way to write --nbd tcp:ADDRESS:PORT
    #[arg(short, long, value_name = "PORT")]
    port: Option<u16>,

    /// The name or address for --port, 10809 without it; 0.0.0.0 is every IPv4 address of this
    /// machine
    #[arg(short, long, value_name = "HOST")]
    bind: Option<String>,
}

impl AddressArgs {
    /// Puts what is given over `config`.
    ///
    /// # Errors
    /// Like [`AddressArgs::check`].
    pub(crate) fn put_over(&self, config: &mut ServeConfig) -> Result<(), String> {
        self.check()?;
        config.nbd.extend(self.listens());
        Ok(())
    }

    /// All addresses, in the order of the options above; empty for the default one.
    fn listens(&self) -> Vec<Address> {
        let host = self.bind.as_deref().map(without_brackets);
        let tcp = host.map(|host| Address::Tcp {
            host: host.to_owned(),
            port: self.port.unwrap_or(DEFAULT_PORT),
        });
        self.nbd.iter().chain(&self.socket).cloned().chain(tcp).collect()
    }

    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user: a port without an address, which qemu-nbd binds on all of the
    /// machine's addresses.
    fn check(&self) -> Result<(), String> {
        if self.port.is_some() && self.bind.is_none() {
            return Err("--port needs --bind HOST: 127.0.0.1 for this host only, 0.0.0.0 for \
                        any client that reaches it"
                .into());
        }
        match self.bind.as_deref().map(without_brackets) {
            Some("") => Err("--bind needs a name or an address".into()),
            _ => Ok(()),
        }
    }
}

fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}
