//! The members of a thread that wait because their export or their client has reached its limits.
//!
//! Invariant: a member that waits takes no request, but its answers leave; without limits nothing
//! waits. A member that waits costs the others nothing until it may go on.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use crate::export_throttle::ExportThrottle;
use crate::member::Member;
use crate::rate_limit::{TokenBucket, Tokens};

/// The shortest time that a member waits: at a high rate one wakeup is for many tokens. Less than
/// [`TokenBucket::MIN_REFILL_TIME`], so that no bucket runs over meanwhile.
const SHORTEST_WAIT: Duration = Duration::from_micros(500);

/// The members of a thread that wait, of all exports.
#[derive(Default)]
pub(crate) struct Throttle {
    /// When members may go on, their numbers, and their exports.
    waiting: BinaryHeap<Reverse<(Instant, usize, u32)>>,
    /// Limits have changed: all that wait are looked at again.
    has_changed: bool,
    /// An export of the thread has limits.
    pub(crate) has_limits: bool,
    /// How many times members were released together.
    pub(crate) round: u64,
}

impl Throttle {
    /// Limits of an export have changed.
    pub(crate) fn on_change(&mut self) {
        self.has_changed = true;
    }

    /// Whether `member`, which has this `number`, has to wait; then its number is kept here. If
    /// not, its quantum allows as much as it may take in this service.
    pub(crate) fn holds(
        &mut self,
        number: usize,
        member: &mut Member,
        export: &mut ExportThrottle,
        now: Instant,
    ) -> bool {
        let limiters = export.limiters(&member.client);
        let waits = limiters.iter().flatten().filter_map(|limiter| limiter.wait_time(now));
        let Some(wait) = waits.max() else {
            let tokens = limiters.iter().flatten().map(|limiter| limiter.tokens());
            member.quantum.limit(tokens.fold(Tokens::ALL, Tokens::min).share(export.contenders));
            return false;
        };
        if !std::mem::replace(&mut member.is_held, true) {
            let wait = wait.clamp(SHORTEST_WAIT, TokenBucket::MAX_REFILL_TIME);
            export.waiting += 1;
            self.waiting.push(Reverse((now + wait, number, member.export())));
        }
        true
    }

    /// The time until a member that waits may go on.
    #[inline]
    pub(crate) fn wait_time(&self) -> Option<Duration> {
        let Reverse((due, ..)) = self.waiting.peek()?;
        Some(match self.has_changed {
            true => Duration::ZERO,
            false => due.saturating_duration_since(Instant::now()),
        })
    }

    /// Begins to release the members that may go on.
    #[inline]
    pub(crate) fn begin_release(&mut self) {
        self.round += 1;
    }

    /// The next member that may go on, if there is one, and its export, whose
    /// [`ExportThrottle::on_released`] has to be called: the member may have left. It is looked at again by
    /// [`Throttle::holds`].
    #[inline]
    pub(crate) fn released(&mut self) -> Option<(usize, u32)> {
        match self.wait_time() {
            Some(Duration::ZERO) => {
                self.waiting.pop().map(|Reverse((_, number, export))| (number, export))
            }
            Some(_) => None,
            None => {
                self.has_changed = false;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::NO_EXPORT;
    use crate::rate_limit::{Limits, SharedLimits};
    use nowait::{ByteRange, Flags, Op, Request};

    const READ: Request =
        Request { op: Op::Read, flags: Flags::NONE, range: ByteRange::new(0, 4096) };

    fn throttle(shared: &SharedLimits) -> (Throttle, ExportThrottle) {
        let mut export = ExportThrottle::default();
        assert!(export.update(shared) && !export.update(shared));
        (Throttle::default(), export)
    }

    /// Requests that each member gets in `time`, if all ask for as many as they may.
    fn requests<const N: usize>(
        shared: &SharedLimits,
        members: &mut [Member; N],
        time: Duration,
    ) -> [u64; N] {
        let ((mut throttle, mut export), mut counts) = (throttle(shared), [0; N]);
        // The buckets begin at the moment of their making.
        let begin = Instant::now();
        let mut now = begin;
        while now < begin + time {
            for (number, member) in members.iter_mut().enumerate() {
                if !throttle.holds(number, member, &mut export, now) {
                    member.quantum.count(READ);
                    export.charge(&mut member.quantum, &member.client);
                    counts[number] += 1;
                }
            }
            now += Duration::from_millis(1);
        }
        counts
    }

    #[test]
    fn each_client_has_its_rate_whatever_the_others_ask_for() {
        let shared = SharedLimits::default();
        let limit = |rate| Limits { requests: Some(TokenBucket::per_second(rate)), bytes: None };
        shared.set_of_clients(limit(200));
        let mut members = [Member::default(), Member::default()];
        let counts = requests(&shared, &mut members, Duration::from_secs(10));
        for count in counts {
            assert!((1990..=2030).contains(&count), "{counts:?}");
        }
    }

    #[test]
    fn the_members_of_one_client_share_its_rate_and_the_limit_of_the_export_holds_beside_it() {
        let shared = SharedLimits::default();
        let limit = |rate| Limits { requests: Some(TokenBucket::per_second(rate)), bytes: None };
        shared.set_of_clients(limit(100));
        let first = Member::default();
        let same = Member::of(first.client.clone());
        let [one, two, other] =
            requests(&shared, &mut [first, same, Member::default()], Duration::from_secs(10));
        assert!((990..=1110).contains(&(one + two)), "{one} and {two}");
        assert!((990..=1110).contains(&other), "{other}");
        shared.set(limit(150));
        let mut members = [Member::default(), Member::default()];
        let counts = requests(&shared, &mut members, Duration::from_secs(10));
        assert!((1490..=1530).contains(&counts.iter().sum::<u64>()), "{counts:?}");
    }

    #[test]
    fn a_client_with_one_request_gets_half_of_a_rate_beside_one_with_many() {
        let shared = SharedLimits::default();
        shared.set(Limits { requests: Some(TokenBucket::per_second(10_000)), bytes: None });
        let ((mut throttle, mut export), mut counts) = (throttle(&shared), [0; 2]);
        let mut members = [Member::default(), Member::default()];
        let begin = Instant::now();
        // Every 10 ms the tokens of 100 requests have come. One client has as many as it may do,
        // the other one has 20.
        for round in 1..=1000 {
            let now = begin + Duration::from_millis(10) * round;
            export.contenders = 2;
            let wanted = [1_000_000, 20];
            let mut left = wanted;
            for number in [0, 1, 0, 1] {
                let member = &mut members[number];
                member.quantum.begin(u64::MAX);
                if throttle.holds(number, member, &mut export, now) {
                    continue;
                }
                while left[number] > 0 && !member.quantum.is_spent() {
                    member.quantum.count(READ);
                    left[number] -= 1;
                    counts[number] += 1;
                }
                export.charge(&mut member.quantum, &member.client);
            }
        }
        assert_eq!(counts[1], 20_000, "{counts:?}");
        assert!((79_000..=81_100).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn a_member_waits_once_and_a_change_of_the_limits_lets_it_go_on() {
        let shared = SharedLimits::default();
        let day = Some(TokenBucket {
            size: 1,
            one_time_burst: 0,
            refill_time: TokenBucket::MAX_REFILL_TIME,
        });
        shared.set_of_clients(Limits { requests: day, bytes: None });
        let (mut throttle, mut export) = throttle(&shared);
        assert_eq!(throttle.released(), None);
        let mut member = Member::default();
        (0..2).for_each(|_| member.quantum.count(READ));
        export.charge(&mut member.quantum, &member.client);
        let now = Instant::now();
        assert!(throttle.holds(3, &mut member, &mut export, now));
        assert!(throttle.holds(3, &mut member, &mut export, now));
        assert_eq!((throttle.waiting.len(), export.waiting, throttle.released()), (1, 1, None));
        shared.set_of_clients(Limits::default());
        assert!(export.update(&shared));
        throttle.on_change();
        let released = Some((3, NO_EXPORT));
        assert_eq!((throttle.wait_time(), throttle.released()), (Some(Duration::ZERO), released));
        export.on_released(throttle.round);
        assert_eq!((throttle.released(), export.is_on(), export.waiting), (None, false, 0));
    }

    #[test]
    fn members_that_are_released_together_share_what_has_come_with_those_of_their_export_only() {
        let shared = SharedLimits::default();
        let day =
            TokenBucket { size: 1, one_time_burst: 0, refill_time: TokenBucket::MAX_REFILL_TIME };
        shared.set_of_clients(Limits { requests: Some(day), bytes: None });
        let (mut throttle, mut first) = throttle(&shared);
        let mut second = ExportThrottle::default();
        assert!(second.update(&shared));
        let mut members = [(); 3].map(|()| Member::default());
        for (number, member) in members.iter_mut().enumerate() {
            let export = if number < 2 { &mut first } else { &mut second };
            (0..2).for_each(|_| member.quantum.count(READ));
            export.charge(&mut member.quantum, &member.client);
            assert!(throttle.holds(number, member, export, Instant::now()));
        }
        throttle.on_change();
        throttle.begin_release();
        while let Some((number, _)) = throttle.released() {
            let export = if number < 2 { &mut first } else { &mut second };
            export.on_released(throttle.round);
        }
        assert_eq!((first.contenders, second.contenders), (2, 1));
    }
}
