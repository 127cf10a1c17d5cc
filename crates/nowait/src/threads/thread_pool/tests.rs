//! Tests of pools for one device and for many, among them devices whose jobs hang.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

/// A bound of waits, far beyond what they take.
const PATIENCE: Duration = Duration::from_secs(60);
/// A time that does not pass during a test.
const NEVER: Duration = Duration::from_secs(3600);

impl WorkItem for usize {
    fn client(&self) -> u64 {
        *self as u64 % 5
    }
}

/// Runs jobs one by one.
fn each<J>(run: impl Fn(J) + Send + Sync) -> impl Fn(&mut Vec<J>) + Send + Sync {
    move |jobs| jobs.drain(..).for_each(&run)
}

/// A job of a device: a number, and whether it waits until the gate opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    device: u64,
    client: u64,
    weight: u32,
    number: usize,
    hangs: bool,
}

impl WorkItem for Job {
    fn device(&self) -> u64 {
        self.device
    }

    fn client(&self) -> u64 {
        self.client
    }

    fn weight(&self) -> u32 {
        self.weight
    }
}

/// A job that returns, of the first client of `device`.
fn job(device: u64, number: usize) -> Job {
    Job { device, client: 0, weight: 1, number, hangs: false }
}

/// `count` jobs of `device` that wait for the gate, each of a client of its own.
fn hanging(device: u64, count: usize) -> impl Iterator<Item = Job> {
    (0..count).map(move |n| Job { client: n as u64, hangs: true, ..job(device, n) })
}

/// Holds the jobs that hang.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        drop(self.opened.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// Opens the gate when it is dropped, so that a failed test ends, too.
struct GateKeeper(Arc<Gate>);

impl Drop for GateKeeper {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// A pool whose jobs tell when they begin and when they have ended.
struct Tested {
    gate: GateKeeper,
    begun: Receiver<Job>,
    ended: Receiver<Job>,
    pool: ThreadPool<Job>,
}

impl Tested {
    fn new(bounds: Bounds) -> Self {
        let (gate, (begin, begun), (end, ended)) = (Arc::<Gate>::default(), channel(), channel());
        let gate2 = gate.clone();
        let run = each(move |job: Job| {
            // Without a receiver the test is over.
            let _ = begin.send(job);
            if job.hangs {
                gate2.pass();
            }
            let _ = end.send(job);
        });
        Self { gate: GateKeeper(gate), begun, ended, pool: ThreadPool::with(bounds, run) }
    }

    /// The numbers of the next jobs that end.
    fn ended<const N: usize>(&self) -> [usize; N] {
        [(); N].map(|()| self.ended.recv_timeout(PATIENCE).unwrap().number)
    }

    /// The numbers of the next jobs that begin, sorted.
    fn begun<const N: usize>(&self) -> [usize; N] {
        let mut begun = [(); N].map(|()| self.begun.recv_timeout(PATIENCE).unwrap().number);
        begun.sort_unstable();
        begun
    }

    /// Runs of jobs of `device` that have begun and not ended.
    fn running(&self, device: u64) -> usize {
        self.lock().queue.running(device)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState<Job>> {
        self.pool.shared.lock()
    }

    fn wait_until(&self, done: impl Fn(&PoolState<Job>) -> bool) {
        wait_until(&self.pool, done);
    }
}

fn wait_until<J: WorkItem>(pool: &ThreadPool<J>, done: impl Fn(&PoolState<J>) -> bool) {
    for _ in 0..PATIENCE.as_millis() {
        if done(&pool.shared.lock()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let state = pool.shared.lock();
    let (queued, stuck) = (state.queue.ready(), state.stuck);
    panic!("waited too long: {} threads, {queued} jobs ready, {stuck} stuck", state.alive);
}

/// A pool for devices whose jobs are stuck soon; its threads do not end by themselves.
fn soon_stuck(limit: u32) -> Bounds {
    let stuck = Some(Duration::from_millis(2));
    Bounds { stuck, idle: NEVER, ..Bounds::of_devices(limit) }
}

/// A pool for devices whose jobs are not stuck during the test.
fn never_stuck(limit: u32) -> Bounds {
    Bounds { stuck: Some(NEVER), idle: NEVER, ..Bounds::of_devices(limit) }
}

#[test]
fn idle_threads_end_and_start_again_for_new_jobs() {
    for bounds in [Bounds::of_one_device(4), Bounds::of_devices(4)] {
        let ran = Arc::new(AtomicUsize::new(0));
        let ran2 = ran.clone();
        let run = each(move |_: usize| {
            ran2.fetch_add(1, Ordering::SeqCst);
        });
        let pool = ThreadPool::with(Bounds { idle: Duration::from_millis(1), ..bounds }, run);
        for round in 1..=3 {
            pool.push(0..10);
            wait_until(&pool, |state| state.alive == 0 && state.queue.ready() == 0);
            wait_until(&pool, |state| state.watcher == Watcher::None);
            assert_eq!(ran.load(Ordering::SeqCst), round * 10);
            assert!(pool.shared.lock().threads.len() <= 2 * 4 + 1);
        }
    }
}

#[test]
fn a_thread_survives_a_job_that_panics() {
    for bounds in [Bounds::of_one_device(1), never_stuck(1)] {
        let (sender, ran) = channel();
        let run = each(move |job: usize| {
            assert!(job != 1, "on purpose");
            sender.send((job, std::thread::current().id())).unwrap();
        });
        let pool = ThreadPool::with(bounds, run);
        pool.push(0..3);
        let (first, second) = (ran.recv().unwrap(), ran.recv().unwrap());
        assert_eq!((first.0, second.0, first.1), (0, 2, second.1));
        wait_until(&pool, |state| state.idle == 1);
        assert_eq!(pool.shared.lock().queue.running(0), 0);
    }
}

/// Four threads are idle when jobs come: one is woken, and no other before it has run.
#[test]
fn idle_threads_are_woken_one_after_the_other_and_jobs_that_hang_have_one_each() {
    let tested = Tested::new(never_stuck(8));
    tested.pool.push((0..4).flat_map(|device| hanging(device, 1)));
    tested.wait_until(|state| (0..4).all(|device| state.queue.running(device) == 1));
    tested.gate.0.open();
    tested.wait_until(|state| state.idle == 4 && !state.waking);
    {
        let mut state = tested.lock();
        (0..4).for_each(|number| state.queue.push(job(4, number)));
        assert_eq!([(); 3].map(|()| state.wakes_next()), [true, false, false]);
    }
    tested.pool.shared.ready.notify_one();
    tested.ended::<8>();
    tested.wait_until(|state| state.idle == 4 && !state.waking);
}

/// One client has more slow jobs than there are threads.
#[test]
fn a_client_with_slow_jobs_leaves_threads_to_other_clients() {
    let tested = Tested::new(Bounds::of_one_device(4));
    tested.pool.push((0..20).map(|n| Job { client: 7, ..hanging(0, 20).nth(n).unwrap() }));
    tested.begun::<3>();
    tested.pool.push([job(0, 101), Job { client: 1, ..job(0, 102) }]);
    // One thread runs these jobs.
    assert_eq!(tested.ended(), [101, 102]);
    tested.wait_until(|state| state.idle == 1);
    assert_eq!(tested.running(0), 3);
    tested.gate.0.open();
    assert_eq!(tested.ended.iter().take(20).count(), 20);
}

#[test]
fn c40_every_job_runs_once_on_no_more_threads_than_the_limit() {
    let (ran, now, peak) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
    );
    let (ran2, now2, peak2) = (ran.clone(), now.clone(), peak.clone());
    let run = each(move |job: usize| {
        peak2.fetch_max(now2.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::yield_now();
        ran2.fetch_add(job, Ordering::SeqCst);
        now2.fetch_sub(1, Ordering::SeqCst);
    });
    let pool = ThreadPool::with(Bounds::of_one_device(3), run);
    for n in 0..100 {
        pool.push([n, n]);
    }
    drop(pool);
    assert_eq!(ran.load(Ordering::SeqCst), 99 * 100);
    assert!(peak.load(Ordering::SeqCst) <= 3 && now.load(Ordering::SeqCst) == 0);
}

#[test]
fn the_limit_of_threads_is_1_to_1024_and_a_device_leaves_a_quarter_of_them() {
    let sizes = |limit| {
        let Bounds { threads, device, .. } = Bounds::of_devices(limit);
        (threads, device)
    };
    let one = |limit| {
        let Bounds { threads, device, stuck, .. } = Bounds::of_one_device(limit);
        (threads, device, stuck)
    };
    assert_eq!([0, 1, 2, 3, 4, 5].map(sizes), [(1, 1), (1, 1), (2, 1), (3, 2), (4, 3), (5, 3)]);
    assert_eq!([16, 1024, 1025, u32::MAX].map(|n| sizes(n).1), [12, 768, 768, 768]);
    assert_eq!([0, 1024, 1025].map(one), [(1, 1, None), (1024, 1024, None), (1024, 1024, None)]);
}

#[test]
fn a_device_alone_uses_three_quarters_of_the_threads_and_others_have_the_rest() {
    let tested = Tested::new(never_stuck(8));
    tested.pool.push(hanging(1, 7));
    assert_eq!(tested.begun(), [0, 1, 2, 3, 4, 5]);
    tested.pool.push(hanging(2, 3));
    assert_eq!(tested.begun(), [0, 1]);
    tested.wait_until(|state| state.watcher == Watcher::Watching);
    let state = tested.lock();
    assert_eq!((state.alive, state.queue.running(1), state.queue.running(2)), (8, 6, 2));
    assert_eq!((state.queue.ready(), state.counted()), (1, 8));
    drop(state);
    tested.gate.0.open();
    tested.ended::<10>();
}

#[test]
fn a_pool_for_one_device_starts_no_thread_in_place_of_a_stuck_one() {
    let tested = Tested::new(Bounds::of_one_device(1));
    tested.pool.push(hanging(0, 1));
    assert_eq!(tested.begun(), [0]);
    tested.pool.push([Job { client: 1, ..job(0, 5) }]);
    let state = tested.lock();
    assert_eq!((state.watcher, state.alive), (Watcher::None, 1));
    drop(state);
    tested.gate.0.open();
    assert_eq!(tested.ended(), [0, 5]);
}

/// Devices that hang one after the other: each has time to take all that it may.
#[test]
fn devices_that_hang_one_after_the_other_take_no_thread_from_another() {
    for (limit, devices) in [(1, 1), (1, 8), (1, 64), (2, 8), (5, 8), (16, 1), (16, 8), (16, 64)] {
        let tested = Tested::new(soon_stuck(limit));
        for device in 1..=devices {
            tested.pool.push(hanging(device, 20));
            for number in [1000, 1001, 1002] {
                tested.pool.push([job(0, number)]);
                assert_eq!(tested.ended(), [number], "{device} devices of {devices}, {limit}");
            }
        }
        assert!(tested.lock().alive <= limit as usize + MAX_STUCK);
        tested.gate.0.open();
        let hung = tested.ended.iter().take(20 * devices as usize).filter(|job| job.hangs);
        assert_eq!(hung.count(), 20 * devices as usize);
        // The threads that were added end without being idle for long.
        tested.wait_until(|state| state.alive <= limit as usize && state.stuck == 0);
        assert_eq!(tested.lock().queue.ready(), 0);
    }
}

#[test]
fn devices_that_hang_simultaneously_take_no_thread_from_another() {
    for (limit, devices) in [(1, 8), (4, 1), (4, 64), (16, 64), (64, 8), (64, 64), (1024, 64)] {
        let tested = Tested::new(soon_stuck(limit));
        let jobs: Vec<Job> = (1..=devices).flat_map(|device| hanging(device, 20)).collect();
        tested.pool.push(jobs);
        for number in 1000..1010 {
            tested.pool.push([job(0, number)]);
            assert_eq!(tested.ended(), [number], "{devices} devices, {limit}");
        }
        assert!(tested.lock().alive <= limit as usize + MAX_STUCK);
        tested.gate.0.open();
        assert_eq!(tested.ended.iter().take(20 * devices as usize).count(), 20 * devices as usize);
        tested.wait_until(|state| state.alive <= limit as usize && state.stuck == 0);
    }
}

/// A job that waits when the last thread hangs is helped though no other job comes.
#[test]
fn time_alone_gives_a_waiting_job_a_thread() {
    let tested = Tested::new(soon_stuck(2));
    tested.pool.push(hanging(1, 1));
    tested.pool.push(hanging(2, 1));
    tested.begun::<2>();
    tested.pool.push([job(3, 30), job(4, 40)]);
    let mut ended = tested.ended::<2>();
    ended.sort_unstable();
    assert_eq!(ended, [30, 40]);
    assert!(tested.lock().stuck >= 1);
    // The threads that were added end when the stuck jobs return.
    tested.gate.0.open();
    tested.ended::<2>();
    tested.wait_until(|state| state.alive <= 2 && state.stuck == 0);
}

#[test]
fn stuck_threads_are_bounded_and_jobs_beyond_wait_for_one_that_returns() {
    let limit = 3;
    let tested = Tested::new(soon_stuck(limit));
    let most = limit as usize + MAX_STUCK;
    for device in 1..=700 {
        tested.pool.push(hanging(device, 2));
    }
    tested.wait_until(|state| state.alive == most && state.stuck == most);
    tested.pool.push([job(0, 1000)]);
    // The watcher goes on, and finds nothing.
    let tick = tested.lock().tick;
    tested.wait_until(|state| state.tick > tick + 3);
    assert_eq!(tested.lock().alive, most);
    assert_eq!(tested.running(0), 0);
    assert!(tested.ended.try_recv().is_err());
    tested.gate.0.open();
    assert_eq!(tested.ended.iter().take(1401).count(), 1401);
    tested.wait_until(|state| state.alive <= limit as usize);
}

#[test]
fn the_queued_jobs_of_a_device_that_hung_run_when_it_recovers() {
    let tested = Tested::new(soon_stuck(1));
    tested.pool.push(hanging(1, 1));
    tested.pool.push((1..50).map(|number| job(1, number)));
    tested.pool.push([job(2, 100)]);
    assert_eq!(tested.ended(), [100]);
    assert_eq!(tested.running(1), 1);
    assert_eq!(tested.lock().queue.ready(), 0);
    tested.gate.0.open();
    // The job that hung, and then one client's jobs, in their order.
    let numbers: [usize; 50] = tested.ended();
    assert_eq!(numbers[0], 0);
    assert!(numbers.is_sorted(), "{numbers:?}");
}

/// One thread, which a first job holds until all jobs are queued.
fn order_of<const N: usize>(jobs: impl IntoIterator<Item = Job>) -> [Job; N] {
    let tested = Tested::new(never_stuck(1));
    tested.pool.push(hanging(u64::MAX, 1));
    assert_eq!(tested.begun(), [0]);
    tested.pool.push(jobs);
    tested.gate.0.open();
    assert_eq!(tested.ended(), [0]);
    [(); N].map(|()| tested.ended.recv_timeout(PATIENCE).unwrap())
}

#[test]
fn devices_share_a_thread_by_their_weights() {
    let jobs = (0..60).map(|n| Job { weight: 1 + n as u32 % 3, ..job(n as u64 % 3, n) });
    let order: [Job; 30] = order_of(jobs);
    let count = |device| order.iter().filter(|job| job.device == device).count();
    assert_eq!([count(0), count(1), count(2)], [5, 10, 15]);
    for device in 0..3 {
        let of = order.iter().filter(|job| job.device == device).map(|job| job.number);
        assert!(of.is_sorted());
    }
}

#[test]
fn the_clients_of_a_device_share_its_turns() {
    // Two clients of device 1, and one of device 2.
    let jobs = (0..30).map(|n| Job { client: n as u64 % 2, ..job(1 + n as u64 % 3 / 2, n) });
    let order: [Job; 20] = order_of(jobs);
    let count = |device, client| {
        order.iter().filter(|job| (job.device, job.client) == (device, client)).count()
    };
    assert_eq!(count(1, 0) + count(1, 1), 10);
    assert_eq!((count(1, 0), count(1, 1)), (5, 5));
}

#[test]
fn jobs_run_on_the_caller_if_no_thread_starts() {
    let ran = Arc::new(Mutex::new(Vec::new()));
    let ran2 = ran.clone();
    let run = each(move |job: Job| {
        ran2.lock().unwrap().push((job.number, std::thread::current().id()));
    });
    let pool = ThreadPool::with(soon_stuck(4), run);
    pool.shared.lock().refuse = true;
    pool.push([job(1, 0), job(2, 1), job(1, 2)]);
    let mut here = std::mem::take(&mut *ran.lock().unwrap());
    here.sort_by_key(|&(number, _)| number);
    let me = std::thread::current().id();
    assert_eq!(here, [(0, me), (1, me), (2, me)]);
    assert_eq!(pool.shared.lock().alive, 0);
    pool.shared.lock().refuse = false;
    pool.push([job(1, 3)]);
    drop(pool);
    let there = ran.lock().unwrap();
    assert!(there.len() == 1 && there[0].0 == 3 && there[0].1 != me);
}

/// The watcher runs, and then the system starts no thread for a while.
#[test]
fn a_thread_that_was_refused_starts_later_without_another_job() {
    let tested = Tested::new(soon_stuck(1));
    tested.pool.push(hanging(1, 1));
    tested.pool.push([job(2, 20)]);
    assert_eq!((tested.begun(), tested.ended()), ([0, 20], [20]));
    tested.pool.push(hanging(3, 1));
    assert_eq!(tested.begun(), [0]);
    tested.lock().refuse = true;
    tested.pool.push([job(2, 21)]);
    tested.wait_until(|state| state.refused);
    let tick = tested.lock().tick;
    tested.wait_until(|state| state.tick > tick + 3);
    tested.lock().refuse = false;
    assert_eq!(tested.ended(), [21]);
}

#[test]
fn dropping_a_pool_runs_the_jobs_of_each_device() {
    for limit in [1, 2, 16] {
        let (sender, ran) = channel();
        let run = each(move |job: Job| sender.send(job.number).unwrap());
        let pool = ThreadPool::of_devices(limit, run);
        pool.push((0..1000).map(|n| Job { client: n as u64 % 3, ..job(n as u64 % 10, n) }));
        drop(pool);
        let mut numbers: Vec<usize> = ran.iter().collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000));
    }
}

/// The jobs of other devices run while the drop waits for one that hangs.
#[test]
fn a_drop_that_waits_for_a_stuck_job_runs_the_others_meanwhile() {
    let tested = Tested::new(soon_stuck(1));
    tested.pool.push(hanging(1, 1));
    assert_eq!(tested.begun(), [0]);
    tested.pool.push([job(2, 20), job(3, 30)]);
    let Tested { gate, ended, pool, .. } = tested;
    let dropped = std::thread::spawn(move || drop(pool));
    let mut numbers = [(); 2].map(|()| ended.recv_timeout(PATIENCE).unwrap().number);
    numbers.sort_unstable();
    assert_eq!((numbers, dropped.is_finished()), ([20, 30], false));
    gate.0.open();
    assert_eq!(ended.recv_timeout(PATIENCE).unwrap().number, 0);
    dropped.join().unwrap();
}

/// Short jobs and some that are stuck for a while, with threads and a watcher that end soon.
#[test]
fn no_job_is_forgotten_while_threads_are_stuck_and_end_and_start() {
    const JOBS: usize = 600;
    let (sender, ran) = channel();
    let run = each(move |job: Job| {
        if job.hangs {
            std::thread::sleep(Duration::from_millis(1 + job.number as u64 % 5));
        }
        sender.send(job.number).unwrap();
    });
    let bounds = Bounds { idle: Duration::from_micros(500), ..soon_stuck(3) };
    let pool = ThreadPool::with(bounds, run);
    std::thread::scope(|scope| {
        for pusher in 0..2 {
            let pool = &pool;
            scope.spawn(move || {
                for n in (pusher * JOBS..(pusher + 1) * JOBS).step_by(2) {
                    let of = |n: usize| Job {
                        client: n as u64 % 2,
                        weight: 1 + n as u32 % 9,
                        hangs: n % 7 < 2,
                        ..job(n as u64 % 6, n)
                    };
                    pool.push([of(n), of(n + 1)]);
                    if n % 50 == 0 {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
            });
        }
    });
    // No push and no drop helps the jobs that wait now.
    let take = |_| ran.recv_timeout(PATIENCE).unwrap();
    let mut numbers: Vec<usize> = (0..2 * JOBS).map(take).collect();
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..2 * JOBS));
    wait_until(&pool, |state| state.alive == 0 && state.watcher == Watcher::None);
}

#[test]
fn of_the_default_number_of_threads_a_device_and_a_client_have_the_documented_shares() {
    let bounds = Bounds::of_devices(crate::WorkerPool::DEFAULT_LIMIT);
    assert_eq!((bounds.threads, bounds.device, bounds.client()), (32, 24, 18));
}
