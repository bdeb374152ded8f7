//! The interface to other ranks, and decisions that all ranks take together, by value.

use std::{fmt::Debug, sync::Arc};

use super::{GroupFault, HostBuffer, Job, Member, Pending, ReduceOp, Split, Traffic, Waited};
use crate::RanksError;

/// Methods that submit a collective as a job and wait for its end.
macro_rules! blocking {
    ($($(#[$doc:meta])* fn $name:ident($($value:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            $(#[$doc])*
            fn $name(&self, label: &str, $($value: $type),*) -> Result<$result, RanksError> {
                let label = label.to_owned();
                Pending::start(self, move |ranks| ranks.$name(&label, $($value),*)).wait()
            }
        )*
    };
}

/// One rank's view of a group of ranks. Object-safe: hold it as `Arc<dyn ProcessGroup>`.
///
/// All ranks must make the same calls with the same labels in the same order. Each rank has one
/// communication thread, which runs its collectives in the order of submission, from any thread.
/// Buffers are taken by value and returned.
///
/// Every method that is a collective waits for its end. [`Pending::start`] does not: it submits a
/// job with collectives to the communication thread.
///
/// ```
/// use burn_ranks::{GroupOptions, ProcessGroup, ReduceOp, ThreadGroup};
///
/// let sums = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let gradients = vec![1.0 + group.rank() as f32; 3];
///     group.all_reduce("gradients, step 0", ReduceOp::Sum, gradients.into())
/// })?;
/// assert!(sums.into_iter().all(|sum| sum == Ok(vec![3.0; 3].into())));
/// # Ok::<(), burn_ranks::RanksError>(())
/// ```
///
/// # Errors
///
/// All collectives fail with [`RanksError::Group`] if a rank hangs, leaves, panics or makes another
/// call, and with [`RanksError::BufferLength`] or [`RanksError::InvalidSetting`] if the request is
/// invalid, before anything is sent.
///
/// # Cost
///
/// With `N` ranks and `L` elements a rank sends `L (N - 1) / N` elements in a reduce-scatter or an
/// all-gather, and twice as many in an all-reduce and at a broadcast's root. Byte strings are sent
/// to every other rank by [`gather_bytes`](Self::gather_bytes), and once, to the root, by
/// [`gather_bytes_to`](Self::gather_bytes_to).
pub trait ProcessGroup: Send + Sync + Debug {
    /// This rank's queue and communication thread. The only required method: a wrapper returns the
    /// member of the group that it wraps.
    fn member(&self) -> &Member;

    /// This rank's number, from 0 to the world size - 1.
    fn rank(&self) -> usize {
        self.member().queue().rank
    }

    /// Number of ranks.
    fn world_size(&self) -> usize {
        self.member().queue().world_size
    }

    /// Submits a job to this rank's communication thread and returns at once. See
    /// [`Pending::start`].
    fn submit(&self, job: Job) {
        self.member().queue().submit(job);
    }

    /// Ends the group with a reason: all ranks get
    /// [`GroupFault::Aborted`](super::GroupFault::Aborted). Ranks that are processes of an MPI job
    /// are ended as well; the reason is printed.
    fn abort(&self, reason: &str) {
        let (rank, reason) = (self.rank(), reason.to_owned());
        let fault = GroupFault::Aborted { rank, reason };
        self.member().queue().end_group(&fault);
    }

    /// What this rank has sent so far.
    fn traffic(&self) -> Traffic {
        self.member().queue().traffic.lock().clone()
    }

    /// Calls `observer` on each thread of this rank that has waited for collectives, after each
    /// wait: for a trace, or to tell how much of a step is communication. It is called instead of
    /// the one before.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use std::time::Duration;
    /// use burn_ranks::{ProcessGroup, SingleRank};
    ///
    /// let waited = Arc::new(Mutex::new(Duration::ZERO));
    /// let sum = waited.clone();
    /// let group = SingleRank::new();
    /// group.observe_waits(Arc::new(move |wait| *sum.lock().unwrap() += wait.time));
    /// group.barrier("step 0")?;
    /// assert!(*waited.lock().unwrap() > Duration::ZERO);
    /// # Ok::<(), burn_ranks::RanksError>(())
    /// ```
    fn observe_waits(&self, observer: Arc<dyn Fn(&Waited) + Send + Sync>) {
        *self.member().queue().observer.lock() = Some(observer);
    }

    blocking! {
        /// Sum or mean of all ranks' buffers.
        fn all_reduce(op: ReduceOp, buffer: HostBuffer) -> HostBuffer;

        /// This rank's part of the sum or mean of all ranks' buffers.
        fn reduce_scatter(op: ReduceOp, buffer: HostBuffer, split: Split) -> HostBuffer;

        /// All ranks' parts, concatenated in the order of ranks.
        fn all_gather(part: HostBuffer, split: Split) -> HostBuffer;

        /// The root's buffer; other ranks pass one of the same length.
        fn broadcast(root: usize, buffer: HostBuffer) -> HostBuffer;

        /// Waits until all ranks have called it.
        fn barrier() -> ();

        /// Every rank's byte string, in the order of ranks; lengths may differ. For metrics and
        /// manifests.
        fn gather_bytes(bytes: Vec<u8>) -> Vec<Vec<u8>>;

        /// On the root every rank's byte string, in the order of ranks; `None` elsewhere. Lengths
        /// may differ. For what one rank writes or shows.
        fn gather_bytes_to(root: usize, bytes: Vec<u8>) -> Option<Vec<Vec<u8>>>;
    }

    // Small values: each rank passes its own, all get the same result. Every call is one small
    // collective.

    /// Whether `value` is true on any rank: one rank's non-finite gradient makes all skip.
    fn agree_any(&self, label: &str, value: bool) -> Result<bool, RanksError> {
        let all = self.gather_bytes(label, vec![value.into()])?;
        Ok(all.concat().contains(&1))
    }

    /// Every rank's number, in the order of ranks.
    fn gather_f64(&self, label: &str, value: f64) -> Result<Vec<f64>, RanksError> {
        let all = self.gather_bytes(label, value.to_ne_bytes().to_vec())?;
        let number = |bytes: &Vec<u8>| bytemuck::pod_read_unaligned(bytes);
        Ok(all.iter().map(number).collect())
    }

    /// The sum, added in the order of ranks; NaN if a rank has NaN.
    fn agree_sum(&self, label: &str, value: f64) -> Result<f64, RanksError> {
        Ok(self.gather_f64(label, value)?.into_iter().sum())
    }

    /// Checks that all ranks have the same text, such as their settings.
    ///
    /// # Errors
    ///
    /// [`RanksError::Disagreement`] on all ranks, with this rank's text and the first that differs
    /// from it.
    fn agree_equal(&self, label: &str, text: &str) -> Result<(), RanksError> {
        let texts = self.gather_bytes(label, text.as_bytes().to_vec())?;
        match texts.iter().position(|other| other != text.as_bytes()) {
            None => Ok(()),
            Some(peer) => Err(RanksError::Disagreement {
                label: label.to_owned(),
                rank: self.rank(),
                value: text.to_owned(),
                peer,
                peer_value: String::from_utf8_lossy(&texts[peer]).into_owned(),
            }),
        }
    }

    /// Checks that all ranks have the same list of texts without line breaks.
    ///
    /// # Errors
    ///
    /// [`RanksError::Disagreement`] on all ranks, with the first entry of this rank's list that
    /// differs from that of another rank; those of the group.
    fn agree_on_entries(&self, label: &str, entries: &[String]) -> Result<(), RanksError> {
        let own = entries.join("\n");
        let lists = self.gather_bytes(label, own.as_bytes().to_vec())?;
        let Some(peer) = lists.iter().position(|other| other != own.as_bytes()) else {
            return Ok(());
        };
        let other = String::from_utf8_lossy(&lists[peer]);
        let other: Vec<_> = other.lines().collect();
        let entry = |index| {
            let own = entries.get(index).map_or("none", String::as_str);
            (own, other.get(index).copied().unwrap_or("none"))
        };
        let differs = |&index: &usize| entry(index).0 != entry(index).1;
        let longest = entries.len().max(other.len());
        let index = (0..longest).find(differs).unwrap_or(longest);
        let (value, peer_value) = entry(index);
        Err(RanksError::Disagreement {
            label: format!("{label}, entry {index}"),
            rank: self.rank(),
            value: value.to_owned(),
            peer,
            peer_value: peer_value.to_owned(),
        })
    }
}
