//! Launching kernels.

use std::ffi::c_void;

use super::capture::{self, Submission};
use super::{entry, stream_entry};
use crate::driver::Call;
use crate::state::State;
use crate::status::{INVALID_HANDLE, INVALID_VALUE, Outcome};
use crate::stream::{Action, Effect};

/// Marks in the `extra` list: its end, a buffer, the buffer's size.
const END: usize = 0;
const BUFFER: usize = 1;
const SIZE: usize = 2;

/// What a launch does.
///
/// # Errors
/// `INVALID_HANDLE`: no such function; `INVALID_VALUE`: arguments are missing.
///
/// # Safety
/// As for `cuLaunchKernel`: the arrays are null or hold what the function's parameters ask for.
pub unsafe fn action(
    state: &State,
    function: usize,
    parameters: *const *const u8,
    extra: *const usize,
) -> Outcome<Action> {
    let function = state.functions.get(&function).ok_or(INVALID_HANDLE)?;
    let kernel = &function.kernel;
    let mut arguments = Vec::new();
    let take = |from: *const u8, size: usize| {
        let mut bytes = vec![0; size];
        // SAFETY: an argument of this size is there, by the contract above.
        unsafe { bytes.as_mut_ptr().copy_from(from, size) };
        bytes
    };
    if !parameters.is_null() {
        for (index, parameter) in kernel.parameters.iter().enumerate() {
            // SAFETY: one pointer per parameter, by the contract above.
            let place = unsafe { parameters.add(index).read() };
            if place.is_null() {
                return Err(INVALID_VALUE);
            }
            arguments.push(take(place, parameter.size()));
        }
    } else if !extra.is_null() {
        // SAFETY: as above.
        let (buffer, size) = unsafe { packed(extra)? };
        for (offset, parameter) in kernel.offsets().into_iter().zip(&kernel.parameters) {
            if offset + parameter.size() > size {
                return Err(INVALID_VALUE);
            }
            // SAFETY: within the buffer, as just checked.
            arguments.push(take(unsafe { buffer.add(offset) }, parameter.size()));
        }
    } else if !kernel.parameters.is_empty() {
        return Err(INVALID_VALUE);
    }
    function.action(&arguments)
}

/// The buffer that an `extra` list names.
///
/// # Safety
/// The list is as `cuLaunchKernel` asks for.
unsafe fn packed(mut list: *const usize) -> Outcome<(*const u8, usize)> {
    let (mut buffer, mut size) = (std::ptr::null(), 0);
    // SAFETY: pairs up to the end's mark, by the contract above.
    unsafe {
        while list.read() != END {
            let value = list.add(1).read();
            match list.read() {
                BUFFER => buffer = value as *const u8,
                SIZE => size = (value as *const usize).read(),
                _ => return Err(INVALID_VALUE),
            }
            list = list.add(2);
        }
    }
    if buffer.is_null() { Err(INVALID_VALUE) } else { Ok((buffer, size)) }
}

/// A launch, as all its entry points have it.
struct Launch {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    stream: usize,
    parameters: *const *const u8,
    extra: *const usize,
}

impl Launch {
    /// # Safety
    /// As for [`action`].
    unsafe fn run(&self, call: &Call, per_thread: bool) -> Outcome {
        let sizes = self.grid.iter().chain(&self.block);
        let threads: u64 = self.block.iter().map(|&it| u64::from(it)).product();
        if sizes.min() == Some(&0) || threads > 1024 {
            return Err(INVALID_VALUE);
        }
        let state = call.lock();
        // SAFETY: by the contract above.
        let mut action = unsafe { action(&state, self.function, self.parameters, self.extra)? };
        drop(state);
        if call.faults.hang {
            action = Action::Work(f64::INFINITY, Effect::Nothing);
        }
        capture::submit(call, self.stream, per_thread, Submission::kernel(action))?;
        Ok(())
    }
}

stream_entry! { Unlocked cuLaunchKernel, cuLaunchKernel_ptsz(
    function: usize,
    grid_x: u32, grid_y: u32, grid_z: u32,
    block_x: u32, block_y: u32, block_z: u32,
    shared: u32, stream: usize, parameters: *const *const u8, extra: *const usize,
) |call, per_thread| {
    let _ = shared;
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    Launch { function, grid, block, stream, parameters, extra }.run(call, per_thread)
} }

stream_entry! { Unlocked cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(
    function: usize,
    grid_x: u32, grid_y: u32, grid_z: u32,
    block_x: u32, block_y: u32, block_z: u32,
    shared: u32, stream: usize, parameters: *const *const u8,
) |call, per_thread| {
    let _ = shared;
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let extra = std::ptr::null();
    Launch { function, grid, block, stream, parameters, extra }.run(call, per_thread)
} }

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Configuration {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    attributes: *const c_void,
    attribute_count: u32,
}

stream_entry! { Unlocked cuLaunchKernelEx, cuLaunchKernelEx_ptsz(
    configuration: *const Configuration, function: usize,
    parameters: *const *const u8, extra: *const usize,
) |call, per_thread| {
    let configuration = configuration.as_ref().ok_or(INVALID_VALUE)?;
    let Configuration { grid, block, stream, .. } = *configuration;
    Launch { function, grid, block, stream, parameters, extra }.run(call, per_thread)
} }

fn launch_grid(call: &Call, function: usize, width: i32, height: i32, stream: usize) -> Outcome {
    let grid = [width.max(0) as u32, height.max(0) as u32, 1];
    let (parameters, extra) = (std::ptr::null(), std::ptr::null());
    let launch = Launch { function, grid, block: [1; 3], stream, parameters, extra };
    // SAFETY: no arguments are given, which is an error for a function that wants some.
    unsafe { launch.run(call, false) }
}

entry! { Context cuLaunch(function: usize) |call| launch_grid(call, function, 1, 1, 0) }

entry! { Context cuLaunchGrid(function: usize, width: i32, height: i32) |call| {
    launch_grid(call, function, width, height, 0)
} }

entry! { Context cuLaunchGridAsync(
    function: usize, width: i32, height: i32, stream: usize
) |call| launch_grid(call, function, width, height, stream) }
