//! Parameters on their way through the host: while one is updated, the next is downloaded and the last uploaded.
//!
//! ```text
//! this thread    download 1, 2 | upload 0, download 3 | upload 1, download 4 | ..
//! worker               update 0 | update 1             | update 2             | ..
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use burn::module::ParamId;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::job::{Done, From, Job};
use crate::host::HostRead;
use crate::offload::{AdamWStep, HostAdamWConfig, OffloadError};

/// The update of a parameter, before anything of it is downloaded.
pub(super) struct Order<I: Backend> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) from: From,
    /// The parameter, where the host must see it.
    pub(super) value: Option<FloatTensor<I>>,
    pub(super) gradient: FloatTensor<I>,
}

type Outcome = Result<(ParamId, Done), OffloadError>;

/// Hands orders to a worker, so many at a time.
pub(super) struct Pipeline<I: Backend> {
    orders: VecDeque<Order<I>>,
    staging: usize,
    underway: usize,
    jobs: Sender<Job>,
    outcomes: Receiver<Outcome>,
    /// Parameters that were not asked for yet.
    done: HashMap<ParamId, Done>,
}

impl<I: Backend> Pipeline<I> {
    /// The worker ends with the pipeline.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        orders: Vec<Order<I>>,
        staging: usize,
        config: &'scope HostAdamWConfig,
        args: AdamWStep,
    ) -> Self {
        let (jobs, queue) = channel();
        let (results, outcomes) = channel();
        if !orders.is_empty() {
            scope.spawn(move || work(queue, results, config, args));
        }
        let mut pipeline = Self {
            orders: orders.into(),
            staging,
            underway: 0,
            jobs,
            outcomes,
            done: HashMap::new(),
        };
        pipeline.fill();
        pipeline
    }

    /// Waits for a parameter; `None` if it was not ordered. They are updated in the order of the orders.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Parameter`].
    pub(super) fn take(&mut self, id: ParamId) -> Result<Option<Done>, OffloadError> {
        loop {
            if let Some(done) = self.done.remove(&id) {
                return Ok(Some(done));
            }
            if self.underway == 0 {
                return Ok(None);
            }
            let (id, done) = self
                .outcomes
                .recv()
                .expect("the worker has said why it ended")?;
            self.underway -= 1;
            self.done.insert(id, done);
            // Before this one is uploaded: the worker is not to wait.
            self.fill();
        }
    }

    /// Starts downloads.
    fn fill(&mut self) {
        while self.underway < self.staging
            && let Some(order) = self.orders.pop_front()
        {
            let job = Job {
                id: order.id,
                path: order.path,
                from: order.from,
                value: order.value.map(HostRead::start::<I>),
                gradient: HostRead::start::<I>(order.gradient),
            };
            self.underway += 1;
            // A worker that has ended is noticed by whoever waits for it.
            let _ = self.jobs.send(job);
        }
    }
}

fn work(queue: Receiver<Job>, results: Sender<Outcome>, config: &HostAdamWConfig, args: AdamWStep) {
    for job in queue {
        let (id, path) = (job.id, job.path.clone());
        let outcome = job.run(config, args);
        let outcome = outcome
            .map(|done| (id, done))
            .map_err(|source| OffloadError::Parameter { path, source });
        if results.send(outcome).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorPrimitive;
    use burn_flex::Flex;

    use super::*;

    fn tensor(values: &[f32]) -> FloatTensor<Flex> {
        let tensor = burn::tensor::Tensor::<Flex, 1>::from_data(values, &Default::default());
        match tensor.into_primitive() {
            TensorPrimitive::Float(tensor) => tensor,
            TensorPrimitive::QFloat(_) => unreachable!("a tensor of floats"),
        }
    }

    #[test]
    fn no_more_parameters_are_under_way_than_staging_says() {
        let config = HostAdamWConfig::default();
        let ids: Vec<_> = (0..10).map(|_| ParamId::new()).collect();
        for staging in [1, 3, 20] {
            let orders = ids.iter().map(|&id| Order {
                id,
                path: "weight".to_owned(),
                from: From::Nothing,
                value: Some(tensor(&[1.0, 2.0])),
                gradient: tensor(&[0.5, -0.5]),
            });
            std::thread::scope(|scope| {
                let args = config.at(0.25);
                let orders = orders.collect();
                let mut pipeline = Pipeline::<Flex>::start(scope, orders, staging, &config, args);
                for (taken, &id) in ids.iter().enumerate() {
                    let left = ids.len() - taken;
                    assert_eq!(pipeline.underway, staging.min(left));
                    let done = pipeline.take(id).unwrap().unwrap();
                    let value = done.value.into_vec::<f32>().unwrap();
                    assert!(value[0] < 1.0 && value[1] > 2.0);
                }
                assert!(pipeline.take(ParamId::new()).unwrap().is_none());
            });
        }
    }

    #[test]
    fn a_parameter_that_cannot_be_updated_is_named() {
        let config = HostAdamWConfig::default();
        std::thread::scope(|scope| {
            let id = ParamId::new();
            let order = Order {
                id,
                path: "blocks.0.weight".to_owned(),
                from: From::Nothing,
                value: Some(tensor(&[1.0, 2.0])),
                gradient: tensor(&[0.5]),
            };
            let mut pipeline =
                Pipeline::<Flex>::start(scope, vec![order], 3, &config, config.at(0.25));
            let Err(error) = pipeline.take(id) else {
                panic!("a gradient of another length was taken");
            };
            assert!(error.to_string().contains("blocks.0.weight"));
        });
    }
}
