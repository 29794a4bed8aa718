//! Streams.

use std::ffi::c_void;

use super::capture::{self, Submission};
use super::{entry, put, stream_entry};
use crate::driver::Call;
use crate::state::{Gone, State};
use crate::status::{INVALID_CONTEXT, INVALID_VALUE, NOT_READY, Outcome};
use crate::stream::{Action, HostCall, NON_BLOCKING, Stream};
use crate::system;

/// Handles with a meaning of their own: `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// The stream that a caller means.
///
/// # Errors
/// `INVALID_HANDLE`; `INVALID_CONTEXT`: a default stream, and no context; what broke or ended its
/// context.
pub fn resolve(call: &Call, state: &mut State, handle: usize, per_thread: bool) -> Outcome<usize> {
    let is_default = matches!(handle, 0 | LEGACY | PER_THREAD);
    if is_default && call.context == 0 {
        return Err(INVALID_CONTEXT);
    }
    let found = match handle {
        PER_THREAD => per_thread_stream(call, state)?,
        0 if per_thread => per_thread_stream(call, state)?,
        0 | LEGACY => state.context(call.context)?.legacy,
        handle => {
            state.touch_stream(handle);
            handle
        }
    };
    let context = state.stream(found)?.context;
    state.context(context)?;
    Ok(found)
}

fn per_thread_stream(call: &Call, state: &mut State) -> Outcome<usize> {
    let thread = system::thread_id();
    let context = state.context(call.context)?;
    if let Some(&stream) = context.per_thread.get(&thread) {
        return Ok(stream);
    }
    let device = context.device;
    let handle = state.new_handle();
    state.streams.insert(handle, Stream::new(call.context, device, 0, 0));
    if let Some(context) = state.contexts.get_mut(&call.context) {
        context.per_thread.insert(thread, handle);
    }
    Ok(handle)
}

unsafe fn create(call: &Call, place: *mut usize, flags: u32, priority: i32) -> Outcome {
    if flags & !NON_BLOCKING != 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = call.lock();
    let device = state.context(call.context)?.device;
    let handle = state.new_handle();
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put(place, handle)? };
    let stream = Stream::new(call.context, device, flags, priority.clamp(-5, 0));
    state.streams.insert(handle, stream);
    Ok(())
}

entry! { Context cuStreamCreate(stream: *mut usize, flags: u32) |call| {
    create(call, stream, flags, 0)
} }

entry! { Context cuStreamCreateWithPriority(
    stream: *mut usize, flags: u32, priority: i32
) |call| {
    create(call, stream, flags, priority)
} }

fn destroy(call: &Call, handle: usize) -> Outcome {
    if matches!(handle, 0 | LEGACY | PER_THREAD) {
        return Err(crate::status::INVALID_HANDLE);
    }
    let mut state = call.lock();
    state.touch_stream(handle);
    capture::abandon(&mut state, handle);
    // Its work goes on; the handle is gone.
    state.stream(handle)?;
    state.gone.insert(handle, Gone::Destroyed);
    let stream = state.stream(handle)?;
    if stream.queue.is_empty() {
        state.streams.remove(&handle);
    } else {
        let renamed = state.new_handle();
        if let Some(stream) = state.streams.remove(&handle) {
            state.streams.insert(renamed, stream);
        }
        for pending in &mut state.host_calls {
            if pending.0 == handle {
                pending.0 = renamed;
            }
        }
        state.orphans.push(renamed);
    }
    Ok(())
}

entry! { Unlocked cuStreamDestroy(stream: usize) |call| destroy(call, stream) }
entry! { Unlocked cuStreamDestroy_v2(stream: usize) |call| destroy(call, stream) }

stream_entry! { Unlocked cuStreamQuery, cuStreamQuery_ptsz(stream: usize) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    capture::forbid_on(&mut state, stream)?;
    capture::forbid_unsafe(&mut state)?;
    state.advance();
    call.kick(&mut state);
    let context = state.stream(stream)?.context;
    state.context(context)?;
    if is_complete(&mut state, stream, u64::MAX)? { Ok(()) } else { Err(NOT_READY) }
} }

/// Whether a stream is done, up to a number; the legacy one stands for all blocking ones.
fn is_complete(state: &mut State, stream: usize, sequence: u64) -> Outcome<bool> {
    let (context, is_legacy) = {
        let it = state.stream(stream)?;
        (it.context, it.is_legacy)
    };
    let mut concerned = state.streams.iter().filter(|(handle, it)| {
        **handle == stream || is_legacy && it.context == context && it.is_blocking()
    });
    Ok(concerned.all(|(_, it)| it.is_done(sequence)))
}

/// Waits until a stream has done what it was given by now.
pub fn synchronize(call: &Call, handle: usize, per_thread: bool) -> Outcome {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, handle, per_thread)?;
    capture::forbid_on(&mut state, stream)?;
    capture::forbid_unsafe(&mut state)?;
    let (last, context) = (state.last_sequence(), state.stream(stream)?.context);
    call.wait_at_end(move |state| {
        state.context(context)?;
        // Another thread may have destroyed it.
        let done = is_complete(state, stream, last).unwrap_or(true);
        Ok(done.then_some(()))
    });
    Ok(())
}

stream_entry! { Unlocked cuStreamSynchronize, cuStreamSynchronize_ptsz(
    stream: usize
) |call, per_thread| synchronize(call, stream, per_thread) }

stream_entry! { Unlocked cuStreamWaitEvent, cuStreamWaitEvent_ptsz(
    stream: usize, event: usize, flags: u32
) |call, per_thread| {
    let _ = flags;
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    if capture::wait_event(&mut state, stream, event)? {
        return Ok(());
    }
    if let Some(mark) = state.event(event)?.mark.clone() {
        call.journal(stream, "order");
        state.enqueue(stream, Action::Wait(mark))?;
        call.kick(&mut state);
    }
    Ok(())
} }

stream_entry! { Unlocked cuLaunchHostFunc, cuLaunchHostFunc_ptsz(
    stream: usize, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void
) |call, per_thread| {
    let function = function.ok_or(INVALID_VALUE)?;
    let action = Action::Host(HostCall { function, data: data as usize });
    capture::submit(call, stream, per_thread, Submission::host(action))?;
    Ok(())
} }

stream_entry! { Unlocked cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(
    stream: usize, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void,
    synchronization: u32,
) |call, per_thread| {
    let _ = synchronization;
    let function = function.ok_or(INVALID_VALUE)?;
    let action = Action::Host(HostCall { function, data: data as usize });
    capture::submit(call, stream, per_thread, Submission::host(action))?;
    Ok(())
} }

/// A callback of the older kind, with what it is called with.
struct Callback {
    function: unsafe extern "C" fn(usize, u32, *mut c_void),
    stream: usize,
    data: usize,
}

unsafe extern "C" fn run_callback(data: *mut c_void) {
    // SAFETY: made by `Box::into_raw` below, for this one call.
    let callback = unsafe { Box::from_raw(data.cast::<Callback>()) };
    // SAFETY: the program gave this function for being called so.
    unsafe { (callback.function)(callback.stream, 0, callback.data as *mut c_void) };
}

stream_entry! { Unlocked cuStreamAddCallback, cuStreamAddCallback_ptsz(
    stream: usize,
    function: Option<unsafe extern "C" fn(usize, u32, *mut c_void)>,
    data: *mut c_void,
    flags: u32,
) |call, per_thread| {
    let _ = flags;
    let function = function.ok_or(INVALID_VALUE)?;
    let callback = Box::new(Callback { function, stream, data: data as usize });
    let data = Box::into_raw(callback) as usize;
    let action = Action::Host(HostCall { function: run_callback, data });
    capture::submit(call, stream, per_thread, Submission::host(action))?;
    Ok(())
} }

stream_entry! { Unlocked cuStreamGetPriority, cuStreamGetPriority_ptsz(
    stream: usize, priority: *mut i32
) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    put(priority, state.stream(stream)?.priority)
} }

stream_entry! { Unlocked cuStreamGetFlags, cuStreamGetFlags_ptsz(
    stream: usize, flags: *mut u32
) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    capture::forbid_on(&mut state, stream)?;
    capture::forbid_unsafe(&mut state)?;
    put(flags, state.stream(stream)?.flags)
} }

stream_entry! { Unlocked cuStreamGetId, cuStreamGetId_ptsz(
    stream: usize, identity: *mut u64
) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    put(identity, stream as u64 >> 4 & 0xffff_ffff)
} }

stream_entry! { Unlocked cuStreamGetCtx, cuStreamGetCtx_ptsz(
    stream: usize, context: *mut usize
) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    put(context, state.stream(stream)?.context)
} }

stream_entry! { Unlocked cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(
    stream: usize, context: *mut usize, green: *mut usize
) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    super::put_if_wanted(green, 0);
    put(context, state.stream(stream)?.context)
} }

stream_entry! { Unlocked cuStreamGetDevice, cuStreamGetDevice_ptsz(
    stream: usize, device: *mut i32
) |call, per_thread| {
    let mut state = call.lock();
    let stream = resolve(call, &mut state, stream, per_thread)?;
    let context = state.stream(stream)?.context;
    put(device, state.context(context)?.ordinal)
} }
