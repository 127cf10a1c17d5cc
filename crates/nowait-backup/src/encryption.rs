//! A place whose files are encrypted, each as a file of age for the same recipients.
//!
//! Invariant: nothing that a chain puts into the place is there unencrypted, and a file that is not encrypted is not
//! read: a stranger who has no key cannot put one in place of another.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use age::stream::{StreamReader, StreamWriter};
use age::x25519::{Identity, Recipient};
use age::{DecryptError, Decryptor, Encryptor};
use nowait_copy::Error;
use nowait_image::os_message;

use crate::manifest::ENCRYPTED;
use crate::place::{FileName, NewFile, Place, Put, StoredFile};

/// The most recipients of a chain.
/// Beyond it: a command that gives more is refused.
const MAX_RECIPIENTS: usize = 100;
/// The most bytes of the header of an encrypted file.
/// Beyond it: the file is damaged.
const MAX_KEY_HEADER_BYTES: usize = 64 << 10;
/// An encrypted file has chunks of so many bytes of content, and so many more of its own.
const CHUNK_BYTES: u64 = 64 << 10;
const TAG_BYTES: u64 = 16;
/// The most bytes of a file with identities.
/// Beyond it: the file is refused.
const MAX_IDENTITY_BYTES: u64 = 1 << 20;

/// The keys of a chain.
pub struct Keys {
    identities: Vec<Identity>,
    recipients: BTreeSet<String>,
}

impl Keys {
    /// The keys for `recipients` (`age1…`) and with the identities in `files` (`AGE-SECRET-KEY-1…` in lines), who are
    /// recipients, too. `None` without any.
    ///
    /// # Errors
    /// A recipient or a file cannot be understood; there are more than 100.
    pub fn new(recipients: &[String], files: &[impl AsRef<Path>]) -> Result<Option<Self>, Error> {
        let mut keys = Self { identities: Vec::new(), recipients: BTreeSet::new() };
        for recipient in recipients {
            parse(recipient).map_err(|what| Error::at(recipient, what))?;
            keys.recipients.insert(recipient.clone());
        }
        for file in files {
            let failed = |what: String| Error::at(&file.as_ref().display(), what);
            keys.identities.extend(read_identities(file.as_ref()).map_err(failed)?);
        }
        keys.recipients.extend(keys.identities.iter().map(|it| it.to_public().to_string()));
        if keys.recipients.len() > MAX_RECIPIENTS {
            return Err(Error::at(&"recipients", format!("there are more than {MAX_RECIPIENTS}")));
        }
        Ok((!keys.recipients.is_empty()).then_some(keys))
    }

    /// `inner`, with files that are encrypted.
    pub(crate) fn place(self, inner: Arc<dyn Place>) -> Arc<dyn Place> {
        Arc::new(EncryptedPlace {
            inner,
            identities: self.identities,
            recipients: Mutex::new(self.recipients),
        })
    }
}

fn parse(recipient: &str) -> Result<Recipient, String> {
    recipient.parse().map_err(|why| format!("not a recipient of age: {why}"))
}

fn read_identities(path: &Path) -> Result<Vec<Identity>, String> {
    let message = |error: io::Error| os_message(&error);
    let file = fs::File::open(path).map_err(message)?;
    let mut text = String::new();
    file.take(MAX_IDENTITY_BYTES + 1).read_to_string(&mut text).map_err(message)?;
    if text.len() as u64 > MAX_IDENTITY_BYTES {
        return Err("too long for a file with identities".into());
    }
    let lines = text.lines().map(str::trim).filter(|it| !it.is_empty() && !it.starts_with('#'));
    let identities: Result<Vec<Identity>, _> = lines.map(str::parse).collect();
    let identities =
        identities.map_err(|why| format!("a line is not an identity of age: {why}"))?;
    if identities.is_empty() {
        return Err("there are no identities in it".into());
    }
    Ok(identities)
}

struct EncryptedPlace {
    inner: Arc<dyn Place>,
    identities: Vec<Identity>,
    recipients: Mutex<BTreeSet<String>>,
}

impl fmt::Debug for EncryptedPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "encrypted {:?}", self.inner)
    }
}

impl EncryptedPlace {
    fn recipients(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.recipients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn encryptor(&self) -> Result<Encryptor, String> {
        let recipients: Result<Vec<Recipient>, String> =
            self.recipients().iter().map(|text| parse(text)).collect();
        let recipients = recipients?;
        let recipients = recipients.iter().map(|recipient| recipient as &dyn age::Recipient);
        Encryptor::with_recipients(recipients).map_err(|error| error.to_string())
    }
}

impl Place for EncryptedPlace {
    fn list(&self) -> Result<Vec<(FileName, u64)>, String> {
        self.inner.list()
    }

    fn open(&self, name: FileName) -> Result<Box<dyn StoredFile>, String> {
        let file = self.inner.open(name)?;
        let mut begin = vec![0; file.len().min(MAX_KEY_HEADER_BYTES as u64) as usize];
        file.read_at(0, &mut begin)?;
        if !begin.starts_with(b"age-encryption.org/") {
            return Err("it is not encrypted (leave out --recipient and --identity)".into());
        }
        if self.identities.is_empty() {
            return Err(ENCRYPTED.into());
        }
        if !begin.windows(4).any(|part| part == b"\n---") {
            return Err("its header is damaged".into());
        }
        let decrypted = Decryptor::new(Input { file, pos: 0 }).and_then(|decryptor| {
            decryptor.decrypt(self.identities.iter().map(|it| it as &dyn age::Identity))
        });
        let mut stream = decrypted.map_err(|error| match error {
            DecryptError::NoMatchingKeys => "it is encrypted for other identities".to_owned(),
            _ => "it cannot be decrypted".into(),
        })?;
        let len = stream.seek(SeekFrom::End(0)).map_err(|_| "it cannot be decrypted")?;
        Ok(Box::new(Decrypted { stream: Mutex::new(stream), len }))
    }

    fn create(&self, name: FileName, most: u64) -> Result<Box<dyn NewFile>, String> {
        let tags = most / CHUNK_BYTES * TAG_BYTES;
        let most = most.saturating_add(tags + MAX_KEY_HEADER_BYTES as u64);
        let output = Output(self.inner.create(name, most)?);
        let stream = self.encryptor()?.wrap_output(output).map_err(|error| error.to_string())?;
        Ok(Box::new(Encrypted::Open(stream)))
    }

    fn put(&self, name: FileName, bytes: &[u8], put: Put) -> Result<(), String> {
        let encrypt = || -> io::Result<Vec<u8>> {
            let encryptor = self.encryptor().map_err(io::Error::other)?;
            let mut stream = encryptor.wrap_output(Vec::new())?;
            stream.write_all(bytes)?;
            stream.finish()
        };
        self.inner.put(name, &encrypt().map_err(|error| error.to_string())?, put)
    }

    fn remove(&self, name: FileName) -> Result<(), String> {
        self.inner.remove(name)
    }

    fn file_bytes(&self, size: u64) -> u64 {
        self.inner.file_bytes(size)
    }

    fn max_open(&self) -> usize {
        self.inner.max_open()
    }

    fn encrypts_for(&self) -> Vec<String> {
        self.recipients().iter().cloned().collect()
    }

    fn learn(&self, recipients: &[String]) {
        let known = recipients.iter().filter(|recipient| parse(recipient).is_ok());
        let mut all = self.recipients();
        let room = MAX_RECIPIENTS.saturating_sub(all.len());
        all.extend(known.take(room).cloned());
    }
}

/// A stored file that is read from its begin to its end, or elsewhere.
struct Input {
    file: Box<dyn StoredFile>,
    pos: u64,
}

impl Read for Input {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let len = self.file.len().saturating_sub(self.pos).min(bytes.len() as u64) as usize;
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        self.file.read_at(self.pos, bytes).map_err(io::Error::other)?;
        self.pos += len as u64;
        Ok(len)
    }
}

impl Seek for Input {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let pos = match to {
            SeekFrom::Start(pos) => Some(pos),
            SeekFrom::End(by) => self.file.len().checked_add_signed(by),
            SeekFrom::Current(by) => self.pos.checked_add_signed(by),
        };
        self.pos = pos.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.pos)
    }
}

struct Decrypted {
    stream: Mutex<StreamReader<Input>>,
    len: u64,
}

impl StoredFile for Decrypted {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, pos: u64, bytes: &mut [u8]) -> Result<(), String> {
        if pos.checked_add(bytes.len() as u64).is_none_or(|end| end > self.len) {
            return Err("its file is too short".into());
        }
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let read = stream.seek(SeekFrom::Start(pos)).and_then(|_| stream.read_exact(bytes));
        read.map_err(|_| "it cannot be decrypted".into())
    }
}

/// A new file that takes what is encrypted.
#[derive(Debug)]
struct Output(Box<dyn NewFile>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.append(bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

enum Encrypted {
    Open(StreamWriter<Output>),
    Complete(Box<dyn NewFile>),
    /// Its end could not be written.
    Failed,
}

impl fmt::Debug for Encrypted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an encrypted file")
    }
}

impl NewFile for Encrypted {
    fn append(&mut self, bytes: &[u8]) -> Result<(), String> {
        match self {
            Self::Open(stream) => stream.write_all(bytes).map_err(|error| error.to_string()),
            Self::Complete(_) | Self::Failed => Err("it is complete".into()),
        }
    }

    fn complete(&mut self) -> Result<(), String> {
        if let Self::Open(stream) = std::mem::replace(self, Self::Failed) {
            let Output(mut file) = stream.finish().map_err(|error| error.to_string())?;
            file.complete()?;
            *self = Self::Complete(file);
        }
        Ok(())
    }

    fn keep(self: Box<Self>) {
        if let Self::Complete(file) = *self {
            file.keep();
        }
    }
}

#[cfg(test)]
mod tests {
    use nowait::ByteRange;
    use nowait_copy::{SourceDisk, TargetDisk};
    use nowait_testkit::Random;

    use super::*;
    use crate::block::MIN_BLOCK_BYTES;
    use crate::chain::Chain;
    use crate::new_point::{Contents, NewPoint};
    use crate::place::Access;
    use crate::point_disk::PointDisk;
    use crate::prune::{Keep, prune};
    use crate::verify::verify;

    const BLOCK: usize = MIN_BLOCK_BYTES as usize;

    /// A new identity in a file, and its recipient.
    fn identity(directory: &Path, name: &str) -> (std::path::PathBuf, String) {
        use age::secrecy::ExposeSecret;
        let (identity, path) = (Identity::generate(), directory.join(name));
        let text = format!("# a comment\n\n{}\n", identity.to_string().expose_secret());
        fs::write(&path, text).unwrap();
        (path, identity.to_public().to_string())
    }

    #[test]
    fn an_encrypted_chain_is_restored_by_each_recipient_and_by_no_other() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("chain");
        let [first, second, other] = ["a", "b", "c"].map(|name| identity(scratch.path(), name));
        let open = |access, recipients: &[String], files: &[&Path]| {
            Chain::open(&path, access, Keys::new(recipients, files)?)
        };
        let disk = Random::from_seed(8).bytes(3 * BLOCK);
        let add = |chain: Chain, disk: &[u8]| {
            let point = NewPoint::new(chain, Contents::Differences).unwrap();
            point.begin(disk.len() as u64).unwrap();
            point.write(0, disk).unwrap();
            point.finish().unwrap();
            point.made().unwrap()
        };
        let both = [first.1.clone(), second.1.clone()];
        add(open(Access::Add, &both, &[]).unwrap(), &disk);
        let mut later = disk.clone();
        later[BLOCK..2 * BLOCK].fill(5);
        // One of them is enough for the next points, and the other can read them all the same.
        let made = add(open(Access::Add, &[], &[&first.0]).unwrap(), &later);
        assert_eq!((made.parent, made.data_bytes), (Some(1), MIN_BLOCK_BYTES));
        let restored = |file: &Path, number| {
            let chain = open(Access::Read, &[], &[file])?;
            let disk = PointDisk::open(chain, Some(number))?;
            let mut bytes = vec![0; disk.size() as usize];
            disk.read(0, &mut bytes).map_err(|what| Error::at(&"read", what))?;
            assert_eq!(disk.extents(ByteRange::new(0, 1)).len(), 1);
            Ok::<_, Error>(bytes)
        };
        for file in [&first.0, &second.0] {
            assert!(restored(file, 1).unwrap() == disk && restored(file, 2).unwrap() == later);
        }
        assert!(restored(&other.0, 1).unwrap_err().to_string().contains("other identities"));
        let pruned = prune(
            open(Access::Remove, &[], &[&second.0]).unwrap(),
            Keep { last: 1, ..Keep::default() },
            &false.into(),
        );
        assert_eq!(pruned.unwrap().kept, [2]);
        for file in [&first.0, &second.0] {
            assert!(restored(file, 2).unwrap() == later);
            let chain = open(Access::Read, &[], &[file]).unwrap();
            let health = verify(&chain, None, &false.into(), &mut |_, _| {}).unwrap();
            assert!(health.len() == 1 && health[0].is_sound());
        }
        for (recipients, files, words) in [
            (&[][..], &[][..], ENCRYPTED),
            (&both, &[], ENCRYPTED),
            (&[], &[&*other.0], "other identities"),
            (&["age1x".into()], &[], "not a recipient"),
            (&[], &[&*path.join("point-000002")], ""),
            (&[], &[&*path.join("nowait-backup.lock")], "no identities"),
        ] {
            let refused = open(Access::Add, recipients, files).err().unwrap().to_string();
            assert!(refused.contains(words), "{refused}");
        }
        // Nothing of the disk, and nothing of the manifest, is there to be read.
        for entry in fs::read_dir(&path).unwrap() {
            let bytes = fs::read(entry.unwrap().path()).unwrap();
            assert!(bytes.is_empty() || bytes.starts_with(b"age-encryption.org/v1"));
            for words in [&disk[..32], b"nwbackup", b"block_bytes"] {
                assert!(!bytes.windows(words.len()).any(|part| part == words));
            }
        }
    }

    #[test]
    fn damage_of_an_encrypted_file_is_found_wherever_it_is() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("chain");
        let (file, _) = identity(scratch.path(), "a");
        let open = |access| Chain::open(&path, access, Keys::new(&[], &[&file]).unwrap()).unwrap();
        let point = NewPoint::new(open(Access::Add), Contents::Whole).unwrap();
        point.begin(2 * MIN_BLOCK_BYTES).unwrap();
        point.write(0, &Random::from_seed(9).bytes(2 * BLOCK)).unwrap();
        point.finish().unwrap();
        drop(point);
        let files = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
        let data = files.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
        let whole = fs::read(&data).unwrap();
        let is_sound = || {
            let health = verify(&open(Access::Read), None, &false.into(), &mut |_, _| {});
            health.unwrap()[0].is_sound()
        };
        assert!(is_sound());
        for at in [0, 30, 100, 200, 300, whole.len() / 2, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&data, damaged).unwrap();
            assert!(!is_sound(), "byte {at}");
        }
        for len in [0, 10, 150, whole.len() / 2, whole.len() - 1] {
            fs::write(&data, &whole[..len]).unwrap();
            assert!(!is_sound(), "{len} bytes");
        }
    }

    #[test]
    fn a_chain_that_is_not_encrypted_takes_no_keys() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("chain");
        let (file, recipient) = identity(scratch.path(), "a");
        let point = NewPoint::new(Chain::open(&path, Access::Add, None).unwrap(), Contents::Whole);
        let point = point.unwrap();
        point.begin(MIN_BLOCK_BYTES).unwrap();
        point.finish().unwrap();
        drop(point);
        let keys = Keys::new(std::slice::from_ref(&recipient), &[&file]).unwrap();
        let refused = Chain::open(&path, Access::Add, keys).err().unwrap().to_string();
        assert!(refused.contains("not encrypted"), "{refused}");
        let recipients: Vec<String> =
            (0..MAX_RECIPIENTS).map(|_| Identity::generate().to_public().to_string()).collect();
        let none: [&Path; 0] = [];
        assert!(Keys::new(&recipients, &none).unwrap().is_some());
        assert!(Keys::new(&recipients, &[&file]).is_err());
        assert!(Keys::new(&[], &none).unwrap().is_none());
    }
}
