//! The environment variables of a launcher, readable before MPI is initialized.

use std::env;

/// Set by Open MPI's `mpirun`, by MPICH's and `srun --mpi=pmi2`, and by `srun`.
const WORLD_SIZE: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// In the same order.
const LOCAL_RANK: [&str; 3] = [
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
];

/// How many processes `mpirun` or `srun` started, of which this is one; `None` for a process that
/// is alone.
///
/// A program that was built without MPI checks this, so as not to run the whole training in every
/// process.
pub fn launched() -> Option<usize> {
    processes(|name| env::var(name).ok())
}

/// This process's number among those on its machine, from the launcher: the index of the device
/// that it should use.
pub fn local_rank() -> Option<usize> {
    let number = |variable| env::var(variable).ok()?.parse().ok();
    LOCAL_RANK.into_iter().find_map(number)
}

fn processes(get: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let number = |variable| get(variable)?.parse().ok().filter(|&number| number > 1);
    WORLD_SIZE.into_iter().find_map(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_several_processes_are_a_job() {
        let with = |value: &str| processes(|name| (name == "PMI_SIZE").then(|| value.to_owned()));
        assert_eq!(with("4"), Some(4));
        assert_eq!(with("1"), None);
        assert_eq!(with("many"), None);
    }
}
