//! The files of one engine: the requests of each that wait for a slot, and which file has the next
//! turn.
//!
//! Invariant: a file with waiting requests is in the list of turns once. A file begins a request only
//! while it has fewer than `SHARE` times the free slots in the engine; so files whose disks hang, up to
//! a third as many as there are slots, leave some to the others.

use std::collections::VecDeque;

use slab::Slab;

/// How many times the free slots a file may have.
const SHARE: usize = 3;

/// A file, with the state `F` that its user keeps.
struct FileTurn<T, F> {
    state: F,
    waiting: VecDeque<T>,
    /// Requests that have begun and not ended.
    in_engine: usize,
}

impl<T, F> FileTurn<T, F> {
    fn may_begin(&self, free: usize) -> bool {
        self.in_engine < free.saturating_mul(SHARE)
    }
}

/// A request that has its turn.
pub(crate) struct Turn<T> {
    pub(crate) file: u32,
    pub(crate) request: T,
    /// It has begun. Otherwise it finds no slot and may not wait.
    pub(crate) has_begun: bool,
}

/// The files of one engine by number, with their waiting requests.
pub(crate) struct FileTurns<T, F> {
    files: Slab<FileTurn<T, F>>,
    /// Files with waiting requests, the next one first.
    turns: VecDeque<u32>,
}

impl<T, F> FileTurns<T, F> {
    pub(crate) const fn new() -> Self {
        Self { files: Slab::new(), turns: VecDeque::new() }
    }

    /// Adds a file, and returns its number.
    pub(crate) fn add(&mut self, state: F) -> u32 {
        self.files.insert(FileTurn { state, waiting: VecDeque::new(), in_engine: 0 }) as u32
    }

    /// Removes a file that has no request.
    pub(crate) fn remove(&mut self, file: u32) -> Option<F> {
        self.turns.retain(|&other| other != file);
        self.files.try_remove(file as usize).map(|file| file.state)
    }

    pub(crate) fn state(&mut self, file: u32) -> Option<&mut F> {
        self.files.get_mut(file as usize).map(|file| &mut file.state)
    }

    /// Requests of a file that wait.
    pub(crate) fn waiting(&self, file: u32) -> usize {
        self.files.get(file as usize).map_or(0, |file| file.waiting.len())
    }

    /// Requests of a file that have begun and not ended.
    pub(crate) fn in_engine(&self, file: u32) -> usize {
        self.files.get(file as usize).map_or(0, |file| file.in_engine)
    }

    /// Appends a request to those of its file that wait.
    pub(crate) fn push(&mut self, file: u32, request: T) {
        let Some(entry) = self.files.get_mut(file as usize) else { return };
        if entry.waiting.is_empty() {
            self.turns.push_back(file);
        }
        entry.waiting.push_back(request);
    }

    /// Begins a request of a file without waiting. False if the file may have no further slot of the
    /// `free` ones.
    pub(crate) fn begin(&mut self, file: u32, free: usize) -> bool {
        let Some(entry) = self.files.get_mut(file as usize) else { return false };
        let may_begin = entry.may_begin(free);
        entry.in_engine += usize::from(may_begin);
        may_begin
    }

    /// The next request that may have one of the `free` slots, or that is not to wait.
    pub(crate) fn next(
        &mut self,
        free: usize,
        is_not_to_wait: impl Fn(&T) -> bool,
    ) -> Option<Turn<T>> {
        for _ in 0..self.turns.len() {
            let number = self.turns.pop_front()?;
            let Some(file) = self.files.get_mut(number as usize) else { continue };
            let has_begun = file.may_begin(free);
            let goes = has_begun || file.waiting.front().is_some_and(&is_not_to_wait);
            let request = if goes { file.waiting.pop_front() } else { None };
            if !file.waiting.is_empty() {
                self.turns.push_back(number);
            }
            if let Some(request) = request {
                file.in_engine += usize::from(has_begun);
                return Some(Turn { file: number, request, has_begun });
            }
        }
        None
    }

    /// Puts a request that the engine did not take back to the front, before all others.
    pub(crate) fn put_back(&mut self, file: u32, request: T) {
        let Some(entry) = self.files.get_mut(file as usize) else { return };
        entry.in_engine -= 1;
        entry.waiting.push_front(request);
        self.turns.retain(|&other| other != file);
        self.turns.push_front(file);
    }

    /// A request of a file that had begun has ended.
    pub(crate) fn ended(&mut self, file: u32) {
        if let Some(file) = self.files.get_mut(file as usize) {
            file.in_engine -= 1;
        }
    }

    /// Takes waiting requests of a file for which `keep` is false out of the list.
    pub(crate) fn retain(&mut self, file: u32, keep: impl FnMut(&T) -> bool) {
        let Some(entry) = self.files.get_mut(file as usize) else { return };
        entry.waiting.retain(keep);
        if entry.waiting.is_empty() {
            self.turns.retain(|&other| other != file);
        }
    }

    /// Takes all waiting requests.
    pub(crate) fn take_all(&mut self) -> Vec<T> {
        self.turns.clear();
        self.files.iter_mut().flat_map(|(_, file)| file.waiting.drain(..)).collect()
    }

    /// Removes all files, of which no request waits.
    pub(crate) fn remove_all(&mut self) -> Vec<F> {
        self.files.drain().map(|file| file.state).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(turns: &mut FileTurns<u32, ()>, free: usize) -> Option<u32> {
        turns.next(free, |_| false).map(|turn| turn.request)
    }

    #[test]
    fn files_take_turns_and_requests_of_one_keep_their_order() {
        let mut turns = FileTurns::new();
        let files = [turns.add(()), turns.add(()), turns.add(())];
        for n in 0..3 {
            turns.push(files[0], n);
        }
        turns.push(files[1], 10);
        turns.push(files[2], 20);
        let order: Vec<_> = std::iter::from_fn(|| begun(&mut turns, 100)).collect();
        assert_eq!(order, [0, 10, 20, 1, 2]);
        assert_eq!(files.map(|file| turns.in_engine(file)), [3, 1, 1]);
    }

    #[test]
    fn a_file_has_up_to_three_quarters_of_the_slots_and_a_third_as_many_files_leave_one() {
        const SLOTS: usize = 64;
        for hanging in 1..=(SLOTS / SHARE) as u32 {
            let mut turns = FileTurns::new();
            let mut free = SLOTS;
            for file in 0..hanging {
                assert_eq!(turns.add(()), file);
                (0..SLOTS as u32).for_each(|n| turns.push(file, n));
            }
            while begun(&mut turns, free).is_some() {
                free -= 1;
            }
            let most = (0..hanging).map(|file| turns.in_engine(file)).max().unwrap();
            assert_eq!((hanging == 1).then_some(most), (hanging == 1).then_some(SLOTS / 4 * 3));
            let last = turns.add(());
            assert!(free > 0 && turns.begin(last, free), "{hanging}");
            assert!(!turns.begin(last, 0));
        }
    }

    #[test]
    fn a_request_that_is_not_to_wait_has_its_turn_without_a_slot() {
        let mut turns = FileTurns::new();
        let file = turns.add(());
        turns.push(file, 1);
        turns.push(file, 2);
        let turn = turns.next(0, |&request| request == 1).unwrap();
        assert_eq!((turn.request, turn.has_begun), (1, false));
        assert!(turns.next(0, |&request| request == 1).is_none());
        assert_eq!((turns.waiting(file), turns.in_engine(file)), (1, 0));
    }

    #[test]
    fn a_request_that_is_put_back_is_the_next_one_and_files_that_are_removed_have_no_turn() {
        let mut turns = FileTurns::new();
        let [one, other] = [turns.add(()), turns.add(())];
        turns.push(one, 1);
        turns.push(one, 2);
        turns.push(other, 3);
        let turn = turns.next(9, |_| false).unwrap();
        turns.put_back(turn.file, turn.request);
        assert_eq!((begun(&mut turns, 9), begun(&mut turns, 9)), (Some(1), Some(3)));
        turns.ended(one);
        turns.retain(one, |&request| request != 2);
        assert_eq!((turns.waiting(one), turns.in_engine(one)), (0, 0));
        assert!(turns.remove(one).is_some() && begun(&mut turns, 9).is_none());
        turns.push(other, 4);
        assert_eq!((turns.take_all(), turns.remove_all().len()), (vec![4], 1));
    }
}
