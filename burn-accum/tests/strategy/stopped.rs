//! What becomes of a window when the training is interrupted.

use burn::{lr_scheduler::constant::ConstantLr, optim::SgdConfig};
use burn_accum::{AccumConfig, EpochTail};

use crate::{
    learner::{B, MICRO_BATCH, Setup, train},
    model::{Model, bits, rows},
    windows::{Windows, in_windows},
};

/// The model has seen all of it, and the record is the one of the last whole epoch.
#[test]
fn nothing_is_lost() {
    let _turn = crate::turn();
    let start = Model::<B>::new();
    let run = |setup, tail| {
        let sgd = SgdConfig::new().init();
        let Windows { update, counter } = in_windows(sgd, AccumConfig::mean(4));
        let strategy = update.strategy().with_tail(tail);
        let scheduler = ConstantLr::new(0.1);
        let strategy = Some(strategy.into());
        let outcome = train(start.clone(), update, scheduler, setup, strategy);
        (outcome, counter)
    };
    for tail in [EpochTail::Apply, EpochTail::Carry] {
        let mut setup = Setup::new(rows(0, 10 * MICRO_BATCH), 5);
        setup.interrupt_at = Some(6 * MICRO_BATCH + 1);
        let (interrupted, counter) = run(setup, tail);
        assert_eq!((counter.micro_batches(), counter.updates()), (7, 2));
        assert_eq!(counter.micro_step(), 0);
        let message = interrupted.interrupter.get_message();
        assert_eq!(message.as_deref(), Some("there it is"));
        assert!(!interrupted.directory.is_recorded(1));
        assert_eq!(interrupted.watch.logged("valid "), [""; 0]);

        let (seven, _) = run(Setup::new(rows(0, 7 * MICRO_BATCH), 1), tail);
        assert_eq!(bits(&interrupted.model), bits(&seven.model));
    }
}
