//! Resolves names of hosts, on a thread that may wait.
//!
//! Invariant: a name that was resolved once has an address from then on, also where the resolver is
//! out of reach.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::dns::Name;

use crate::host_names::addresses_of;

/// Resolves names, and keeps what was found.
#[derive(Clone, Debug, Default)]
pub(super) struct Resolver {
    known: Arc<Mutex<HashMap<String, Vec<SocketAddr>>>>,
}

impl Resolver {
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = addresses_of(name, 0);
        match (found, known.get(name)) {
            (Ok(found), before) if !found.is_empty() || before.is_none() => {
                known.insert(name.to_owned(), found.clone());
                Ok(found)
            }
            (Err(error), None) => Err(error),
            (_, Some(before)) => Ok(before.clone()),
            (Ok(found), None) => Ok(found),
        }
    }
}

impl tower::Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.clone();
        Box::pin(async move {
            let found = tokio::task::spawn_blocking(move || resolver.resolve(name.as_str()));
            found.await.map_err(io::Error::other)?.map(Vec::into_iter)
        })
    }
}
