//! Of 0.21's module only what a message needs: the search for the parameters takes a `Module`.

/// The first few of `parameters`, and how many there are.
pub fn name_some(parameters: &[String]) -> String {
    const NAMED: usize = 8;
    let named = parameters[..parameters.len().min(NAMED)].join(", ");
    match parameters.len() {
        0 => "no parameter".to_owned(),
        count if count > NAMED => format!("{named}, ... ({count} parameters)"),
        _ => named,
    }
}
