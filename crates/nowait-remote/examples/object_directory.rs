//! A directory as an `ObjectStore`, for databases that ask for one, with its files by direct I/O.
//!
//! An object is complete and durable or not there, and is read and written by one request: it has to fit into memory. What
//! else the trait has is not implemented.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, fs, io};

use async_trait::async_trait;
use chrono::DateTime;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use nowait::{AsyncFile, Flags, IoBuffer, OpenOptions, durable_rename, sync_directory};
use object_store::path::Path;
use object_store::*;

/// The directory of objects that are being written, which is not part of the store.
const PARTIAL: &str = ".partial";
const STORE: &str = "ObjectDirectory";

/// The objects below a directory.
#[derive(Clone, Debug)]
pub(crate) struct ObjectDirectory(pub(crate) PathBuf);

impl fmt::Display for ObjectDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}

fn failed(path: &Path, error: impl Into<io::Error>) -> Error {
    let (error, path) = (error.into(), path.to_string());
    match (error.kind(), error.into()) {
        (io::ErrorKind::NotFound, source) => Error::NotFound { path, source },
        (io::ErrorKind::AlreadyExists, source) => Error::AlreadyExists { path, source },
        (_, source) => Error::Generic { store: STORE, source },
    }
}

fn not_implemented<T>(operation: &str) -> Result<T> {
    Err(Error::NotImplemented { operation: operation.into(), implementer: STORE.into() })
}

fn meta(location: &Path, found: &fs::Metadata) -> ObjectMeta {
    let last_modified = DateTime::from_timestamp(found.mtime(), 0).unwrap_or_default();
    let (location, size) = (location.clone(), found.len());
    ObjectMeta { location, last_modified, size, e_tag: None, version: None }
}

impl ObjectDirectory {
    /// The file of an object. A location has neither `..` nor an empty part.
    fn file_of(&self, location: &Path) -> Result<PathBuf> {
        match location.parts().next() {
            Some(first) if first.as_ref() != PARTIAL => Ok(self.0.join(location.as_ref())),
            _ => not_implemented("an object of this name"),
        }
    }

    /// Writes an object under another name, and then gives it its own.
    async fn write(&self, payload: PutPayload, path: PathBuf, create: bool) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let partial = self.0.join(PARTIAL).join(format!("{}-{number}", std::process::id()));
        let parent = path.parent().unwrap_or(&self.0);
        [parent, &self.0.join(PARTIAL)].into_iter().try_for_each(fs::create_dir_all)?;
        let file = AsyncFile::open(&partial, OpenOptions::new().create_new(true))?;
        let mut data = IoBuffer::zeroed(payload.content_length())?;
        let all = payload.iter().flat_map(|part| part.iter());
        data.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
        let name = async {
            if file.write_at(data, 0, Flags::NONE).await.0? < payload.content_length() {
                return Err(io::ErrorKind::WriteZero.into());
            }
            file.sync_all().await?;
            match create {
                true => fs::hard_link(&partial, &path).and_then(|()| Ok(sync_directory(parent)?)),
                false => Ok(durable_rename(&partial, &path)?),
            }
        };
        let named = name.await;
        let _ = fs::remove_file(partial);
        named
    }

    /// Appends the objects below a directory.
    fn walk(&self, directory: &Path, found: &mut Vec<ObjectMeta>) -> io::Result<()> {
        for entry in fs::read_dir(self.0.join(directory.as_ref()))? {
            let (name, entry) = entry.map(|entry| (entry.file_name(), entry))?;
            let Some(name) = name.to_str().filter(|&name| name != PARTIAL) else { continue };
            let (location, metadata) = (directory.clone().join(name), entry.metadata()?);
            match metadata.is_dir() {
                true => self.walk(&location, found)?,
                false => found.push(meta(&location, &metadata)),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl ObjectStore for ObjectDirectory {
    async fn put_opts(
        &self,
        to: &Path,
        data: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        if matches!(options.mode, PutMode::Update(_)) || !options.attributes.is_empty() {
            return not_implemented("an update by version, or attributes");
        }
        let create = options.mode == PutMode::Create;
        self.write(data, self.file_of(to)?, create).await.map_err(|error| failed(to, error))?;
        Ok(PutResult { e_tag: None, version: None, extensions: Extensions::default() })
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        not_implemented("put_multipart")
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        let failed = |error| failed(from, error);
        let file = AsyncFile::open(&self.file_of(from)?, OpenOptions::new().read_only(true))
            .map_err(failed)?;
        let meta = meta(from, &file.metadata().await.map_err(failed)?);
        options.check_preconditions(&meta)?;
        let range = options.range.map_or(Ok(0..meta.size), |range| range.as_range(meta.size));
        let range = range.map_err(|error| Error::Generic { store: STORE, source: error.into() })?;
        let len = if options.head { 0 } else { (range.end - range.start) as usize };
        let (read, data) = file.read_at(IoBuffer::zeroed(len).map_err(failed)?, range.start).await;
        if read.map_err(failed)? < len {
            return Err(Error::Generic { store: STORE, source: "it was cut off".into() });
        }
        let data = data.to_vec().into();
        let payload = GetResultPayload::Stream(stream::iter([Ok(data)]).boxed());
        Ok(GetResult {
            payload,
            meta,
            range,
            attributes: Attributes::new(),
            extensions: Extensions::default(),
        })
    }

    fn delete_stream(
        &self,
        all: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |path: Path| {
            let removed = fs::remove_file(store.file_of(&path)?);
            removed.map_err(|error| failed(&path, error)).map(|()| path)
        };
        all.map(move |path| path.and_then(&delete)).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (mut found, root) = (Vec::new(), prefix.cloned().unwrap_or_default());
        let failure = self.walk(&root, &mut found).err().map(|error| Err(failed(&root, error)));
        stream::iter(found.into_iter().map(Ok).chain(failure)).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        not_implemented("list_with_delimiter")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        not_implemented("copy")
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let store = ObjectDirectory(std::env::args().nth(1).ok_or("which directory?")?.into());
    pollster::block_on(async {
        store.put(&Path::from("tables/greeting"), "Hello".into()).await?;
        let read = store.get_range(&Path::from("tables/greeting"), 1..4).await?;
        println!("{read:?}, {:?}", store.list(None).try_collect::<Vec<_>>().await?);
        Ok(())
    })
}
