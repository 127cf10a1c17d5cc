//! The options of `--mode hosts`, and its output.
//!
//! Invariant: without options the outcome is the same on every machine.

use std::time::Duration;

use clap::Args;
use nowait_remote::BackOff;
use nowait_sim::hosts::outcome::table;
use nowait_sim::hosts::parameters::{
    BootParameters, BootReads, GiveUp, Parameters, Plan, StoreParameters,
};
use nowait_sim::hosts::simulate;

/// With `--mode hosts`: many hosts boot from one image in a store. See docs/many-hosts.md.
#[derive(Args)]
#[command(next_help_heading = "Many hosts, with --mode hosts")]
pub(crate) struct HostsArgs {
    /// Hosts; several numbers are as many simulations.
    #[arg(long, value_name = "N", default_value = "1000", value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    hosts: Vec<u32>,
    /// Machines of each host, which share its cache.
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    machines: u32,
    /// The time over which the starts of hosts are spread.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = positive_or_zero)]
    window: f64,
    /// Ways to compare: download, no-cache, cache, prefetch, warm-cache, rack-cache, rack-prefetch
    /// [default: all of them].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = plan)]
    plan: Vec<Plan>,
    /// A boot that reads so much of files of random sizes, instead of one of Debian that was recorded.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=4096))]
    boot_mib: Option<u64>,
    /// The size of the image of such a boot.
    #[arg(long, value_name = "MIB", default_value_t = 2048, requires = "boot_mib",
        value_parser = clap::value_parser!(u64).range(64..=65_536))]
    image_mib: u64,
    /// The time of a boot whose reads take none.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = positive_or_zero)]
    boot_seconds: f64,
    /// The bandwidth of the store.
    #[arg(long, value_name = "GBIT/S", default_value_t = 100.0, value_parser = positive)]
    store_gbit: f64,
    /// The bandwidth of one request.
    #[arg(long, value_name = "GBIT/S", default_value_t = 0.8, value_parser = positive)]
    request_gbit: f64,
    /// The median time from a request to its first byte.
    #[arg(long, value_name = "MS", default_value_t = 20.0, value_parser = positive_or_zero)]
    store_latency: f64,
    /// Requests a second above which the store answers 503.
    #[arg(long, value_name = "N", default_value_t = 5500.0, value_parser = positive)]
    store_requests: f64,
    /// Of a million requests, those that end with an error, in the middle, late or never.
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(0..=500_000))]
    faults: u32,
    /// The bandwidth of a host's network.
    #[arg(long, value_name = "GBIT/S", default_value_t = 10.0, value_parser = positive)]
    host_gbit: f64,
    /// Hosts that share the server of a rack.
    #[arg(long, value_name = "N", default_value_t = 40,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rack_hosts: u32,
    /// The bandwidth of a rack's server.
    #[arg(long, value_name = "GBIT/S", default_value_t = 25.0, value_parser = positive)]
    rack_gbit: f64,
    /// The time after which a read without an answer fails.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = positive)]
    reconnect: f64,
    /// A read fails when its own request has failed for that time, though others are answered.
    #[arg(long)]
    give_up_each: bool,
    /// Reads one after the other do not make a server read ahead.
    #[arg(long)]
    no_read_ahead: bool,
    /// A host that is refused does not ask less often.
    #[arg(long)]
    unpaced: bool,
    /// Repeats failed requests after 1 ms instead of a pause that grows and is random.
    #[arg(long)]
    retry_at_once: bool,
    /// Prints JSON, an object for each simulation.
    #[arg(long)]
    json: bool,
}

impl HostsArgs {
    fn parameters(&self, seed: u64) -> Parameters {
        let at_once = Duration::from_millis(1);
        Parameters {
            seed,
            hosts: 1,
            machines: self.machines,
            window: self.window,
            plan: Plan::NoCache,
            boot: BootParameters {
                reads: self.boot_mib.map_or(BootReads::Recorded, |mib| BootReads::Synthetic {
                    image_bytes: self.image_mib << 20,
                    read_bytes: mib << 20,
                }),
                think_seconds: self.boot_seconds,
                ..Parameters::default().boot
            },
            store: StoreParameters {
                latency: self.store_latency / 1e3,
                bandwidth: self.store_gbit * 1e9,
                request_bandwidth: self.request_gbit * 1e9,
                request_rate: self.store_requests,
                faults: (f64::from(self.faults) * 0.065_536).round() as u16,
            },
            host_bandwidth: self.host_gbit * 1e9,
            rack_hosts: self.rack_hosts,
            rack_bandwidth: self.rack_gbit * 1e9,
            reconnect: self.reconnect,
            give_up: if self.give_up_each { GiveUp::Request } else { GiveUp::Store },
            read_ahead: !self.no_read_ahead,
            paced: !self.unpaced,
            back_off: if self.retry_at_once {
                BackOff { first: at_once, longest: at_once }
            } else {
                BackOff::STORE
            },
        }
    }
}

fn plan(name: &str) -> Result<Plan, String> {
    Plan::ALL.into_iter().find(|plan| plan.name() == name).ok_or("no such plan".to_owned())
}

fn number(text: &str, valid: impl Fn(f64) -> bool) -> Result<f64, String> {
    let number = text.parse::<f64>().map_err(|error| error.to_string())?;
    if valid(number) { Ok(number) } else { Err("not in the range up to 1000000".to_owned()) }
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |number| (1e-3..=1e6).contains(&number))
}

fn positive_or_zero(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1e6).contains(&number))
}

/// Runs the simulations and prints their outcomes.
pub(crate) fn run(args: &HostsArgs, seed: u64) -> Result<(), String> {
    let plans = if args.plan.is_empty() { Plan::ALL.to_vec() } else { args.plan.clone() };
    let parameters = args.parameters(seed);
    let mut outcomes = Vec::new();
    for &hosts in &args.hosts {
        for &plan in &plans {
            outcomes.push(simulate(&Parameters { hosts, plan, ..parameters }));
        }
    }
    if args.json {
        let text = serde_json::to_string_pretty(&outcomes).map_err(|error| error.to_string())?;
        println!("{text}");
    } else {
        print!("{}", table(&outcomes));
    }
    Ok(())
}
