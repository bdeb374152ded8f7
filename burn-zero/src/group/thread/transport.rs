//! Ranks that read each other's buffers: nothing is copied on the way.

use std::sync::Arc;

use bytemuck::Pod;

use super::board::{Board, Message};
use crate::group::{
    Call, GroupFault, GroupOptions, ReduceOp, Sent, buffer::Element, reduce::reduce,
    transport::Transport,
};

pub(super) struct ThreadTransport {
    rank: usize,
    board: Arc<Board>,
    options: GroupOptions,
    sent: Sent,
    /// This rank's call.
    calling: u64,
}

impl ThreadTransport {
    pub fn new(rank: usize, board: Arc<Board>, options: GroupOptions) -> Self {
        Self {
            rank,
            board,
            options,
            sent: Sent::default(),
            calling: 0,
        }
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.board.world_size()).filter(move |&rank| rank != own)
    }

    /// Lets `to` read `elements` of `values`.
    fn send<P: Pod + Send + Sync>(&mut self, to: usize, values: &Arc<Vec<P>>, elements: usize) {
        self.sent.elements += elements as u64;
        self.sent.data_bytes += (elements * size_of::<P>()) as u64;
        self.board
            .post(self.rank, to, Message::Values(values.clone()));
    }

    fn take(&self, from: usize, call: &Call) -> Result<Message, GroupFault> {
        self.board
            .take(from, self.rank, call, self.options.deadline)
    }

    /// The vector that `from` sends. Its type is that of the call, which all ranks have agreed on.
    fn receive<P: Pod + Send + Sync>(
        &self,
        from: usize,
        call: &Call,
    ) -> Result<Arc<Vec<P>>, GroupFault> {
        match self.take(from, call)? {
            Message::Values(values) => Ok(values
                .downcast()
                .expect("ranks agree on a call's type before they send")),
            Message::Call(other) => unreachable!("{other} came in the middle of {call}"),
        }
    }

    fn receive_all<P: Pod + Send + Sync>(
        &self,
        own: &Arc<Vec<P>>,
        call: &Call,
    ) -> Result<Vec<Arc<Vec<P>>>, GroupFault> {
        let receive = |rank| {
            if rank == self.rank {
                Ok(own.clone())
            } else {
                self.receive(rank, call)
            }
        };
        (0..self.board.world_size()).map(receive).collect()
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.board.world_size()
    }

    fn announce(&mut self, call: &Call) -> Result<Vec<Call>, GroupFault> {
        self.calling = call.sequence;
        let own = Arc::new(call.clone());
        for peer in self.peers() {
            self.board.post(self.rank, peer, Message::Call(own.clone()));
        }
        let receive = |rank| {
            if rank == self.rank {
                return Ok(call.clone());
            }
            match self.take(rank, call)? {
                Message::Call(call) => Ok((*call).clone()),
                Message::Values(_) => unreachable!("values came before {call}"),
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
        for peer in self.peers() {
            self.send(peer, buffer, offsets[peer + 1] - offsets[peer]);
        }
        let buffers = self.receive_all(buffer, call)?;
        let own = offsets[self.rank]..offsets[self.rank + 1];
        let parts: Vec<&[E]> = buffers.iter().map(|buffer| &buffer[own.clone()]).collect();
        let mut out = vec![E::zeroed(); own.len()];
        reduce(op, &parts, &mut out);
        Ok(out)
    }

    fn all_gather<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        part: &Arc<Vec<P>>,
        offsets: &[usize],
        into: impl FnOnce() -> Vec<P>,
    ) -> Result<Vec<P>, GroupFault> {
        for peer in self.peers() {
            self.send(peer, part, part.len());
        }
        let parts = self.receive_all(part, call)?;
        let mut out = into();
        for (part, at) in parts.iter().zip(offsets.windows(2)) {
            out[at[0]..at[1]].copy_from_slice(part);
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
        let own = offsets[self.rank]..offsets[self.rank + 1];
        if root != self.rank {
            return Ok(self.receive::<P>(root, call)?[own].to_vec());
        }
        for peer in self.peers() {
            self.send(peer, buffer, offsets[peer + 1] - offsets[peer]);
        }
        Ok(buffer[own].to_vec())
    }

    fn gather<P: Pod + Send + Sync>(
        &mut self,
        call: &Call,
        root: usize,
        part: &Arc<Vec<P>>,
        offsets: &[usize],
    ) -> Result<Vec<P>, GroupFault> {
        if root != self.rank {
            self.send(root, part, part.len());
            return Ok(Vec::new());
        }
        let parts = self.receive_all(part, call)?;
        let mut out = Vec::with_capacity(offsets[parts.len()]);
        parts.iter().for_each(|part| out.extend_from_slice(part));
        Ok(out)
    }

    fn take_sent(&mut self) -> Sent {
        std::mem::take(&mut self.sent)
    }

    fn spread(&mut self, fault: &GroupFault) {
        self.board.fail(self.calling, fault);
    }

    fn leave(&mut self, calls: u64) {
        self.board.leave(self.rank, calls);
    }
}
