//! The command-line option for what a server reports by itself.

use std::time::Duration;

use clap::Args;

/// What is reported.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct MessageArgs {
    /// Warn of requests that take longer than TIME, such as 500ms, 10s or 2m; off: of none
    ///
    /// A request counts from when it goes to storage to its end; the time that is told is at most a
    /// quarter of TIME too short. One that does not end is warned of, too. The same is said once in
    /// 30 s at most.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_threshold)]
    slow_requests: Threshold,
}

/// A time, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Threshold(Option<Duration>);

impl MessageArgs {
    /// The time after which a request is slow; `None`: none is.
    pub(crate) fn slow_requests(&self) -> Option<Duration> {
        self.slow_requests.0
    }
}

/// Parses `off`, or a number with a unit.
fn parse_threshold(text: &str) -> Result<Threshold, &'static str> {
    const FORM: &str = "a whole number of ms, s or m, such as 500ms, or off";
    if text == "off" {
        return Ok(Threshold(None));
    }
    let end = text.find(|c: char| !c.is_ascii_digit()).ok_or(FORM)?;
    let (number, unit) = text.split_at(end);
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        _ => return Err(FORM),
    };
    let number: u32 = number.parse().map_err(|_| FORM)?;
    match Duration::from_millis(u64::from(number) * milliseconds) {
        Duration::ZERO => Err("at least 1ms (or off)"),
        time => Ok(Threshold(Some(time))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_a_number_with_a_unit_or_off() {
        let parsed = |text| parse_threshold(text).map(|threshold| threshold.0);
        assert_eq!(parsed("500ms"), Ok(Some(Duration::from_millis(500))));
        assert_eq!(parsed("10s"), Ok(Some(Duration::from_secs(10))));
        assert_eq!(parsed("2m"), Ok(Some(Duration::from_secs(120))));
        assert_eq!(parsed("off"), Ok(None));
        for text in ["", "10", "s", "-1s", "0s", "1h", "1.5s", "99999999999s", "1 s"] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }
}
