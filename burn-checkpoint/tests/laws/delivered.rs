//! Tensors that are delivered at each use: the bits of resident ones, and nothing of them stays.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::embedding;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use burn_checkpoint::kinds::Value;
use burn_checkpoint::{
    Delivery, MemoryBudget, OpInfo, Policy, Remat, RematError, RematStats, UploadOrder,
    UploadPlace, Work, checkpoint, checkpoint_with, delivered, delivered_in_order,
    delivered_in_types, evict, is_delivered,
};
use burn_decorator::shared;
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::input::{Bits, gradient_bits, input};
use crate::probe::{Probe, take_counts, watched};

type B = Autodiff<Remat<Probe<Flex>>>;

const BYTES: u64 = 8 * 8 * 4;

/// The elements of weight `index`.
fn elements(index: usize) -> TensorData {
    (input::<Flex>() * 0.3 + index as f32 * 0.1).into_data()
}

fn on_device<A: Backend>(index: usize) -> Tensor<A, 2> {
    Tensor::from_data(elements(index), &Default::default()).require_grad()
}

pub fn on_use<A: Backend, const D: usize>(
    shape: [usize; D],
    data: impl Fn() -> TensorData + Send + Sync + 'static,
) -> Tensor<A, D> {
    let tensor = delivered::<A>(shape.into(), DType::F32, &Default::default(), data);
    Tensor::from_primitive(TensorPrimitive::Float(tensor.expect("a `Remat`"))).require_grad()
}

fn weight(index: usize) -> Tensor<B, 2> {
    on_use([8, 8], move || elements(index))
}

/// Views, casts, and computations on weights alone, whose results autodiff saves.
fn block<A: Backend>(x: Tensor<A, 2>, w: &[Tensor<A, 2>]) -> Tensor<A, 2> {
    let [a, b, c] = w else {
        panic!("three weights")
    };
    let x = x.matmul(a.clone().transpose()).tanh();
    let x = x.matmul(b.clone().cast(DType::F64).cast(DType::F32).mul_scalar(0.5));
    let bias = c.clone().slice([0..1, 0..8]).exp().reshape([8]);
    let scale = (a.clone() * c.clone()).permute([1, 0]).slice([2..3, 0..8]);
    (x * scale.expand([8, 8]) + bias.unsqueeze()).matmul(b.clone().matmul(c.clone()))
}

/// The loss and the gradients of a model of two blocks, with the bytes that tensors of `Remat`
/// occupied between forward and backward.
fn train<A: AutodiffBackend>(
    weights: &[Tensor<A, 2>],
    wrap: impl Fn(&dyn Fn() -> Tensor<A, 2>) -> Tensor<A, 2>,
) -> (Vec<Bits>, u64) {
    let x = input::<A>().require_grad();
    let y = wrap(&|| block(x.clone(), &weights[..3]));
    let y = wrap(&|| block(y.clone(), &weights[1..]));
    let loss = y.powf_scalar(2.0).mean();
    let live = RematStats::of_thread().live_bytes;
    let grads = loss.clone().backward();
    let leaves = weights.iter().chain([&x]);
    let mut bits: Vec<_> = leaves.map(|leaf| gradient_bits(leaf, &grads)).collect();
    bits.push(loss.into_data().bytes.to_vec());
    (bits, live)
}

fn weights<A: Backend>(make: impl Fn(usize) -> Tensor<A, 2>) -> Vec<Tensor<A, 2>> {
    (0..4).map(make).collect()
}

#[test]
fn the_bits_are_those_of_resident_tensors_and_nothing_stays() {
    let (plain, _) = train::<Autodiff<Flex>>(&weights(on_device), |run| run());
    let own = weights(weight);
    RematStats::reset_thread();
    let (bits, live) = train(&own, |run| run());
    assert_eq!(bits, plain);
    assert_eq!(
        live, 0,
        "of what autodiff saves of weights nothing is there"
    );
    let stats = RematStats::of_thread();
    assert_eq!(stats.live_bytes, 0);
    assert!(stats.peak_bytes <= 4 * BYTES, "{stats:?}");
    assert!(stats.uploaded_bytes >= 12 * BYTES, "{stats:?}");
}

#[test]
fn the_bits_are_the_same_in_scopes_and_under_budgets() {
    let (plain, _) = train::<Autodiff<Flex>>(&weights(on_device), |run| run());
    let own = weights(weight);
    let policies = [Policy::Recompute, Policy::KeepCompute, Policy::Offload];
    for policy in policies {
        let (bits, live) = train(&own, |run| checkpoint_with(policy.clone(), run));
        assert_eq!(bits, plain, "{policy:?}");
        // The input and two results, and what the loss saves; products too where they are kept.
        assert!(live <= 14 * BYTES, "{policy:?}: {live}");
    }
    let nested = |run: &dyn Fn() -> _| checkpoint(|| checkpoint(run));
    assert_eq!(train(&own, nested).0, plain);
    for tensors in [100, 14, 12] {
        let budget = MemoryBudget::bytes(tensors * BYTES).install_apart();
        for _ in 0..2 {
            assert_eq!(train(&own, |run| run()).0, plain, "{tensors} tensors");
            assert_eq!(train(&own, |run| checkpoint(run)).0, plain);
        }
        drop(budget);
    }
}

#[test]
fn a_view_or_a_cast_is_uploaded_for_its_use_only() {
    let own = weight(0);
    take_counts();
    let view = own.clone().transpose().reshape([64]).unsqueeze::<2>();
    let cast = view.clone().cast(DType::F64);
    assert_eq!((view.dims(), cast.dtype()), ([1, 64], DType::F64));
    assert_eq!(take_counts().get("float_from_data"), None);
    for _ in 0..2 {
        let sum =
            (cast.clone() + Tensor::<B, 2>::zeros([1, 64], (&cast.device(), DType::F64))).sum();
        let _ = sum.into_data();
        assert_eq!(take_counts()["float_from_data"], 1);
    }
    // Used twice by one operation that is recorded: once for both.
    let square = checkpoint(|| own.clone().matmul(own.clone()));
    assert_eq!(take_counts()["float_from_data"], 1);
    drop(square);
    let data = own.clone().into_data();
    assert_eq!(data, elements(0));
    let same = own.clone().detach().set_require_grad(false);
    assert_eq!(same.into_data(), data);
    let flat = own.clone().reshape([4, 16]).reshape([64]);
    assert_eq!(flat.into_data().as_bytes(), data.as_bytes());
    assert_eq!(
        take_counts().get("float_from_data"),
        None,
        "a read is no use"
    );
}

/// The backward pass of an embedding reads the shape of its weights, and no element.
#[test]
fn an_embedding_brings_its_weights_in_forward_only() {
    fn gradient<A: AutodiffBackend>(weights: &Tensor<A, 2>) -> Bits {
        let rows = Tensor::<A, 2, Int>::from_data([[3, 0, 3], [7, 3, 1]], &Default::default());
        let y = embedding(weights.clone(), rows);
        gradient_bits(weights, &y.powf_scalar(2.0).mean().backward())
    }
    let plain = gradient::<Autodiff<Flex>>(&on_device(0));
    let uses = Arc::new(AtomicUsize::new(0));
    let counted = uses.clone();
    let own: Tensor<B, 2> = on_use([8, 8], move || {
        counted.fetch_add(1, Ordering::Relaxed);
        elements(0)
    });
    assert_eq!(gradient(&own), plain);
    assert_eq!(uses.load(Ordering::Relaxed), 1);
}

#[test]
fn a_cast_to_a_type_that_is_there_asks_for_that_type_through_views() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let note = asked.clone();
    let has = |dtype| dtype == DType::BF16;
    let data = move |dtype| {
        note.lock().unwrap().push(dtype);
        let float = on_device::<Flex>(0);
        match dtype {
            DType::BF16 => float.cast(DType::BF16).into_data(),
            _ => float.into_data(),
        }
    };
    let device = Default::default();
    let weight = delivered_in_types::<B>([8, 8].into(), DType::F32, &device, has, data);
    let weight = TensorPrimitive::Float(weight.expect("a `Remat`"));
    let weight = Tensor::<B, 2>::from_primitive(weight).require_grad();
    let plain = on_device::<Autodiff<Flex>>(0);
    let check = |of: fn(Tensor<B, 2>) -> Tensor<B, 2>, plain: Tensor<_, 2>, types: &[DType]| {
        assert_eq!(of(weight.clone()).into_data(), plain.into_data());
        assert_eq!(*asked.lock().unwrap(), types);
        asked.lock().unwrap().clear();
    };
    let low = |w: Tensor<_, 2>| w.transpose().reshape([4, 16]).cast(DType::BF16);
    check(
        |w| {
            w.transpose()
                .reshape([4, 16])
                .cast(DType::BF16)
                .mul_scalar(3)
        },
        low(plain.clone()).mul_scalar(3),
        &[DType::BF16],
    );
    // What is cast back was rounded; another type is computed from its own.
    check(
        |w| w.cast(DType::BF16).cast(DType::F32),
        plain.clone().cast(DType::BF16).cast(DType::F32),
        &[DType::BF16],
    );
    check(
        |w| w.cast(DType::F16),
        plain.clone().cast(DType::F16),
        &[DType::F32],
    );
    let gradient = |w: &Tensor<B, 2>| {
        let loss = w.clone().transpose().cast(DType::BF16).powi_scalar(2).sum();
        w.grad(&loss.backward()).expect("it is trained").into_data()
    };
    let loss = plain.clone().transpose().cast(DType::BF16);
    let loss = loss.powi_scalar(2).sum();
    let expected = plain.grad(&loss.backward()).expect("it is trained");
    assert_eq!(gradient(&weight), expected.into_data());
    assert!(
        asked
            .lock()
            .unwrap()
            .iter()
            .all(|dtype| *dtype == DType::BF16)
    );
}

#[test]
fn what_is_delivered_is_known() {
    fn is<A: Backend, const D: usize>(tensor: &Tensor<A, D>) -> bool {
        is_delivered::<A>(&tensor.clone().into_primitive().tensor())
    }
    let (own, other) = (weight(0), on_device::<B>(0));
    assert!(is(&own) && is(&own.clone().transpose()) && is(&(own.clone() * 2.0)));
    assert!(!is(&other) && !is(&(own.clone() + other)) && !is(&own.clone().sum()));
    assert!(is(&own.inner()));
    assert!(!is(&on_device::<Autodiff<Flex>>(0)));
}

#[test]
fn a_budget_makes_room_and_never_evicts() {
    let uses = Arc::new(AtomicUsize::new(0));
    let count = uses.clone();
    let own: Tensor<B, 2> = on_use([8, 8], move || {
        count.fetch_add(1, Ordering::Relaxed);
        elements(0)
    });
    let budget = MemoryBudget::bytes(8 * BYTES).strict().install_apart();
    let mut y = input::<B>().require_grad();
    for _ in 0..12 {
        y = y.matmul(own.clone()).tanh();
    }
    let forward = RematStats::of_thread();
    assert!(forward.evicted_operations > 0 && budget.peak_bytes() <= 8 * BYTES);
    assert_eq!(
        uses.swap(0, Ordering::Relaxed) * 256,
        forward.uploaded_bytes as usize
    );
    let grads = y.sum().backward();
    assert!(own.grad(&grads).is_some());
    assert!(budget.peak_bytes() <= 8 * BYTES);
    evict(&own);
    assert!(own.into_data() == elements(0));
}

/// It may look for what to evict while the elements are computed, and finds tensors that come back
/// from the one that is delivered.
#[test]
fn what_delivers_may_compute_under_the_budget() {
    let (done, over) = channel();
    std::thread::spawn(move || {
        let _budget = MemoryBudget::bytes(4 * BYTES).install_apart();
        let (x, packed) = (input::<Remat<Flex>>(), input::<Remat<Flex>>());
        let own: Tensor<Remat<Flex>, 2> =
            on_use([8, 8], move || (packed.clone() * 0.5 - 1.0).into_data());
        let held: Vec<_> = (0..8).map(|_| x.clone().matmul(own.clone())).collect();
        let product = held[0].clone().into_data();
        done.send(held.iter().all(|held| held.clone().into_data() == product))
    });
    assert_eq!(over.recv_timeout(Duration::from_secs(20)), Ok(true));
}

#[test]
fn a_failed_delivery_is_told_and_the_next_use_tries_again() {
    let uses = Arc::new(AtomicUsize::new(0));
    let count = uses.clone();
    let own: Tensor<B, 2> = on_use([8, 8], move || {
        match count.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("the host is gone"),
            1 => TensorData::from([1.0f32]),
            _ => elements(0),
        }
    });
    let plain = on_device::<B>(0).matmul(input()).into_data();
    let run = || checkpoint(|| own.clone().matmul(input())).into_data();
    let failed = || {
        let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("no elements");
        assert_eq!(RematStats::of_thread().live_bytes, 0);
        panic
    };
    assert_eq!(
        *failed().downcast::<&str>().expect("text"),
        "the host is gone"
    );
    let message = failed().downcast::<String>().expect("text");
    assert!(
        message.contains("[1]") && message.contains("[8, 8]"),
        "{message}"
    );
    assert_eq!(run(), plain);
}

/// Each would come back only together with the others.
#[test]
fn several_results_of_one_operation_stay() {
    const BOTH: &OpInfo = &OpInfo::custom("both", Work::Cheap);
    let _budget = MemoryBudget::bytes(8 * BYTES).install_apart();
    let own: Tensor<Remat<Flex>, 2> = on_use([8, 8], || elements(0));
    let own = Value::Float(own.into_primitive().tensor());
    let twice = |[x]: [Value<Flex>; 1]| Value::Many(vec![x.clone(), x]);
    let Value::Many(both) = Remat::<Flex>::operation(BOTH, [own], twice) else {
        panic!("two results");
    };
    for result in both {
        let result = TensorPrimitive::Float(result.float());
        let result = Tensor::<Remat<Flex>, 2>::from_primitive(result);
        for _ in 0..2 {
            assert_eq!(result.clone().into_data(), elements(0));
        }
    }
}

#[test]
fn threads_use_one_tensor_at_a_time_and_get_all_of_it() {
    let own = weight(0);
    let expected = on_device::<B>(0).matmul(input()).into_data();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let view = own.clone().transpose().transpose();
                    assert_eq!(view.matmul(input()).into_data(), expected);
                }
            });
        }
    });
}

#[test]
fn a_backend_without_remat_is_refused() {
    type Plain = Autodiff<Flex>;
    let refused = delivered::<Plain>([1].into(), DType::F32, &Default::default(), || {
        TensorData::from([1.0f32])
    });
    let backend = Plain::name(&Default::default());
    assert_eq!(refused.map(drop), Err(RematError::NoRemat { backend }));
    // It asks for no tensor of another backend.
    assert!(!is_delivered::<B>(
        &on_device::<B>(0).into_primitive().tensor()
    ));
}

/// Elements that are at hand, and how often they were asked for.
struct OnHost {
    data: TensorData,
    uses: Arc<AtomicUsize>,
}

impl OnHost {
    fn new(index: usize) -> Self {
        Self {
            data: shared(elements(index)),
            uses: Arc::default(),
        }
    }
}

impl Delivery for OnHost {
    fn data(&self, _dtype: DType) -> TensorData {
        self.uses.fetch_add(1, Ordering::Relaxed);
        self.data.clone()
    }

    fn at_hand(&self, dtype: DType) -> Option<TensorData> {
        Some(self.data(dtype))
    }
}

fn at<A: Backend>(place: &UploadPlace, delivery: OnHost) -> Tensor<A, 2> {
    let device = Default::default();
    let tensor = delivered_in_order::<A>(place, [8, 8].into(), DType::F32, &device, delivery);
    Tensor::from_primitive(TensorPrimitive::Float(tensor.expect("a `Remat`"))).require_grad()
}

/// Places of weights in one order, and their versions, the same in each step.
fn in_order<A: Backend>(
    count: usize,
) -> (
    Vec<UploadPlace>,
    impl Fn(&[UploadPlace]) -> Vec<Tensor<A, 2>>,
) {
    let order = UploadOrder::new();
    let places = (0..count).map(|_| order.place()).collect();
    let versions = |places: &[UploadPlace]| {
        let versions = places.iter().enumerate();
        versions
            .map(|(index, place)| at(place, OnHost::new(index)))
            .collect()
    };
    (places, versions)
}

fn products<A: Backend>(weights: &[Tensor<A, 2>]) -> Tensor<A, 2> {
    let x = input::<A>();
    weights
        .iter()
        .fold(x, |x, weight| x.matmul(weight.clone()).tanh())
}

/// The uploads before each matrix product of what runs.
fn uploads_before_products(run: impl FnOnce()) -> Vec<usize> {
    let log = Rc::new(RefCell::new((0, Vec::new())));
    let own = log.clone();
    let note = move |op: &'static str| {
        let (uploads, before) = &mut *own.borrow_mut();
        match op {
            "float_from_data" => *uploads += 1,
            "float_matmul" => before.push(*uploads),
            _ => {}
        }
    };
    watched(note, run);
    log.take().1
}

#[test]
fn the_next_upload_begins_while_this_one_computes() {
    type R = Remat<Probe<Flex>>;
    let (places, versions) = in_order::<R>(4);
    let x = input::<R>();
    let run = |weights: &[Tensor<R, 2>]| {
        let x = x.clone();
        let y = weights.iter().fold(x, |x, weight| x.matmul(weight.clone()));
        assert!(RematStats::of_thread().live_bytes <= BYTES, "one ahead");
        drop(y);
    };
    RematStats::reset_thread();
    let weights = versions(&places);
    assert_eq!(uploads_before_products(|| run(&weights)), [1, 2, 3, 4]);
    drop(weights);
    for _ in 0..2 {
        let weights = versions(&places);
        assert_eq!(uploads_before_products(|| run(&weights)), [2, 3, 4, 4]);
        assert_eq!(RematStats::of_thread().live_bytes, 0);
        // Another order costs uploads only: that of the first is expected by the next step.
        drop(weights);
    }
    let mut weights = versions(&places);
    weights.reverse();
    let expected = products(&weights).into_data();
    let plain: Vec<_> = (0..4).rev().map(on_device::<R>).collect();
    assert_eq!(expected, products(&plain).into_data());
    // Old versions would keep the order, and what it has uploaded.
    drop(weights);
    let weights = versions(&places);
    drop(uploads_before_products(|| run(&weights)));
    assert!(RematStats::of_thread().live_bytes <= BYTES);
    drop((weights, places));
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

#[test]
fn the_bits_are_the_same_if_uploads_begin_before_uses() {
    let (plain, _) = train::<Autodiff<Flex>>(&weights(on_device), |run| run());
    let (places, versions) = in_order::<B>(4);
    for _ in 0..3 {
        let own = versions(&places);
        assert_eq!(train(&own, |run| run()).0, plain);
        assert_eq!(train(&own, |run| checkpoint(run)).0, plain);
    }
    // None is uploaded before its use under a budget.
    let within = |versions: &dyn Fn() -> Vec<Tensor<B, 2>>| {
        let budget = MemoryBudget::bytes(14 * BYTES).install_apart();
        for _ in 0..3 {
            assert_eq!(train(&versions(), |run| run()).0, plain);
        }
        budget.peak_bytes()
    };
    let peak = within(&|| weights(weight));
    assert_eq!(within(&|| versions(&places)), peak);
}

/// A new version takes the place of one that is still in use.
#[test]
fn a_tensor_is_of_its_own_version() {
    type R = Remat<Flex>;
    let place = UploadOrder::new().place();
    let old = at::<R>(&place, OnHost::new(0));
    let twice = |weight: &Tensor<R, 2>| (weight.clone() * 1.0 - input::<R>()).into_data();
    let expected = twice(&on_device(0));
    for _ in 0..3 {
        assert_eq!(twice(&old), expected);
    }
    // It is on the device, as it is expected to be used again.
    let new = at::<R>(&place, OnHost::new(1));
    let expected = [expected, twice(&on_device(1))];
    for _ in 0..3 {
        assert_eq!([twice(&old), twice(&new)], expected);
    }
}

#[test]
fn an_upload_that_fails_before_its_use_is_tried_again_at_the_use() {
    type R = Remat<Probe<Flex>>;
    let (places, versions) = in_order::<R>(3);
    let expected = products(&versions(&places)).into_data();
    let weights = versions(&places);
    let mut uploads = 0;
    let fails_second = move |op: &'static str| {
        let is_upload = op == "float_from_data";
        uploads += usize::from(is_upload);
        assert!(!is_upload || uploads != 3, "out of memory");
    };
    let fails = RefCell::new(fails_second);
    // The first is that of the input, and the second that of the first weight.
    let run = || products(&weights).into_data();
    let found = watched(move |op| (fails.borrow_mut())(op), run);
    assert_eq!(found, expected);
}

/// Who writes into what was delivered does not write into what will be delivered.
#[test]
fn what_is_shared_is_copied_where_it_is_written() {
    type R = Remat<Flex>;
    let place = UploadOrder::new().place();
    let delivery = OnHost::new(0);
    let uses = delivery.uses.clone();
    let held = delivery.data.clone();
    let weight = at::<R>(&place, delivery);
    for _ in 0..3 {
        // In place where the operand has no other owner.
        let changed = weight.clone().slice_fill([0..4, 0..8], 7.0).mul_scalar(2.0);
        assert_ne!(changed.into_data(), held);
        assert_eq!(held, elements(0));
        let read = weight.clone().into_data();
        assert_eq!(
            read.as_bytes().as_ptr(),
            held.as_bytes().as_ptr(),
            "no copy"
        );
    }
    assert!(uses.load(Ordering::Relaxed) >= 6);
}
