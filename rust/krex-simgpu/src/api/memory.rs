//! Allocating memory, filling it, and telling what an address is.

use std::ffi::c_void;

use super::capture::{self, Submission, Submitted};
use super::{accepted, entry, put, put_if_wanted, stream_entry};
use crate::driver::Call;
use crate::graph;
use crate::memory::Place;
use crate::status::{INVALID_CONTEXT, INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::stream::{Action, Effect, Poll};

fn allocate(call: &Call, bytes: usize, place: Place) -> Outcome<u64> {
    let mut state = call.lock();
    capture::forbid_unsafe(&mut state)?;
    if call.faults.memory {
        return Err(OUT_OF_MEMORY);
    }
    call.journal(0, "alloc");
    let device = state.context(call.context)?.device;
    state.memory.allocate(bytes, device, call.context, place)
}

/// Frees once the context's work is done, as a driver does.
fn free(call: &Call, address: u64, place: Place) -> Outcome {
    if address == 0 {
        return Ok(());
    }
    let mut state = call.lock();
    capture::forbid_unsafe(&mut state)?;
    if !state.memory.is_start(address, place) {
        return Err(INVALID_VALUE);
    }
    call.journal(0, "free");
    super::context::synchronize(call, state, call.context)?;
    call.lock().memory.free(address, place)
}

entry! { Context cuMemAlloc_v2(address: *mut u64, bytes: usize) |call| {
    put(address, 0)?;
    put(address, allocate(call, bytes, Place::Device)?)
} }

entry! { Context cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32) |call| {
    let _ = flags;
    put(address, 0)?;
    put(address, allocate(call, bytes, Place::Device)?)
} }

entry! { Context cuMemAllocPitch_v2(
    address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32
) |call| {
    let _ = element;
    let row = width.next_multiple_of(512);
    put(address, 0)?;
    put(pitch, row)?;
    put(address, allocate(call, row.checked_mul(height).ok_or(OUT_OF_MEMORY)?, Place::Device)?)
} }

entry! { Context cuMemFree_v2(address: u64) |call| free(call, address, Place::Device) }

entry! { Context cuMemHostAlloc(address: *mut u64, bytes: usize, flags: u32) |call| {
    let _ = flags;
    put(address, allocate(call, bytes, Place::Pinned)?)
} }

entry! { Context cuMemAllocHost_v2(address: *mut u64, bytes: usize) |call| {
    put(address, allocate(call, bytes, Place::Pinned)?)
} }

entry! { Context cuMemFreeHost(address: u64) |call| free(call, address, Place::Pinned) }

entry! { Context cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32) |call| {
    let _ = flags;
    let mut state = call.lock();
    let device = state.context(call.context)?.device;
    state.memory.register(address, bytes as u64, device, call.context)
} }

entry! { Context cuMemHostUnregister(address: u64) |call| free(call, address, Place::Pinned) }

entry! { Context cuMemHostGetDevicePointer_v2(
    address: *mut u64, host: u64, flags: u32
) |call| {
    let _ = flags;
    if call.lock().memory.place(host) != Place::Pinned {
        return Err(INVALID_VALUE);
    }
    put(address, host)
} }

entry! { Context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call| {
    let state = call.lock();
    let device = state.context(call.context)?.device;
    put(free, state.memory.free_bytes(device) as usize)?;
    put(total, state.memory.total as usize)
} }

entry! { Context cuMemGetAddressRange_v2(
    base: *mut u64, bytes: *mut usize, address: u64
) |call| {
    let (start, range) = call.lock().memory.range(address).ok_or(crate::status::NOT_FOUND)?;
    put_if_wanted(base, start);
    put_if_wanted(bytes, range.bytes as usize);
    Ok(())
} }

unsafe fn allocate_async(
    call: &Call,
    place: *mut u64,
    bytes: usize,
    stream: usize,
    per_thread: bool,
) -> Outcome {
    if call.faults.memory {
        return Err(OUT_OF_MEMORY);
    }
    let mut state = call.lock();
    let resolved = super::stream::resolve(call, &mut state, stream, per_thread)?;
    let context = state.stream(resolved)?.context;
    if state.stream(resolved)?.capture.is_none() {
        capture::forbid_unsafe(&mut state)?;
    }
    let device = state.context(context)?.device;
    let address = state.memory.allocate(bytes, device, context, Place::Device)?;
    drop(state);
    let action = Action::Instant(Effect::Nothing);
    let submission = Submission { action, kind: "alloc", node: graph::MEM_ALLOC };
    let submitted = capture::submit(call, stream, per_thread, submission);
    if submitted.is_err() {
        let _ = call.lock().memory.free(address, Place::Device);
    }
    submitted?;
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put(place, address) }
}

stream_entry! { Unlocked cuMemAllocAsync, cuMemAllocAsync_ptsz(
    address: *mut u64, bytes: usize, stream: usize
) |call, per_thread| allocate_async(call, address, bytes, stream, per_thread) }

stream_entry! { Unlocked cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
    address: *mut u64, bytes: usize, pool: usize, stream: usize
) |call, per_thread| {
    let _ = pool;
    allocate_async(call, address, bytes, stream, per_thread)
} }

stream_entry! { Unlocked cuMemFreeAsync, cuMemFreeAsync_ptsz(
    address: u64, stream: usize
) |call, per_thread| {
    let mut state = call.lock();
    if !state.memory.is_start(address, Place::Device) {
        return Err(INVALID_VALUE);
    }
    let resolved = super::stream::resolve(call, &mut state, stream, per_thread)?;
    if state.stream(resolved)?.capture.is_none() {
        capture::forbid_unsafe(&mut state)?;
    }
    drop(state);
    let action = Action::Instant(Effect::Free { address });
    let submission = Submission { action, kind: "free", node: graph::MEM_FREE };
    capture::submit(call, stream, per_thread, submission)?;
    Ok(())
} }

/// The pools have no properties of their own: a handle per device is enough.
fn pool(call: &Call, device: i32) -> Outcome<usize> {
    Ok(0x5000_0000_0000 + 0x10 * (call.ordinal(device)? + 1))
}

entry! { Unlocked cuDeviceGetDefaultMemPool(pool_place: *mut usize, device: i32) |call| {
    put(pool_place, pool(call, device)?)
} }

entry! { Unlocked cuDeviceGetMemPool(pool_place: *mut usize, device: i32) |call| {
    put(pool_place, pool(call, device)?)
} }

entry! { Unlocked cuMemPoolCreate(pool_place: *mut usize, properties: *const c_void) |call| {
    let _ = properties;
    put(pool_place, call.lock().new_handle())
} }

entry! { Unlocked cuMemPoolGetAttribute(pool: usize, attribute: u32, value: *mut u64) |_call| {
    let _ = pool;
    match attribute {
        1..=3 => put(value.cast::<i32>(), 1),
        4..=8 => put(value, 0),
        _ => Err(INVALID_VALUE),
    }
} }

accepted! {
    Unlocked cuDeviceSetMemPool(device: i32, pool: usize);
    Unlocked cuMemPoolDestroy(pool: usize);
    Unlocked cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *const c_void);
    Unlocked cuMemPoolTrimTo(pool: usize, bytes: usize);
    Unlocked cuMemPoolSetAccess(pool: usize, access: *const c_void, count: usize);
    Unlocked cuMemAdvise(address: u64, bytes: usize, advice: u32, device: i32);
    Unlocked cuMemAdvise_v2(address: u64, bytes: usize, advice: u32, location: u64);
}

/// Rows of equal values.
struct Fill {
    address: u64,
    pitch: u64,
    pattern: u32,
    size: u64,
    width: usize,
    height: usize,
}

impl Fill {
    fn action(&self, call: &Call) -> Outcome<Action> {
        let (width, height) = (self.width as u64, self.height as u64);
        let Self { address, pitch, pattern, size, .. } = *self;
        let bytes = width * size;
        let reached = height.saturating_sub(1) * pitch + bytes;
        if bytes > 0 && height > 0 && !call.lock().memory.reaches(address, reached) {
            return Err(INVALID_VALUE);
        }
        let effect = Effect::Fill { address, pattern, size, width, height, pitch };
        // 1 TB/s, and what it takes to start.
        Ok(Action::Work(2_000.0 + (bytes * height) as f64 / 1_000.0, effect))
    }

    fn run(&self, call: &Call, stream: usize, per_thread: bool) -> Outcome {
        let action = self.action(call)?;
        capture::submit(call, stream, per_thread, Submission::fill(action))?;
        Ok(())
    }
}

macro_rules! fills {
    ($($name:ident, $variant:ident, $asynchronous:ident, $asynchronous_variant:ident: $type:ty;)*) => {
        $(stream_entry! { Context $name, $variant(
            address: u64, value: $type, count: usize
        ) |call, per_thread| {
            let (pattern, size) = (u32::from(value), size_of::<$type>() as u64);
            let fill = Fill { address, pitch: 0, pattern, size, width: count, height: 1 };
            fill.run(call, 0, per_thread)
        } }
        stream_entry! { Unlocked $asynchronous, $asynchronous_variant(
            address: u64, value: $type, count: usize, stream: usize
        ) |call, per_thread| {
            let (pattern, size) = (u32::from(value), size_of::<$type>() as u64);
            let fill = Fill { address, pitch: 0, pattern, size, width: count, height: 1 };
            fill.run(call, stream, per_thread)
        } })*
    };
}

fills! {
    cuMemsetD8_v2, cuMemsetD8_v2_ptds, cuMemsetD8Async, cuMemsetD8Async_ptsz: u8;
    cuMemsetD16_v2, cuMemsetD16_v2_ptds, cuMemsetD16Async, cuMemsetD16Async_ptsz: u16;
    cuMemsetD32_v2, cuMemsetD32_v2_ptds, cuMemsetD32Async, cuMemsetD32Async_ptsz: u32;
}

macro_rules! fills_2d {
    ($($name:ident, $variant:ident, $asynchronous:ident, $asynchronous_variant:ident: $type:ty;)*) => {
        $(stream_entry! { Context $name, $variant(
            address: u64, pitch: usize, value: $type, width: usize, height: usize
        ) |call, per_thread| {
            let (pattern, size) = (u32::from(value), size_of::<$type>() as u64);
            let fill = Fill { address, pitch: pitch as u64, pattern, size, width, height };
            fill.run(call, 0, per_thread)
        } }
        stream_entry! { Unlocked $asynchronous, $asynchronous_variant(
            address: u64, pitch: usize, value: $type, width: usize, height: usize, stream: usize
        ) |call, per_thread| {
            let (pattern, size) = (u32::from(value), size_of::<$type>() as u64);
            let fill = Fill { address, pitch: pitch as u64, pattern, size, width, height };
            fill.run(call, stream, per_thread)
        } })*
    };
}

fills_2d! {
    cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds, cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz: u8;
    cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds, cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz: u16;
    cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds, cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz: u32;
}

/// A fill for a node of a graph.
pub fn fill_action(
    call: &Call,
    address: u64,
    pitch: usize,
    pattern: u32,
    size: u32,
    width: usize,
    height: usize,
) -> Outcome<Action> {
    let (pitch, size) = (pitch as u64, u64::from(size));
    if !matches!(size, 1 | 2 | 4) {
        return Err(INVALID_VALUE);
    }
    Fill { address, pitch, pattern, size, width, height }.action(call)
}

fn write_value(
    call: &Call,
    stream: usize,
    per_thread: bool,
    address: u64,
    bytes: &[u8],
) -> Outcome {
    if !call.lock().memory.reaches(address, bytes.len() as u64) {
        return Err(INVALID_VALUE);
    }
    let action = Action::Instant(Effect::Store { to: address, bytes: bytes.into() });
    let submission = Submission { action, kind: "value", node: graph::EMPTY };
    capture::submit(call, stream, per_thread, submission).map(|_: Submitted| ())
}

macro_rules! writes {
    ($($name:ident, $variant:ident: $type:ty;)*) => {
        $(stream_entry! { Unlocked $name, $variant(
            stream: usize, address: u64, value: $type, flags: u32
        ) |call, per_thread| {
            let _ = flags;
            write_value(call, stream, per_thread, address, &value.to_ne_bytes())
        } })*
    };
}

writes! {
    cuStreamWriteValue32, cuStreamWriteValue32_ptsz: u32;
    cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz: u32;
    cuStreamWriteValue64, cuStreamWriteValue64_ptsz: u64;
    cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz: u64;
}

fn wait_value(call: &Call, stream: usize, per_thread: bool, poll: Poll) -> Outcome {
    if !call.lock().memory.reaches(poll.address, poll.size as u64) {
        return Err(INVALID_VALUE);
    }
    let submission = Submission { action: Action::Poll(poll), kind: "value", node: graph::EMPTY };
    capture::submit(call, stream, per_thread, submission).map(|_: Submitted| ())
}

macro_rules! waits {
    ($($name:ident, $variant:ident: $type:ty;)*) => {
        $(stream_entry! { Unlocked $name, $variant(
            stream: usize, address: u64, value: $type, flags: u32
        ) |call, per_thread| {
            let (size, value) = (size_of::<$type>(), u64::from(value));
            let poll = Poll { address, size, value, condition: flags & 3 };
            wait_value(call, stream, per_thread, poll)
        } })*
    };
}

waits! {
    cuStreamWaitValue32, cuStreamWaitValue32_ptsz: u32;
    cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz: u32;
    cuStreamWaitValue64, cuStreamWaitValue64_ptsz: u64;
    cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz: u64;
}

fn prefetch(call: &Call, stream: usize, per_thread: bool, address: u64, bytes: usize) -> Outcome {
    if !call.lock().memory.reaches(address, bytes as u64) {
        return Err(INVALID_VALUE);
    }
    let action = Action::Work(2_000.0, Effect::Nothing);
    let submission = Submission { action, kind: "prefetch", node: graph::EMPTY };
    capture::submit(call, stream, per_thread, submission).map(|_: Submitted| ())
}

stream_entry! { Unlocked cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(
    address: u64, bytes: usize, device: i32, stream: usize
) |call, per_thread| {
    let _ = device;
    prefetch(call, stream, per_thread, address, bytes)
} }

stream_entry! { Unlocked cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
    address: u64, bytes: usize, location: u64, flags: u32, stream: usize
) |call, per_thread| {
    let _ = (location, flags);
    prefetch(call, stream, per_thread, address, bytes)
} }

/// Stores one attribute of an address; an address that the driver doesn't know has few.
unsafe fn attribute(call: &Call, place: *mut c_void, attribute: u32, address: u64) -> Outcome {
    let state = call.lock();
    let known = state.memory.range(address);
    // SAFETY: null or valid for the attribute's type, by the contract of the header.
    unsafe {
        match (attribute, known) {
            (_, None) => Err(INVALID_VALUE),
            (1, Some((_, range))) => put(place.cast(), range.context),
            (2, Some((_, range))) => put(place.cast::<u32>(), memory_type(range.place)),
            (3, Some(_)) => put(place.cast(), address),
            (4, Some((_, range))) if range.place == Place::Pinned => put(place.cast(), address),
            (7, Some((_, range))) => put(place.cast(), range.identity),
            (8, Some(_)) => put(place.cast::<u32>(), 0),
            (9, Some((_, range))) => {
                let ordinal = state.context(range.context)?.ordinal;
                put(place.cast::<i32>(), ordinal)
            }
            (11, Some((start, _))) => put(place.cast(), start),
            (12, Some((_, range))) => put(place.cast(), range.bytes),
            (13, Some(_)) => put(place.cast::<u32>(), 1),
            _ => Err(INVALID_VALUE),
        }
    }
}

/// `CU_MEMORYTYPE_*`.
fn memory_type(place: Place) -> u32 {
    if place == Place::Device { 2 } else { 1 }
}

entry! { Unlocked cuPointerGetAttribute(
    place: *mut c_void, which: u32, address: u64
) |call| {
    if call.context == 0 && call.lock().contexts.is_empty() {
        return Err(INVALID_CONTEXT);
    }
    attribute(call, place, which, address)
} }

entry! { Unlocked cuPointerGetAttributes(
    count: u32, which: *const u32, places: *const *mut c_void, address: u64
) |call| {
    if which.is_null() || places.is_null() {
        return Err(INVALID_VALUE);
    }
    for index in 0..count as usize {
        let place = places.add(index).read();
        if attribute(call, place, which.add(index).read(), address).is_err() {
            // What doesn't apply is 0, and no error.
            match which.add(index).read() {
                2 | 8 | 9 | 13 => put_if_wanted(place.cast::<u32>(), 0),
                _ => put_if_wanted(place.cast::<u64>(), 0),
            }
        }
    }
    Ok(())
} }
