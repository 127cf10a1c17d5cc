//! The machine that is measured on, as reports name it.

use std::fs;

use serde_json::{Value, json};

use crate::error::Error;

/// The machine that is measured: its kernel, and the model name of its processor.
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) processor: String,
}

impl Machine {
    pub(crate) fn this() -> Result<Machine, Error> {
        let read = |path| fs::read_to_string(path).map_err(Error::system("reading below /proc"));
        let kernel = read("/proc/sys/kernel/osrelease")?.trim().to_owned();
        let cpuinfo = read("/proc/cpuinfo")?;
        let names =
            cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let processor = names.map_or_else(String::new, |(_, name)| name.trim().to_owned());
        Ok(Machine { kernel, processor })
    }

    /// The first line of a report.
    pub(crate) fn line(&self) -> String {
        format!("Linux {}, {}", self.kernel, self.processor)
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "kernel": self.kernel, "processor": self.processor })
    }
}
