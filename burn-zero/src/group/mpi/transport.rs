//! The transport by messages: every pair of ranks exchanges its parts directly, in chunks.

use std::{ops::Range, sync::Arc, time::Duration};

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use super::link::{CALLS, DATA, Link};
use crate::group::{
    Call, GroupFault, ReduceOp, Sent, buffer::Element, call::parts, reduce::reduce, round,
    transport::Transport,
};

/// A call as a message: its label has at most 400 bytes and what the rank declares about 120, whose escapes have at most 6 each.
const CALL_BYTES: usize = 4096;

pub(super) struct MpiTransport {
    link: Link,
    sent: Sent,
}

impl MpiTransport {
    pub fn new(link: Link) -> Self {
        Self {
            link,
            sent: Sent::default(),
        }
    }

    pub fn into_link(self) -> Link {
        self.link
    }

    /// Chunk `index` of a part; empty behind its end.
    fn chunk(&self, part: &Range<usize>, index: usize) -> Range<usize> {
        let chunk = self.link.options.chunk_elements;
        let start = part.end.min(part.start + index * chunk);
        start..part.end.min(start + chunk)
    }

    /// Number of chunks of the longest of these parts.
    fn chunks<'a>(&self, parts: impl IntoIterator<Item = &'a Range<usize>>) -> usize {
        let longest = parts.into_iter().map(Range::len).max().unwrap_or(0);
        longest.div_ceil(self.link.options.chunk_elements)
    }

    /// One chunk to and from each of some ranks; empty ones are not sent.
    fn exchange<P: Pod>(
        &mut self,
        call: &Call,
        sends: &[(usize, &[P])],
        receives: Vec<(usize, &mut [P])>,
    ) {
        for (_, values) in sends {
            self.sent.elements += values.len() as u64;
            self.sent.data_bytes += size_of_val(*values) as u64;
        }
        let sends: Vec<_> = sends
            .iter()
            .filter(|(_, values)| !values.is_empty())
            .map(|(to, values)| (*to, cast_slice(values)))
            .collect();
        let mut receives: Vec<_> = receives
            .into_iter()
            .filter(|(_, values)| !values.is_empty())
            .map(|(from, values)| (from, cast_slice_mut(values)))
            .collect();
        self.link.exchange(call, DATA, &sends, &mut receives);
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn world_size(&self) -> usize {
        self.link.world_size()
    }

    fn announce(&mut self, call: &Call) -> Result<Vec<Call>, GroupFault> {
        let own = serde_json::to_vec(call).expect("a call is plain data");
        let sends: Vec<_> = self.link.peers().map(|to| (to, &own[..])).collect();
        let mut buffers = vec![[0; CALL_BYTES]; sends.len()];
        let mut receives: Vec<_> = self
            .link
            .peers()
            .zip(buffers.iter_mut().map(|into| &mut into[..]))
            .collect();
        let lengths = self.link.exchange(call, CALLS, &sends, &mut receives);
        self.sent.header_bytes += (own.len() * sends.len()) as u64;
        let mut calls: Vec<Call> = buffers
            .iter()
            .zip(lengths)
            .map(|(bytes, length)| {
                serde_json::from_slice(&bytes[..length]).expect("ranks run the same program")
            })
            .collect();
        calls.insert(self.rank(), call.clone());
        Ok(calls)
    }

    fn reduce_scatter<E: Element>(
        &mut self,
        call: &Call,
        buffer: &Arc<Vec<E>>,
        offsets: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<E>, GroupFault> {
        let rank = self.rank();
        let parts = parts(offsets);
        let own = &parts[rank];
        let mut out = vec![E::zeroed(); own.len()];
        let longest = self.link.options.chunk_elements.min(own.len());
        let mut staging = vec![vec![E::zeroed(); longest]; self.world_size()];
        for index in 0..self.chunks(&parts) {
            let own_chunk = self.chunk(own, index);
            let sends: Vec<_> = self
                .link
                .peers()
                .map(|to| (to, &buffer[self.chunk(&parts[to], index)]))
                .collect();
            let receives = staging
                .iter_mut()
                .enumerate()
                .filter(|(from, _)| *from != rank)
                .map(|(from, into)| (from, &mut into[..own_chunk.len()]))
                .collect();
            self.exchange(call, &sends, receives);
            let mut parts: Vec<&[E]> = staging
                .iter()
                .map(|part| &part[..own_chunk.len()])
                .collect();
            parts[rank] = &buffer[own_chunk.clone()];
            reduce(
                op,
                &parts,
                &mut out[own_chunk.start - own.start..own_chunk.end - own.start],
            );
        }
        Ok(out)
    }

    fn transfer<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        own: &Arc<Vec<P>>,
        sends: &[Range<usize>],
        places: &[Range<usize>],
        into: impl FnOnce() -> Vec<P>,
    ) -> Result<Vec<P>, GroupFault> {
        let rank = self.rank();
        let mut out = into();
        out[places[rank].clone()].copy_from_slice(&own[sends[rank].clone()]);
        let others = |ranges: &[Range<usize>]| -> Vec<_> {
            let peers = self.link.peers();
            peers.map(|peer| ranges[peer].clone()).collect()
        };
        for index in 0..self.chunks(others(sends).iter().chain(&others(places))) {
            let chunk = |to| (to, &own[self.chunk(&sends[to], index)]);
            let sends: Vec<_> = self.link.peers().map(chunk).collect();
            let (mut rest, mut start) = (&mut out[..], 0);
            let mut receives = Vec::new();
            // Places ascend with ranks, but for the empty ones.
            for (from, place) in places.iter().enumerate() {
                let chunk = self.chunk(place, index);
                if from == rank || chunk.is_empty() {
                    continue;
                }
                let (_, behind) = rest.split_at_mut(chunk.start - start);
                let (values, behind) = behind.split_at_mut(chunk.len());
                (rest, start) = (behind, chunk.end);
                receives.push((from, values));
            }
            self.exchange(call, &sends, receives);
        }
        Ok(out)
    }

    fn take_sent(&mut self) -> Sent {
        std::mem::take(&mut self.sent)
    }

    fn patience(&self) -> Option<Duration> {
        Some(round(self.link.options.deadline))
    }

    fn stay(&mut self) {
        self.link.stay();
    }

    fn spread(&mut self, fault: &GroupFault) {
        self.link.spread(fault);
    }

    fn leave(&mut self, calls: u64) {
        self.link.leave(calls);
    }
}
