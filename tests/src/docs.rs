//! Documentation that is printed from the code.

use std::fmt::Write;
use std::sync::Mutex;

use burn_amp::{Cast, op_table};
use burn_checkpoint::{OpInfo, Work};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations.md");

/// Begins the part of the page whose numbers are measured, and so are not compared.
const ERRORS: &str = "\n# Errors: autocast beside PyTorch's\n";

/// Locks the page while a part of it is written.
static WRITING: Mutex<()> = Mutex::new(());

/// The parts of the page: what is printed from the tables, and what is measured. Parts that are
/// given replace those of the page if `UPDATE_DOCS` is set.
fn page(printed: Option<&str>, measured: impl FnOnce() -> Option<String>) -> [String; 2] {
    let _writing = WRITING
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let found = std::fs::read_to_string(PAGE).expect("docs/operations.md");
    let (mut first, mut second) = match found.split_once(ERRORS) {
        Some((first, second)) => (first.to_owned(), second.to_owned()),
        None => (found, String::new()),
    };
    if std::env::var_os("UPDATE_DOCS").is_some() {
        first = printed.map_or(first, str::to_owned);
        second = measured().unwrap_or(second);
        std::fs::write(PAGE, format!("{first}{ERRORS}{second}"))
            .expect("docs/operations.md is written");
    }
    [first, second]
}

/// The part of `docs/operations.md` that is printed from the tables; `UPDATE_DOCS` replaces it.
pub fn printed_operations(printed: &str) -> String {
    let [first, _] = page(Some(printed), || None);
    first
}

/// The part of `docs/operations.md` that is measured; `UPDATE_DOCS` replaces it by what `measure`
/// returns.
pub fn errors(measure: impl FnOnce() -> String) -> String {
    let [_, second] = page(None, || Some(measure()));
    second
}

/// `docs/operations.md` without what is measured.
pub fn operations() -> String {
    let mut page = String::from(
        "# What happens to each operation\n\n\
         Printed from `burn_amp::op_table()` and `burn_checkpoint::op_table()` by a test (`UPDATE_DOCS=1 cargo test --workspace \
         --test laws table`): do not edit. The rows of both are those of `burn-decorator`.\n\n\
         # Cast: what autocast does\n\n\
         - **lower**: float operands are brought to the policy's low type (bf16 or f16).\n\
         - **full**: low operands are brought to f32.\n\
         - **promote**: operands of different types are brought to the widest.\n\
         - **keep**: operands stay as they come.\n\n\
         f64, integer, boolean and quantized operands are left alone in every class, and so are gradients and what is \
         computed from them. Operands of different types never reach the inner backend, whatever the class.\n\n\
         Rows named `*_backward` do not run in `Autocast<Autodiff<_>>`: autodiff calls those operations on the backend inside \
         of it, in the types that forward has kept. The gradient of a lowered layer's bias is therefore summed in the low \
         type, as in PyTorch. They run for code that calls them through `Autocast` itself.\n",
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
    page.push_str(&work());
    page
}

/// What a work class means to burn-checkpoint.
const WORK: [(Work, &str, &str); 11] = [
    (
        Work::Compute,
        "compute",
        "recorded; a product, whose cost grows faster than its bytes: `Policy::KeepCompute` keeps its result",
    ),
    (
        Work::Sort,
        "sort",
        "recorded; sorting, a Fourier transform, dynamic programming",
    ),
    (
        Work::Norm,
        "norm",
        "recorded; several passes with exponentials or roots",
    ),
    (
        Work::Math,
        "math",
        "recorded; a transcendental function of each element",
    ),
    (Work::Reduce, "reduce", "recorded; a pass over the input"),
    (
        Work::Index,
        "index",
        "recorded; moves elements by index or by windows",
    ),
    (
        Work::Cheap,
        "cheap",
        "recorded; a few instructions an element",
    ),
    (
        Work::View,
        "view",
        "recorded; none or a copy: the result may share the operand's storage, and is then counted with it",
    ),
    (
        Work::New,
        "new",
        "recorded in forward passes; a function of plain arguments",
    ),
    (
        Work::Fixed,
        "fixed",
        "kept and counted, never computed again: random numbers, data from the host, uninitialised tensors, shapes that depend on data",
    ),
    (
        Work::Pass,
        "pass",
        "passed on: what asks, or reads to the host",
    ),
];

/// The part on recomputation.
fn work() -> String {
    let rows: Vec<&OpInfo> = burn_checkpoint::op_table().collect();
    let recorded = rows
        .iter()
        .filter(|op| !matches!(op.work, Work::Fixed | Work::Pass));
    let mut part = format!(
        "\n# Work: what recomputation does\n\n\
         In a scope or under a budget {} of {} operations are recorded: their results can be dropped and come back by running the \
         operation once more. The class says what that takes.\n",
        recorded.count(),
        rows.len()
    );
    for (work, name, means) in WORK {
        let of_class = rows.iter().filter(|op| op.work == work);
        let count = of_class.clone().count();
        write!(part, "\n## {name} ({count} operations)\n\n{means}.\n").expect("a string");
        let mut groups: Vec<&str> = of_class.clone().map(|op| op.group).collect();
        groups.dedup();
        for group in groups {
            let names: Vec<_> = of_class
                .clone()
                .filter(|op| op.group == group)
                .map(|op| format!("`{}`", op.name))
                .collect();
            write!(part, "\n- {group}: {}", names.join(", ")).expect("a string");
        }
        part.push('\n');
    }
    part
}
