//! One AdamW step over a flat buffer, all contenders in one run, interleaved: the machine's stream
//! limit at the same traffic, `HostAdamW`, steps of modules on Flex with Burn's own AdamW and with
//! the offloaded one and, where a Python has them, PyTorch's fused AdamW and DeepSpeed's CPUAdam.
//!
//! ```text
//! cargo bench --workspace --bench host_adamw
//! HOST_ADAMW_ELEMENTS=25e6 HOST_ADAMW_ROUNDS=21 HOST_ADAMW_PYTHON=venv/bin/python cargo bench ..
//! ```
//!
//! What else runs on the machine hits all contenders of a round more or less alike, so it is the
//! ratios that count: the median of the ratios to the stream of the same round, and the ratio of
//! the fastest rounds.

mod module;
mod python;
mod stream;

use std::time::Instant;

use burn_zero::{Gradients, HostAdamW, HostAdamWConfig, ParamsOut};
use half::bf16;

/// A contender: does one step and returns its seconds.
type Contender = Box<dyn FnMut() -> f64>;

/// Contenders of one traffic, the stream limit first.
struct Group {
    name: &'static str,
    bytes_per_element: usize,
    contenders: Vec<(String, Contender)>,
}

fn main() {
    // Run by `cargo test --benches` it only proves that it runs.
    let measuring = std::env::args().any(|argument| argument == "--bench");
    let elements = setting("HOST_ADAMW_ELEMENTS", if measuring { 50e6 } else { 1e5 });
    let rounds = setting("HOST_ADAMW_ROUNDS", if measuring { 15.0 } else { 1.0 });
    let threads = rayon::current_num_threads();
    println!("{elements} elements, {rounds} interleaved rounds, {threads} threads");
    for mut group in [single_precision(elements), low_precision(elements)] {
        report(&mut group, rounds);
    }
}

fn setting(name: &str, default: f64) -> usize {
    let value = std::env::var(name)
        .ok()
        .map(|text| text.parse().expect("a number"));
    value.unwrap_or(default) as usize
}

fn timed(mut step: impl FnMut() + 'static) -> Contender {
    Box::new(move || {
        let start = Instant::now();
        step();
        start.elapsed().as_secs_f64()
    })
}

/// f32 gradients in, f32 parameters out: 4 arrays read, 3 written.
fn single_precision(elements: usize) -> Group {
    let mut contenders: Vec<(String, Contender)> = vec![
        ("stream, huge pages".into(), stream::f32_in(elements, false)),
        ("stream, prefetching".into(), stream::f32_in(elements, true)),
        (
            "stream, ordinary pages".into(),
            stream::ordinary_pages(elements),
        ),
    ];
    contenders.push(("HostAdamW".into(), host_f32(elements)));
    contenders.push(("Burn AdamW on Flex".into(), module::burns(elements)));
    contenders.push(("OffloadedAdamW on Flex".into(), module::offloaded(elements)));
    contenders.extend(python::contenders(elements));
    Group {
        name: "f32 gradients",
        bytes_per_element: 28,
        contenders,
    }
}

/// bf16 gradients in, f32 master and bf16 parameters out.
fn low_precision(elements: usize) -> Group {
    let mut contenders: Vec<(String, Contender)> = vec![
        (
            "stream, huge pages".into(),
            stream::bf16_in_out(elements, false),
        ),
        (
            "stream, prefetching".into(),
            stream::bf16_in_out(elements, true),
        ),
    ];
    contenders.push(("HostAdamW".into(), host_bf16(elements)));
    Group {
        name: "bf16 gradients, bf16 copy out",
        bytes_per_element: 28,
        contenders,
    }
}

fn host(elements: usize) -> HostAdamW {
    let initial: Vec<f32> = (0..elements)
        .map(|index| (index % 1000) as f32 * 1e-3)
        .collect();
    HostAdamW::new(HostAdamWConfig::default(), &initial).expect("memory")
}

fn host_f32(elements: usize) -> Contender {
    let mut adamw = host(elements);
    let gradients = stream::HugeBuffer::new(elements * 4);
    timed(move || {
        adamw
            .step(1e-3, Gradients::F32(gradients.as_slice()), None)
            .expect("a step");
    })
}

fn host_bf16(elements: usize) -> Contender {
    let mut adamw = host(elements);
    let gradients = vec![bf16::from_f32(1e-3); elements];
    let mut out = vec![bf16::ZERO; elements];
    timed(move || {
        let out = ParamsOut::Bf16(&mut out);
        adamw
            .step(1e-3, Gradients::Bf16(&gradients), Some(out))
            .expect("a step");
    })
}

fn report(group: &mut Group, rounds: usize) {
    let mut seconds = vec![Vec::new(); group.contenders.len()];
    for round in 0..=rounds {
        for ((_, contender), seconds) in group.contenders.iter_mut().zip(&mut seconds) {
            let measured = contender();
            // The first round warms up.
            if round > 0 || rounds == 1 {
                seconds.push(measured);
            }
        }
    }
    println!(
        "\n{}, {} bytes an element",
        group.name, group.bytes_per_element
    );
    println!(
        "{:28} {:>9} {:>9} {:>10} {:>10}",
        "", "median ms", "fastest", "to stream", "fastest"
    );
    let fastest_stream = fastest(&seconds[0]);
    for ((name, _), own) in group.contenders.iter().zip(&seconds) {
        let ratios = own
            .iter()
            .zip(&seconds[0])
            .map(|(own, stream)| own / stream)
            .collect();
        let best = fastest(own);
        println!(
            "{name:28} {:9.2} {:9.2} {:10.3} {:10.3}",
            median(own.clone()) * 1e3,
            best * 1e3,
            median(ratios),
            best / fastest_stream
        );
    }
}

fn fastest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
