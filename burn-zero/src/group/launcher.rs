//! The environment variables of a launcher, readable before MPI is initialized.

use std::env;

/// Set by Open MPI's `mpirun`, by MPICH's and `srun --mpi=pmi2`, and by `srun`.
const VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// A job of several processes, of which this is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The environment variable that says so.
    pub variable: &'static str,
    /// How many processes there are.
    pub world_size: usize,
}

/// The job that `mpirun` or `srun` started this process in; `None` for a process that is alone.
///
/// A program that was built without MPI checks this, so as not to run the whole training in every process.
pub fn launched() -> Option<Launched> {
    find(|name| env::var(name).ok())
}

/// This process's number among those on its machine, from the launcher: the index of the device that it should use.
pub fn local_rank() -> Option<usize> {
    const VARIABLES: [&str; 3] = [
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    ];
    let number = |variable| env::var(variable).ok()?.parse().ok();
    VARIABLES.into_iter().find_map(number)
}

fn find(get: impl Fn(&str) -> Option<String>) -> Option<Launched> {
    VARIABLES.into_iter().find_map(|variable| {
        let world_size = get(variable)?.parse().ok()?;
        (world_size > 1).then_some(Launched {
            variable,
            world_size,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_several_processes_are_a_job() {
        let with = |value: &str| {
            find(|name| (name == "PMI_SIZE").then(|| value.to_owned())).map(|job| job.world_size)
        };
        assert_eq!(with("4"), Some(4));
        assert_eq!(with("1"), None);
        assert_eq!(with("many"), None);
        assert_eq!(find(|_| None), None);
    }
}
