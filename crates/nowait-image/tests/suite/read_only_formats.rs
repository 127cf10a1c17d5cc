//! Images of formats that are only read, made by QEMU's tools, and the checks that are alike for all.
//!
//! Invariant: an image is read byte for byte as its disk, in each way that the crate has, and no byte of it
//! is changed, also where it is damaged.

use std::fs;
use std::path::{Path, PathBuf};

use nowait::BlockingFile;
use nowait_image::create::{CreateOptions, create};
use nowait_image::{Chain, ChainOptions, ChainReader, Format, ImageError, formats, map, open};
use nowait_testkit::Random;

use crate::images::qemu_img;

const BLOCK: usize = 4096;
/// More than any whole disk here has; a damaged header may tell of more.
const MAX_BYTES: u64 = 64 << 20;

/// A directory with a raw disk, `disk.raw`, of `blocks` blocks of 4 KiB and `more` bytes: runs of random
/// bytes, of text, and holes.
pub(crate) struct Disk {
    directory: tempfile::TempDir,
    pub(crate) bytes: Vec<u8>,
}

impl Disk {
    pub(crate) fn new(seed: u64, blocks: usize, more: usize) -> Self {
        let mut random = Random::from_seed(seed);
        let mut bytes = vec![0; blocks * BLOCK + more];
        let mut at = 0;
        while at < bytes.len() {
            let len = (1 + random.below(40) as usize) * BLOCK;
            let end = (at + len).min(bytes.len());
            match random.below(3) {
                0 => {}
                1 => random.fill(&mut bytes[at..end]),
                _ => bytes[at..end].fill(b'a' + random.below(26) as u8),
            }
            at = end;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("disk.raw"), &bytes).unwrap();
        Self { directory, bytes }
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    /// Makes `name`, with the disk in it, by `qemu-img convert`.
    pub(crate) fn convert(&self, format: &str, options: &str, name: &str) {
        let mut arguments = vec!["convert", "-q", "-f", "raw", "-O", format];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        arguments.extend(["disk.raw", name]);
        qemu_img(self.directory(), &arguments);
    }

    /// All files but the disk, and what is in them.
    pub(crate) fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = fs::read_dir(self.directory()).unwrap();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    }
}

fn options(format: Option<Format>) -> ChainOptions {
    ChainOptions { format, ..ChainOptions::default() }
}

/// The bytes of the image at `path`, read by the map that is served, through its worker's way.
fn served(path: &Path, format: Option<Format>) -> Result<Vec<u8>, ImageError> {
    let image = open(path, &options(format))?;
    assert!(image.is_read_only());
    let file = BlockingFile::new(image.device());
    let mut bytes = vec![0xee; image.size().min(MAX_BYTES) as usize];
    // In pieces that begin and end inside a grain or a block, and each twice: at first the mapping is looked
    // up, then it is known.
    for _ in 0..2 {
        for (index, piece) in bytes.chunks_mut(100_001).enumerate() {
            let read = file.read_at(piece, index as u64 * 100_001);
            let read = read.map_err(|e| ImageError::refused(path, e.to_string()))?;
            assert_eq!(read, piece.len());
        }
    }
    Ok(bytes)
}

/// The bytes of the image at `path`, read for the offline commands.
fn read_offline(path: &Path, format: Option<Format>) -> Result<Vec<u8>, ImageError> {
    let chain = Chain::open(path, &options(format))?;
    let reader = ChainReader::new(chain.layers())?;
    let mut bytes = vec![0xee; reader.size() as usize];
    for (index, piece) in bytes.chunks_mut(1_000_001).enumerate() {
        reader.read_at(index as u64 * 1_000_001, piece)?;
    }
    Ok(bytes)
}

/// Checks that `name` reads as the disk in each way, also below a qcow2 image.
pub(crate) fn assert_reads(disk: &Disk, name: &str, format: &str) {
    let path = disk.path(name);
    let parsed = formats::by_name(format);
    for guessed in [None, parsed] {
        assert_eq!(Chain::open(&path, &options(guessed)).unwrap().top().format().name(), format);
    }
    let before = disk.files();
    let mut expected = disk.bytes.clone();
    // A flat or fixed disk may be longer by what its format rounds up to.
    let found = served(&path, None).unwrap();
    expected.resize(found.len(), 0);
    assert!(found.len() - disk.bytes.len() < 512 && found == expected, "{name}");
    assert!(read_offline(&path, parsed).unwrap() == expected, "{name}");
    assert_map(&path, &expected);
    let overlay = format!("over-{name}.qcow2");
    let of_overlay = CreateOptions {
        backing: Some(name.into()),
        backing_format: parsed,
        ..CreateOptions::new(Format::Qcow2, None)
    };
    create(&disk.path(&overlay), &of_overlay).unwrap();
    let found = served_below(&disk.path(&overlay));
    let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!((differs, found.len()), (None, expected.len()), "{overlay}");
    assert!(read_offline(&disk.path(&overlay), None).unwrap() == expected, "{overlay}");
    fs::remove_file(disk.path(&overlay)).unwrap();
    assert!(disk.files() == before, "{name} was changed");
}

/// The bytes of the qcow2 image at `path`, which stands on another one.
fn served_below(path: &Path) -> Vec<u8> {
    served(path, None).unwrap()
}

/// The map has no zeros where there are bytes, and covers the disk.
fn assert_map(path: &Path, expected: &[u8]) {
    let chain = Chain::open(path, &options(None)).unwrap();
    let mut end = 0;
    map::map(&chain, |entry| {
        assert_eq!(entry.start, end);
        end += entry.length;
        let bytes = &expected[entry.start as usize..end as usize];
        assert!(!entry.zero || bytes.iter().all(|&byte| byte == 0), "{entry:?}");
        Ok(())
    })
    .unwrap();
    assert_eq!(end, expected.len() as u64);
}

/// Opens and reads the damaged image `name`: it is refused in one line, or a read fails, or it is read. In
/// no case it is changed. Returns whether all of it was read.
pub(crate) fn try_damaged(disk: &Disk, name: &str, format: &str) -> bool {
    let path = disk.path(name);
    let before = fs::read(&path).unwrap();
    let format = formats::by_name(format);
    let mut read = true;
    for outcome in [served(&path, format).map(drop), map_of(&path, format)] {
        if let Err(error) = outcome {
            let line = error.to_string();
            assert!(!line.contains('\n') && line.starts_with(&*path.to_string_lossy()), "{line}");
            read = false;
        }
    }
    let chain = Chain::open(&path, &options(format));
    read &= chain.is_ok_and(|chain| ChainReader::new(chain.layers()).is_ok());
    assert!(fs::read(&path).unwrap() == before);
    read
}

fn map_of(path: &Path, format: Option<Format>) -> Result<(), ImageError> {
    let chain = Chain::open(path, &options(format))?;
    let mut out = Vec::new();
    map::write_json(&chain, &mut out)
}

/// The refusal of the image `name`.
pub(crate) fn refusal(disk: &Disk, name: &str, options: &ChainOptions) -> String {
    let error = open(&disk.path(name), options).err().expect("a refusal");
    error.to_string()
}
