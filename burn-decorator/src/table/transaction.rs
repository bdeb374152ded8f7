//! Reading several tensors at once: `TransactionOps`.

/// Hands every row of [`TransactionOps`](burn_backend::ops::TransactionOps) to a macro; see [the
/// crate's documentation](crate).
#[macro_export]
macro_rules! transaction_ops {
    ($callback:ident) => {
        $crate::rows_of_release! {
            $callback TransactionOps
            keep    pass    tr_execute(transaction: Transaction) -> TransactionData;
        }
    };
}
