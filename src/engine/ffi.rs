//! The MLX operations that mlx-rs does not wrap. The only `unsafe` of this crate is here.

#![expect(unsafe_code, reason = "calls into mlx-c; each block says why it is sound")]

use std::ffi::{CStr, CString};

use mlx_rs::{Array, Dtype, Stream};

use super::EngineError;

fn check(status: i32, operation: &'static str, result: mlx_sys::mlx_array) -> Result<Array, EngineError> {
    if status != 0 {
        // SAFETY: `result` was made by mlx_array_new and is not used after this.
        unsafe { mlx_sys::mlx_array_free(result) };
        return Err(EngineError::Mlx(format!("{operation} was refused for these shapes")));
    }
    // SAFETY: on success the handle is valid, and nothing else owns it.
    Ok(unsafe { Array::from_ptr(result) })
}

/// `array[start[0]..stop[0], start[1]..stop[1], …]`, a view.
pub fn slice(array: &Array, start: &[i32], stop: &[i32]) -> Result<Array, EngineError> {
    let axes = array.ndim();
    assert!(start.len() == axes && stop.len() == axes, "a start and a stop for each axis");
    let strides = [1; 8];
    let stream = Stream::thread_local_or_default();
    // SAFETY: every pointer is valid for `axes` elements during the call; the result handle is checked below.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_slice(
            &raw mut result,
            array.as_ptr(),
            start.as_ptr(),
            axes,
            stop.as_ptr(),
            axes,
            strides.as_ptr(),
            axes,
            stream.as_ptr(),
        );
        check(status, "slice", result)
    }
}

/// `array` with `update` written at `start`; the buffer is reused where nothing else holds it.
pub fn slice_update(array: &Array, update: &Array, start: &[i32]) -> Result<Array, EngineError> {
    let axes = array.ndim();
    assert!(start.len() == axes && update.ndim() == axes, "a start and an extent for each axis");
    let stop: Vec<i32> = start.iter().zip(update.shape()).map(|(start, extent)| start + extent).collect();
    let strides = [1; 8];
    let stream = Stream::thread_local_or_default();
    // SAFETY: as in `slice`.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_slice_update(
            &raw mut result,
            array.as_ptr(),
            update.as_ptr(),
            start.as_ptr(),
            axes,
            stop.as_ptr(),
            axes,
            strides.as_ptr(),
            axes,
            stream.as_ptr(),
        );
        check(status, "slice_update", result)
    }
}

/// `array` with `updates[i]` written where axis `axes[j]` is `indices[j][i]`.
///
/// `updates` has the shape of an index array followed by that of `array` with 1 at the indexed axes.
pub fn scatter(array: &Array, indices: &[&Array], updates: &Array, axes: &[i32]) -> Result<Array, EngineError> {
    scatter_by(mlx_sys::mlx_scatter, "scatter", array, indices, updates, axes)
}

/// As [`scatter`], adding instead; places named more than once take every sum.
pub fn scatter_add(array: &Array, indices: &[&Array], updates: &Array, axes: &[i32]) -> Result<Array, EngineError> {
    scatter_by(mlx_sys::mlx_scatter_add, "scatter_add", array, indices, updates, axes)
}

type Scatter = unsafe extern "C" fn(
    *mut mlx_sys::mlx_array,
    mlx_sys::mlx_array,
    mlx_sys::mlx_vector_array,
    mlx_sys::mlx_array,
    *const i32,
    usize,
    mlx_sys::mlx_stream,
) -> i32;

fn scatter_by(
    operation: Scatter,
    name: &'static str,
    array: &Array,
    indices: &[&Array],
    updates: &Array,
    axes: &[i32],
) -> Result<Array, EngineError> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: the vector handle is freed after the call; the rest as in `slice`.
    unsafe {
        let vector = mlx_sys::mlx_vector_array_new();
        for index in indices {
            mlx_sys::mlx_vector_array_append_value(vector, index.as_ptr());
        }
        let mut result = mlx_sys::mlx_array_new();
        let status =
            operation(&raw mut result, array.as_ptr(), vector, updates.as_ptr(), axes.as_ptr(), axes.len(), stream.as_ptr());
        mlx_sys::mlx_vector_array_free(vector);
        check(status, name, result)
    }
}

/// How MLX packs a matrix: elements that share a scale, bits of each, and MLX's name of the mode.
#[derive(Debug, Clone, Copy)]
pub struct Packing {
    pub group_size: i32,
    pub bits: i32,
    pub mode: &'static CStr,
}

/// A packed matrix as MLX takes it: words, scales, and the offsets that affine quantization alone has.
#[derive(Clone, Copy)]
pub struct PackedMatrix<'a> {
    pub weight: &'a Array,
    pub scales: &'a Array,
    pub biases: Option<&'a Array>,
    pub packing: Packing,
}

fn given(value: i32) -> mlx_sys::mlx_optional_int {
    mlx_sys::mlx_optional_int { value, has_value: true }
}

/// The handle of an array that may be left out. An empty handle owns nothing.
fn optional(array: Option<&Array>) -> mlx_sys::mlx_array {
    // SAFETY: makes an empty handle.
    array.map_or_else(|| unsafe { mlx_sys::mlx_array_new() }, Array::as_ptr)
}

/// `x @ weightᵀ`, (…, in) -> (…, out).
pub fn quantized_matmul(x: &Array, matrix: PackedMatrix<'_>) -> Result<Array, EngineError> {
    let PackedMatrix { weight, scales, biases, packing: Packing { group_size, bits, mode } } = matrix;
    let stream = Stream::thread_local_or_default();
    // SAFETY: every handle outlives the call; the mode is NUL-terminated; the result handle is checked.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_quantized_matmul(
            &raw mut result,
            x.as_ptr(),
            weight.as_ptr(),
            scales.as_ptr(),
            optional(biases),
            true,
            given(group_size),
            given(bits),
            mode.as_ptr(),
            stream.as_ptr(),
        );
        check(status, "quantized_matmul", result)
    }
}

/// The matrix written out, in `dtype` where that is given and by MLX's choice else.
pub fn dequantize(matrix: PackedMatrix<'_>, dtype: Option<Dtype>) -> Result<Array, EngineError> {
    let PackedMatrix { weight, scales, biases, packing: Packing { group_size, bits, mode } } = matrix;
    let stream = Stream::thread_local_or_default();
    let dtype =
        mlx_sys::mlx_optional_dtype { value: dtype.unwrap_or(Dtype::Float32) as mlx_sys::mlx_dtype, has_value: dtype.is_some() };
    // SAFETY: as in `quantized_matmul`.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_dequantize(
            &raw mut result,
            weight.as_ptr(),
            scales.as_ptr(),
            optional(biases),
            given(group_size),
            given(bits),
            mode.as_ptr(),
            optional(None),
            dtype,
            stream.as_ptr(),
        );
        check(status, "dequantize", result)
    }
}

/// `x[i] @ weight[experts[i]]ᵀ` for each i; `sorted` where `experts` ascend, which MLX is faster with.
pub fn gather_quantized_matmul(x: &Array, matrix: PackedMatrix<'_>, experts: &Array, sorted: bool) -> Result<Array, EngineError> {
    let PackedMatrix { weight, scales, biases, packing: Packing { group_size, bits, mode } } = matrix;
    let stream = Stream::thread_local_or_default();
    // SAFETY: as in `quantized_matmul`.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_gather_qmm(
            &raw mut result,
            x.as_ptr(),
            weight.as_ptr(),
            scales.as_ptr(),
            optional(biases),
            optional(None),
            experts.as_ptr(),
            true,
            given(group_size),
            given(bits),
            mode.as_ptr(),
            sorted,
            stream.as_ptr(),
        );
        check(status, "gather_qmm", result)
    }
}

/// `a @ b` in float32, computed at once, then changed by `change`, which is given its numbers in order. On the CPU alone.
pub fn matmul_then(a: &Array, b: &Array, change: impl FnOnce(&mut [f32])) -> Result<Array, EngineError> {
    change_computed(a.matmul(b)?, change)
}

/// `array × factor` in float32, computed at once, then changed by `change`, as in [`matmul_then`].
pub fn multiply_then(array: &Array, factor: f32, change: impl FnOnce(&mut [f32])) -> Result<Array, EngineError> {
    change_computed(array.multiply(Array::from_f32(factor))?, change)
}

/// `result` is of an operation that was asked for here, so that its buffer is its own.
fn change_computed(result: Array, change: impl FnOnce(&mut [f32])) -> Result<Array, EngineError> {
    let numbers = result.try_as_slice::<f32>().map_err(|error| EngineError::Mlx(error.to_string()))?;
    let (pointer, length) = (numbers.as_ptr().cast_mut(), numbers.len());
    if length > 0 {
        // SAFETY: the operation has run, into a buffer that it allocated or took over from an array that nothing else holds; the
        // handle, which is the only one, is not used while the slice lives, and no task reads it before this returns.
        change(unsafe { std::slice::from_raw_parts_mut(pointer, length) });
    }
    Ok(result)
}

/// A CUDA kernel of our own, which MLX compiles on its first use and keeps by its name.
pub struct CudaKernel {
    handle: mlx_sys::mlx_fast_cuda_kernel,
    name: &'static str,
}

/// Blocks of a launch, and threads of a block.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    pub blocks: [i32; 3],
    pub threads: i32,
}

impl CudaKernel {
    /// `source` is the body of a function whose parameters MLX writes: `inputs`, with `NAME_shape` behind those whose shape it
    /// mentions, then `outputs`. `header` goes before it.
    pub fn new(name: &'static str, inputs: &[&CStr], outputs: &[&CStr], source: &str, header: &str) -> Result<Self, EngineError> {
        let no_nul = |text: &str| CString::new(text).map_err(|_| EngineError::Mlx(format!("the source of {name} has a NUL")));
        // MLX finds what it has compiled, on disk too, by the name alone.
        let text = [header, source].concat();
        let hash = blake3::hash(text.as_bytes()).to_hex();
        let (full_name, source, header) = (no_nul(&format!("{name}_{}", &hash[..16]))?, no_nul(source)?, no_nul(header)?);
        // SAFETY: every string outlives the call, which copies them; the vectors are freed after it.
        let handle = unsafe {
            let strings = |names: &[&CStr]| {
                let vector = mlx_sys::mlx_vector_string_new();
                for name in names {
                    mlx_sys::mlx_vector_string_append_value(vector, name.as_ptr());
                }
                vector
            };
            let (inputs, outputs) = (strings(inputs), strings(outputs));
            let (full_name, source, header) = (full_name.as_ptr(), source.as_ptr(), header.as_ptr());
            // Not made contiguous: that would be a copy, and some of these kernels write into what they are given.
            let handle = mlx_sys::mlx_fast_cuda_kernel_new(full_name, inputs, outputs, source, header, false, 0);
            mlx_sys::mlx_vector_string_free(inputs);
            mlx_sys::mlx_vector_string_free(outputs);
            handle
        };
        if handle.ctx.is_null() {
            return Err(EngineError::Mlx(format!("this MLX has no CUDA kernels, {name} was to be one")));
        }
        Ok(Self { handle, name })
    }

    /// `inputs` must be row-contiguous. One array of each of `outputs`, uninitialized but for what the kernel writes.
    pub fn apply(&self, inputs: &[&Array], outputs: &[(&[i32], Dtype)], launch: Launch) -> Result<Vec<Array>, EngineError> {
        let stream = Stream::thread_local_or_default();
        let Launch { blocks: [x, y, z], threads } = launch;
        // SAFETY: handles are made and freed here but for the kernel's, which lives as long as `self`; shapes outlive the calls
        // that copy them; a result handle is only taken over where the call succeeded.
        unsafe {
            let config = mlx_sys::mlx_fast_cuda_kernel_config_new();
            for (shape, dtype) in outputs {
                let dtype = *dtype as mlx_sys::mlx_dtype;
                mlx_sys::mlx_fast_cuda_kernel_config_add_output_arg(config, shape.as_ptr(), shape.len(), dtype);
            }
            // MLX counts threads, not blocks.
            mlx_sys::mlx_fast_cuda_kernel_config_set_grid(config, x * threads, y, z);
            mlx_sys::mlx_fast_cuda_kernel_config_set_thread_group(config, threads, 1, 1);
            let vector = mlx_sys::mlx_vector_array_new();
            for input in inputs {
                mlx_sys::mlx_vector_array_append_value(vector, input.as_ptr());
            }
            let mut results = mlx_sys::mlx_vector_array_new();
            let mut status = mlx_sys::mlx_fast_cuda_kernel_apply(&raw mut results, self.handle, vector, config, stream.as_ptr());
            mlx_sys::mlx_vector_array_free(vector);
            mlx_sys::mlx_fast_cuda_kernel_config_free(config);
            let mut arrays = Vec::with_capacity(outputs.len());
            for index in 0..outputs.len() {
                let mut result = mlx_sys::mlx_array_new();
                if status == 0 {
                    status = mlx_sys::mlx_vector_array_get(&raw mut result, results, index);
                }
                arrays.push(check(status, self.name, result));
            }
            mlx_sys::mlx_vector_array_free(results);
            arrays.into_iter().collect()
        }
    }
}

impl Drop for CudaKernel {
    fn drop(&mut self) {
        // SAFETY: the handle was made by `new` and is used no more.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_free(self.handle) };
    }
}

/// Tells MLX's CUDA backend how many plans and graphs to keep, where the environment does not: it stops with an error once a run
/// has used more shapes than that. Read by MLX when it first computes.
///
/// Must be called before any thread is started.
#[expect(clippy::disallowed_methods, reason = "MLX has no other way to be told, and the user's own settings stay")]
pub fn prepare_environment() {
    for (name, value) in [("MLX_CUDA_SDPA_CACHE_SIZE", "8192"), ("MLX_CUDA_GRAPH_CACHE_SIZE", "8192")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: no other thread exists yet, as the caller says, so none reads the environment meanwhile.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// Whether MLX's GPU is one of NVIDIA's.
pub fn cuda_available() -> bool {
    let mut available = false;
    // SAFETY: `available` outlives the call.
    let status = unsafe { mlx_sys::mlx_cuda_is_available(&raw mut available) };
    status == 0 && available
}

/// The numbers of a float32 array, in order; computed first where they are not yet.
pub fn numbers(array: &Array) -> Result<&[f32], EngineError> {
    if array.size() == 0 {
        return Ok(&[]);
    }
    array.try_as_slice::<f32>().map_err(|error| EngineError::Mlx(error.to_string()))
}

/// As [`numbers`], of an int32 array.
pub fn integers(array: &Array) -> Result<&[i32], EngineError> {
    if array.size() == 0 {
        return Ok(&[]);
    }
    array.try_as_slice::<i32>().map_err(|error| EngineError::Mlx(error.to_string()))
}

/// Lends the numbers of a float32 array on the CPU to be changed in place.
///
/// No other array may share the buffer: `array` is the only handle of what an operation gave, and neither a view of it nor an
/// operation that reads it is still to be computed. The cache's arrays are like that between two steps.
pub fn lend(array: &mut Array) -> Result<&mut [f32], EngineError> {
    let numbers = numbers(array)?;
    let (pointer, length) = (numbers.as_ptr().cast_mut(), numbers.len());
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the array is computed, contiguous and has `length` numbers; by the contract above no task and no other handle reads
    // its buffer, and the exclusive borrow of the handle keeps both it and this slice the only ways to it.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, length) })
}

/// Whether MLX can compute on a GPU here.
pub fn gpu_available() -> bool {
    // SAFETY: the device handle is made and freed here; `available` outlives the call.
    unsafe {
        let device = mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0);
        let mut available = false;
        let status = mlx_sys::mlx_device_is_available(&raw mut available, device);
        mlx_sys::mlx_device_free(device);
        status == 0 && available
    }
}

/// The GPU's memory in bytes, all of it that a program should use, where MLX tells it.
pub fn gpu_memory_bytes() -> Option<u64> {
    gpu_bytes(&[c"max_recommended_working_set_size", c"total_memory", c"memory_size"])
}

/// What of it nobody has taken yet; Metal does not tell.
pub fn gpu_free_bytes() -> Option<u64> {
    gpu_bytes(&[c"free_memory"])
}

/// The first of `keys` that MLX knows of its GPU.
fn gpu_bytes(keys: &[&CStr]) -> Option<u64> {
    // SAFETY: handles are made and freed here; keys are NUL-terminated.
    unsafe {
        let device = mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0);
        let mut info = mlx_sys::mlx_device_info_new();
        let mut bytes = None;
        if mlx_sys::mlx_device_info_get(&raw mut info, device) == 0 {
            for key in keys {
                let (mut exists, mut value) = (false, 0usize);
                if mlx_sys::mlx_device_info_has_key(&raw mut exists, info, key.as_ptr()) == 0
                    && exists
                    && mlx_sys::mlx_device_info_get_size(&raw mut value, info, key.as_ptr()) == 0
                {
                    bytes = Some(value as u64);
                    break;
                }
            }
            mlx_sys::mlx_device_info_free(info);
        }
        mlx_sys::mlx_device_free(device);
        bytes
    }
}

/// MLX's own version.
pub fn mlx_version() -> Option<String> {
    // SAFETY: the string is copied before its handle is freed.
    unsafe {
        let mut text = mlx_sys::mlx_string_new();
        let status = mlx_sys::mlx_version(&raw mut text);
        let data = mlx_sys::mlx_string_data(text);
        let version = (status == 0 && !data.is_null()).then(|| CStr::from_ptr(data).to_string_lossy().into_owned());
        mlx_sys::mlx_string_free(text);
        version
    }
}
