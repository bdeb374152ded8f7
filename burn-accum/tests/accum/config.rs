//! What may be asked for.

use burn_accum::{AccumConfig, WindowSchedule};

#[test]
fn schedules_are_piecewise_constant() {
    let schedule = WindowSchedule::Piecewise(vec![(0, 2), (3, 1), (4, 7)]);
    assert_eq!(schedule.validate(), Ok(()));
    let lengths: Vec<_> = (0..6).map(|update| schedule.steps_at(update)).collect();
    assert_eq!(lengths, [2, 2, 2, 1, 7, 7]);
    assert_eq!(WindowSchedule::Constant(3).steps_at(1 << 40), 3);
}

#[test]
fn impossible_schedules_are_refused() {
    let refused = |pieces: &[(u64, usize)]| {
        WindowSchedule::Piecewise(pieces.to_vec())
            .validate()
            .unwrap_err()
            .to_string()
    };
    assert!(refused(&[]).contains("at least one entry"));
    assert!(refused(&[(2, 1)]).contains("begins at update 2, but it must be 0"));
    assert!(refused(&[(0, 1), (5, 2), (5, 3)]).contains("entry 2 begins at update 5"));
    assert!(refused(&[(0, 1), (5, 0)]).contains("0 micro-batches from update 5"));
    assert!(WindowSchedule::Constant(0).validate().is_err());
}

#[test]
fn files_may_leave_fields_out_but_not_misspell_them() {
    let read = |text| serde_json::from_str::<AccumConfig>(text);
    assert_eq!(read("{}").unwrap(), AccumConfig::default());
    assert_eq!(
        read(r#"{"steps": 4, "normalization": "tokens"}"#).unwrap(),
        AccumConfig::tokens(4)
    );
    assert_eq!(
        read(r#"{"normalization": "Tokens"}"#).unwrap(),
        AccumConfig::tokens(1)
    );
    assert!(read(r#"{"step": 4}"#).is_err());

    let schedule: WindowSchedule =
        serde_json::from_str(r#"{"piecewise": [[0, 2], [9, 4]]}"#).unwrap();
    assert_eq!(schedule, WindowSchedule::Piecewise(vec![(0, 2), (9, 4)]));
}
