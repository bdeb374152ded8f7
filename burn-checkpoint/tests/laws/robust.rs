//! Threads, panics, long chains, many steps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};

use burn::backend::Autodiff;
use burn::nn::DropoutConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, Tolerance};
use burn_checkpoint::{
    MemoryBudget, Outputs, Policy, Remat, RematStats, checkpoint, checkpoint_with, evict,
};
use burn_flex::Flex;

use crate::apart::InstallApart;
use crate::delivered::on_use;
use crate::input::{Bits, gradient_bits, input};
use crate::models::generator;

type B = Autodiff<Remat<Flex>>;
type Plain = Autodiff<Flex>;

fn device<T: Default>() -> T {
    T::default()
}

/// The bits of the gradient of a chain of `exp` and `log`, in scopes.
fn chain<A: burn::tensor::backend::AutodiffBackend>(scopes: usize) -> Bits {
    let x = input::<A>().require_grad();
    let mut y = x.clone();
    for _ in 0..scopes {
        y = checkpoint(|| y.clone().exp().tanh().matmul(y.clone().abs().sqrt()));
    }
    gradient_bits(&x, &y.sum().backward())
}

#[test]
fn two_training_threads() {
    let plain = chain::<Plain>(20);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                for _ in 0..10 {
                    assert!(chain::<B>(20) == plain);
                    let _budget = MemoryBudget::bytes(3000).install_apart();
                    assert!(chain::<B>(20) == plain);
                }
                assert_eq!(RematStats::of_thread().live_bytes, 0);
            });
        }
    });
}

/// Two threads that draw from one generator in turns that nobody knows: the masks of forward are
/// those of backward.
#[test]
fn two_training_threads_that_draw() {
    let step = || {
        let x = input::<B>().require_grad();
        let dropout = DropoutConfig::new(0.5).init();
        let mut y = x.clone();
        for _ in 0..3 {
            y = checkpoint(|| dropout.forward(y.clone().exp().log()) * 2.0);
        }
        // y = c x with a c of 0 or a power of two for each element, which is the gradient.
        let found = y.clone().inner();
        let grads = y.sum().backward();
        let expected = input::<Flex>()
            * Tensor::from_data(x.grad(&grads).expect("one").into_data(), &device());
        let tolerance = Tolerance::<f32>::relative(1e-4);
        found
            .into_data()
            .assert_approx_eq(&expected.into_data(), tolerance);
    };
    let _generator = generator();
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                RematStats::reset_thread();
                for _ in 0..20 {
                    step();
                    let _budget = MemoryBudget::bytes(1500).install_apart();
                    step();
                }
                let stats = RematStats::of_thread();
                assert!(
                    stats.replayed_operations > 0 && stats.live_bytes == 0,
                    "{stats:?}"
                );
            });
        }
    });
}

#[test]
fn forward_here_and_backward_there() {
    let plain = chain::<Plain>(1);
    let x = input::<B>().require_grad();
    let y = checkpoint(|| x.clone().exp().tanh().matmul(x.clone().abs().sqrt()));
    let found = std::thread::spawn(move || gradient_bits(&x, &y.sum().backward()));
    assert!(found.join().expect("no panic") == plain);
}

/// One evicted tensor, used by many threads at once.
#[test]
fn replayed_by_many_threads() {
    let x = input::<Remat<Flex>>();
    let expected = x.clone().exp().sin().cos().into_data();
    for _ in 0..20 {
        let mut kept = Vec::new();
        let _ = checkpoint(|| {
            let y = x.clone().exp().sin();
            kept = vec![y.clone().cos(), y.clone(), y];
            x.clone()
        });
        std::thread::scope(|threads| {
            for _ in 0..4 {
                let kept = kept.clone();
                let expected = &expected;
                threads.spawn(move || {
                    let [last, first, _] = kept.try_into().expect("three");
                    assert_eq!(&last.into_data(), expected);
                    assert_eq!(&first.cos().into_data(), expected);
                });
            }
        });
    }
}

/// A replay finds what it starts from, and the last handles of that go, and with them the storage,
/// before the replay has locked it.
#[test]
fn the_last_handles_of_inputs_go_while_another_thread_replays() {
    const INPUTS: usize = 2_000;
    let x = Tensor::<Remat<Flex>, 2>::ones([1, 1], &device());
    for round in 0..20 {
        // Resident, and able to come back.
        let budget = MemoryBudget::bytes(1 << 30).install_apart();
        let inputs: Vec<_> = (0..INPUTS).map(|_| x.clone().cos()).collect();
        let kept = Tensor::cat(inputs.clone(), 0);
        evict(&kept);
        drop(budget);
        let start = Barrier::new(2);
        let cosines = std::thread::scope(|threads| {
            threads.spawn(|| {
                start.wait();
                match round % 2 {
                    0 => inputs.into_iter().for_each(drop),
                    // Consumed, as an operation does.
                    _ => inputs.into_iter().for_each(|input| drop(input.into_data())),
                }
            });
            start.wait();
            kept.into_data()
        });
        let expected = x.clone().cos().repeat_dim(0, INPUTS).into_data();
        assert_eq!(cosines, expected);
    }
}

#[test]
fn a_panic_in_a_scope_arrives_and_leaves_no_scope_open() {
    let before = chain::<B>(2);
    let caught = catch_unwind(|| {
        checkpoint(|| {
            let x = input::<B>();
            checkpoint(|| x.clone().exp());
            panic!("of the user");
            #[allow(unreachable_code, reason = "the type of the region")]
            x
        })
    });
    let message = caught.expect_err("a panic");
    assert_eq!(
        *message.downcast::<&str>().expect("its message"),
        "of the user"
    );
    RematStats::reset_thread();
    let _ = input::<B>().exp().exp();
    assert_eq!(RematStats::of_thread().peak_bytes, 0, "nothing is recorded");
    assert!(chain::<B>(2) == before);
}

/// Sends whether it is dropped during a panic.
struct Told(Sender<bool>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0
            .send(std::thread::panicking())
            .expect("the test listens");
    }
}

/// burn-fusion frees nothing that is dropped during a panic.
#[test]
fn what_a_panic_drops_goes_after_it() {
    type Fail = fn(Tensor<Remat<Flex>, 2>);
    // With the number of deliveries until one fails.
    let fail: [(&str, u32, Fail); 3] = [
        ("a scope", u32::MAX, |x| {
            checkpoint(|| {
                let held = x.exp().sin();
                assert_eq!(held.dims(), [0, 0], "of the user");
                held
            });
        }),
        ("a strict budget", u32::MAX, |x| {
            let _budget = MemoryBudget::bytes(256).strict().install_apart();
            let y = x.clone().matmul(x);
            drop(y.clone() + y.cos());
        }),
        ("a replay", 1, |x| {
            let mut kept = None;
            checkpoint(|| kept = Some(x * Tensor::ones([8, 8], &device())));
            kept.map(Tensor::into_data);
        }),
    ];
    for (name, deliveries, fail) in fail {
        let (send, told) = channel();
        let told_of = Told(send);
        let asked = AtomicU32::new(0);
        let source = on_use([8, 8], move || {
            let _ = &told_of;
            let asked = asked.fetch_add(1, Ordering::SeqCst);
            assert!(asked < deliveries, "the network is down");
            input::<Flex>().into_data()
        });
        let caught = catch_unwind(AssertUnwindSafe(|| fail(source)));
        assert!(caught.is_err(), "{name}");
        Remat::<Flex>::sync(&device()).expect("a device");
        assert_eq!(told.iter().collect::<Vec<_>>(), [false], "{name}");
    }
}

#[test]
fn a_panic_during_replay_arrives_and_the_next_try_succeeds() {
    RematStats::reset_thread();
    let fails = Arc::new(AtomicBool::new(false));
    let source = {
        let fails = fails.clone();
        on_use([8, 8], move || {
            assert!(!fails.load(Ordering::SeqCst), "the network is down");
            input::<Flex>().into_data()
        })
    };
    let mut kept: Option<Tensor<Remat<Flex>, 2>> = None;
    checkpoint(|| kept = Some(source.clone().matmul(source.clone()).exp()));
    let kept = kept.expect("made in the scope");
    fails.store(true, Ordering::SeqCst);
    let live = RematStats::of_thread().live_bytes;
    for _ in 0..3 {
        let caught = catch_unwind(AssertUnwindSafe(|| kept.clone().into_data()));
        let message = caught.expect_err("a panic");
        assert_eq!(
            *message.downcast::<&str>().expect("its message"),
            "the network is down"
        );
        // Nothing stays locked, half there, or counted.
        assert_eq!(RematStats::of_thread().live_bytes, live);
    }
    // The rest of the thread goes on.
    assert!(chain::<B>(2) == chain::<Plain>(2));
    fails.store(false, Ordering::SeqCst);
    let expected = input::<Flex>().matmul(input()).exp().into_data();
    assert_eq!(kept.into_data(), expected);
    drop(source);
    assert_eq!(RematStats::of_thread().live_bytes, 0);
}

#[test]
fn long_chains() {
    const LENGTH: usize = 200_000;
    let mut kept = None;
    let result = checkpoint(|| {
        let mut x = Tensor::<Remat<Flex>, 1>::ones([1], &device());
        for _ in 0..LENGTH {
            x = x * 1.00001;
        }
        kept = Some(x.clone());
        x * 2.0
    });
    // Replayed from its begin, and dropped.
    let kept = kept.expect("made in the scope");
    let expected = (0..LENGTH).fold(1.0f32, |x, _| x * 1.00001);
    assert_eq!(kept.into_scalar(), expected);
    drop(result);

    // Never replayed, dropped as one.
    let dropped = checkpoint(|| {
        let mut x = Tensor::<Remat<Flex>, 1>::ones([1], &device());
        for _ in 0..LENGTH {
            x = x * 1.00001;
        }
        kept_alive(&x);
        0.0f32
    });
    assert_eq!(dropped, 0.0);
}

fn kept_alive(x: &Tensor<Remat<Flex>, 1>) {
    assert_eq!(x.dims(), [1]);
}

struct Encoded {
    states: Tensor<B, 2>,
    lengths: Option<Tensor<B, 1, Int>>,
}
burn_checkpoint::outputs!(impl[] Encoded { states, lengths });

#[test]
fn results_of_all_kinds_are_kept() {
    RematStats::reset_thread();
    let x = input::<B>();
    let (encoded, [a, b], masks) = checkpoint(|| {
        let lengths = x.clone().sum_dim(1).int().reshape([8]);
        let encoded = Encoded {
            states: x.clone().exp(),
            lengths: Some(lengths),
        };
        let masks = vec![x.clone().greater_elem(0.0)];
        (encoded, [x.clone().sin(), x.clone().cos()], masks)
    });
    assert_eq!(RematStats::of_thread().evicted_operations, 0);
    let _ = (encoded.states + a + b).into_data();
    let _ = (encoded.lengths, masks[0].clone().into_data());
    assert_eq!(RematStats::of_thread().replayed_operations, 0);
}

/// What was found of a scope's results before that panicked is not the next scope's.
#[test]
fn a_panic_while_results_are_looked_for() {
    struct Broken(Tensor<B, 2>);
    impl Outputs for Broken {
        fn touch(&self) {
            self.0.touch();
            panic!("of the user");
        }
    }
    let x = input::<B>();
    let mut made = None;
    let broken = catch_unwind(AssertUnwindSafe(|| {
        checkpoint(|| {
            made = Some(x.clone().exp());
            Broken(made.clone().expect("made here"))
        })
    }));
    assert!(broken.is_err());
    // It keeps its results, and what they could come back by goes.
    checkpoint(|| x.clone().sin());
    RematStats::reset_thread();
    evict(&made);
    assert_eq!(RematStats::of_thread().evicted_operations, 1);
    assert_eq!(made.map(Tensor::into_data), Some(x.exp().into_data()));
}

/// What a scope's result type does not show is evicted, and comes back.
#[test]
fn a_result_that_is_missed_is_recomputed() {
    let x = input::<B>();
    let mut missed = None;
    checkpoint(|| missed = Some(x.clone().exp()));
    let missed = missed.expect("made in the scope");
    assert_eq!(missed.into_data(), x.exp().into_data());
}

#[test]
fn offloaded_ahead_of_use() {
    RematStats::reset_thread();
    let x = input::<B>().require_grad();
    let y = checkpoint_with(Policy::Offload, || {
        x.clone().matmul(x.clone()).tanh().tanh().tanh().tanh()
    });
    let stats = RematStats::of_thread();
    assert_eq!(stats.offloaded_bytes, 4 * 256, "{stats:?}");
    assert_eq!(stats.live_bytes, 256);
    y.sum().backward();
    let stats = RematStats::of_thread();
    assert_eq!(stats.uploaded_bytes, 4 * 256);
    assert_eq!(stats.replayed_operations, 0);
}

/// What comes back from the host lies in the order of its shape: a transposed operand of a matmul
/// too.
#[test]
fn what_is_transposed_has_the_same_gradients_after_an_offload() {
    let x = input::<B>().require_grad();
    let transposed = || x.clone().transpose().tanh();
    let forward = || transposed().matmul(x.clone()).tanh();
    let gradient = |y: Tensor<B, 2>| x.grad(&y.sum().backward()).expect("a gradient").into_data();
    let plain = gradient(forward());
    assert_eq!(gradient(checkpoint_with(Policy::Offload, forward)), plain);
}
