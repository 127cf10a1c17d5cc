//! The text form of a plan: a failure prints it, and `--replay` reads it.
//!
//! Invariant: the text of a plan is read back as the same plan.

use std::fmt::{Debug, Write};

use nowait::sim::Fault;

use crate::backup::backup_scenario::BackupScenario;
use crate::log::log_scenario::LogScenario;
use crate::moves::move_scenario::MoveScenario;
use crate::raw_bitmaps::bitmaps_scenario::BitmapsScenario;
use crate::remote::remote_scenario::RemoteScenario;
use crate::run::{InjectedBug, Plan};
use crate::scenario::Mode;

/// The command-line name of a bug: that of its variant, in small letters with hyphens.
pub fn name_of(bug: InjectedBug) -> String {
    let variant = match bug {
        InjectedBug::Engine(bug) => format!("{bug:?}"),
        InjectedBug::Server(bug) => format!("{bug:?}"),
        InjectedBug::Image(bug) => format!("{bug:?}"),
        InjectedBug::Remote(bug) => format!("{bug:?}"),
    };
    let mut name = String::new();
    for letter in variant.chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

/// The bug with this name.
pub fn bug_of(name: &str) -> Option<InjectedBug> {
    InjectedBug::all().into_iter().find(|&bug| name_of(bug) == name)
}

/// The text of `plan`, one line for each field.
pub fn write(plan: &Plan) -> String {
    let mut text = format!("mode {}\nseed {}\n", plan.mode.name(), plan.seed);
    if let Some(bug) = plan.bug {
        let _ = writeln!(text, "break {}", name_of(bug));
    }
    match plan.once {
        Some((at, Fault::Errno(errno))) => _ = writeln!(text, "fault {at} {errno}"),
        Some((at, Fault::Short)) => _ = writeln!(text, "fault {at} short"),
        Some((at, Fault::Full)) => _ = writeln!(text, "fault {at} full"),
        Some((at, Fault::SubmitError)) => _ = writeln!(text, "fault {at} kick"),
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

/// Parses the text of a plan; lines beginning with `#` are ignored. `None` when it is invalid.
pub fn read(text: &str) -> Option<Plan> {
    let mut plan = Plan::new(Mode::Engine, 0, 0);
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let (word, rest) = line.trim().split_once(' ')?;
        match word {
            "mode" => plan.mode = Mode::ALL.into_iter().find(|mode| mode.name() == rest)?,
            "seed" => plan.seed = rest.parse().ok()?,
            "break" => plan.bug = Some(bug_of(rest)?),
            "fault" => {
                let (at, what) = rest.split_once(' ')?;
                let fault = match what {
                    "short" => Fault::Short,
                    "full" => Fault::Full,
                    "kick" => Fault::SubmitError,
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

/// Calls `$each` with the scenario of `$plan`, and with a function that describes its step of a number.
macro_rules! of_scenario {
    ($plan:expr, $each:expr, $($mode:ident: $scenario:ident),*) => {
        match $plan.mode {
            $(Mode::$mode => {
                let scenario = $scenario::of($plan.seed);
                $each(&scenario, &|n| format!("{:?}", scenario.step(n).0))
            })*
            _ => {
                let scenario = $plan.scenario();
                $each(&scenario, &|n| {
                    let step = scenario.step(n);
                    format!("part {}: {:?}", step.part, step.action)
                })
            }
        }
    };
}

/// Calls `each` as [`of_scenario`] does.
fn with_scenario(
    plan: &Plan,
    each: impl FnOnce(&dyn Debug, &dyn Fn(u64) -> String) -> String,
) -> String {
    of_scenario!(
        plan,
        each,
        Remote: RemoteScenario,
        Log: LogScenario,
        Backup: BackupScenario,
        Bitmaps: BitmapsScenario,
        Move: MoveScenario
    )
}

/// The scenario of `plan`, on several lines.
pub fn scenario_of(plan: &Plan) -> String {
    with_scenario(plan, |scenario, _| format!("{scenario:#?}"))
}

/// The actions of `plan`, a line for each step.
pub fn describe(plan: &Plan) -> String {
    let line = |n: u64, step: &dyn Fn(u64) -> String| format!("# {n}: {}\n", step(n));
    with_scenario(plan, |_, step| plan.steps.iter().map(|&n| line(n, step)).collect())
}

#[cfg(test)]
mod tests {
    use nowait::sim::EngineBug;
    use nowait_server::ServerBug;

    use super::*;

    #[test]
    fn each_bug_has_a_name_of_its_own() {
        assert_eq!(bug_of("drop-flush"), Some(InjectedBug::Engine(EngineBug::DropFlush)));
        assert_eq!(bug_of("drop-flushes"), None);
        assert!(InjectedBug::all().into_iter().all(|bug| bug_of(&name_of(bug)) == Some(bug)));
    }

    #[test]
    fn a_plan_is_read_back_as_it_was_written() {
        for (bug, once) in [
            (None, None),
            (Some(InjectedBug::Engine(EngineBug::DropFlush)), Some((7, Fault::Short))),
            (Some(InjectedBug::Server(ServerBug::ReplyTwice)), Some((1, Fault::Errno(5)))),
            (None, Some((2, Fault::Full))),
            (None, Some((200, Fault::SubmitError))),
        ] {
            let plan = Plan { mode: Mode::Server, seed: 99, steps: vec![0, 4, 5, 6, 9], bug, once };
            let text = write(&plan) + &describe(&plan);
            assert_eq!(read(&text), Some(plan), "{text}");
        }
        assert!(read("seed x\n").is_none() && read("what 1\n").is_none());
    }
}
