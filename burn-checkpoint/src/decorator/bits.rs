//! Zeros and ones as dropout draws them. They cannot be drawn again, so a scope or a budget keeps
//! them, packed into bits, from which a recipe computes the numbers.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{
    Backend, DType, DeviceOps, Distribution, FloatDType, IntDType, Shape, TensorData,
    TensorMetadata,
};

use crate::budget::again::again;
use crate::node::handle::Handle;
use crate::node::kind::{Float, Int, Value};
use crate::node::recipe::recipe;
use crate::record::context;
use crate::record::op::OpInfo;
use crate::record::work::Work;
use crate::record::{Call, Room};

/// Numbers packed into one integer: all sums of so many powers of two are exact in every float
/// type.
const BITS: usize = 8;

/// Fewer numbers stay as they are: packing starts five operations.
const LEAST: usize = 256;

const DRAW: &OpInfo = &OpInfo::new("float_random", Work::Fixed, "FloatTensorOps");
const NUMBERS: &OpInfo = &OpInfo::new("int_into_float", Work::Cheap, "IntTensorOps");

/// Whether a draw is recorded, of zeros and ones, and large enough to be kept as bits.
#[inline]
pub(super) fn is_worth(shape: &Shape, distribution: Distribution) -> bool {
    context::records()
        && matches!(distribution, Distribution::Bernoulli(_))
        && shape.num_elements() >= LEAST
}

/// Draws and packs the numbers, and returns them with the recipe that unpacks them.
pub(super) fn draw<B: Backend>(
    shape: Shape,
    distribution: Distribution,
    device: &B::Device,
    dtype: FloatDType,
) -> Handle<B, Float> {
    let elements = shape.num_elements();
    let packed = if B::supports_dtype(device, DType::U8) {
        IntDType::U8
    } else {
        IntDType::I32
    };
    let bytes =
        elements * DType::from(dtype).size() + elements.div_ceil(BITS) * DType::from(packed).size();
    let memory = context::memory_on(device.id());
    memory.make_room(DRAW.name, bytes as u64);
    // Drawing and packing are retried apart: a retry of the packing must not draw again.
    let draw = || B::float_random(shape.clone(), distribution, device, dtype);
    let numbers = again(&memory, DRAW, draw);
    let pack = || Value::Int(pack::<B>(numbers.clone(), packed, device));
    let mut bits = again(&memory, DRAW, pack);
    let mut call = Call::<B>::new(DRAW);
    call.begin_new(Room::default()); // room was made above
    let bits: Handle<B, Int> = call.results(&mut bits, None).expect();
    // Two handles until the end: an operand without other references would be given up for its
    // result.
    let second = bits.clone();
    let mut call = Call::<B>::new(NUMBERS);
    bits.show(&mut call);
    call.begin();
    let recipe = call.needs_recipe().then(|| {
        let (saved, device) = (bits.save(), device.clone());
        recipe::<B, _>(move |visit| {
            if let Some(visit) = visit {
                saved.sources(visit);
                return Value::Absent;
            }
            Value::Float(unpack::<B>(saved.load(), shape.clone(), dtype, &device))
        })
    });
    let numbers = call.results(&mut Value::Float(numbers), recipe).expect();
    drop((bits, second));
    numbers
}

/// Number `row * columns + column` becomes bit `row` of integer `column`: a product with the powers
/// of two, which takes no memory but the result's.
fn pack<B: Backend>(numbers: FloatTensor<B>, packed: IntDType, device: &B::Device) -> IntTensor<B> {
    let dtype = numbers.dtype();
    let elements = numbers.shape().num_elements();
    let columns = elements.div_ceil(BITS);
    let mut numbers = B::float_reshape(numbers, Shape::new([elements]));
    if columns * BITS > elements {
        let rest = Shape::new([columns * BITS - elements]);
        let zeros = B::float_zeros(rest, device, dtype.into());
        numbers = B::float_cat(vec![numbers, zeros], 0);
    }
    let powers = (0..BITS as u32).map(|bit| 2f32.powi(bit as i32)).collect();
    let data = TensorData::new::<f32, _>(powers, [1, BITS]).convert_dtype(dtype);
    let powers = B::float_from_data(data, device);
    let rows = B::float_reshape(numbers, Shape::new([BITS, columns]));
    B::float_into_int(B::float_matmul(powers, rows), packed)
}

/// The numbers of [`pack`].
fn unpack<B: Backend>(
    packed: IntTensor<B>,
    shape: Shape,
    dtype: FloatDType,
    device: &B::Device,
) -> FloatTensor<B> {
    let elements = shape.num_elements();
    let columns = packed.shape().num_elements();
    let ints = packed.dtype().into();
    let row_numbers = B::int_arange(0..BITS as i64, device, ints);
    let rows = B::int_reshape(row_numbers, Shape::new([BITS, 1]));
    let shifted = B::bitwise_right_shift(packed, rows); // [BITS, columns]
    let lowest = B::bitwise_and_scalar(shifted, 1.into());
    let mut bits = B::int_reshape(lowest, Shape::new([columns * BITS]));
    if columns * BITS > elements {
        bits = B::int_slice(bits, &[(0..elements).into()]);
    }
    B::int_into_float(B::int_reshape(bits, shape), dtype)
}
