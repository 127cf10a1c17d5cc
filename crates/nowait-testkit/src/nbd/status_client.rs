//! An NBD client that asks for block status in contexts of its choice.
//!
//! Invariant: it has no code in common with the server; a reply that breaks the protocol fails the test.

use std::collections::BTreeMap;
use std::path::Path;

use crate::nbd::constants::*;
use crate::nbd::handshake::{Mode, greet};
use crate::nbd::wire_client::{Extents, Request, WireClient};

/// A connection with contexts.
pub struct StatusClient {
    wire: WireClient,
}

impl StatusClient {
    /// A client of export `name` that selects the contexts `queries`.
    pub fn connect(socket: &Path, name: &str, mode: Mode, queries: &[&str]) -> Self {
        let client = WireClient::greeted(greet(socket).expect("a server"), mode);
        Self { wire: client.choose(name, queries, &[]).expect("the export") }
    }

    /// The names of the contexts by their ids.
    pub fn contexts(&self) -> &BTreeMap<u32, String> {
        &self.wire.contexts
    }

    /// The extents of each context from `offset` on, or the error.
    pub fn status(
        &mut self,
        offset: u64,
        len: u64,
        flags: u16,
    ) -> Result<BTreeMap<u32, Extents>, u32> {
        let outcome = self.wire.call(Request::of(BLOCK_STATUS, offset, len).with(flags));
        if outcome.error != 0 {
            return Err(outcome.error);
        }
        let ids = outcome.status.iter().map(|(id, _)| *id);
        let mut ids = ids.collect::<Vec<_>>();
        ids.sort_unstable();
        assert!(ids.iter().eq(self.wire.contexts.keys()), "one chunk for each context");
        Ok(outcome.status.into_iter().collect())
    }

    /// Whether each unit of `unit` bytes is dirty in `size` bytes of the export, by the context whose name ends with
    /// `context`.
    pub fn dirty(&mut self, context: &str, size: u64, unit: u64, flags: u16) -> Vec<bool> {
        let is_it = |(_, name): &(&u32, &String)| name.ends_with(context);
        let id = *self.wire.contexts.iter().find(is_it).expect("a context of that name").0;
        let mut units = Vec::new();
        while (units.len() as u64) * unit < size {
            let at = units.len() as u64 * unit;
            let all = self.status(at, size - at, flags).expect("a map");
            let extents = &all[&id];
            assert!(flags & REQ_ONE == 0 || extents.len() == 1, "{extents:?}");
            assert!(extents.iter().map(|(len, _)| len).sum::<u64>() <= size - at);
            for (len, flags) in extents {
                assert!(*flags <= 1 && len.is_multiple_of(unit), "{extents:?}");
                units.resize(units.len() + (len / unit) as usize, *flags == 1);
            }
        }
        units
    }
}
