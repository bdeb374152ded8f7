//! Movements of data as messages: every pair of ranks exchanges its parts directly, in chunks.

use std::{ops::Range, sync::Arc, time::Duration};

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use super::link::{CALLS, DATA, Link};
use crate::group::{
    Call, GroupFault, ReduceOp, Sent, buffer::Element, reduce::reduce, round, transport::Transport,
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

    /// Number of chunks of the longest part.
    fn chunks(&self, offsets: &[usize]) -> usize {
        let longest = offsets
            .windows(2)
            .map(|part| part[1] - part[0])
            .max()
            .unwrap_or(0);
        longest.div_ceil(self.link.options.chunk_elements)
    }

    /// Where chunk `index` of each other rank's part goes.
    fn others_chunks<'a, P>(
        &self,
        out: &'a mut [P],
        offsets: &[usize],
        index: usize,
    ) -> Vec<(usize, &'a mut [P])> {
        let mut rest = out;
        let mut receives = Vec::new();
        for from in 0..self.link.world_size() {
            let range = part(offsets, from);
            let (values, behind) = rest.split_at_mut(range.len());
            rest = behind;
            if from != self.link.rank() {
                receives.push((from, &mut values[self.chunk(&(0..range.len()), index)]));
            }
        }
        receives
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

fn part(offsets: &[usize], rank: usize) -> Range<usize> {
    offsets[rank]..offsets[rank + 1]
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
        let own = part(offsets, rank);
        let mut out = vec![E::zeroed(); own.len()];
        let longest = self.link.options.chunk_elements.min(own.len());
        let mut staging = vec![vec![E::zeroed(); longest]; self.world_size()];
        for index in 0..self.chunks(offsets) {
            let peers: Vec<_> = self.link.peers().collect();
            let own_chunk = self.chunk(&own, index);
            let sends: Vec<_> = peers
                .iter()
                .map(|&to| (to, &buffer[self.chunk(&part(offsets, to), index)]))
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

    fn all_gather<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        own: &Arc<Vec<P>>,
        offsets: &[usize],
        into: impl FnOnce() -> Vec<P>,
    ) -> Result<Vec<P>, GroupFault> {
        let rank = self.rank();
        let mut out = into();
        out[part(offsets, rank)].copy_from_slice(own);
        for index in 0..self.chunks(offsets) {
            let chunk = &own[self.chunk(&(0..own.len()), index)];
            let sends: Vec<_> = self.link.peers().map(|to| (to, chunk)).collect();
            let receives = self.others_chunks(&mut out, offsets, index);
            self.exchange(call, &sends, receives);
        }
        Ok(out)
    }

    fn scatter<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        root: usize,
        buffer: &Arc<Vec<P>>,
        offsets: &[usize],
    ) -> Result<Vec<P>, GroupFault> {
        let rank = self.rank();
        let own = part(offsets, rank);
        let mut out = buffer[own.clone()].to_vec();
        for index in 0..self.chunks(offsets) {
            if rank == root {
                let sends: Vec<_> = self
                    .link
                    .peers()
                    .map(|to| (to, &buffer[self.chunk(&part(offsets, to), index)]))
                    .collect();
                self.exchange(call, &sends, Vec::new());
            } else {
                let chunk = self.chunk(&(0..own.len()), index);
                self.exchange(call, &[], vec![(root, &mut out[chunk])]);
            }
        }
        Ok(out)
    }

    fn gather<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        root: usize,
        own: &Arc<Vec<P>>,
        offsets: &[usize],
    ) -> Result<Vec<P>, GroupFault> {
        if self.rank() != root {
            for index in 0..own.len().div_ceil(self.link.options.chunk_elements) {
                let chunk = &own[self.chunk(&(0..own.len()), index)];
                self.exchange(call, &[(root, chunk)], Vec::new());
            }
            return Ok(Vec::new());
        }
        let mut out = vec![P::zeroed(); offsets[self.world_size()]];
        out[part(offsets, root)].copy_from_slice(own);
        for index in 0..self.chunks(offsets) {
            let receives = self.others_chunks(&mut out, offsets, index);
            self.exchange(call, &[], receives);
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
