//! What an operation costs, and the key by which the size of its result is remembered.

use std::fmt::{Debug, Write};
use std::hash::{Hash, Hasher};

use burn_backend::{DType, Shape};
use burn_decorator::profile::{DeviceProfile, KernelWork};
use rustc_hash::FxHasher;

use crate::node::extent::Extent;
use crate::record::op::OpInfo;
use crate::record::products::{Operand, multiplications};
use crate::record::work::{START_NS, Work, product_ns};

/// Estimated nanoseconds to bring a tensor of so many bytes back from the host. Only their ratio to
/// the costs of operations matters.
pub(crate) fn upload_ns(device: Option<&DeviceProfile>, bytes: u64) -> f32 {
    // Without a device: pageable memory over PCIe 4.
    let (launch_seconds, bytes_per_second) = device.map_or((0.0, 10e9), |device| {
        (
            device.launch.as_secs_f64(),
            device.link.upload_bytes_per_second,
        )
    });
    (launch_seconds.max(bytes as f64 / bytes_per_second) * 1e9) as f32
}

/// What is known of an operation before it runs, collected from its operands.
pub(crate) struct OpCost {
    op: &'static OpInfo,
    /// Elements of the largest operand.
    largest: u64,
    /// Bytes of the largest operand.
    pub largest_bytes: u64,
    /// Bytes of all operands.
    bytes: u64,
    /// Bytes of a lookup's table, which is its first operand.
    table_bytes: Option<u64>,
    /// Whether an operand is f16 or bf16.
    is_half: bool,
    /// The first three operands of a product.
    operands: Option<[Operand; 3]>,
    seen: usize,
    /// Whether a view has to copy: its result lies in another order than its operand.
    pub copies: bool,
    hasher: FxHasher,
    /// Bytes of the last result with the same key, if room was made for so many.
    pub expected: Option<u64>,
}

impl OpInfo {
    /// Nanoseconds that a [`MemoryBudget`](crate::MemoryBudget) takes this operation to cost on
    /// operands of these shapes. Only ratios matter.
    ///
    /// ```
    /// use burn_checkpoint::op_table;
    ///
    /// let matmul = op_table().find(|op| op.name == "float_matmul").unwrap();
    /// let of_side = |n: usize| {
    ///     matmul.estimated_ns(&[[n, n].into(), [n, n].into()], &[n, n].into())
    /// };
    /// assert!(of_side(2048) > 7.0 * of_side(1024));
    /// ```
    pub fn estimated_ns(&'static self, operands: &[Shape], result: &Shape) -> f32 {
        let mut cost = OpCost::new(self);
        for shape in operands {
            cost.operand(Extent::of(shape, DType::F32), || shape.clone());
        }
        cost.ns(result.num_elements() as u64)
    }
}

impl OpCost {
    #[inline]
    pub fn new(op: &'static OpInfo) -> Self {
        let mut hasher = FxHasher::default();
        hasher.write_u64(op.key);
        Self {
            op,
            largest: 0,
            largest_bytes: 0,
            bytes: 0,
            table_bytes: None,
            is_half: false,
            operands: (op.work == Work::Compute).then(Default::default),
            seen: 0,
            copies: false,
            hasher,
            expected: None,
        }
    }

    /// Adds an operand, whose shape matters for products only.
    #[inline]
    pub fn operand(&mut self, extent: Extent, shape: impl FnOnce() -> Shape) {
        self.hasher.write_u64(extent.key);
        if self.op.looks_up && self.table_bytes.is_none() {
            // A lookup reads as much of it as it returns.
            self.table_bytes = Some(extent.bytes);
        } else {
            self.largest = self.largest.max(extent.elements);
        }
        self.largest_bytes = self.largest_bytes.max(extent.bytes);
        self.bytes += extent.bytes;
        self.is_half |= extent.is_half;
        if let Some(operands) = &mut self.operands {
            if let Some(operand) = operands.get_mut(self.seen) {
                *operand = Operand::new(&shape());
            }
            self.seen += 1;
        }
    }

    /// Adds to the key: a plain number, or the type of the result.
    pub fn hash(&mut self, part: impl Hash) {
        part.hash(&mut self.hasher);
    }

    /// Adds a plain argument by its debug output, because few types of arguments can be hashed.
    pub fn argument(&mut self, argument: &dyn Debug) {
        struct Text<'a>(&'a mut FxHasher);
        impl Write for Text<'_> {
            fn write_str(&mut self, part: &str) -> std::fmt::Result {
                self.0.write(part.as_bytes());
                Ok(())
            }
        }
        write!(Text(&mut self.hasher), "{argument:?}").expect("hashing does not fail");
    }

    /// Estimated nanoseconds on one thread of a CPU, given the elements of the result.
    pub fn ns(&self, elements: u64) -> f32 {
        let largest = self.largest.max(elements) as f64;
        let ns = match self.op.work {
            Work::Compute => product_ns(self.op.name, self.multiplications(elements), largest),
            Work::View if !self.copies => 0.0,
            _ => self.op.rate.ns(largest),
        };
        (START_NS + ns) as f32
    }

    /// Estimated nanoseconds on a device, by a roofline, given the elements and the bytes of the
    /// result.
    pub fn ns_on(&self, device: &DeviceProfile, elements: u64, bytes: u64) -> f32 {
        let mut kernel = KernelWork {
            bytes: (self.bytes + bytes) as f64,
            is_half: self.is_half,
            ..KernelWork::default()
        };
        match self.op.work {
            Work::View if !self.copies => kernel.bytes = 0.0,
            // So often it passes over its operands.
            Work::Sort => kernel.bytes *= 8.0,
            Work::Compute => kernel.flops = 2.0 * self.multiplications(elements),
            Work::Math => kernel.functions = elements as f64,
            Work::Index => {
                let table_bytes = self.table_bytes.unwrap_or(0);
                kernel.bytes -= table_bytes.saturating_sub(bytes) as f64;
            }
            _ => {}
        }
        (device.seconds(&kernel) * 1e9).max(START_NS) as f32
    }

    fn multiplications(&self, elements: u64) -> f64 {
        let of = |operands| multiplications(self.op.name, operands, elements as f64);
        self.operands.as_ref().map_or(0.0, of)
    }

    /// The key of this operation on operands of these shapes and types with these arguments.
    pub fn key(&self) -> u64 {
        self.hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::op::op_table;

    /// Of an operation on operands of these shapes and types.
    fn cost(name: &str, operands: &[(&[usize], DType)]) -> OpCost {
        let mut cost = OpCost::new(op_table().find(|op| op.name == name).expect("a row"));
        for (dims, dtype) in operands {
            let shape = Shape::from(dims.to_vec());
            cost.operand(Extent::of(&shape, *dtype), || shape.clone());
        }
        cost
    }

    /// GELU over the same f32 elements on devices and on a CPU.
    #[test]
    fn an_upload_is_dearer_than_a_gelu_on_a_device_and_cheaper_on_a_cpu() {
        let elements = 1 << 22;
        let gelu = cost("gelu", &[(&[elements], DType::F32)]);
        let bytes = 4 * elements as u64;
        for device in [DeviceProfile::A100, DeviceProfile::RTX_3090] {
            let upload = upload_ns(Some(&device), bytes);
            assert!(upload > 10.0 * gelu.ns_on(&device, elements as u64, bytes));
        }
        assert!(upload_ns(None, bytes) < gelu.ns(elements as u64));
    }

    #[test]
    fn a_product_is_as_fast_as_its_type_and_its_bytes() {
        let ns = |size: usize, dtype: DType| {
            let matrix: (&[_], _) = (&[size, size], dtype);
            let product = cost("float_matmul", &[matrix; 2]);
            let elements = (size * size) as u64;
            let bytes = elements * dtype.size() as u64;
            f64::from(product.ns_on(&DeviceProfile::A100, elements, bytes))
        };
        let of_flops = |size: usize, flops: f64| 2e9 * (size as f64).powi(3) / flops;
        for (dtype, flops) in [(DType::F32, 19.5e12), (DType::BF16, 312e12)] {
            let ratio = ns(4096, dtype) / of_flops(4096, flops);
            assert!((ratio - 1.0).abs() < 1e-3, "{dtype:?}: {ratio}");
        }
        assert_eq!(ns(16, DType::F32), 5000.0, "a launch");
    }

    /// 64 rows of a table of 256 MiB.
    #[test]
    fn a_lookup_reads_the_rows_that_it_returns() {
        let (table, indices): (&[_], &[_]) = (&[65536, 1024], &[1, 64]);
        let lookup = cost("embedding", &[(table, DType::F32), (indices, DType::I32)]);
        let rows = 64 * 1024;
        let ns = lookup.ns_on(&DeviceProfile::A100, rows, 4 * rows);
        assert_eq!(ns, 5000.0, "a launch");
        assert_eq!(lookup.ns(rows), cost("embedding", &[]).ns(rows));
    }

    #[test]
    fn a_size_is_that_of_shapes_types_and_arguments() {
        let key = |elements, from, to| {
            let mut cast = cost("float_cast", &[(&[elements], from)]);
            cast.hash(to);
            cast.key()
        };
        let known = key(8, DType::F32, DType::F16);
        assert_eq!(known, key(8, DType::F32, DType::F16));
        assert_ne!(known, key(9, DType::F32, DType::F16));
        assert_ne!(known, key(8, DType::F64, DType::F16));
        assert_ne!(known, key(8, DType::F32, DType::F64));
    }
}
