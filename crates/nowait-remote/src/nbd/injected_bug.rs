//! Bugs of the storage of an export that a simulation injects to prove that it would find them.

nowait::injected_bugs! {
    /// A bug that the storage of an export could have.
    pub enum RemoteBug {
        /// A new connection does not begin with the replay log.
        ForgetReplay,
        /// A flush shortens the log when it is asked.
        TrimWhenAsked,
        /// A flush that has succeeded ends changes that ended after it was asked.
        TrimTooMuch,
        /// Of two changes of the same bytes the earlier one is made again last.
        ReplayOutOfOrder,
        /// A change is made again although a later one has overwritten it.
        ReplayOverwritten,
        /// A durable write is not in the log, although earlier changes are.
        ForgetDurable,
        /// Requests that the server has not answered are answered when its connection is lost.
        AnswerUnanswered,
        /// Changes that overlap are with the server together.
        ForgetOverlap,
        /// A read is asked beside a change of its bytes that is asked again.
        ReadBesideRepeated,
        /// A flush may succeed after one has failed.
        ForgetFailedFlush,
    }
}
