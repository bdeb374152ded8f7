//! The memory of the host.

use std::{fs, path::Path};

use sysinfo::{MemoryRefreshKind, System};

/// The memory that this process may use on the host, in bytes: that of the machine, or the limit of
/// its control group or of one above it (`srun --mem`, `MemoryMax`) if that is less. `None` if the
/// system does not report it.
///
/// This is the device memory of the backends on the CPU. No backend reports the memory of a GPU:
/// ask its vendor's tool, or the runtime below the backend.
pub fn host_memory_bytes() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let group = group_limit(Path::new("/"));
    let machine = system.total_memory();
    let bytes = group.map_or(machine, |group| group.min(machine));
    (bytes > 0).then_some(bytes)
}

/// The least memory limit of this process's control groups and of those above them, in bytes;
/// `root` is the root of the file system. `None` without a limit. sysinfo 0.38 reads only the group
/// at the mount point.
fn group_limit(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limits = groups.lines().filter_map(|line| {
        // hierarchy:controllers:/path, without controllers in version 2
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (mount, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|controller| controller == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let mount = root.join(mount);
        let groups = Path::new(path.trim_start_matches('/')).ancestors();
        let limit = |group| {
            let limit = fs::read_to_string(mount.join(group).join(file)).ok()?;
            limit.trim().parse().ok() // not "max"
        };
        groups.filter_map(limit).min()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::group_limit;

    #[test]
    fn the_least_limit_of_a_group_and_those_above_counts() {
        const V1: &str = "9:name=systemd:/job\n4:cpu,memory:/job/step\n0::/\n";
        const V2: &str = "0::/job/step\n";
        type Files = &'static [(&'static str, &'static str)];
        let limits: [(&str, Files, Option<u64>); 6] = [
            (V2, &[("job/step/memory.max", "7000\n")], Some(7000)),
            (
                V2,
                &[
                    ("job/step/memory.max", "max\n"),
                    ("job/memory.max", "8000\n"),
                ],
                Some(8000),
            ),
            // A container that sees its own group as the root.
            (V2, &[("memory.max", "9000\n")], Some(9000)),
            (V2, &[("job/other/memory.max", "1\n")], None),
            (
                V1,
                &[
                    (
                        "memory/job/step/memory.limit_in_bytes",
                        "9223372036854771712\n",
                    ),
                    ("memory/job/memory.limit_in_bytes", "6000\n"),
                ],
                Some(6000),
            ),
            ("", &[], None),
        ];
        for (groups, files, expected) in limits {
            let root = tempfile::tempdir().unwrap();
            let write = |path: &str, text: &str| {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            };
            write("proc/self/cgroup", groups);
            for (path, text) in files {
                write(&format!("sys/fs/cgroup/{path}"), text);
            }
            assert_eq!(group_limit(root.path()), expected, "{groups} {files:?}");
        }
        let elsewhere = tempfile::tempdir().unwrap();
        assert_eq!(group_limit(elsewhere.path()), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_host_has_memory() {
        let bytes = super::host_memory_bytes().unwrap();
        assert!((1 << 24..1 << 50).contains(&bytes), "{bytes}");
    }
}
