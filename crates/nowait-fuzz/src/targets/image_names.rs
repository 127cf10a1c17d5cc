//! Qcow2 headers that name other files, in a directory tree with files that no header may reach.
//!
//! An input is a list of names and formats, which become the headers of three images in the same
//! directory that may be backing files of each other.
//!
//! Checked, with the chain opened as the server does, for reading and for writing: every opened
//! file is in the directory of the images and not hidden, a data file is opened only if it was
//! given, and no file of the tree is changed.

use std::fs;

use nowait_image::{Chain, ChainOptions, Format};

use crate::target::{Check, Target};
use crate::targets::image;
use crate::targets::tree::Tree;

/// The separator of the parts of an input: a byte that does not occur in UTF-8.
const BETWEEN: u8 = 0xff;
/// The placeholder for the directory of the images in an input, because its path differs between
/// runs.
const ROOT: u8 = b'@';
/// The images; the first one is opened.
const IMAGES: [&str; 3] = ["top.qcow2", "mid.qcow2", "low.qcow2"];
/// The only data file that is given.
const DATA: &str = "data.raw";
/// Bytes of a cluster; the first cluster contains the header and all names.
const CLUSTER: usize = 4096;
/// Clusters of each image: header, refcount table, refcount block, L1 table.
const CLUSTERS: usize = 4;
/// Bytes of the disk.
const DISK: u64 = 64 << 10;
/// Bytes of a minimal header of version 3.
const HEADER: usize = 104;

pub(crate) const TARGET: Target = Target {
    name: "names",
    about: "qcow2 headers that name backing files and data files, opened as the server does",
    prepare,
    seeds,
    words: &[
        &[BETWEEN],
        b"../",
        b"./",
        b"/",
        b"//",
        b"@/",
        b"@/../beside/base.raw",
        b"@2/base.raw",
        b"file:",
        b"file:///",
        b"json:{\"driver\":\"file\",\"filename\":\"@/.hidden\"}",
        b"nbd:unix:",
        b"base.raw",
        b"data.raw",
        b"mid.qcow2",
        b"low.qcow2",
        b"odd\nname",
        b".hidden",
        b"sub/../",
        b"sub/inner.raw",
        b"../beside/base.raw",
        b"in",
        b".in",
        b"out",
        b"rc",
        b"others/base.raw",
        b"here/",
        b"raw",
        b"qcow2",
        b"\0",
        b"\n",
    ],
    longest: 6000,
    ..image::TARGET
};

/// Joins the three parts of each image and the part that states whether the data file is given.
fn seed(parts: &[&str]) -> Vec<u8> {
    parts.iter().map(|part| part.as_bytes()).collect::<Vec<_>>().join(&BETWEEN)
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "base.raw",
        "@/base.raw",
        "in",
        "twice",
        "here/base.raw",
        "sub/../base.raw",
        "file:base.raw",
        "odd\nname",
        ".hidden",
        ".in",
        "rc",
        "out",
        "others/base.raw",
        "below",
        "sub/inner.raw",
        "../beside/base.raw",
        "@/../beside/base.raw",
        "@2/base.raw",
        ".dot/base.raw",
        "none",
        "json:{\"file\":\"@/base.raw\"}",
        r#"json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}}"#,
        r#"json:{"file.filename":"../beside/base.raw","file.driver":"file","driver":"raw"}"#,
        r#"json:{"driver":"nbd","server":{"type":"inet","host":"h","port":1},"export":"e"}"#,
        "nbd:unix:/s:exportname=e",
        "base.raw\0",
        "top.qcow2",
    ]
    .iter()
    .flat_map(|name| {
        let below = seed(&["", "mid.qcow2", "qcow2", "", name, "raw", ""]);
        [seed(&["", name, "raw", ""]), below, seed(&["", "", "", name])]
    })
    .collect();
    seeds.push(seed(&["data", "", "", DATA]));
    seeds.push(seed(&[
        "data",
        "mid.qcow2",
        "qcow2",
        "",
        "low.qcow2",
        "qcow2",
        DATA,
        "in",
        "raw",
        "",
    ]));
    seeds
}

fn prepare() -> Result<Check, String> {
    let tree = Tree::new()?;
    Ok(Box::new(move |input| check_input(&tree, input).map(|_| ())))
}

/// Opens the chain for reading and for writing. Returns the number of backing and data files that
/// were opened.
fn check_input(tree: &Tree, input: &[u8]) -> Result<usize, String> {
    let input = expanded(tree, input);
    let mut parts = input.split(|&byte| byte == BETWEEN);
    let given = parts.next().is_some_and(|part| !part.is_empty());
    for image in IMAGES {
        let mut next = || parts.next().unwrap_or_default();
        let bytes = header(next(), next(), next());
        fs::write(tree.images().join(image), bytes).map_err(|error| format!("{image}: {error}"))?;
    }
    let before = tree.snapshot()?;
    let mut opened = 0;
    for (writable, format) in [(false, None), (false, Some(Format::Qcow2)), (true, None)] {
        let data_files = if given { vec![tree.images().join(DATA)] } else { Vec::new() };
        let options = ChainOptions { format, writable, data_files, ..ChainOptions::default() };
        // A rejection is an error with a message; nothing may have been changed then.
        if let Ok(chain) = Chain::open(&tree.images().join(IMAGES[0]), &options) {
            opened += check_opened(tree, &chain, given)?;
        }
    }
    let mut after = tree.snapshot()?;
    if given {
        // Only its content is compared, not its attributes: it is marked as raw.
        let data = tree.images().join(DATA);
        if let (Some(now), Some(then)) = (after.get_mut(&data), before.get(&data)) {
            (now.1, now.2) = (then.1, then.2);
        }
    }
    match before == after {
        true => Ok(opened),
        false => {
            let changed = before.iter().find(|(path, state)| after.get(*path) != Some(*state));
            Err(format!("{:?} was changed", changed.map(|(path, _)| path)))
        }
    }
}

/// Checks the files that were opened. Returns how many of them a header has named.
fn check_opened(tree: &Tree, chain: &Chain, given: bool) -> Result<usize, String> {
    let mut opened = 0;
    for (above, layer) in chain.layers().iter().enumerate() {
        tree.refuses(&layer.file)?;
        opened += usize::from(above > 0);
        for data in layer.other_files() {
            if !given {
                return Err(format!(
                    "the data file {:?} was opened, which was not given",
                    data.path()
                ));
            }
            tree.refuses(data)?;
            opened += 1;
        }
    }
    Ok(opened)
}

fn expanded(tree: &Tree, input: &[u8]) -> Vec<u8> {
    let root = tree.images().as_os_str().as_encoded_bytes();
    let expand = |byte: &u8| if *byte == ROOT { root.to_vec() } else { vec![*byte] };
    input.iter().flat_map(expand).collect()
}

/// An empty image with these names in its header; valid if the names fit.
fn header(backing: &[u8], format: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = b"QFI\xfb\0\0\0\x03".to_vec();
    bytes.resize(HEADER, 0);
    let mut extension = |kind: u32, text: &[u8]| {
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&(text.len() as u32).to_be_bytes());
        bytes.extend_from_slice(text);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    };
    if !format.is_empty() {
        extension(0xe279_2aca, format);
    }
    if !data.is_empty() {
        extension(0x4441_5441, data);
    }
    extension(0, b"");
    let name = bytes.len();
    bytes.extend_from_slice(backing);
    bytes.resize(bytes.len().max(CLUSTERS * CLUSTER), 0);
    let mut put = |at: usize, what: &[u8]| {
        let place = bytes.get_mut(at..).unwrap_or_default();
        place.iter_mut().zip(what).for_each(|(to, from)| *to = *from);
    };
    if !backing.is_empty() {
        put(8, &(name as u64).to_be_bytes());
        put(16, &(backing.len() as u32).to_be_bytes());
    }
    put(20, &CLUSTER.ilog2().to_be_bytes());
    put(24, &DISK.to_be_bytes());
    put(36, &1u32.to_be_bytes());
    put(40, &(3 * CLUSTER as u64).to_be_bytes());
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    if !data.is_empty() {
        put(72, &4u64.to_be_bytes());
    }
    put(96, &4u32.to_be_bytes());
    put(100, &(HEADER as u32).to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    (0..CLUSTERS).for_each(|cluster| put(2 * CLUSTER + 2 * cluster, &1u16.to_be_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permitted_names_are_opened_and_others_are_rejected() {
        let tree = Tree::new().unwrap();
        let opened = |parts: &[&str]| check_input(&tree, &seed(parts)).unwrap();
        for name in
            ["base.raw", "@/base.raw", "twice", "here/base.raw", "file:base.raw", "odd\nname"]
        {
            assert_eq!(opened(&["", name, "raw", ""]), 3, "{name}");
        }
        for name in
            [".hidden", "rc", ".in", "out", "sub/inner.raw", "@2/base.raw", "json:{}", "none"]
        {
            assert_eq!(opened(&["", name, "raw", ""]), 0, "{name}");
            assert_eq!(opened(&["", "mid.qcow2", "qcow2", "", name, "raw", ""]), 0, "{name}");
        }
        assert_eq!(opened(&["", "", "", DATA]), 0);
        assert_eq!(opened(&["given", "", "", DATA]), 3);
        let all = ["given", "mid.qcow2", "qcow2", "", "low.qcow2", "qcow2", DATA, "in", "raw", ""];
        assert_eq!(opened(&all), 12);
    }
}
