//! Bugs of a served image that a simulation injects to prove that it would find them.

nowait::injected_bugs! {
    /// A bug that a served image could have.
    pub enum ImageBug {
        /// A new cluster's bytes behind those of the request are not what the disk held there (C24).
        ForgetTail,
        /// Bytes of an image below the top one are read from another position.
        ReadBelowElsewhere,
        /// An earlier stage of the metadata is not made durable before the next one is written.
        ForgetOrder,
        /// Clusters are freed on close, and the refcounts are not written.
        ForgetGivenBack,
        /// On close the file loses a cluster that is in use.
        CutTooShort,
        /// The file is not extended before a write behind its end.
        ForgetToGrow,
        /// A failed write of metadata in the background is forgotten (C51).
        ForgetFailure,
        /// A flush during a writeback succeeds immediately, before its data is durable (C49).
        FlushBesideAnother,
        /// A cluster with a refcount of 0 is allocated although it is in use.
        ForgetOverlapCheck,
        /// The bits of a write are stored after its acknowledgement: when the image is closed (C74).
        BitAfterWrite,
        /// The changes of bitmaps by a killed process are not durable before the disk is written to (C77).
        ForgetRemoval,
        /// A region of the bitmaps is closed while a write in it is in flight (C90).
        CoolInFlight,
        /// The bitmaps of a raw disk are used as they are, whatever has written to the disk since (C93).
        TrustChangedDisk,
    }
}
