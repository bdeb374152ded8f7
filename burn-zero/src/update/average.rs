//! The model with the averages of its weights, of which each rank keeps those of its shards.

use std::collections::HashMap;

use burn::module::AutodiffModule;
use burn::tensor::Shape;
use burn_backend::{AutodiffBackend, Backend};
use burn_update::{Averages, UpdateError};

use super::gather::Gather;
use super::sharding::{Prepared, Sharding};
use super::step::{in_type_of_parameters, read_shards};
use crate::error::ZeroError;
use crate::parameters::module::device_of;
use crate::parameters::{NewValue, ParameterStore, Shard};
use crate::reduce::{GradientReducer, Layout};
use crate::settings::Memory;

impl Sharding {
    /// The model with `averages` of this rank's shards, and those of the other ranks, for its
    /// weights: gathered now, or at stage 3 where they are used. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`](crate::ShardingFault::NotPrepared),
    /// [`ShardingFault::OtherModel`](crate::ShardingFault::OtherModel); those of the group.
    pub(super) fn averaged<B, M>(
        &self,
        model: &M,
        averages: Averages<B::InnerBackend>,
    ) -> Result<M::InnerModule, UpdateError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        self.trained::<B, M>(model)?;
        let Prepared { reducer, store } = self.prepared()?;
        let layout = reducer.layout();
        let averages = by_position::<B::InnerBackend>(layout, averages);
        let averaged = match store.shards() {
            Some(memory) => of_shards::<B, M>(&store, memory, model, averages),
            None => {
                let model = Box::new(model.clone());
                *self.whole_averages::<B, M>(&reducer, &store, model, averages)?
            }
        };
        Ok(averaged.valid())
    }

    /// The model with the averages of all ranks, where each has whole parameters.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn whole_averages<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        reducer: &GradientReducer,
        store: &ParameterStore,
        model: Box<M>,
        mut averages: HashMap<usize, NewValue<B::InnerBackend>>,
    ) -> Result<Box<M>, ZeroError> {
        let layout = reducer.layout();
        if layout.holds_all() {
            let memory = self.settings.parameters;
            return Ok(store.replace::<B, M>(model, memory, |parameter| {
                let shape = layout.parameters()[parameter].shape.clone();
                Some(averages.remove(&parameter)?.reshaped(Shape::from(shape)))
            }));
        }
        let own = read_shards::<B::InnerBackend>(layout, averages)?;
        let all = vec![true; layout.parameters().len()];
        let gather = Gather::new(reducer, "averages of the weights".into(), own, all);
        self.replace_by_gathered::<B, M>(model, store, gather)
    }
}

/// The averages of this rank's shards in the types of their parameters, by parameter.
fn by_position<I: Backend>(
    layout: &Layout,
    mut averages: Averages<I>,
) -> HashMap<usize, NewValue<I>> {
    let known = layout.parameters().iter().enumerate();
    let found = known.filter_map(|(parameter, known)| {
        let average = averages.remove(&known.path)?;
        Some((parameter, NewValue::Device(average)))
    });
    in_type_of_parameters(layout, found.collect())
}

/// The model with leaves that are gathered from the averages of all ranks, when they are used.
fn of_shards<B: AutodiffBackend, M: AutodiffModule<B>>(
    store: &ParameterStore,
    memory: Memory,
    model: &M,
    averages: HashMap<usize, NewValue<B::InnerBackend>>,
) -> M {
    let device = device_of::<B, M>(model);
    let shards = averages.into_iter().map(|(parameter, average)| {
        let average = Shard::new::<B::InnerBackend>(average, memory, &device);
        (parameter, average)
    });
    let at = "the averages of the weights".to_owned();
    let averages = store.beside::<B, M>(shards.collect(), model, at);
    let averages = averages.expect("the store has shards");
    averages.put::<B, M>(model.clone())
}
