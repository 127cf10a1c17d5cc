//! The example of a directory as an object store: objects are put, read in ranges, listed and deleted.

#[path = "../examples/object_directory.rs"]
#[expect(dead_code, reason = "the test makes the calls of its `main`")]
mod object_directory;

use futures_util::TryStreamExt;
use object_directory::ObjectDirectory;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload};

fn names(found: &[object_store::ObjectMeta]) -> Vec<String> {
    let mut names: Vec<_> = found.iter().map(|object| object.location.to_string()).collect();
    names.sort();
    names
}

#[test]
fn objects_of_any_length_are_put_read_in_ranges_listed_and_deleted() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = ObjectDirectory(dir.path().to_owned());
    pollster::block_on(async {
        let content: Vec<u8> = (0..3_000_001u32).map(|n| (n % 251) as u8).collect();
        for (name, len) in [("a", 0), ("b/c", 4096), ("b/d/e", content.len()), ("bc", 1)] {
            store.put(&Path::from(name), content[..len].to_vec().into()).await.unwrap();
            let read = store.get(&Path::from(name)).await.unwrap().bytes().await.unwrap();
            assert!(read == content[..len], "{name}");
        }
        let large = Path::from("b/d/e");
        for range in [0..1, 4095..4097, 1_048_575..2_097_153, 2_999_999..9_999_999] {
            let end = (range.end as usize).min(content.len());
            let read = store.get_range(&large, range.clone()).await.unwrap();
            assert!(read == content[range.start as usize..end], "{range:?}");
        }
        assert!(
            store.get_range(&large, 3_000_001..3_000_002).await.is_err(),
            "it begins at the end"
        );
        assert_eq!(store.head(&large).await.unwrap().size, 3_000_001);
        let all: Vec<_> = store.list(None).try_collect().await.unwrap();
        assert_eq!(names(&all), ["a", "b/c", "b/d/e", "bc"]);
        let below: Vec<_> = store.list(Some(&Path::from("b"))).try_collect().await.unwrap();
        assert_eq!(names(&below), ["b/c", "b/d/e"]);
        let create = || PutMode::Create.into();
        let taken = store.put_opts(&large, PutPayload::from_static(b"x"), create()).await;
        assert!(matches!(taken, Err(Error::AlreadyExists { .. })));
        store.put_opts(&Path::from("new"), PutPayload::from_static(b"x"), create()).await.unwrap();
        assert!(matches!(store.copy(&large, &large).await, Err(Error::NotImplemented { .. })));
        store.delete(&large).await.unwrap();
        assert!(matches!(store.get(&large).await, Err(Error::NotFound { .. })));
        assert!(store.put(&Path::from(".partial/x"), PutPayload::new()).await.is_err());
    });
    let partial = dir.path().join(".partial");
    assert_eq!(std::fs::read_dir(partial).unwrap().count(), 0, "nothing is left half written");
}
