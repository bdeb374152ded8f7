//! Groups of parameters, by path: each with an optimizer and a learning rate of its own, or frozen.

use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Device, Tensor};

use crate::optimizer::{BurnOptimizer, OPTIMIZER, RECORD};
use crate::part::Slot;
use crate::{Optimize, Parameter, PartState, Stateful, Step, UpdateError};

/// Groups of a model's parameters, each with its optimizer, for
/// [`Update::of_groups`](crate::Update::of_groups). Parameters of no group are the rest's.
///
/// ```
/// use burn::{backend::Autodiff, nn::{Linear, LinearConfig}, optim::{AdamWConfig, MuonConfig}};
/// use burn_update::{Group, Groups, Paths, Update};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let adamw = AdamWConfig::new().with_weight_decay(0.1);
/// let no_decay = adamw.clone().with_weight_decay(0.0);
///
/// let groups = Groups::new(adamw.init()) // the rest
///     .with("no decay", Group::new(Paths::glob("*bias"), no_decay.init()))
///     .with("matrices", Group::new(Paths::matrices(), MuonConfig::new().init()).with_lr_factor(20.0));
/// let update: Update<Linear<B>, B> = Update::of_groups(groups);
/// # let _ = update;
/// ```
///
/// A group that matches no parameter, and a parameter that two groups match, are errors of the
/// first step: [`UpdateError::NoParameter`], [`UpdateError::TwoGroups`]. A tied parameter is
/// matched by any of its paths.
///
/// With one group that has all parameters the update is that group's optimizer, bit for bit.
pub struct Groups<M: AutodiffModule<B> + 'static, B: AutodiffBackend> {
    rest: Slot<dyn Optimize<M, B>>,
    named: Vec<Named<M, B>>,
    /// The group of each parameter of the model, once it is known.
    members: HashMap<ParamId, UpdatedBy>,
    /// The only one of its optimizers that is used, in a trial.
    alone: Option<UpdatedBy>,
}

/// A group of parameters with its name.
struct Named<M: AutodiffModule<B> + 'static, B: AutodiffBackend> {
    name: String,
    group: Group<M, B>,
}

/// What updates a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UpdatedBy {
    /// The optimizer of the rest.
    Rest,
    /// The group with this index.
    Group(usize),
}

/// One of the [`Groups`]: the parameters with these paths, and what updates them.
pub struct Group<M: AutodiffModule<B> + 'static, B: AutodiffBackend> {
    paths: Paths,
    lr_factor: f64,
    /// `None` if the group is frozen.
    optimizer: Option<Slot<dyn Optimize<M, B>>>,
}

/// The parameters that a [`Group`] matches, by path: `blocks.3.attention.query.weight`.
#[derive(Clone)]
pub struct Paths {
    patterns: Vec<Pattern>,
}

#[derive(Clone)]
enum Pattern {
    Glob(String),
    Predicate {
        description: String,
        holds: Arc<Predicate>,
    },
}

type Predicate = dyn Fn(&str, &[usize]) -> bool + Send + Sync;

impl Paths {
    /// The paths that look like `pattern` as a whole: `*` stands for any text, also with dots in
    /// it, `?` for one character.
    ///
    /// ```
    /// use burn_update::Paths;
    ///
    /// let paths = Paths::glob("blocks.*.norm?.*").or_glob("*bias");
    /// assert!(paths.matches("blocks.3.norm1.gamma", &[64]));
    /// assert!(paths.matches("blocks.3.attention.query.bias", &[64]));
    /// assert!(!paths.matches("blocks.3.attention.query.weight", &[64, 64]));
    /// ```
    pub fn glob(pattern: impl Into<String>) -> Self {
        Self {
            patterns: vec![Pattern::Glob(pattern.into())],
        }
    }

    /// The parameters for which `holds`, of a path and a shape. `description` names them in errors.
    pub fn when(
        description: impl Into<String>,
        holds: impl Fn(&str, &[usize]) -> bool + Send + Sync + 'static,
    ) -> Self {
        let pattern = Pattern::Predicate {
            description: description.into(),
            holds: Arc::new(holds),
        };
        Self {
            patterns: vec![pattern],
        }
    }

    /// The parameters with two dimensions, which Muon is for. It is not meant for embeddings and
    /// heads: write [`when`](Self::when) to leave these out.
    pub fn matrices() -> Self {
        Self::when("matrices", |_, shape| shape.len() == 2)
    }

    /// Also the paths that look like `pattern`. Each pattern must match a parameter.
    #[must_use]
    pub fn or_glob(mut self, pattern: impl Into<String>) -> Self {
        self.patterns.push(Pattern::Glob(pattern.into()));
        self
    }

    /// Whether it matches a parameter with this path and shape.
    pub fn matches(&self, path: &str, shape: &[usize]) -> bool {
        let mut patterns = self.patterns.iter();
        patterns.any(|pattern| pattern.matches(path, shape))
    }
}

impl Pattern {
    fn matches(&self, path: &str, shape: &[usize]) -> bool {
        match self {
            Self::Glob(pattern) => is_like(pattern.as_bytes(), path.as_bytes()),
            Self::Predicate { holds, .. } => holds(path, shape),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Glob(pattern) => write!(f, "the pattern `{pattern}`"),
            Self::Predicate { description, .. } => write!(f, "the predicate `{description}`"),
        }
    }
}

impl fmt::Debug for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let patterns = self.patterns.iter().map(Pattern::to_string);
        f.debug_list().entries(patterns).finish()
    }
}

/// Whether `text` looks like `pattern`: `*` is any text, `?` one character.
fn is_like(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=text.len()).any(|skipped| is_like(rest, &text[skipped..])),
        (Some((b'?', rest)), Some((_, text))) => is_like(rest, text),
        (Some((expected, rest)), Some((found, text))) if expected == found => is_like(rest, text),
        _ => false,
    }
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Group<M, B> {
    /// Parameters that are updated by an optimizer of their own: of another kind, or of the same
    /// kind with another weight decay, or none.
    pub fn new(paths: Paths, optimizer: impl Optimizer<M, B> + 'static) -> Self {
        Self {
            paths,
            lr_factor: 1.0,
            optimizer: Some(slot(optimizer)),
        }
    }

    /// Parameters that are not trained. Their gradients count neither for the norm nor for a loss
    /// scale.
    pub fn frozen(paths: Paths) -> Self {
        Self {
            paths,
            lr_factor: 1.0,
            optimizer: None,
        }
    }

    /// Multiplies the learning rate of these parameters.
    #[must_use]
    pub fn with_lr_factor(mut self, lr_factor: f64) -> Self {
        self.lr_factor = lr_factor;
        self
    }
}

fn slot<M, B>(optimizer: impl Optimizer<M, B> + 'static) -> Slot<dyn Optimize<M, B>>
where
    M: AutodiffModule<B> + 'static,
    B: AutodiffBackend,
{
    Slot::<dyn Optimize<M, B>>::of_optimize(BurnOptimizer::new(optimizer))
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Groups<M, B> {
    /// The optimizer of the parameters that no group matches.
    pub fn new(rest: impl Optimizer<M, B> + 'static) -> Self {
        Self {
            rest: slot(rest),
            named: Vec::new(),
            members: HashMap::new(),
            alone: None,
        }
    }

    /// Adds a group. Its name is that of its state in a record.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, group: Group<M, B>) -> Self {
        self.named.push(Named {
            name: name.into(),
            group,
        });
        self
    }

    /// The group of each parameter.
    ///
    /// # Errors
    ///
    /// [`UpdateError::NoParameter`], [`UpdateError::TwoGroups`], [`UpdateError::SameName`].
    fn members(
        &self,
        parameters: &[Parameter],
    ) -> Result<HashMap<ParamId, UpdatedBy>, UpdateError> {
        let mut members: HashMap<_, _> = parameters
            .iter()
            .map(|parameter| (parameter.id, UpdatedBy::Rest))
            .collect();
        for (index, Named { name, group }) in self.named.iter().enumerate() {
            self.check_name(index)?;
            for pattern in &group.paths.patterns {
                let mut matched = parameters
                    .iter()
                    .filter(|parameter| pattern.matches(&parameter.path, &parameter.shape))
                    .peekable();
                if matched.peek().is_none() {
                    return Err(UpdateError::NoParameter {
                        group: name.clone(),
                        paths: pattern.to_string(),
                        parameters: parameters.iter().map(|found| found.path.clone()).collect(),
                    });
                }
                for parameter in matched {
                    match members.insert(parameter.id, UpdatedBy::Group(index)) {
                        Some(UpdatedBy::Group(other)) if other != index => {
                            return Err(UpdateError::TwoGroups {
                                parameter: parameter.path.clone(),
                                first: self.named[other].name.clone(),
                                second: name.clone(),
                            });
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(members)
    }

    fn check_name(&self, index: usize) -> Result<(), UpdateError> {
        let name = &self.named[index].name;
        let mut before = self.named[..index].iter();
        if name == REST || before.any(|other| &other.name == name) {
            return Err(UpdateError::SameName { name: name.clone() });
        }
        Ok(())
    }

    /// The optimizers with their names in a record.
    fn optimizers(&self) -> impl Iterator<Item = (&str, &dyn Optimize<M, B>)> {
        let rest: (&str, &dyn Optimize<M, B>) = (REST, &*self.rest.part);
        let named = self.named.iter().filter_map(|Named { name, group }| {
            let optimizer: &dyn Optimize<M, B> = &*group.optimizer.as_ref()?.part;
            Some((name.as_str(), optimizer))
        });
        core::iter::once(rest).chain(named)
    }

    fn optimizers_mut(&mut self) -> impl Iterator<Item = (&str, &mut dyn Optimize<M, B>)> {
        let rest: (&str, &mut dyn Optimize<M, B>) = (REST, &mut *self.rest.part);
        let named = self.named.iter_mut().filter_map(|Named { name, group }| {
            let optimizer: &mut dyn Optimize<M, B> = &mut *group.optimizer.as_mut()?.part;
            Some((name.as_str(), optimizer))
        });
        core::iter::once(rest).chain(named)
    }
}

/// The name of the rest's state in a record.
const REST: &str = "rest";

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Stateful<B> for Groups<M, B> {
    fn name(&self) -> String {
        OPTIMIZER.to_owned()
    }

    fn save(&self) -> Option<PartState> {
        let mut all = PartState::default();
        for (name, optimizer) in self.optimizers() {
            if let Some(mut state) = optimizer.save() {
                all.put_state(name, &mut state, RECORD);
            }
        }
        Some(all)
    }

    fn load(&mut self, mut state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        for (name, optimizer) in self.optimizers_mut() {
            optimizer.load(state.take_state(name, RECORD)?, device)?;
        }
        match state.left().next() {
            Some(name) => Err(UpdateError::RecordHas {
                part: format!("{OPTIMIZER}.{name}"),
            }),
            None => Ok(()),
        }
    }
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> Optimize<M, B> for Groups<M, B> {
    fn prepare(&mut self, mut model: M, parameters: &[Parameter]) -> Result<M, UpdateError> {
        self.members = self.members(parameters)?;
        for (_, optimizer) in self.optimizers_mut() {
            model = optimizer.prepare(model, parameters)?;
        }
        Ok(model)
    }

    fn frozen(&self) -> Vec<ParamId> {
        let is_frozen = |member: &UpdatedBy| match member {
            UpdatedBy::Rest => false,
            UpdatedBy::Group(index) => self.named[*index].group.optimizer.is_none(),
        };
        let members = self.members.iter();
        let frozen = members.filter(|(_, member)| is_frozen(member));
        frozen.map(|(id, _)| *id).collect()
    }

    fn use_alone(&mut self, number: usize) -> Option<String> {
        let groups = self.named.iter().enumerate();
        let groups = groups.filter(|(_, named)| named.group.optimizer.is_some());
        let groups = groups.map(|(index, named)| {
            (
                UpdatedBy::Group(index),
                format!("the optimizer of group `{}`", named.name),
            )
        });
        let rest = (UpdatedBy::Rest, "the optimizer of the rest".to_owned());
        let (alone, name) = core::iter::once(rest).chain(groups).nth(number)?;
        self.alone = Some(alone);
        Some(name)
    }

    fn update(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        mut model: M,
        gradients: GradientsParams,
    ) -> Result<M, UpdateError> {
        let mut splitter = Splitter {
            path: Vec::new(),
            members: &self.members,
            alone: self.alone,
            gradients,
            rest: GradientsParams::new(),
            groups: self.named.iter().map(|_| GradientsParams::new()).collect(),
            unknown: None,
        };
        model.visit(&mut splitter);
        let Splitter {
            rest,
            groups,
            unknown,
            ..
        } = splitter;
        if let Some(parameter) = unknown {
            return Err(UpdateError::OtherModel { parameter });
        }
        if !rest.is_empty() {
            model = self.rest.part.update(step, model, rest)?;
        }
        let lr = step.lr;
        for (Named { group, .. }, gradients) in self.named.iter_mut().zip(groups) {
            let optimizer = group.optimizer.as_mut().filter(|_| !gradients.is_empty());
            if let Some(optimizer) = optimizer {
                step.lr = lr * group.lr_factor;
                let updated = optimizer.part.update(step, model, gradients);
                step.lr = lr;
                model = updated?;
            }
        }
        Ok(model)
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Clone for Group<M, B> {
    fn clone(&self) -> Self {
        Self {
            paths: self.paths.clone(),
            lr_factor: self.lr_factor,
            optimizer: self.optimizer.clone(),
        }
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Clone for Named<M, B> {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            group: self.group.clone(),
        }
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Clone for Groups<M, B> {
    fn clone(&self) -> Self {
        Self {
            rest: self.rest.clone(),
            named: self.named.clone(),
            members: self.members.clone(),
            alone: self.alone,
        }
    }
}

/// Gives each group its gradients.
struct Splitter<'a> {
    path: Vec<String>,
    members: &'a HashMap<ParamId, UpdatedBy>,
    alone: Option<UpdatedBy>,
    gradients: GradientsParams,
    rest: GradientsParams,
    groups: Vec<GradientsParams>,
    /// The path of a parameter of no known model.
    unknown: Option<String>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Splitter<'_> {
    burn_decorator::follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.gradients.remove::<B::InnerBackend, D>(param.id);
        let Some(gradient) = gradient else { return };
        match self.alone.as_ref().or(self.members.get(&param.id)) {
            Some(UpdatedBy::Rest) => self.rest.register(param.id, gradient),
            Some(UpdatedBy::Group(index)) => self.groups[*index].register(param.id, gradient),
            None => self.unknown = Some(self.path.join(".")),
        }
    }
}
