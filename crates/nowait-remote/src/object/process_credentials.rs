//! Credentials that a profile's program gives, for all objects of this process.
//!
//! Invariant: the program runs once at a time, and again only after a pause; credentials that are still good are used while
//! it runs.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use nowait_image::os_message;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use tokio::sync::Notify;

use crate::object::credential_process;
use crate::object::fault::BadAnswer;

/// Credentials are replaced so long before they expire, those of a shorter life after half of it.
const BEFORE_END: Duration = Duration::from_secs(300);
/// The pause between the end of the program and its next run, and the longest after failures, with which it doubles.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The credentials that were asked for last.
static LAST: Mutex<Option<ProcessCredentials>> = Mutex::new(None);

/// Credentials of a profile; clones share them.
#[derive(Clone)]
pub(super) struct ProcessCredentials(Arc<Shared>);

struct Shared {
    profile: String,
    command: String,
    state: Mutex<State>,
    /// The program has exited, for those who wait for that with a thread and without.
    exited: Condvar,
    ended_later: Notify,
}

#[derive(Clone)]
struct Known {
    credential: Arc<AwsCredential>,
    /// When others are to be had, and when it expires.
    life: Option<(SystemTime, SystemTime)>,
}

struct State {
    known: Option<Known>,
    is_running: bool,
    /// Failures one after the other.
    failed: u32,
    /// Why there are no credentials.
    why: String,
    not_before: Instant,
}

/// Next step for a request.
enum Step {
    Use(Arc<AwsCredential>),
    Wait,
    Fail(String),
}

impl fmt::Debug for ProcessCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessCredentials({:?})", self.0.profile)
    }
}

impl ProcessCredentials {
    /// Credentials of the `profile` whose program has this command line. Waits for the program unless its credentials are there.
    ///
    /// # Errors
    /// One line: the program gives none.
    pub(super) fn open(profile: &str, command: &str) -> Result<Self, String> {
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |it: &&Self| it.0.profile == profile && it.0.command == command;
        let found = last.as_ref().filter(is_same).cloned();
        let credentials = found.unwrap_or_else(|| Self::new(profile, command));
        *last = Some(credentials.clone());
        drop(last);
        loop {
            let mut state = credentials.lock();
            match credentials.step(&mut state) {
                Step::Use(_) => break,
                Step::Fail(why) => return Err(why),
                Step::Wait => {
                    drop(credentials.0.exited.wait(state).unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
        Ok(credentials)
    }

    fn new(profile: &str, command: &str) -> Self {
        let state = State {
            known: None,
            is_running: false,
            failed: 0,
            why: String::new(),
            not_before: Instant::now(),
        };
        Self(Arc::new(Shared {
            profile: profile.to_owned(),
            command: command.to_owned(),
            state: Mutex::new(state),
            exited: Condvar::new(),
            ended_later: Notify::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the program run if that is necessary.
    fn step(&self, state: &mut State) -> Step {
        let now = SystemTime::now();
        let is_before = |end: fn((SystemTime, SystemTime)) -> SystemTime| {
            move |known: &&Known| known.life.is_none_or(|life| now < end(life))
        };
        if let Some(known) = state.known.as_ref().filter(is_before(|life| life.0)) {
            return Step::Use(known.credential.clone());
        }
        if !state.is_running && state.not_before <= Instant::now() {
            let credentials = self.clone();
            let run = move || credentials.renew();
            match thread::Builder::new().name("credentials".into()).spawn(run) {
                Ok(_) => state.is_running = true,
                Err(error) => self.note_failure(state, &os_message(&error)),
            }
        }
        match state.known.as_ref().filter(is_before(|life| life.1)) {
            Some(known) => Step::Use(known.credential.clone()),
            None if state.is_running => Step::Wait,
            None => Step::Fail(state.why.clone()),
        }
    }

    fn renew(&self) {
        let ran = credential_process::run(&self.0.command);
        let given = ran.output.and_then(|output| known_of(&output).map_err(str::to_owned));
        let mut state = self.lock();
        state.is_running = false;
        match given {
            Ok(known) => {
                state.known = Some(known);
                state.failed = 0;
                state.why = self.sentence("has given credentials that expire too soon");
                state.not_before = Instant::now() + PAUSE;
                if !ran.messages.is_empty() {
                    tracing::info!(
                        "the program of the profile '{}': {}",
                        self.0.profile,
                        ran.messages
                    );
                }
            }
            Err(why) if ran.messages.is_empty() => self.note_failure(&mut state, &why),
            Err(why) => self.note_failure(&mut state, &format!("{why}: {}", ran.messages)),
        }
        self.0.exited.notify_all();
        self.0.ended_later.notify_waiters();
    }

    fn note_failure(&self, state: &mut State, why: &str) {
        state.why = self.sentence(why);
        let pause = PAUSE.saturating_mul(1 << state.failed.min(20)).min(LONGEST_PAUSE);
        state.not_before = Instant::now() + pause;
        state.failed += 1;
        if state.failed == 1 && state.known.is_some() {
            tracing::warn!("{}; its credentials are used until they expire", state.why);
        }
    }

    fn sentence(&self, end: &str) -> String {
        format!("the program of the profile '{}' (credential_process) {end}", self.0.profile)
    }
}

/// The credentials in the `output` of a program that has just exited.
fn known_of(output: &[u8]) -> Result<Known, &'static str> {
    let (credential, end) = credential_process::parse(output)?;
    let now = SystemTime::now();
    let life = match end.map(|end| (end, end.duration_since(now))) {
        None => None,
        Some((end, Ok(left))) if !left.is_zero() => Some((end - BEFORE_END.min(left / 2), end)),
        Some(_) => return Err("gives credentials that have expired already"),
    };
    Ok(Known { credential: Arc::new(credential), life })
}

#[async_trait]
impl CredentialProvider for ProcessCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        loop {
            let mut exited = std::pin::pin!(self.0.ended_later.notified());
            // Before the look at the state: an end after that is not missed.
            exited.as_mut().enable();
            let step = self.step(&mut self.lock());
            match step {
                Step::Use(credential) => return Ok(credential),
                Step::Wait => exited.await,
                Step::Fail(why) => {
                    let source = Box::new(BadAnswer::NoCredentials(why));
                    return Err(object_store::Error::Generic { store: "S3", source });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(expiration: SystemTime) -> Vec<u8> {
        let end = chrono::DateTime::<chrono::Utc>::from(expiration).to_rfc3339();
        let text = r#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"B","Expiration":"END"}"#;
        text.replace("END", &end).into_bytes()
    }

    #[test]
    fn credentials_are_renewed_five_minutes_before_their_end_or_after_half_their_life() {
        let now = SystemTime::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let (renewed, end) = known_of(&printed(after(3600))).unwrap().life.unwrap();
        assert_eq!(end.duration_since(renewed).unwrap(), BEFORE_END);
        let (renewed, end) = known_of(&printed(after(100))).unwrap().life.unwrap();
        assert!(end.duration_since(renewed).unwrap() <= Duration::from_secs(50));
        for past in [now, now - Duration::from_secs(1000)] {
            assert!(known_of(&printed(past)).err().unwrap().contains("expired already"));
        }
        let endless = br#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"B"}"#;
        assert!(known_of(endless).unwrap().life.is_none());
    }

    #[test]
    fn failures_are_told_in_words_and_followed_by_longer_pauses() {
        let credentials = ProcessCredentials::new("p", "sh -c 'echo it is locked >&2; exit 1'");
        let error = |credentials: &ProcessCredentials| loop {
            let mut state = credentials.lock();
            match credentials.step(&mut state) {
                Step::Fail(why) => return why,
                Step::Use(_) => panic!("credentials"),
                Step::Wait => drop(credentials.0.exited.wait(state).unwrap()),
            }
        };
        let told = "the program of the profile 'p' (credential_process) exited with status 1: it is locked";
        assert_eq!(error(&credentials), told);
        // During the pause it is not run again.
        assert_eq!((error(&credentials).as_str(), credentials.lock().failed), (told, 1));
        let mut state = credentials.lock();
        for seconds in [2, 4, 8, 16, 32, 60, 60] {
            let before = Instant::now() + Duration::from_secs(seconds);
            credentials.note_failure(&mut state, "x");
            assert!(state.not_before >= before);
            assert!(state.not_before <= Instant::now() + Duration::from_secs(seconds));
        }
    }
}
