//! The planner against brute force, and the model on examples worked out by hand.

mod step;

use std::collections::BTreeMap;

use proptest::prelude::*;

use burn_checkpoint::plan::{
    BlockProfile, Node, Plan, PlanError, Profile, TailProfile, plan, simulate,
};

/// Every way to nest scopes around so many blocks, but for a scope that holds nothing but a scope.
fn every_plan(blocks: usize) -> Vec<Plan> {
    let mut lists: Vec<Vec<Vec<Node>>> = vec![vec![Vec::new()]];
    let mut beginnings: Vec<Vec<Node>> = vec![Vec::new()];
    for length in 1..=blocks {
        let mut several = Vec::new();
        for first in 1..length {
            for beginning in &beginnings[first] {
                let rests = &lists[length - first];
                several.extend(
                    rests
                        .iter()
                        .map(|rest| [std::slice::from_ref(beginning), rest].concat()),
                );
            }
        }
        let mut whole: Vec<Node> = several.iter().cloned().map(Node::Scope).collect();
        if length == 1 {
            whole.extend([Node::Block, Node::Scope(vec![Node::Block])]);
        }
        several.extend(whole.iter().map(|node| vec![node.clone()]));
        beginnings.push(whole);
        lists.push(several);
    }
    lists.remove(blocks).into_iter().map(Plan::new).collect()
}

#[test]
fn every_plan_is_enumerated_once() {
    for (blocks, expected) in [1, 2, 8, 48, 352, 2880, 25216].into_iter().enumerate() {
        let plans = every_plan(blocks);
        assert_eq!(plans.len(), expected);
        let different: std::collections::HashSet<_> = plans.iter().collect();
        assert_eq!(different.len(), expected);
        assert!(plans.iter().all(|plan| plan.blocks() == blocks));
    }
}

/// The least time for every peak that is worth it.
fn brute_force(profile: &Profile) -> BTreeMap<u64, u64> {
    let mut least = BTreeMap::new();
    for plan in every_plan(profile.blocks.len()) {
        let step = simulate(profile, &plan).unwrap();
        let time = least.entry(step.peak_bytes).or_insert(u64::MAX);
        *time = step.time_ns.min(*time);
    }
    let mut fastest = u64::MAX;
    least.retain(|_, time| {
        let faster = *time < fastest;
        fastest = fastest.min(*time);
        faster
    });
    least
}

/// At every limit where the optimum changes, and just below it, the planner finds what brute force
/// finds.
fn finds_the_optimum(profile: &Profile) -> Result<(), TestCaseError> {
    let optimum = brute_force(profile);
    let (&least_bytes, _) = optimum.first_key_value().unwrap();
    for (&peak_bytes, &time_ns) in &optimum {
        let limits = [peak_bytes, peak_bytes + 1];
        let next = optimum.range(peak_bytes + 1..).next();
        for limit_bytes in limits.into_iter().chain(next.map(|(next, _)| next - 1)) {
            let found = plan(profile, limit_bytes).unwrap();
            let step = simulate(profile, &found).unwrap();
            let best = optimum.range(..=limit_bytes).next_back().unwrap();
            prop_assert_eq!(
                (&step.peak_bytes, &step.time_ns),
                best,
                "{:?} in {:?}",
                found,
                limit_bytes
            );
        }
        prop_assert!(time_ns >= step::plain_ns(profile));
    }
    if let Some(limit_bytes) = least_bytes.checked_sub(1) {
        let refused = PlanError::DoesNotFit {
            blocks: profile.blocks.len(),
            limit_bytes,
            least_bytes,
        };
        prop_assert_eq!(plan(profile, limit_bytes), Err(refused));
    }
    Ok(())
}

/// Numbers that often agree, so that ties and boundaries occur.
fn number(most: u64) -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, 0..most]
}

prop_compose! {
    fn block(most: u64)(
        output_bytes in number(most),
        saved_bytes in number(2 * most),
        kept_bytes in number(most),
        temporary_bytes in number(most),
        backward_peak_bytes in number(4 * most),
        gradient_bytes in number(most / 2),
        times in [number(50), number(50), number(50)],
    ) -> BlockProfile {
        let tape_bytes = output_bytes + saved_bytes + kept_bytes;
        BlockProfile {
            output_bytes,
            tape_bytes,
            kept_bytes,
            forward_peak_bytes: tape_bytes + temporary_bytes,
            backward_peak_bytes,
            gradient_bytes,
            forward_ns: times[0],
            replay_ns: times[0].min(times[1]),
            backward_ns: times[2],
        }
    }
}

prop_compose! {
    fn chain(most_blocks: usize, most: u64)(
        blocks in prop::collection::vec(block(most), 0..=most_blocks),
        base_bytes in number(most),
        peak_bytes in number(4 * most),
        gradient_bytes in number(most),
    ) -> Profile {
        Profile { base_bytes, blocks, tail: TailProfile { peak_bytes, gradient_bytes } }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_is_the_optimum_of_all_plans(profile in chain(5, 12)) {
        finds_the_optimum(&profile)?;
    }

    #[test]
    fn bytes_are_not_rounded(profile in chain(4, 1 << 40)) {
        finds_the_optimum(&profile)?;
    }

    #[test]
    fn a_plan_never_exceeds_its_limit(profile in chain(14, 1 << 30), share in 0.0..1.2f64) {
        let plain = simulate(&profile, &Plan::plain(profile.blocks.len())).unwrap();
        let limit_bytes = (plain.peak_bytes as f64 * share) as u64;
        match plan(&profile, limit_bytes) {
            Ok(found) => {
                let step = simulate(&profile, &found).unwrap();
                prop_assert!(step.peak_bytes <= limit_bytes);
                prop_assert!(step.peak_bytes < plain.peak_bytes || step.time_ns == plain.time_ns);
                prop_assert_eq!(found.blocks(), profile.blocks.len());
            }
            Err(PlanError::DoesNotFit { least_bytes, .. }) => {
                prop_assert!(least_bytes > limit_bytes);
                prop_assert!(plan(&profile, least_bytes).is_ok());
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn more_bytes_are_never_slower(profile in chain(10, 1000), limits in [0..20_000u64, 0..20_000]) {
        let time = |limit_bytes| {
            let found = plan(&profile, limit_bytes).ok()?;
            Some(simulate(&profile, &found).unwrap().time_ns)
        };
        let [less, more] = [limits[0].min(limits[1]), limits[0].max(limits[1])].map(time);
        prop_assert!(less.is_none() || more <= less);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    #[test]
    fn six_blocks_as_well(blocks in prop::collection::vec(block(12), 6)) {
        finds_the_optimum(&Profile { blocks, ..Profile::default() })?;
    }
}

/// A block whose output takes 1 byte and whose tape takes 10, with 3 for the forward pass and 6 for
/// the backward pass.
fn uniform(blocks: usize) -> Profile {
    let block = BlockProfile {
        output_bytes: 1,
        tape_bytes: 10,
        backward_peak_bytes: 11,
        forward_ns: 3,
        replay_ns: 3,
        backward_ns: 6,
        ..BlockProfile::default()
    };
    Profile {
        base_bytes: 1,
        blocks: vec![block; blocks],
        tail: TailProfile::default(),
    }
}

fn read(text: &str) -> Result<Plan, serde_json::Error> {
    serde_json::from_str(text)
}

fn simulated(profile: &Profile, text: &str) -> (u64, u64, u64) {
    let step = simulate(profile, &read(text).unwrap()).unwrap();
    (step.peak_bytes, step.time_ns, step.replayed)
}

#[test]
fn the_model_by_hand() {
    let four = uniform(4);
    // The input, four tapes, the gradient of the last output.
    assert_eq!(simulated(&four, "[0, 1, 2, 3]"), (1 + 40 + 1, 36, 0));
    // The input, three outputs, the last tape, its gradient.
    assert_eq!(
        simulated(&four, "[[0], [1], [2], [3]]"),
        (1 + 3 + 10 + 1, 48, 4)
    );
    assert_eq!(
        simulated(&four, "[[0], [1], [2], 3]"),
        (1 + 3 + 10 + 1, 45, 3)
    );
    // Two tapes on top of one output.
    assert_eq!(
        simulated(&four, "[[0, 1], [2, 3]]"),
        (1 + 1 + 20 + 1, 48, 4)
    );
    // Block 0 runs three times, block 1 twice: the first scope is replayed for 1, then for 0.
    assert_eq!(
        simulated(&four, "[[[0], 1], [2], 3]"),
        (1 + 2 + 10 + 1, 48, 4)
    );
    // A scope at the end of a scope is brought back with it.
    assert_eq!(
        simulated(&four, "[[0, [1]], 2, 3]"),
        simulated(&four, "[[0, 1], 2, 3]")
    );
    assert_eq!(
        simulated(&four, "[[[0, 1, 2, 3]]]"),
        simulated(&four, "[[0, 1, 2, 3]]")
    );
}

#[test]
fn random_numbers_stay() {
    let mut four = uniform(4);
    for block in &mut four.blocks {
        block.kept_bytes = 2;
    }
    assert_eq!(simulated(&four, "[0, 1, 2, 3]").0, 1 + 40 + 1);
    // Those of the four blocks, three outputs, what goes of the last tape, its gradient.
    assert_eq!(
        simulated(&four, "[[0], [1], [2], [3]]").0,
        1 + 8 + 3 + 8 + 1
    );
    assert_eq!(simulated(&four, "[[0, 1], [2, 3]]").0, 1 + 8 + 1 + 16 + 1);
}

#[test]
fn only_the_last_block_of_a_scope_is_brought_back_in_part() {
    let mut profile = uniform(3);
    for block in &mut profile.blocks {
        block.replay_ns = 1;
    }
    assert_eq!(simulated(&profile, "[[0, 1, 2]]").1, 27 + 3 + 3 + 1);
    assert_eq!(simulated(&profile, "[[0], [1], [2]]").1, 27 + 1 + 1 + 1);
}

#[test]
fn gradients_of_parameters_pile_up_from_the_end() {
    let mut profile = uniform(2);
    profile.tail = TailProfile {
        peak_bytes: 5,
        gradient_bytes: 100,
    };
    for block in &mut profile.blocks {
        block.gradient_bytes = 20;
        block.backward_peak_bytes = 31;
    }
    assert_eq!(simulated(&profile, "[0, 1]").0, 1 + 100 + 20 + 31);
    assert_eq!(simulated(&profile, "[[0], [1]]").0, 1 + 100 + 20 + 31);
    profile.blocks[0].gradient_bytes = 0;
    profile.blocks[0].backward_peak_bytes = 11;
    assert_eq!(simulated(&profile, "[0, 1]").0, 1 + 10 + 100 + 31);
    // The tail's own peak, before there is a gradient.
    profile.tail.peak_bytes = 1000;
    assert_eq!(simulated(&profile, "[[0], [1]]").0, 1 + 2 + 1000);
    assert_eq!(simulated(&profile, "[0, [1]]").0, 1 + 11 + 1000);
}

#[test]
fn enough_bytes_need_no_scope_and_the_least_need_many() {
    let profile = uniform(12);
    let plain = simulate(&profile, &Plan::plain(12)).unwrap();
    assert_eq!(plan(&profile, plain.peak_bytes), Ok(Plan::plain(12)));

    let Err(PlanError::DoesNotFit { least_bytes, .. }) = plan(&profile, 0) else {
        panic!("nothing fits 0 bytes");
    };
    // Whatever there is, the tape and gradient of one block, its input and the chain's.
    assert_eq!(least_bytes, 1 + 1 + 10 + 1);
    let least = plan(&profile, least_bytes).unwrap();
    let depth = serde_json::to_string(&least).unwrap().matches("[").count();
    assert!(depth > 3, "{least:?}");
}

#[test]
fn a_chain_of_no_blocks_is_its_tail() {
    let profile = Profile {
        base_bytes: 7,
        blocks: Vec::new(),
        tail: TailProfile {
            peak_bytes: 3,
            gradient_bytes: 0,
        },
    };
    assert_eq!(plan(&profile, 10), Ok(Plan::default()));
    assert!(plan(&profile, 9).is_err());
}

#[test]
fn a_plan_of_another_length_is_refused() {
    let refused = PlanError::Length {
        planned: 4,
        blocks: 3,
    };
    assert_eq!(simulate(&uniform(3), &Plan::plain(4)), Err(refused));
}

fn node() -> impl Strategy<Value = Node> {
    Just(Node::Block).prop_recursive(4, 40, 6, |inner| {
        prop::collection::vec(inner, 0..6).prop_map(Node::Scope)
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(nodes in prop::collection::vec(node(), 0..8)) {
        let plan = Plan::new(nodes);
        let json = serde_json::to_string(&plan).unwrap();
        prop_assert_eq!(read(&json).unwrap(), plan);
    }

    /// The recursion over intervals, which the planner minimizes, is the step that it stands for.
    #[test]
    fn a_simulation_is_a_step_event_by_event(
        nodes in prop::collection::vec(node(), 0..8),
        blocks in prop::collection::vec(block(1000), 1..12),
        mut profile in chain(0, 1000),
    ) {
        let plan = Plan::new(nodes);
        profile.blocks = blocks.into_iter().cycle().take(plan.blocks()).collect();
        let found = simulate(&profile, &plan).unwrap();
        prop_assert_eq!(found, step::of(&profile, &plan), "{:?}", plan);
    }
}

#[test]
fn the_named_plans() {
    let is = |text: &str, plan: Plan| assert_eq!(read(text).unwrap(), plan);
    is("[0, 1, 2]", Plan::plain(3));
    is("[[0], [1], [2]]", Plan::every_block(3));
    is("[[0, 1], [2, 3], [4, 5, 6]]", Plan::segments(7, 3));
    is("[]", Plan::plain(0));
    assert_eq!(Plan::segments(2, 3), Plan::every_block(2));
    assert_eq!(Plan::every_block(0), Plan::plain(0));
}

#[test]
fn a_wrong_text_is_refused() {
    for (text, reason) in [
        ("[0, 2]", "block 2 of a plan stands where block 1 must"),
        ("[[1]]", "block 1 of a plan stands where block 0 must"),
        ("[0, [1, 1]]", "block 1 of a plan stands where block 2 must"),
        ("[0, \"1\"]", ""),
        ("[[0, 1]", ""),
    ] {
        let error = read(text).expect_err(text).to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
    // Deeper than any format's limit is no stack overflow.
    let deep = format!("{}0{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(read(&deep).is_err());
}
