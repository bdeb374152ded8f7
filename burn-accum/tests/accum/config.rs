//! What may be asked for.

use burn_accum::AccumConfig;

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
}
