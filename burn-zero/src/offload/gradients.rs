//! Gradients that are copied to the host during backward, for an optimizer that is not inside a `ZeroOptimizer`.

use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;

use crate::backend::attach;
use crate::group::SingleRank;
use crate::optimizer::Parameters;
use crate::reduce::{GradientReducer, Layout};
use crate::{Memory, ZeroError, ZeroSettings};

/// The gradient reducer, of one rank: none before there is a model, and on a backend that is not
/// [`Sharded`](crate::Sharded).
#[derive(Clone, Debug, Default)]
pub(super) struct HostGradients(Option<Arc<GradientReducer>>);

impl HostGradients {
    /// From now on the gradients of these parameters are copied to the host in this thread's backward passes, in buckets of this many
    /// elements.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for buckets of nothing.
    pub(super) fn attach<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: &M,
        bucket_elements: usize,
        is_on_host: impl Fn(ParamId) -> bool,
    ) -> Result<(), ZeroError> {
        let known = self.0.take();
        let all = Parameters::of::<B, M>(module);
        let found = all.ids().into_iter().zip(all.list).zip(all.nodes);
        let (list, nodes): (Vec<_>, Vec<_>) = found
            .filter(|((id, _), _)| is_on_host(*id))
            .map(|((_, parameter), node)| (parameter, node))
            .unzip();
        // The shards that a `ZeroOptimizer` makes are not leaves.
        if list.is_empty() || nodes.contains(&None) {
            return Ok(());
        }
        let reducer = match known.filter(|known| known.layout().parameters() == list) {
            Some(known) => known,
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
        attach(&reducer, &nodes);
        self.0 = Some(reducer);
        Ok(())
    }
}
