//! Documentation that is printed from the code.

use std::fmt::Write;

use burn_amp::{Cast, op_table};

/// `docs/operations.md`.
pub fn operations() -> String {
    let mut page = String::from(
        "# What autocast does to each operation\n\n\
         Printed from `burn_amp::op_table()` by a test (`UPDATE_DOCS=1 cargo test -p tests --test laws table`): do not edit.\n\n\
         - **lower**: float operands are brought to the policy's low type (bf16 or f16).\n\
         - **full**: low operands are brought to f32.\n\
         - **promote**: operands of different types are brought to the widest.\n\
         - **keep**: operands stay as they come.\n\n\
         f64, integer, boolean and quantized operands are left alone in every class, and so are gradients and what is \
         computed from them. Operands of different types never reach the inner backend, whatever the class.\n",
    );
    let castable = || op_table().iter().filter(|row| row.float_operands);
    let rest = op_table().len() - castable().count();
    for cast in [Cast::Lower, Cast::Full, Cast::Promote, Cast::Keep] {
        let rows: Vec<_> = castable().filter(|row| row.cast == cast).collect();
        write!(
            page,
            "\n## {cast} ({} operations)\n\n| operation | trait | why |\n|---|---|---|\n",
            rows.len()
        )
        .expect("a string");
        for row in rows {
            writeln!(page, "| `{}` | {} | {} |", row.op, row.group, row.reason).expect("a string");
        }
    }
    write!(
        page,
        "\nThe other {rest} of {} operations take no float tensor and are passed on as they are.\n",
        op_table().len()
    )
    .expect("a string");
    page
}
