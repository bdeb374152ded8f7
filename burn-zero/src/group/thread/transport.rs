//! The transport by shared memory: ranks read each other's buffers without a copy.

use std::{ops::Range, sync::Arc};

use bytemuck::Pod;

use super::mailboxes::{Mailboxes, Message};
use crate::group::{
    Call, GroupFault, GroupOptions, ReduceOp, Sent, buffer::Element, call::parts, reduce::reduce,
    transport::Transport,
};

pub(super) struct ThreadTransport {
    rank: usize,
    mailboxes: Arc<Mailboxes>,
    options: GroupOptions,
    sent: Sent,
    /// This rank's call.
    calling: u64,
}

/// A vector of another rank, and the elements of it that this one reads.
type Part<P> = (Arc<Vec<P>>, Range<usize>);

impl ThreadTransport {
    pub fn new(rank: usize, mailboxes: Arc<Mailboxes>, options: GroupOptions) -> Self {
        Self {
            rank,
            mailboxes,
            options,
            sent: Sent::default(),
            calling: 0,
        }
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.mailboxes.world_size()).filter(move |&rank| rank != own)
    }

    fn take(&self, from: usize, call: &Call) -> Result<Message, GroupFault> {
        self.mailboxes
            .take(from, self.rank, call, self.options.deadline)
    }

    /// Lets every rank read its range of `own`. Returns what the ranks that `reads` names let this one read, in their order.
    fn exchange<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        own: &Arc<Vec<P>>,
        sends: &[Range<usize>],
        reads: impl Fn(usize) -> bool,
    ) -> Result<Vec<Part<P>>, GroupFault> {
        for to in self.peers().filter(|&to| !sends[to].is_empty()) {
            self.sent.elements += sends[to].len() as u64;
            self.sent.data_bytes += (sends[to].len() * size_of::<P>()) as u64;
            self.mailboxes.post(
                self.rank,
                to,
                Message::Values(own.clone(), sends[to].clone()),
            );
        }
        let receive = |from: usize| -> Result<Part<P>, GroupFault> {
            if from == self.rank {
                return Ok((own.clone(), sends[from].clone()));
            }
            match self.take(from, call)? {
                Message::Values(values, range) => {
                    let values = values.downcast();
                    let values = values.expect("ranks agree on a call's type before they send");
                    Ok((values, range))
                }
                Message::Call(other) => unreachable!("{other} came in the middle of {call}"),
            }
        };
        let ranks = (0..self.world_size()).filter(|&from| reads(from));
        ranks.map(receive).collect()
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mailboxes.world_size()
    }

    fn announce(&mut self, call: &Call) -> Result<Vec<Call>, GroupFault> {
        self.calling = call.sequence;
        let own = Arc::new(call.clone());
        for peer in self.peers() {
            self.mailboxes
                .post(self.rank, peer, Message::Call(own.clone()));
        }
        let receive = |rank| {
            if rank == self.rank {
                return Ok(call.clone());
            }
            match self.take(rank, call)? {
                Message::Call(call) => Ok((*call).clone()),
                Message::Values(..) => unreachable!("values came before {call}"),
            }
        };
        (0..self.world_size()).map(receive).collect()
    }

    fn reduce_scatter<E: Element>(
        &mut self,
        call: &Call,
        buffer: &Arc<Vec<E>>,
        offsets: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<E>, GroupFault> {
        let ranges = parts(offsets);
        let own = ranges[self.rank].clone();
        let buffers = self.exchange(call, buffer, &ranges, |_| !own.is_empty())?;
        let parts: Vec<_> = buffers.iter().map(|(all, at)| &all[at.clone()]).collect();
        let mut out = vec![E::zeroed(); own.len()];
        reduce(op, &parts, &mut out);
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
        let received = self.exchange(call, own, sends, |from| !places[from].is_empty())?;
        let mut out = into();
        let places = places.iter().filter(|place| !place.is_empty());
        for (place, (values, range)) in places.zip(received) {
            out[place.clone()].copy_from_slice(&values[range]);
        }
        Ok(out)
    }

    fn take_sent(&mut self) -> Sent {
        std::mem::take(&mut self.sent)
    }

    fn spread(&mut self, fault: &GroupFault) {
        self.mailboxes.fail(self.calling, fault);
    }

    fn leave(&mut self, calls: u64) {
        self.mailboxes.leave(self.rank, calls);
    }
}
