//! The oracle of a log: which records it must have, may have, and must not have.
//!
//! Invariant: each record that was ever appended has a state here. Rules of docs/contract.md: C66, C68, C69,
//! C71, C73.

use std::collections::BTreeMap;

use nowait::sim::Random;
use nowait::{Error, LogPosition, LogRecord};

use crate::model::Violation;

/// The state of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Its append has not returned, or failed with an error that says nothing.
    Open,
    /// Its append failed, and the log may have gone on.
    Failed,
    /// Durable, at this position.
    Durable(u64),
    /// Not in the log, now or later.
    Gone,
}

/// A record, by its number.
struct Known {
    len: u64,
    fate: Fate,
    /// All records that were durable when it began are before this.
    after: u64,
    /// Records that had failed when it began.
    failures: usize,
}

/// The oracle.
#[derive(Default)]
pub(super) struct LogOracle {
    records: Vec<Known>,
    /// The durable records that are not truncated, by position.
    durable: BTreeMap<u64, u64>,
    /// The records that have failed in this process.
    failed: Vec<u64>,
    /// No record before this is in the log: the start after a truncation.
    floor: u64,
    /// The greatest position to which it was truncated, or may have been.
    ceiling: u64,
}

/// The data of record `number`.
pub(super) fn data_of(number: u64, len: u64) -> Vec<u8> {
    let mut random = Random::part(number, len);
    let mut data = number.to_le_bytes().to_vec();
    data.resize_with(len as usize, || random.next() as u8);
    data
}

impl LogOracle {
    /// Appends so far.
    pub(super) fn appends(&self) -> u64 {
        self.records.len() as u64
    }

    /// A record is appended. Returns its number and data.
    pub(super) fn begin(&mut self, len: u64) -> (u64, Vec<u8>) {
        let number = self.records.len() as u64;
        let after = self.durable.last_key_value().map_or(0, |(position, _)| *position);
        let failures = self.failed.len();
        self.records.push(Known { len, fate: Fate::Open, after, failures });
        (number, data_of(number, len))
    }

    fn known(&mut self, number: u64) -> Result<&mut Known, Violation> {
        let found = self.records.get_mut(number as usize);
        found.ok_or_else(|| Violation::new(format!("C68: record {number} was never appended")))
    }

    /// The append of a record has returned.
    pub(super) fn end(
        &mut self,
        number: u64,
        result: Result<LogPosition, Error>,
    ) -> Result<(), Violation> {
        match result {
            Ok(position) => {
                let failures = self.known(number)?.failures;
                self.place(number, position.get())?;
                // The log has gone on after these: it has told that they are not in it.
                for gone in self.failed.drain(..failures).collect::<Vec<_>>() {
                    self.known(gone)?.fate = Fate::Gone;
                }
                self.records.iter_mut().for_each(|known| {
                    known.failures = known.failures.saturating_sub(failures);
                });
            }
            Err(error) if [libc::EIO, libc::ENOSPC, libc::ENOMEM].contains(&error.errno()) => {
                self.known(number)?.fate = Fate::Failed;
                self.failed.push(number);
            }
            Err(error) => return Err(Violation::new(format!("record {number}: {error}"))),
        }
        Ok(())
    }

    /// Record `number` is durable at `position`.
    fn place(&mut self, number: u64, position: u64) -> Result<(), Violation> {
        let known = self.known(number)?;
        let wrong = match known.fate {
            _ if position <= known.after && known.fate != Fate::Durable(position) => {
                "C66: before older ones"
            }
            Fate::Open | Fate::Failed => "",
            Fate::Durable(other) if other == position => "",
            Fate::Durable(_) => "C73: it was elsewhere",
            Fate::Gone => "C68: it was not there before",
        };
        if !wrong.is_empty() {
            let what = format!("record {number} is at {position}: {wrong} ({:?})", known.fate);
            return Err(Violation::new(what));
        }
        known.fate = Fate::Durable(position);
        if let Some(other) = self.durable.insert(position, number).filter(|other| *other != number)
        {
            return Err(Violation::new(format!("C66: {number} and {other} are at {position}")));
        }
        Ok(())
    }

    /// A durable record, by chance.
    pub(super) fn some_durable(&self, random: &mut Random) -> Option<(u64, u64)> {
        let at = random.below(self.durable.len() as u64) as usize;
        self.durable.iter().nth(at).map(|(position, number)| (*position, *number))
    }

    /// Checks the data that was read at `position`, or why it was not.
    pub(super) fn read(
        &mut self,
        (position, number): (u64, u64),
        read: Result<Vec<u8>, Error>,
    ) -> Result<(), Violation> {
        let len = self.known(number)?.len;
        match read {
            Ok(data) if data == data_of(number, len) => Ok(()),
            Ok(_) => Err(Violation::new(format!("C66: other bytes are at {position}"))),
            Err(error) => self.may_fail(position, error),
        }
    }

    /// Checks the error of a read at `position`.
    fn may_fail(&self, position: u64, error: Error) -> Result<(), Violation> {
        match error.errno() {
            libc::ENODATA if position < self.ceiling => Ok(()),
            libc::EIO | libc::ENOSPC | libc::ENOMEM => Ok(()),
            _ => Err(Violation::new(format!("a read at {position}: {error}"))),
        }
    }

    /// Truncation to `position` begins.
    pub(super) fn truncates(&mut self, position: u64) {
        self.ceiling = self.ceiling.max(position);
    }

    /// A truncation has completed, and the log starts at `start`, durably.
    pub(super) fn truncated(&mut self, start: u64) {
        self.floor = self.floor.max(start);
        let kept = self.durable.split_off(&self.floor);
        for number in std::mem::replace(&mut self.durable, kept).into_values() {
            if let Some(known) = self.records.get_mut(number as usize) {
                known.fate = Fate::Gone;
            }
        }
    }

    /// Checks all records that an iterator has given, in order, from `start` on; `is_new` if the log was opened
    /// just now, so that those that are not there will never be.
    pub(super) fn all(
        &mut self,
        start: u64,
        records: &[Result<LogRecord, Error>],
        is_new: bool,
    ) -> Result<(), Violation> {
        let mut found = BTreeMap::new();
        let mut failed = false;
        for record in records {
            match record {
                Ok(LogRecord { position, data }) => self.found(position.get(), data, &mut found)?,
                Err(error) => {
                    self.may_fail(start, *error)?;
                    failed = true;
                }
            }
        }
        if start < self.floor {
            return Err(Violation::new(format!("C73: it starts at {start} before {}", self.floor)));
        }
        let missing = |(position, _): &(&u64, &u64)| {
            **position >= start.max(self.ceiling) && !found.contains_key(*position)
        };
        if let Some((position, number)) = self.durable.iter().find(missing).filter(|_| !failed) {
            let what = format!("C68: record {number}, acknowledged at {position}, is missing");
            return Err(Violation::new(what));
        }
        if is_new && !failed {
            self.opened(start, &found);
        }
        Ok(())
    }

    /// A record was found at `position`.
    fn found(
        &mut self,
        position: u64,
        data: &[u8],
        found: &mut BTreeMap<u64, u64>,
    ) -> Result<(), Violation> {
        let number = data.first_chunk().map_or(u64::MAX, |number| u64::from_le_bytes(*number));
        let len = self.known(number)?.len;
        if data != data_of(number, len) {
            return Err(Violation::new(format!("C68: a part of record {number} is at {position}")));
        }
        if found.last_key_value().is_some_and(|(last, _)| *last >= position) {
            return Err(Violation::new(format!("C66: {position} comes after a later one")));
        }
        found.insert(position, number);
        self.place(number, position)
    }

    /// The records that an open has found stay, and no others come.
    fn opened(&mut self, start: u64, found: &BTreeMap<u64, u64>) {
        self.failed.clear();
        let is_found = |number: u64, known: &Known| match known.fate {
            Fate::Durable(position) => found.get(&position) == Some(&number),
            _ => false,
        };
        for (number, known) in (0..).zip(&mut self.records) {
            known.failures = 0;
            if !is_found(number, known) {
                known.fate = Fate::Gone;
            }
        }
        self.durable.clone_from(found);
        self.floor = self.floor.max(start);
    }
}
