//! A stream against a file of the standard library: odd sizes, seeks, growth, and futures that are dropped.

use std::future::{Future, poll_fn};
use std::io::{Read, Seek, SeekFrom, Write};
use std::pin::pin;
use std::task::Poll;

use futures_lite::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
use nowait::{
    AsyncFile, BlockDevice, FileStream, LocalAsyncFile, LocalDriver, OpenOptions, StreamFile,
};
use nowait_testkit::Random;

const STEPS: u64 = 1500;
/// Longer than a request of the smallest stream.
const LONGEST: u64 = 3 * 4096 + 1000;
const FARTHEST: u64 = 200_000;

/// Makes the same random steps on a stream and on a file; `dropped` of 8 futures are polled once and dropped before.
async fn agrees<F: StreamFile>(mut stream: FileStream<F>, mut model: std::fs::File, seed: u64) {
    let mut random = Random::from_seed(seed);
    for step in 0..STEPS {
        let len = random.below(LONGEST) as usize;
        if random.below(8) == 0 {
            let mut memory = vec![0; len];
            poll_once(stream.read(&mut memory)).await;
            stream.seek(SeekFrom::Start(model.stream_position().unwrap())).await.unwrap();
        }
        match random.below(3) {
            0 => {
                let mut data = vec![0; len];
                random.fill(&mut data);
                stream.write_all(&data).await.unwrap();
                model.write_all(&data).unwrap();
            }
            1 => {
                let (mut read, mut wanted) = (vec![0; len], Vec::new());
                let mut bytes = 0;
                while bytes < len {
                    match stream.read(&mut read[bytes..]).await.unwrap() {
                        0 => break,
                        more => bytes += more,
                    }
                }
                (&mut model).take(len as u64).read_to_end(&mut wanted).unwrap();
                assert!(read[..bytes] == wanted, "step {step}: {bytes} of {len} bytes");
            }
            _ => {
                let target = match random.below(3) {
                    0 => SeekFrom::Start(random.below(FARTHEST)),
                    1 => SeekFrom::Current(random.below(2 * LONGEST) as i64 - LONGEST as i64),
                    _ => SeekFrom::End(random.below(20_000) as i64 - 15_000),
                };
                let (sought, wanted) = (stream.seek(target).await, model.seek(target));
                match wanted {
                    Ok(pos) => assert_eq!(sought.unwrap(), pos, "step {step}, {target:?}"),
                    Err(_) => assert!(sought.is_err(), "step {step}, {target:?}"),
                }
            }
        }
        assert_eq!(stream.position(), model.stream_position().unwrap(), "step {step}");
    }
    stream.close().await.unwrap();
}

/// Polls a future once, and drops it.
async fn poll_once(future: impl Future) {
    let mut future = pin!(future);
    poll_fn(|context| {
        let _ = future.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}

/// Runs `test` with a new path and a model, and compares the files.
fn beside_a_model(test: impl FnOnce(&std::path::Path, std::fs::File)) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [path, model] = ["file", "model"].map(|name| dir.path().join(name));
    let options = || std::fs::OpenOptions::new().read(true).write(true).create_new(true).clone();
    test(&path, options().open(&model).unwrap());
    assert!(std::fs::read(path).unwrap() == std::fs::read(model).unwrap());
}

#[test]
fn a_stream_of_any_executor_agrees_with_a_file_of_the_standard_library() {
    for (capacity, seed) in [(1, 1), (4097, 2), (64 << 10, 3)] {
        beside_a_model(|path, model| {
            let file = AsyncFile::open(path, OpenOptions::new().create(true)).unwrap();
            let stream = FileStream::with_capacity(capacity, file);
            pollster::block_on(agrees(stream, model, seed));
        });
    }
}

#[test]
fn a_stream_of_one_thread_agrees_with_a_file_of_the_standard_library() {
    beside_a_model(|path, model| {
        LocalDriver::new().unwrap().block_on(async {
            let file = LocalAsyncFile::open(path, OpenOptions::new().create(true)).unwrap();
            agrees(FileStream::with_capacity(4096, file), model, 4).await;
        });
    });
}

/// The traits of tokio beside those of futures-io: another way to seek, and memory that is not initialised.
#[test]
fn tokio_reads_seeks_and_writes_a_stream() {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = AsyncFile::open(&dir.path().join("file"), OpenOptions::new().create(true)).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let run = async move {
        let mut stream = FileStream::with_capacity(4096, file.clone());
        AsyncWriteExt::write_all(&mut stream, &[b'x'; 5000]).await?;
        AsyncWriteExt::write_all(&mut stream, b"\nlast line\n").await?;
        assert_eq!(AsyncSeekExt::seek(&mut stream, SeekFrom::End(-11)).await?, 5000);
        let mut lines = AsyncBufReadExt::lines(&mut stream);
        assert_eq!(lines.next_line().await?.as_deref(), Some(""));
        assert_eq!(lines.next_line().await?.as_deref(), Some("last line"));
        assert_eq!(lines.next_line().await?, None);
        AsyncSeekExt::rewind(&mut stream).await?;
        let mut all = Vec::new();
        assert_eq!(AsyncReadExt::read_to_end(&mut stream, &mut all).await?, 5011);
        assert!(all.starts_with(&[b'x'; 5000]) && all.ends_with(b"last line\n"));
        AsyncSeekExt::seek(&mut stream, SeekFrom::Start(10_000)).await?;
        assert_eq!(AsyncReadExt::read(&mut stream, &mut [0; 9]).await?, 0);
        AsyncWriteExt::write_all(&mut stream, b"!").await?;
        AsyncWriteExt::shutdown(&mut stream).await?;
        assert_eq!(file.size(), 10_001);
        let before = AsyncSeekExt::seek(&mut stream, SeekFrom::Current(-20_000)).await;
        assert_eq!(before.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!(stream.position(), 10_001);
        std::io::Result::Ok(())
    };
    runtime.block_on(async { tokio::spawn(run).await.unwrap() }).unwrap();
}

/// The bytes of a write that was sent are written, whatever becomes of its stream.
#[test]
fn c45_a_stream_that_is_dropped_in_the_middle_writes_what_was_sent_and_leaves_no_memory_behind() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for round in 0..50u8 {
        let path = dir.path().join(round.to_string());
        let disk = BlockDevice::open_file(&path, OpenOptions::new().create(true)).unwrap();
        let disk = std::sync::Arc::new(disk);
        let weak = std::sync::Arc::downgrade(&disk);
        pollster::block_on(async {
            let mut stream = FileStream::new(AsyncFile::new(disk).unwrap());
            stream.write_all(&[round; 9000]).await.unwrap();
            if round % 2 == 0 {
                stream.seek(SeekFrom::Start(0)).await.unwrap();
                poll_once(stream.read(&mut [0; 10])).await;
            }
        });
        nowait_testkit::wait_until("the end of the file", || weak.strong_count() == 0);
        assert_eq!(std::fs::read(&path).unwrap(), [round; 9000]);
    }
}

#[test]
fn an_error_of_a_write_comes_with_the_next_call_once_and_the_position_goes_back() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(10_000).unwrap();
    let disk = BlockDevice::open(file.path(), OpenOptions::default()).unwrap();
    LocalDriver::new().unwrap().block_on(async {
        let file = LocalAsyncFile::new(std::sync::Arc::new(disk)).unwrap();
        let mut stream = FileStream::new(file);
        // A disk keeps its size: the second half of this does not fit.
        stream.seek(SeekFrom::Start(8000)).await.unwrap();
        assert_eq!(stream.write(&[5; 4000]).await.unwrap(), 4000);
        let full = stream.flush().await.unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        stream.flush().await.unwrap();
        assert_eq!(stream.position(), 10_000);
        stream.seek(SeekFrom::Start(7999)).await.unwrap();
        let mut back = Vec::new();
        stream.read_to_end(&mut back).await.unwrap();
        assert_eq!((back.len(), back[0], &back[1..]), (2001, 0, &[5; 2000][..]));
        // Positions behind the last possible byte.
        stream.seek(SeekFrom::Start(u64::MAX)).await.unwrap();
        assert!(
            stream.write(b"x y").await.is_err() && stream.seek(SeekFrom::Current(1)).await.is_err()
        );
    });
}
