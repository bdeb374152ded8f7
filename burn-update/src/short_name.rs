//! Names of types in errors.

/// The name of a type for a message: without the paths of modules, and without parameters below the
/// third level.
pub(crate) fn short_name<T: ?Sized>() -> String {
    const LEVELS: i32 = 2;
    let (mut short, mut word, mut level) = (String::new(), 0, 0);
    for symbol in core::any::type_name::<T>().chars() {
        level += i32::from(symbol == '<');
        if level <= LEVELS {
            if symbol == ':' {
                short.truncate(word);
                continue;
            }
            short.push(symbol);
            if !symbol.is_alphanumeric() && symbol != '_' {
                word = short.len();
            }
        } else if symbol == '<' && level == LEVELS + 1 {
            short.push_str("<..>");
            word = short.len();
        }
        level -= i32::from(symbol == '>');
    }
    short
}

#[test]
fn a_name_has_no_paths_and_three_levels() {
    assert_eq!(
        short_name::<Option<Vec<(u8, Option<String>)>>>(),
        "Option<Vec<(u8, Option<..>)>>"
    );
}
