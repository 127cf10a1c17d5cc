//! Parses the block devices of the command line: `--ublk[=[EXPORT=]ID]`.
//!
//! Invariant: after `assign`, no export has two nodes, and no two nodes have one number.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::config::device_options::DeviceOptions;
use crate::config::export_spec::{ExportIndices, NamedExport};

/// The greatest number of a ublk device: one less than the kernel's minor numbers.
/// Beyond it: the option is refused.
pub const MAX_ID: u32 = (1 << 20) - 1;

/// A node, one of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkSpec {
    /// The name of its export; without it one of those that have no node.
    export: Option<String>,
    /// Its number; any free one without it.
    id: Option<u32>,
}

impl FromStr for UblkSpec {
    type Err = String;

    /// The part before the last `=` is the name of an export.
    fn from_str(text: &str) -> Result<Self, String> {
        let (export, number) = match text.rsplit_once('=') {
            Some((export, number)) => (Some(export.to_owned()), number),
            None => (None, text),
        };
        if number.is_empty() {
            return Ok(Self { export, id: None });
        }
        match number.parse().ok().filter(|id| *id <= MAX_ID) {
            Some(id) => Ok(Self { export, id: Some(id) }),
            None => Err(format!(
                "'{number}' is not a number in 0..={MAX_ID} (as in ID, EXPORT=ID or EXPORT=)"
            )),
        }
    }
}

impl fmt::Display for UblkSpec {
    /// The text from which it is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(export) = &self.export {
            write!(f, "{export}=")?;
        }
        self.id.map_or(Ok(()), |id| id.fmt(f))
    }
}

impl DeviceOptions for Vec<UblkSpec> {
    fn check(&self, exports: &[NamedExport]) -> Result<(), String> {
        assign(self, exports).map(drop)
    }

    fn needs_ring(&self) -> Option<&'static str> {
        self.used_by_host()
    }

    fn used_by_host(&self) -> Option<&'static str> {
        (!self.is_empty()).then_some("--ublk")
    }

    fn needs_process(&self) -> Option<&'static str> {
        self.used_by_host()
    }
}

/// The numbers of the nodes by the indices of their exports in `exports`, of which there is at least one. A node without
/// a name is for the first export that none has.
///
/// # Errors
/// A message for the user: an export has two nodes or is not there, a number is given twice, or there are more
/// nodes than exports.
pub fn assign(
    nodes: &[UblkSpec],
    exports: &[NamedExport],
) -> Result<BTreeMap<usize, Option<u32>>, String> {
    let (mut assigned, indices) = (BTreeMap::new(), ExportIndices::of(exports));
    for node in nodes {
        let Some(name) = &node.export else { continue };
        let at = indices.get(name).ok_or_else(|| {
            format!("--ublk={name}=: no image has the name '{name}' (give it NAME=)")
        })?;
        if assigned.insert(at, node.id).is_some() {
            return Err(format!("--ublk={name}=: the image has a node already"));
        }
    }
    let mut rest = 0..exports.len();
    for node in nodes.iter().filter(|node| node.export.is_none()) {
        let free = rest.find(|at| !assigned.contains_key(at));
        let free = free.ok_or_else(|| {
            let (nodes, images) = (nodes.len(), exports.len());
            format!("--ublk: {nodes} nodes for {images} images (an image can be one node)")
        })?;
        assigned.insert(free, node.id);
    }
    let mut numbers: Vec<u32> = assigned.values().copied().flatten().collect();
    numbers.sort_unstable();
    match numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("--ublk={}: the number is given twice", pair[0])),
        None => Ok(assigned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assigned(nodes: &[&str], names: &[&str]) -> Result<Vec<(usize, Option<u32>)>, String> {
        let nodes = nodes.iter().map(|text| text.parse()).collect::<Result<Vec<_>, _>>()?;
        let named = |name: &&str| NamedExport { name: (*name).into(), image: "disk.img".into() };
        let exports: Vec<_> = names.iter().map(named).collect();
        Ok(assign(&nodes, &exports)?.into_iter().collect())
    }

    #[test]
    fn a_node_is_for_the_export_that_is_named_or_for_the_first_that_none_has() {
        let names = ["", "data", "a=b"];
        for (nodes, expected) in [
            (&[][..], &[][..]),
            (&[""], &[(0, None)]),
            (&["7"], &[(0, Some(7))]),
            (&["=7"], &[(0, Some(7))]),
            (&["data="], &[(1, None)]),
            (&["a=b=5"], &[(2, Some(5))]),
            (&["", "3", ""], &[(0, None), (1, Some(3)), (2, None)]),
            (&["3", "=1"], &[(0, Some(1)), (1, Some(3))]),
            (&["data=0", "1", "2"], &[(0, Some(1)), (1, Some(0)), (2, Some(2))]),
            (&["1048575"], &[(0, Some(MAX_ID))]),
        ] {
            assert_eq!(assigned(nodes, &names).unwrap(), expected, "{nodes:?}");
        }
    }

    #[test]
    fn the_text_of_a_node_is_read_as_the_same() {
        for text in ["", "7", "=7", "data=", "a=b=5"] {
            assert_eq!(text.parse::<UblkSpec>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_node_without_an_export_of_its_own_or_a_number_of_its_own_is_refused() {
        for (nodes, why) in [
            (&["other=1"][..], "no image has the name 'other'"),
            (&["data=1", "data="], "--ublk=data=: the image has a node already"),
            (&["", "", ""], "3 nodes for 2 images"),
            (&["", "data=", "1"], "3 nodes for 2 images"),
            (&["1", "data=1"], "--ublk=1: the number is given twice"),
            (&["1048576"], "'1048576' is not a number in 0..=1048575"),
            (&["-1"], "'-1' is not a number in"),
            (&["data=x"], "'x' is not a number in"),
            (&["data"], "'data' is not a number in"),
        ] {
            let error = assigned(nodes, &["", "data"]).unwrap_err();
            assert!(error.contains(why) && !error.contains('\n'), "{nodes:?}: {error}");
        }
    }
}
