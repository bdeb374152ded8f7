//! What the ranks of a job run.

use std::sync::Arc;

use burn_zero::{GroupOptions, MpiGroup};

use crate::{in_learner::Layers, resumed, training};

pub fn run(program: &str) {
    let group = MpiGroup::with_options(GroupOptions::default());
    let group = group.unwrap_or_else(|error| panic!("{error}"));
    if let Some(arguments) = program.strip_prefix("save until killed ") {
        return training::save_until_killed(group, arguments);
    }
    if let Some(arguments) = program.strip_prefix("dropout until ") {
        return resumed::until(group, arguments);
    }
    if let Some(arguments) = program.strip_prefix("carry ") {
        return training::carry(group, arguments);
    }
    match program {
        "train" => training::print_digests(Arc::new(group)),
        "killed in backward" => training::killed_in_backward(group),
        "killed in a gather" => training::killed_in_a_gather(group),
        "other learning rate" => training::differs(group),
        other => match Layers::of(other) {
            Some(layers) => layers.on_processes(group),
            None => panic!("no program {other}"),
        },
    }
}
