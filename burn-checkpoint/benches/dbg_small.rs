//! x
#[path = "../tests/many/mod.rs"]
mod many;
use burn::backend::Autodiff;
use burn_checkpoint::{MemoryBudget, Remat, RematStats, snapshot::Snapshot, trace::record};
use burn_flex::Flex;
use many::{Ctc, Lstm, Step};
type B = Autodiff<Remat<Flex>>;
fn go(name: &str, step: &impl Step<B>, f: f64) {
    let budget = MemoryBudget::fraction(f).unwrap().install();
    step.run(); budget.step();
    let l = budget.limit_bytes()[0].unwrap();
    drop(budget);
    let budget = MemoryBudget::bytes(l).install();
    let s = std::time::Instant::now();
    step.run(); budget.step();
    println!("{:?}", s.elapsed());
    RematStats::reset_thread();
    let r = record();
    step.run();
    budget.step();
    let ev = r.finish();
    println!("{name} {f} {:?} {:?}", budget.limit_bytes(), RematStats::of_thread());
    println!("{}", Snapshot::at_peak(&ev).unwrap());
    let mut by = std::collections::BTreeMap::<String, (usize, u64)>::new();
    for e in &ev {
        let t = format!("{:?}", e.kind);
        let t = t.split("node").next().unwrap().to_string();
        if t.starts_with("Replay") || t.starts_with("Evict") { let x = by.entry(t).or_default(); x.0 += 1; x.1 += e.bytes; }
    }
    let mut v: Vec<_> = by.into_iter().collect();
    v.sort_by_key(|x| std::cmp::Reverse(x.1.0));
    for (k, (n, b)) in v.into_iter().take(30) { println!("{n:>7} {b:>10} {k}"); }
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    if a[1] == "rec" || a[1] == "plain" || a[1] == "lim" {
        let step: Box<dyn Step<B>> = if a[2] == "lstm" { Box::new(Lstm::new()) } else { Box::new(Ctc::new(400)) };
        let n = a.get(3).map_or(if a[2] == "lstm" { 300 } else { 100 }, |n| n.parse().unwrap());
        for _ in 0..2 { step.run(); }
        let bytes = if a[1] == "rec" { u64::MAX / 2 } else if a[2] == "lstm" { 1561859 } else { 1272162 };
        let budget = (a[1] != "plain").then(|| MemoryBudget::bytes(bytes).install());
        let cpu = || std::fs::read_to_string("/proc/thread-self/schedstat").unwrap().split(' ').next().unwrap().parse::<f64>().unwrap();
        let c = cpu();
        let mut times: Vec<_> = (0..n).map(|_| { let s = std::time::Instant::now(); step.run(); if let Some(b) = &budget { b.step(); } s.elapsed() }).collect();
        times.sort();
        println!("{} {} median {:?} min {:?} cpu {:.3} ms", a[1], a[2], times[n / 2], times[0], (cpu() - c) / 1e6 / n as f64);
        return;
    }
    let t: usize = a[1].parse().unwrap();
    if t == 0 { go("lstm", &Lstm::new(), 0.4) } else { go("ctc", &Ctc::new(t), 0.37) }
}
