//! Copying memory.

use super::capture::{self, Submission, Submitted};
use super::{put, stream_entry};
use crate::driver::Call;
use crate::memory::Place;
use crate::status::{INVALID_VALUE, Outcome};
use crate::stream::{Action, Effect};

/// What a copy is asked to do.
struct Copy {
    to: u64,
    from: u64,
    bytes: usize,
    /// What the function's name promises of each side.
    to_device: bool,
    from_device: bool,
}

impl Copy {
    /// `wait`: the call returns when the copy is done.
    fn run(&self, call: &Call, stream: usize, per_thread: bool, wait: bool) -> Outcome {
        let Self { to, from, bytes, to_device, from_device } = *self;
        let mut state = call.lock();
        for (address, is_device) in [(to, to_device), (from, from_device)] {
            if is_device && !state.memory.reaches(address, bytes as u64) && bytes > 0 {
                return Err(INVALID_VALUE);
            }
        }
        let resolved = super::stream::resolve(call, &mut state, stream, per_thread)?;
        let (to_place, from_place) = (state.memory.place(to), state.memory.place(from));
        let is_captured = state.stream(resolved)?.capture.is_some();
        if wait {
            capture::forbid_on(&mut state, resolved)?;
        }
        drop(state);
        let pageable_target = to_place == Place::Pageable;
        let effect = if from_place == Place::Pageable && !is_captured {
            // The caller may reuse its memory as soon as the call returns.
            let mut taken = vec![0_u8; bytes];
            // SAFETY: the caller gave `bytes` readable bytes.
            unsafe { taken.as_mut_ptr().copy_from(from as *const u8, bytes) };
            if pageable_target {
                Effect::Copy { to, from, bytes: bytes as u64 }
            } else {
                Effect::Store { to, bytes: taken.into() }
            }
        } else {
            Effect::Copy { to, from, bytes: bytes as u64 }
        };
        let speed = match (to_place, from_place) {
            (Place::Device, Place::Device) => 1_000.0,
            _ => 20.0, // Bytes per nanosecond, over the bus.
        };
        let action = Action::Work(2_000.0 + bytes as f64 / speed, effect);
        match capture::submit(call, stream, per_thread, Submission::copy(action))? {
            // A synchronous copy within the device doesn't block.
            Submitted::Queued(..) if to_place == Place::Device && from_place == Place::Device => {}
            Submitted::Queued(stream, sequence) if wait || pageable_target => {
                call.wait_at_end(move |state| {
                    let done = state.stream(stream).map_or(true, |it| it.is_done(sequence));
                    Ok(done.then_some(()))
                });
            }
            _ => {}
        }
        Ok(())
    }
}

macro_rules! copies {
    ($($name:ident, $variant:ident, $asynchronous:ident, $asynchronous_variant:ident:
        $to_device:literal $from_device:literal;)*) => {
        $(stream_entry! { Context $name, $variant(
            to: u64, from: u64, bytes: usize
        ) |call, per_thread| {
            let (to_device, from_device) = ($to_device, $from_device);
            Copy { to, from, bytes, to_device, from_device }.run(call, 0, per_thread, true)
        } }
        stream_entry! { Unlocked $asynchronous, $asynchronous_variant(
            to: u64, from: u64, bytes: usize, stream: usize
        ) |call, per_thread| {
            let (to_device, from_device) = ($to_device, $from_device);
            Copy { to, from, bytes, to_device, from_device }.run(call, stream, per_thread, false)
        } })*
    };
}

copies! {
    cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz: true false;
    cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz: false true;
    cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds, cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz: true true;
    cuMemcpy, cuMemcpy_ptds, cuMemcpyAsync, cuMemcpyAsync_ptsz: false false;
}

stream_entry! { Unlocked cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz(
    to: u64, from: u64, bytes: usize, attributes: *const u8, stream: usize
) |call, per_thread| {
    let _ = attributes;
    let copy = Copy { to, from, bytes, to_device: false, from_device: false };
    copy.run(call, stream, per_thread, false)
} }

stream_entry! { Context cuMemcpyPeer, cuMemcpyPeer_ptds(
    to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize
) |call, per_thread| {
    let _ = (to_context, from_context);
    Copy { to, from, bytes, to_device: true, from_device: true }.run(call, 0, per_thread, true)
} }

stream_entry! { Unlocked cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
    to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, stream: usize
) |call, per_thread| {
    let _ = (to_context, from_context);
    let copy = Copy { to, from, bytes, to_device: true, from_device: true };
    copy.run(call, stream, per_thread, false)
} }

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub struct Rectangle {
    from_x: usize,
    from_y: usize,
    from_type: u32,
    from_host: u64,
    from_device: u64,
    from_array: usize,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_type: u32,
    to_host: u64,
    to_device: u64,
    to_array: usize,
    to_pitch: usize,
    width: usize,
    height: usize,
}

/// `CU_MEMORYTYPE_HOST`, `_DEVICE`, `_UNIFIED`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const UNIFIED: u32 = 4;

impl Rectangle {
    /// Row by row: slow, and right.
    fn run(&self, call: &Call, stream: usize, per_thread: bool, wait: bool) -> Outcome {
        let base = |kind, host, device| match kind {
            HOST => Ok(host),
            DEVICE | UNIFIED => Ok(device),
            _ => Err(INVALID_VALUE),
        };
        let from = base(self.from_type, self.from_host, self.from_device)?;
        let to = base(self.to_type, self.to_host, self.to_device)?;
        for row in 0..self.height {
            let copy = Copy {
                to: to + ((self.to_y + row) * self.to_pitch + self.to_x) as u64,
                from: from + ((self.from_y + row) * self.from_pitch + self.from_x) as u64,
                bytes: self.width,
                to_device: self.to_type == DEVICE,
                from_device: self.from_type == DEVICE,
            };
            copy.run(call, stream, per_thread, wait)?;
        }
        Ok(())
    }
}

stream_entry! { Context cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(
    rectangle: *const Rectangle
) |call, per_thread| {
    rectangle.as_ref().ok_or(INVALID_VALUE)?.run(call, 0, per_thread, true)
} }

stream_entry! { Context cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(
    rectangle: *const Rectangle
) |call, per_thread| {
    rectangle.as_ref().ok_or(INVALID_VALUE)?.run(call, 0, per_thread, true)
} }

stream_entry! { Unlocked cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(
    rectangle: *const Rectangle, stream: usize
) |call, per_thread| {
    rectangle.as_ref().ok_or(INVALID_VALUE)?.run(call, stream, per_thread, false)
} }

/// The batch of copies, without its attributes.
unsafe fn batch(
    call: &Call,
    lists: [*const u64; 2],
    sizes: *const usize,
    count: usize,
    stream: usize,
    per_thread: bool,
) -> Outcome {
    if lists[0].is_null() || lists[1].is_null() || sizes.is_null() || count == 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = call.lock();
    let resolved = super::stream::resolve(call, &mut state, stream, per_thread)?;
    if state.stream(resolved)?.is_legacy || state.stream(resolved)?.capture.is_some() {
        return Err(INVALID_VALUE);
    }
    drop(state);
    for index in 0..count {
        // SAFETY: lists of `count`, by the contract of the header.
        let (to, from, bytes) = unsafe {
            (lists[0].add(index).read(), lists[1].add(index).read(), sizes.add(index).read())
        };
        let copy = Copy { to, from, bytes, to_device: false, from_device: false };
        copy.run(call, stream, per_thread, false)?;
    }
    Ok(())
}

stream_entry! { Unlocked cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(
    to: *const u64, from: *const u64, sizes: *const usize, count: usize,
    attributes: *const u8, indices: *const usize, attribute_count: usize,
    failed: *mut usize, stream: usize,
) |call, per_thread| {
    let _ = (attributes, indices, attribute_count);
    if !failed.is_null() {
        put(failed, usize::MAX)?;
    }
    batch(call, [to, from], sizes, count, stream, per_thread)
} }

stream_entry! { Unlocked cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(
    to: *const u64, from: *const u64, sizes: *const usize, count: usize,
    attributes: *const u8, indices: *const usize, attribute_count: usize, stream: usize,
) |call, per_thread| {
    let _ = (attributes, indices, attribute_count);
    batch(call, [to, from], sizes, count, stream, per_thread)
} }
