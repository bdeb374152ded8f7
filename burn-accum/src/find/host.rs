//! The memory of the host.

use sysinfo::{MemoryRefreshKind, System};

/// The memory that this process may use on the host, in bytes: that of the machine, or of its control group if that is less. `None`
/// if the system does not report it.
///
/// This is the device memory of the backends on the CPU. No backend reports the memory of a GPU: ask its vendor's tool, or the
/// runtime below the backend.
pub fn host_memory_bytes() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let group = system.cgroup_limits().map(|group| group.total_memory);
    let machine = system.total_memory();
    let bytes = group.map_or(machine, |group| group.min(machine));
    (bytes > 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn a_host_has_memory() {
        let bytes = super::host_memory_bytes().unwrap();
        assert!((1 << 24..1 << 50).contains(&bytes), "{bytes}");
    }
}
