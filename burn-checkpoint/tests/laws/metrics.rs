//! What metrics show.

use burn::data::dataloader::Progress;
use burn::tensor::Tensor;
use burn::train::metric::{Metric, MetricMetadata, Numeric};
use burn_checkpoint::{HoldersMetric, MemoryBudget, Remat};
use burn_flex::Flex;

use crate::apart::InstallApart;

#[test]
fn the_largest_holders_are_those_of_the_peak() {
    let _all = MemoryBudget::bytes(u64::MAX).install_apart();
    let metric = HoldersMetric::new();
    for kib in [4, 8] {
        let x = Tensor::<Remat<Flex>, 1>::ones([kib * 256], &Default::default());
        drop([0; 3].map(|_| x.clone().exp()));
        let mut metric = metric.clone();
        let read = move || {
            let progress = Progress::new(0, 1);
            let metadata = MetricMetadata {
                progress: progress.clone(),
                global_progress: progress,
                iteration: None,
                lr: None,
            };
            let text = metric.update(&(), &metadata).formatted;
            (text, metric.value().current())
        };
        let (text, peak) = std::thread::spawn(read).join().expect("no panic");
        let held = format!("float_exp {}.0 KiB", 3 * kib);
        assert!(text.contains(&held), "{text}");
        assert_eq!(peak, 4.0 * kib as f64 / 1024.0);
    }
}
