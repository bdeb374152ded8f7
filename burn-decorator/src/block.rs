//! The blocks that a model repeats, by the paths of its parameters.

/// The path of the repeated block that a parameter is in, up to the first part that is a number;
/// empty if it is in none.
///
/// ```
/// use burn_decorator::repeated_block;
///
/// assert_eq!(repeated_block("blocks.0.mlp.weight"), "blocks.0");
/// assert_eq!(repeated_block("norm.gamma"), "");
/// ```
pub fn repeated_block(path: &str) -> &str {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..end];
        }
        end += 1;
    }
    ""
}
