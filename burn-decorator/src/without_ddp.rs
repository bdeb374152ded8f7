//! Refuses Burn's features `ddp` and `distributed` where these crates are compiled, with an error
//! that names them.
//!
//! With them `Autodiff<B>` is an `AutodiffBackend` for `B: DistributedBackend` only, whose methods
//! give a server thread raw pointers to gradients. A tensor that may be recomputed, in host memory
//! or sharded has no such pointer (`docs/zero.md`, "Burn's own data parallel"). Every use of
//! `Autodiff<B>` over another backend would be an error of its own, and none would name the
//! feature.

use burn_backend::AutodiffBackend;
use burn_backend::tensor::FloatTensor;

/// Has a function of the name that the features add to [`AutodiffBackend`], so that a call of it is
/// ambiguous with them.
trait BurnsFeaturesDdpAndDistributedDoNotWorkWithTheseDecorators: AutodiffBackend {
    fn is_distributed(_: &FloatTensor<Self>) -> bool {
        false
    }
}

impl<B: AutodiffBackend> BurnsFeaturesDdpAndDistributedDoNotWorkWithTheseDecorators for B {}

#[expect(dead_code, reason = "it is compiled, never called")]
fn is_refused<B>(tensor: &FloatTensor<B>) -> bool
where
    B: AutodiffBackend + BurnsFeaturesDdpAndDistributedDoNotWorkWithTheseDecorators,
{
    B::is_distributed(tensor)
}
