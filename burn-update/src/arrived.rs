//! The gradients of one micro-step, from one device or several, and the other entries of their
//! containers.

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::{GradientsParams, MultiGradientsParams},
    tensor::{
        Bool, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use burn_decorator::non_finite::{GradientsOf, on, widen};

/// The id under which gradients carry the number of items that they came from, f32 `[1]`.
/// `ParamId`s are random 64-bit numbers, so this fixed one does not collide with them.
pub fn items_id() -> ParamId {
    ParamId::from(u64::from_be_bytes(*b"burnitem"))
}

/// What a training loop asks of an update that is inside of a Learner, which does not expose it: as
/// an entry of gradients that has no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// That it is there.
    Answer,
    /// To apply a window that is not complete.
    Flush,
    /// What the loop has left in the update's progress for its reduction over ranks.
    Ranks,
    /// To leave the model with the averages of its weights in the update's progress.
    Average,
}

impl Request {
    const ALL: [Self; 4] = [Self::Answer, Self::Flush, Self::Ranks, Self::Average];

    /// Fixed, as [`items_id`] is.
    fn id(self) -> ParamId {
        let name = match self {
            Self::Answer => b"burnansw",
            Self::Flush => b"burnflus",
            Self::Ranks => b"burnrank",
            Self::Average => b"burnaver",
        };
        ParamId::from(u64::from_be_bytes(*name))
    }

    /// The gradients of a step that is this request.
    pub(crate) fn as_gradients<I: Backend>(self, device: &I::Device) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        gradients.register(self.id(), Tensor::<I, 1>::zeros([1], device));
        gradients
    }
}

/// The gradients of one micro-step, from one device or several: what
/// [`Update::step`](crate::Update::step) takes, and an [`Accumulate`](crate::Accumulate) adds up.
pub struct Arrived {
    /// One entry per device.
    devices: Vec<GradientsParams>,
}

impl From<GradientsParams> for Arrived {
    fn from(gradients: GradientsParams) -> Self {
        Self {
            devices: vec![gradients],
        }
    }
}

impl From<MultiGradientsParams> for Arrived {
    fn from(gradients: MultiGradientsParams) -> Self {
        let devices = gradients.grads.into_iter().map(|(gradients, _)| gradients);
        Self {
            devices: devices.collect(),
        }
    }
}

impl Arrived {
    /// How many micro-batches these are; call it after the numbers of items are taken out. A device
    /// that ran out of data brings no gradients; at least one micro-batch is counted, even if it
    /// has no gradients.
    pub fn micro_batches(&self) -> u64 {
        let bringing = self
            .devices
            .iter()
            .filter(|gradients| !gradients.is_empty());
        bringing.count().max(1) as u64
    }

    /// Takes the numbers of items out, f32 `[1]` each, one for each device that brought one.
    pub fn take_items<I: Backend>(&mut self) -> Vec<Tensor<I, 1>> {
        self.devices
            .iter_mut()
            .filter_map(|gradients| gradients.remove(items_id()))
            .collect()
    }

    /// Takes a request out, if these are one.
    pub(crate) fn take_request<I: Backend>(&mut self) -> Option<Request> {
        let mut is_there = |request: &Request| {
            let mut devices = self.devices.iter_mut();
            devices.any(|gradients| gradients.remove::<I, 1>(request.id()).is_some())
        };
        Request::ALL.into_iter().find(&mut is_there)
    }

    /// Whether the gradients came from one device.
    pub fn is_of_one_device(&self) -> bool {
        self.devices.len() == 1
    }

    /// The gradients, if they came from one device.
    pub fn into_one(mut self) -> GradientsParams {
        debug_assert!(self.devices.len() <= 1, "gradients of several devices");
        self.devices.pop().unwrap_or_default()
    }

    /// The gradients, added up over the devices, in the types of their parameters.
    pub(crate) fn sum<B, M>(self, model: &M) -> GradientsParams
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        if self.devices.len() <= 1 {
            return self.into_one();
        }
        let mut summer = Summer {
            arrived: self,
            sums: GradientsParams::new(),
        };
        model.visit(&mut summer);
        summer.sums
    }

    /// Takes the gradients of a parameter out, of all devices, without adding them up.
    pub(crate) fn drop_gradients<I: Backend>(&mut self, id: ParamId) {
        for gradients in &mut self.devices {
            // `GradientsParams` does not store the number of dimensions.
            drop(gradients.remove::<I, 1>(id));
        }
    }

    /// Takes the gradients of a parameter out and adds them to `sum`, in f32 and in place, on the
    /// device where Burn's `MultiGradientsParams::remove` puts them: it is fixed for each
    /// parameter. If `non_finite`, `[1]`, is set, `sum` stays as it is, bit for bit.
    pub fn add_to<I: Backend, const D: usize>(
        &mut self,
        id: ParamId,
        mut sum: Option<Tensor<I, D>>,
        non_finite: Option<&Tensor<I, 1, Bool>>,
    ) -> Option<Tensor<I, D>> {
        let devices = self.devices.len();
        let first = id.val() as usize % devices.max(1);
        let mut home = None;
        for index in (first..devices).chain(0..first) {
            let Some(gradient) = self.devices[index].remove::<I, D>(id) else {
                continue;
            };
            let home = home.get_or_insert_with(|| gradient.device());
            let mut gradient = widen(on(gradient, home));
            if let Some(non_finite) = non_finite {
                let mask = on(non_finite.clone(), home).reshape([1; D]);
                gradient = gradient.mask_fill(mask, -0.0); // -0 + 0 is 0
            }
            sum = Some(match sum {
                Some(sum) => on(sum, home).add(gradient),
                None => gradient,
            });
        }
        sum
    }
}

impl GradientsOf for Arrived {
    fn each<I: Backend, const D: usize>(&self, id: ParamId) -> Vec<Tensor<I, D>> {
        let devices = self.devices.iter();
        devices.filter_map(|gradients| gradients.get(id)).collect()
    }
}

/// Adds the devices' gradients up.
struct Summer {
    arrived: Arrived,
    sums: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Summer {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let sum = self
            .arrived
            .add_to::<B::InnerBackend, D>(param.id, None, None);
        if let Some(sum) = sum {
            self.sums.register(param.id, sum.cast(param.val().dtype()));
        }
    }
}
