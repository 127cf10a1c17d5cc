//! Tests of the order in which jobs are taken, and of the limits of devices and clients.

use super::*;

/// A job with a number, which is unique for a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    device: u64,
    client: u64,
    weight: u32,
    number: u32,
}

/// Jobs join from 100 on, up to three with numbers in a row.
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

    fn joins(run: &[Self], next: &Self) -> bool {
        let first = run[0].number;
        run.len() < 3 && first >= 100 && next.number == first + run.len() as u32
    }
}

fn job(device: u64, client: u64, number: u32) -> Job {
    Job { device, client, weight: 1, number }
}

/// The device, the client and the numbers of the next run.
fn pop(queue: &mut FairQueue<Job>) -> Option<((u64, u64), Vec<u32>)> {
    let mut run = Vec::new();
    let (index, client) = queue.pop(&mut run)?;
    let id = (run[0].device, client);
    assert_eq!(queue.devices.find(id.0), Some(index));
    assert!(run.iter().all(|job| (job.device, job.client) == id));
    Some((id, run.iter().map(|job| job.number).collect()))
}

/// A run of a client of a device has ended.
fn end(queue: &mut FairQueue<Job>, (device, client): (u64, u64)) {
    let index = queue.devices.find(device).unwrap();
    queue.ended((index, client));
}

fn popped(queue: &mut FairQueue<Job>) -> Vec<u32> {
    std::iter::from_fn(|| pop(queue)).flat_map(|(_, run)| run).collect()
}

fn queued(queue: &FairQueue<Job>) -> usize {
    queue.clients.values().map(|client| client.items.len()).sum()
}

/// The devices of the next `count` runs, each of which ends before the next one is taken.
fn turns(queue: &mut FairQueue<Job>, count: usize) -> Vec<u64> {
    let turn = |_| {
        let (id, _) = pop(queue).unwrap();
        end(queue, id);
        id.0
    };
    (0..count).map(turn).collect()
}

#[test]
fn clients_take_turns_and_the_jobs_of_each_stay_in_order() {
    let mut queue = FairQueue::new(10, 10);
    (0..4).for_each(|n| queue.push(job(0, 1, n)));
    for (client, number) in [(2, 10), (3, 20), (2, 11)] {
        queue.push(job(0, client, number));
    }
    assert_eq!(popped(&mut queue), [0, 10, 20, 1, 11, 2, 3]);
    assert_eq!((queue.ready(), queued(&queue)), (0, 0));
}

#[test]
fn devices_take_turns_however_many_clients_and_jobs_each_has() {
    let mut queue = FairQueue::new(100, 100);
    for n in 0..4 {
        // Two clients of the first device, and one of the second.
        queue.push(job(1, 1, n));
        queue.push(job(1, 2, 10 + n));
        queue.push(job(2, 1, 20 + n));
    }
    let order = popped(&mut queue);
    assert_eq!(order, [0, 20, 10, 21, 1, 22, 11, 23, 2, 12, 3, 13]);
}

#[test]
fn a_device_that_comes_later_neither_waits_for_the_past_nor_gets_it_back() {
    let mut queue = FairQueue::new(100, 100);
    (0..50).for_each(|n| queue.push(job(1, 1, n)));
    assert_eq!(turns(&mut queue, 20), [1; 20]);
    (50..60).for_each(|n| queue.push(job(2, 1, n)));
    assert_eq!(turns(&mut queue, 6), [2, 1, 2, 1, 2, 1]);
}

#[test]
fn devices_have_turns_by_their_weights_and_evenly_spread() {
    for (weights, shares) in [
        ([1, 2, 5], [100, 200, 500]),
        ([100, 200, 500], [100, 200, 500]),
        ([0, 1, 1], [100, 100, 100]), // 0 is taken as 1
        ([100, 5000, 10_000], [10, 500, 1000]),
        ([100, 5000, 50_000], [10, 500, 1000]), // more than 10000 is taken as 10000
    ] {
        let mut queue = FairQueue::new(100, 100);
        for device in 0..3 {
            (0..2000).for_each(|number| {
                let weight = weights[device as usize];
                queue.push(Job { device, client: 1, weight, number: number % 100 });
            });
        }
        let order = turns(&mut queue, shares.iter().sum());
        let counts = [0, 1, 2].map(|id| order.iter().filter(|&&device| device == id).count());
        for (count, share) in counts.into_iter().zip(shares) {
            assert!(count.abs_diff(share) <= 1, "{weights:?}: {counts:?}");
        }
        // The lightest one waits for its part of the others' turns, not for all of them.
        let first = order.iter().position(|&device| device == 0).unwrap();
        assert!(first < 3, "{weights:?}: {first}");
        let longest = order.split(|&device| device == 0).map(<[u64]>::len).max().unwrap();
        assert!(longest <= order.len() / shares[0] + 2, "{weights:?}: {longest}");
    }
}

#[test]
fn a_device_of_one_job_at_a_time_has_its_share_only() {
    let mut queue = FairQueue::new(100, 100);
    for number in 0..1000 {
        queue.push(Job { device: 1, client: 1, weight: 10, number: number % 100 });
    }
    let light = Job { device: 2, client: 1, weight: 1, number: 0 };
    queue.push(light);
    let mut count = 0;
    for _ in 0..110 {
        // The queue has forgotten the jobs of the light device when it pushes the next one.
        if turns(&mut queue, 1) == [2] {
            count += 1;
            queue.push(light);
        }
    }
    assert!((9..=11).contains(&count), "{count}");
}

#[test]
fn the_weight_of_the_last_job_counts() {
    let mut queue = FairQueue::new(100, 100);
    for number in 0..40 {
        queue.push(job(1, 1, number));
        queue.push(Job { weight: if number < 39 { 1 } else { 3 }, ..job(2, 1, number) });
    }
    let order = turns(&mut queue, 40);
    assert_eq!(order.iter().filter(|&&device| device == 2).count(), 30);
}

#[test]
fn a_client_at_its_limit_of_running_jobs_continues_when_one_ends() {
    let mut queue = FairQueue::new(10, 2);
    (0..5).for_each(|n| queue.push(job(0, 1, n)));
    assert_eq!(popped(&mut queue), [0, 1]);
    queue.push(job(0, 2, 10));
    assert_eq!(popped(&mut queue), [10]);
    end(&mut queue, (0, 1));
    assert_eq!((popped(&mut queue), queue.ready(), queued(&queue)), (vec![2], 0, 2));
    end(&mut queue, (0, 2));
    (0..2).for_each(|_| end(&mut queue, (0, 1)));
    assert_eq!(popped(&mut queue), [3, 4]);
}

#[test]
fn a_device_at_its_limit_of_running_jobs_continues_when_one_ends() {
    let mut queue = FairQueue::new(2, 2);
    (0..5).for_each(|n| queue.push(job(1, u64::from(n), n)));
    assert_eq!((queue.ready(), popped(&mut queue), queue.ready()), (5, vec![0, 1], 0));
    queue.push(job(2, 1, 10));
    assert_eq!((queue.ready(), popped(&mut queue)), (1, vec![10]));
    end(&mut queue, (1, 1));
    assert_eq!((queue.ready(), popped(&mut queue), queued(&queue)), (3, vec![2], 2));
    end(&mut queue, (1, 0));
    end(&mut queue, (1, 2));
    assert_eq!(popped(&mut queue), [3, 4]);
}

#[test]
fn a_changed_limit_of_devices_holds_for_all_that_have_jobs() {
    let mut queue = FairQueue::new(3, 3);
    for n in 0..6 {
        (1..=3).for_each(|device| queue.push(job(device, 1, n)));
    }
    assert_eq!(popped(&mut queue), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    queue.set_device_limit(1);
    (1..=3).for_each(|device| end(&mut queue, (device, 1)));
    assert_eq!((queue.ready(), popped(&mut queue)), (0, vec![]));
    (1..=3).for_each(|device| assert_eq!(queue.running(device), 2));
    queue.set_device_limit(0); // the least is 1
    (1..=2).for_each(|_| end(&mut queue, (2, 1)));
    assert_eq!((queue.ready(), popped(&mut queue)), (3, vec![3]));
    queue.set_device_limit(3);
    assert_eq!(queue.ready(), 3 + 2 + 3);
    let mut rest = popped(&mut queue);
    rest.sort_unstable();
    assert_eq!((rest, queued(&queue)), (vec![3, 3, 4, 5], 4));
}

#[test]
fn jobs_that_join_are_taken_together_and_count_as_one_that_runs() {
    for (device_limit, client_limit) in [(1, 10), (10, 1)] {
        let mut queue = FairQueue::new(device_limit, client_limit);
        [7, 100, 101, 102, 103, 200].into_iter().for_each(|number| queue.push(job(3, 1, number)));
        for run in [vec![7], vec![100, 101, 102], vec![103], vec![200]] {
            assert_eq!((pop(&mut queue), pop(&mut queue)), (Some(((3, 1), run)), None));
            end(&mut queue, (3, 1));
        }
        assert_eq!(queued(&queue), 0);
    }
}

#[test]
fn jobs_of_clients_with_one_number_on_two_devices_do_not_join() {
    let mut queue = FairQueue::new(10, 10);
    [job(1, 1, 100), job(2, 1, 101)].into_iter().for_each(|job| queue.push(job));
    assert_eq!(pop(&mut queue), Some(((1, 1), vec![100])));
    assert_eq!(pop(&mut queue), Some(((2, 1), vec![101])));
}

#[test]
fn the_queued_jobs_can_be_taken_in_order_for_each_client() {
    let mut queue = FairQueue::new(2, 2);
    for n in 0..4 {
        queue.push(job(1, 1, n));
        queue.push(job(2, 1, 20 + n));
    }
    assert_eq!(pop(&mut queue), Some(((1, 1), vec![0])));
    let taken = queue.drain();
    let of = |device| taken.iter().filter(move |job| job.device == device).map(|job| job.number);
    assert!(of(1).eq([1, 2, 3]) && of(2).eq(20..24) && taken.len() == 7);
    assert_eq!((queue.ready(), queue.running(1)), (0, 1));
    // A device goes on as any other.
    queue.push(job(1, 2, 30));
    assert_eq!(popped(&mut queue), [30]);
    for id in [(1, 1), (1, 2)] {
        end(&mut queue, id);
    }
    assert!(queue.drain().is_empty() && queue.clients.is_empty() && queue.devices.is_empty());
}

#[test]
fn clients_and_devices_without_jobs_are_removed() {
    let mut queue = FairQueue::new(2, 2);
    for n in 0..1000 {
        queue.push(job(n / 2, n, 0));
        assert_eq!(pop(&mut queue), Some(((n / 2, n), vec![0])));
        end(&mut queue, (n / 2, n));
        assert!(queue.clients.is_empty() && queue.devices.is_empty());
    }
    assert_eq!(queue.spare.len(), 1);
    // Also those that had their turns while others had jobs.
    (0..100).for_each(|device| (0..3).for_each(|n| queue.push(job(device, 1, n))));
    turns(&mut queue, 300);
    assert!(queue.clients.is_empty() && queue.devices.is_empty());
    assert_eq!(queue.spare.len(), SPARE);
}

/// Pushes, pops and ends in an order that a fixed generator makes.
#[test]
fn at_random_no_job_is_lost_and_the_limits_hold() {
    let mut random = 1u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    let (device_limit, client_limit) = (3, 2);
    let mut queue = FairQueue::new(device_limit, client_limit);
    let (mut running, mut pushed, mut taken) = (Vec::new(), 0, 0);
    let mut last = HashMap::new();
    for step in 0..50_000 {
        match next(5) {
            0 | 1 if step < 40_000 => {
                let (device, client) = (next(20), next(4));
                let weight = 1 + next(7) as u32;
                // Numbers that are 256 apart do not join.
                pushed += 1;
                queue.push(Job { weight, ..job(device, client, pushed << 8) });
            }
            2 | 3 => {
                let ready = queue.ready();
                let popped = pop(&mut queue);
                assert_eq!(popped.is_some(), ready > 0);
                let Some((id, run)) = popped else { continue };
                taken += run.len();
                assert!(run[0] > last.insert(id, run[0]).unwrap_or(0), "order of {id:?}");
                running.push(id);
                let of = |device| running.iter().filter(|id| id.0 == device).count();
                assert!(of(id.0) <= device_limit);
                assert!(running.iter().filter(|&&other| other == id).count() <= client_limit);
            }
            _ if !running.is_empty() => {
                end(&mut queue, running.swap_remove(next(running.len() as u64) as usize));
            }
            _ => {}
        }
    }
    running.drain(..).for_each(|id| end(&mut queue, id));
    while let Some((id, run)) = pop(&mut queue) {
        taken += run.len();
        end(&mut queue, id);
    }
    assert_eq!(taken, pushed as usize);
    assert!(queue.clients.is_empty() && queue.devices.is_empty());
}

/// Addresses of the memory of all lists of jobs and of clients.
fn memory(queue: &FairQueue<Job>) -> Vec<usize> {
    let lists = queue.clients.values().map(|client| &client.items).chain(&queue.spare);
    let mut lists: Vec<usize> = lists.map(|list| list.as_slices().0.as_ptr() as usize).collect();
    lists.extend(queue.devices.lists().map(|list| list.as_slices().0.as_ptr() as usize));
    lists.sort_unstable();
    lists
}

#[test]
fn in_steady_state_no_list_is_allocated() {
    let mut queue = FairQueue::new(2, 2);
    // Each client and device is forgotten after each of its jobs.
    let round = |queue: &mut FairQueue<Job>, first: u64| {
        (0..40).for_each(|n| queue.push(job(first + n % 20, n, 0)));
        while let Some((id, _)) = pop(queue) {
            end(queue, id);
        }
        assert!(queue.clients.is_empty() && queue.devices.is_empty());
        memory(queue)
    };
    let warm = (0..100).map(|first| round(&mut queue, first)).last();
    assert_eq!(warm.as_ref().map(Vec::len), Some(40 + 20));
    for first in 0..1000 {
        assert_eq!(Some(round(&mut queue, first)), warm);
    }
}

#[test]
fn a_job_that_is_removed_is_not_taken_and_its_client_and_device_go_on() {
    let mut queue = FairQueue::new(usize::MAX, usize::MAX);
    for number in [1, 2, 3] {
        queue.push(job(1, 7, number));
    }
    queue.push(job(1, 8, 4));
    queue.push(job(2, 7, 5));
    let mut remove = |device, client, number| {
        let removed = queue.remove(device, client, |job| job.number == number);
        removed.map(|job| job.number)
    };
    assert_eq!((remove(1, 7, 2), remove(1, 7, 2)), (Some(2), None));
    assert_eq!((remove(1, 9, 1), remove(3, 7, 1)), (None, None), "it is another's");
    assert_eq!((remove(1, 8, 4), remove(2, 7, 5)), (Some(4), Some(5)), "the last ones");
    assert_eq!((queue.ready(), queued(&queue)), (2, 2));
    // One whose client has a run that has not ended.
    let (id, run) = pop(&mut queue).unwrap();
    assert_eq!((run, queue.remove(1, 7, |_| true).map(|job| job.number)), (vec![1], Some(3)));
    end(&mut queue, id);
    queue.push(job(1, 7, 6));
    assert_eq!(popped(&mut queue), [6]);
    end(&mut queue, (1, 7));
    assert!(queue.devices.is_empty());
}
