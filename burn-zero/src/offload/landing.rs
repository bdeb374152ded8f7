//! Gradients that go to the host while backward goes on, for an optimizer that is not inside of a `ZeroOptimizer`.

use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;

use crate::backend::attach;
use crate::group::SingleRank;
use crate::optimizer::Parameters;
use crate::reduce::{GradientReducer, Layout, Parameter};
use crate::{Memory, ZeroError, ZeroSettings};

/// What brings them: none before there is a model, and on a backend that is not [`Sharded`](crate::Sharded).
#[derive(Clone, Debug, Default)]
pub(super) struct Landing {
    reducer: Option<Arc<GradientReducer>>,
}

impl Landing {
    /// From now on this thread looks out for the leaves of these parameters, in buckets of so many elements.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for buckets of nothing.
    pub(super) fn look_out<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: &M,
        bucket_elements: usize,
        is_on_host: impl Fn(ParamId) -> bool,
    ) -> Result<(), ZeroError> {
        let all = Parameters::of::<B, M>(module);
        let ids = all.ids().into_iter();
        let found = ids.zip(all.list).zip(all.nodes);
        let (list, nodes): (Vec<_>, Vec<_>) = found
            .filter(|((id, _), _)| is_on_host(*id))
            .map(|((_, parameter), node)| (parameter, node))
            .unzip();
        // The pieces that a `ZeroOptimizer` makes are no leaves.
        if list.is_empty() || nodes.contains(&None) {
            self.reducer = None;
            return Ok(());
        }
        attach(self.exchange_of(list, bucket_elements)?, &nodes);
        Ok(())
    }

    fn exchange_of(
        &mut self,
        list: Vec<Parameter>,
        bucket_elements: usize,
    ) -> Result<&Arc<GradientReducer>, ZeroError> {
        let known = self.reducer.take();
        let known = known.filter(|reducer| reducer.layout().parameters() == list);
        let reducer = match known {
            Some(reducer) => reducer,
            None => {
                let settings = ZeroSettings {
                    bucket_elements,
                    gradients: Memory::Host,
                    ..ZeroSettings::default()
                };
                let layout = Layout::new(list, 1, 0, &settings)?;
                let group = Arc::new(SingleRank::new());
                Arc::new(GradientReducer::new(layout, group, &settings))
            }
        };
        Ok(self.reducer.insert(reducer))
    }
}
