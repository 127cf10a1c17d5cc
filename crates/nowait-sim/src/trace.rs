//! A plan as text: what a failure prints, and what `--replay` reads.
//!
//! Invariant: what was written is read back as the same plan.
//! Knows: run, scenario. Known by: main.

use std::fmt::Write;

use nowait::sim::{Break, Fault};
use nowait_image::Flaw;
use nowait_server::Mistake;

use crate::run::{Broken, Plan};
use crate::scenario::Mode;

/// The name under which a mistake is asked for.
#[must_use]
pub fn name_of(broken: Broken) -> &'static str {
    match broken {
        Broken::Engine(Break::DropFlush) => "drop-flush",
        Broken::Engine(Break::CompleteBeforeData) => "complete-before-data",
        Broken::Engine(Break::FreeSlotTwice) => "free-slot-twice",
        Broken::Engine(Break::ReplyFromStaleBuffer) => "reply-from-stale-buffer",
        Broken::Engine(Break::ForgetRangeLock) => "forget-range-lock",
        Broken::Server(Mistake::ReplyFromOldBuffer) => "reply-from-old-buffer",
        Broken::Server(Mistake::ReplyTwice) => "reply-twice",
        Broken::Server(Mistake::LoseAtDisconnect) => "lose-at-disconnect",
        Broken::Server(Mistake::TrustReports) => "trust-reports",
        Broken::Image(Flaw::ForgetTail) => "forget-tail",
        Broken::Image(Flaw::ReadBelowElsewhere) => "read-below-elsewhere",
        Broken::Image(Flaw::ForgetOrder) => "forget-order",
        Broken::Image(Flaw::ForgetGivenBack) => "forget-given-back",
        Broken::Image(Flaw::CutTooShort) => "cut-too-short",
        Broken::Image(Flaw::ForgetToGrow) => "forget-to-grow",
        Broken::Image(Flaw::ForgetFailure) => "forget-failure",
        Broken::Image(Flaw::FlushBesideAnother) => "flush-beside-another",
    }
}

/// The mistake of that name.
#[must_use]
pub fn break_of(name: &str) -> Option<Broken> {
    Broken::all().into_iter().find(|&broken| name_of(broken) == name)
}

/// `plan`, one line for each of its parts.
#[must_use]
pub fn write(plan: &Plan) -> String {
    let mut text = format!("mode {}\nseed {}\n", plan.mode.name(), plan.seed);
    if let Some(broken) = plan.broken {
        let _ = writeln!(text, "break {}", name_of(broken));
    }
    match plan.once {
        Some((at, Fault::Errno(errno))) => _ = writeln!(text, "fault {at} {errno}"),
        Some((at, Fault::Short)) => _ = writeln!(text, "fault {at} short"),
        Some((at, Fault::Full)) => _ = writeln!(text, "fault {at} full"),
        Some((at, Fault::Kick)) => _ = writeln!(text, "fault {at} kick"),
        None => {}
    }
    text.push_str("steps");
    for steps in plan.steps.chunk_by(|one, next| one + 1 == *next) {
        let _ = match steps {
            [first, .., last] => write!(text, " {first}-{last}"),
            _ => write!(text, " {}", steps.first().copied().unwrap_or_default()),
        };
    }
    text.push('\n');
    text
}

/// The plan that `text` is of; lines beginning with `#` are passed over. `None` when it is of none.
#[must_use]
pub fn read(text: &str) -> Option<Plan> {
    let mut plan = Plan::new(Mode::Engine, 0, 0);
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let (word, rest) = line.trim().split_once(' ')?;
        match word {
            "mode" => plan.mode = Mode::ALL.into_iter().find(|mode| mode.name() == rest)?,
            "seed" => plan.seed = rest.parse().ok()?,
            "break" => plan.broken = Some(break_of(rest)?),
            "fault" => {
                let (at, what) = rest.split_once(' ')?;
                let fault = match what {
                    "short" => Fault::Short,
                    "full" => Fault::Full,
                    "kick" => Fault::Kick,
                    errno => Fault::Errno(errno.parse().ok()?),
                };
                plan.once = Some((at.parse().ok()?, fault));
            }
            "steps" => {
                for part in rest.split(' ') {
                    let (first, last) = part.split_once('-').unwrap_or((part, part));
                    plan.steps.extend(first.parse::<u64>().ok()?..=last.parse().ok()?);
                }
            }
            _ => return None,
        }
    }
    Some(plan)
}

/// What happens in `plan`, a line for each step.
#[must_use]
pub fn describe(plan: &Plan) -> String {
    let scenario = plan.scenario();
    let mut text = String::new();
    for &n in &plan.steps {
        let step = scenario.step(n);
        let _ = writeln!(text, "# {n}: part {}: {:?}", step.part, step.action);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_back_as_it_was_written() {
        for (broken, once) in [
            (None, None),
            (Some(Broken::Engine(Break::DropFlush)), Some((7, Fault::Short))),
            (Some(Broken::Server(Mistake::ReplyTwice)), Some((1, Fault::Errno(5)))),
            (None, Some((2, Fault::Full))),
            (None, Some((200, Fault::Kick))),
        ] {
            let plan =
                Plan { mode: Mode::Server, seed: 99, steps: vec![0, 4, 5, 6, 9], broken, once };
            let text = write(&plan) + &describe(&plan);
            assert_eq!(read(&text), Some(plan), "{text}");
        }
        assert!(read("seed x\n").is_none() && read("what 1\n").is_none());
    }
}
