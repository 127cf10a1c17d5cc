//! The methods that `AsyncFile` and `LocalAsyncFile` have in common.
//!
//! Invariant: the futures of both differ in `Send` only. The thread of the executor waits in none of the calls that a disk does
//! not have but locks, which do not wait.

/// The requests of a file whose field `$state` has its disk, and its settings; its futures are `$send`.
macro_rules! async_file_requests {
    ($state:ident $(, $send:ident)?) => {
        /// Bytes of the file at present, as [`BlockDevice::size`].
        #[must_use]
        pub fn size(&self) -> u64 {
            self.$state.disk.size()
        }

        /// This file, of which each read and write has `flags` in addition to its own, such as
        /// [`Flags::HIPRI`].
        #[must_use]
        pub fn with_flags(self, flags: Flags) -> Self {
            Self { flags: flags | self.flags, ..self }
        }

        /// This file, of which each read and write has `priority` at the block layer, unless its own flags have
        /// another one (C88).
        #[must_use]
        pub fn with_priority(self, priority: IoPriority) -> Self {
            Self { flags: self.flags.with_priority(priority), ..self }
        }

        /// This file; each future of this handle that has not ended `timeout` after its first poll ends with
        /// `ETIMEDOUT`, and gives back an empty buffer: the request or call goes on as if its future had been dropped, so
        /// that a write or an append may or may not be done, and its memory is freed when the kernel has left it (C84).
        #[must_use]
        pub fn with_timeout(self, timeout: Duration) -> Self {
            Self { timeout: Some(timeout), ..self }
        }

        /// Reads into `buffer` from byte `pos` on. The result is the bytes read: fewer than
        /// `buffer.len()` only past the end of the file (C17).
        ///
        /// # Errors
        /// `EINVAL` for a range beyond `i64::MAX` (C08); the errno of preadv2(2). The buffer is given
        /// back.
        pub fn read_at(
            &self,
            buffer: IoBuffer,
            pos: u64,
        ) -> impl Future<Output = (Result<usize, Error>, IoBuffer)> $(+ $send)? + Unpin + use<> {
            self.request(Op::Read, self.flags, ByteRange::new(pos, buffer.len() as u64), buffer)
        }

        /// Writes `buffer` from byte `pos` on; a file grows as needed (C57). The result is the bytes
        /// written: fewer than `buffer.len()` only where the write crosses the end of a disk (C25), or where
        /// an error follows. With [`Flags::DSYNC`] they are durable (C28).
        ///
        /// # Errors
        /// `EROFS` on a read-only device, `ENOSPC` at or past the end of a disk and where no space is
        /// left, `EINVAL` for a range beyond `i64::MAX`, `EAGAIN` under [`Flags::NOWAIT`]; the errno of pwritev2(2) or fdatasync(2). The
        /// buffer is given back.
        pub fn write_at(
            &self,
            buffer: IoBuffer,
            pos: u64,
            flags: Flags,
        ) -> impl Future<Output = (Result<usize, Error>, IoBuffer)> $(+ $send)? + Unpin + use<> {
            let range = ByteRange::new(pos, buffer.len() as u64);
            self.request(Op::Write, flags | self.flags, range, buffer)
        }

        /// Reads into all of `buffers` in turn, without a copy where the device allows that. The result is as that of
        /// [`Self::read_at`].
        ///
        /// # Errors
        /// Like [`Self::read_at`]; `EINVAL` for more than 1024 buffers (C04).
        pub fn read_vectored_at(
            &self,
            buffers: Vec<IoBuffer>,
            pos: u64,
        ) -> impl Future<Output = (Result<usize, Error>, Vec<IoBuffer>)> $(+ $send)? + use<> {
            self.vectored(Op::Read, self.flags, pos, buffers)
        }

        /// Writes all of `buffers` in turn, without a copy where the device allows that. The result is as that of
        /// [`Self::write_at`].
        ///
        /// # Errors
        /// Like [`Self::write_at`]; `EINVAL` for more than 1024 buffers (C04).
        pub fn write_vectored_at(
            &self,
            buffers: Vec<IoBuffer>,
            pos: u64,
            flags: Flags,
        ) -> impl Future<Output = (Result<usize, Error>, Vec<IoBuffer>)> $(+ $send)? + use<> {
            self.vectored(Op::Write, flags | self.flags, pos, buffers)
        }

        fn vectored(
            &self,
            op: Op,
            flags: Flags,
            pos: u64,
            buffers: Vec<IoBuffer>,
        ) -> impl Future<Output = (Result<usize, Error>, Vec<IoBuffer>)> $(+ $send)? + use<> {
            let len = buffers.iter().map(|buffer| buffer.len() as u64).sum();
            let request = self.request(op, flags, ByteRange::new(pos, len), IoBuffer::list(buffers));
            async move {
                let (done, buffers) = request.await;
                (done, buffers.into_list())
            }
        }

        /// Makes every write durable that had ended when this is first polled (C49).
        ///
        /// # Errors
        /// The errno of fdatasync(2); after a failed flush always `EIO` (C51).
        pub fn flush(&self) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            self.no_data(Op::Flush, Flags::NONE, ByteRange::default())
        }

        /// Releases the storage of `range`, which then reads as zeros where the file system can punch
        /// holes.
        ///
        /// # Errors
        /// `EOPNOTSUPP` where it cannot; `EROFS`; the errno of fallocate(2).
        pub fn discard(&self, range: ByteRange) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            self.no_data(Op::Discard, Flags::NONE, range)
        }

        /// Makes `range` read as zeros. With [`Flags::NO_UNMAP`] it keeps its storage; with
        /// [`Flags::FAST_ZERO`] the request fails unless zeroing is cheap.
        ///
        /// # Errors
        /// `EOPNOTSUPP` for `FAST_ZERO` where zeroing is not cheap; `EROFS`; the errno of fallocate(2)
        /// or pwritev2(2).
        pub fn zero(
            &self,
            range: ByteRange,
            flags: Flags,
        ) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            self.no_data(Op::Zero, flags, range)
        }

        fn no_data(
            &self,
            op: Op,
            flags: Flags,
            range: ByteRange,
        ) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            let request = self.request(op, flags, range, IoBuffer::default());
            async move { request.await.0.map(|_| ()) }
        }
    };
}

/// The calls that a disk does not have, of the same file.
macro_rules! async_file_calls {
    ($state:ident $(, $send:ident)?) => {
        /// Writes `buffer` at the end of the file, and returns the position of its first byte (C26): all of
        /// it in one piece, also beside other processes that append. With [`Flags::DSYNC`] it is durable
        /// (C28).
        ///
        /// # Errors
        /// Like [`BlockingFile::append`](crate::BlockingFile::append). The buffer is given back.
        pub fn append(
            &self,
            buffer: IoBuffer,
            flags: Flags,
        ) -> impl Future<Output = (Result<u64, Error>, IoBuffer)> $(+ $send)? + use<> {
            file_call::append(self.$state.disk.clone(), self.timeout, buffer, flags | self.flags)
        }

        /// Sets the size of the file; what is new reads as zeros. It has no order with requests in flight.
        ///
        /// # Errors
        /// Like [`BlockDevice::set_len`].
        pub fn set_len(&self, bytes: u64) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            self.call(move |disk| disk.set_len(bytes))
        }

        /// Allocates storage for the holes in `range`, which still read as zeros.
        ///
        /// # Errors
        /// Like [`BlockDevice::allocate`].
        pub fn allocate(
            &self,
            range: ByteRange,
            mode: Allocate,
        ) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            self.call(move |disk| disk.allocate(range, mode))
        }

        /// Makes every write durable that had ended when this is first polled, and the file's metadata.
        ///
        /// # Errors
        /// Like [`BlockDevice::sync_all`].
        pub fn sync_all(&self) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            self.call(|disk| disk.sync_all())
        }

        /// The metadata of the file.
        ///
        /// # Errors
        /// Like [`BlockDevice::metadata`].
        pub fn metadata(&self) -> impl Future<Output = Result<Metadata, Error>> $(+ $send)? + use<> {
            self.call(|disk| disk.metadata())
        }

        /// Locks the file against the handles that lock it, without waiting. The lock ends with the last clone of a file that
        /// was opened by its path, and otherwise with the device (C87).
        ///
        /// # Errors
        /// Like [`BlockDevice::try_lock`].
        pub fn try_lock(&self, lock: FileLock) -> Result<(), Error> {
            self.$state.disk.try_lock(lock)
        }

        /// Ends the lock of this file and its clones.
        ///
        /// # Errors
        /// Like [`BlockDevice::unlock`].
        pub fn unlock(&self) -> Result<(), Error> {
            self.$state.disk.unlock()
        }

        /// Gives a name to a file that was opened as an [`OpenOptions::unnamed`](crate::OpenOptions::unnamed)
        /// one.
        ///
        /// # Errors
        /// Like [`BlockDevice::link`].
        pub fn link(&self, path: &Path) -> impl Future<Output = Result<(), Error>> $(+ $send)? + use<> {
            let path = path.to_owned();
            self.call(move |disk| disk.link(&path))
        }

        fn call<T, F>(&self, make: F) -> impl Future<Output = Result<T, Error>> + Send + use<T, F>
        where
            T: Send + 'static,
            F: FnOnce(&BlockDevice<dyn BlockMap>) -> Result<T, Error> + Send + 'static,
        {
            file_call::call_fallible(self.$state.disk.clone(), self.timeout, make)
        }
    };
}
