//! Contexts: primary ones, others, and which one is current.

use std::ffi::c_void;
use std::sync::MutexGuard;

use super::{accepted, entry, put, put_if_wanted};
use crate::driver::{Call, with_contexts};
use crate::state::{Context, Gone, State};
use crate::status::{
    CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_VALUE, OUT_OF_MEMORY, Outcome,
    PRIMARY_CONTEXT_ACTIVE, UNSUPPORTED_LIMIT,
};
use crate::stream::Stream;

const FLAGS: u32 = 0xff;

/// Makes a context; takes its time.
fn create(call: &Call, ordinal: i32, flags: u32, is_primary: bool) -> Outcome<usize> {
    if flags & !FLAGS != 0 {
        return Err(INVALID_VALUE);
    }
    let index = call.ordinal(ordinal)?;
    if call.faults.memory {
        return Err(OUT_OF_MEMORY);
    }
    let device = call.lock().devices[index].index;
    call.journal(0, "birth");
    call.driver.shared.give_birth(device, call.driver.settings.birth);
    call.driver.journal.write(call.entry, 0, "born");
    let mut state = call.lock();
    let (handle, legacy) = (state.new_handle(), state.new_handle());
    let mut stream = Stream::new(handle, device, 0, 0);
    stream.is_legacy = true;
    state.streams.insert(legacy, stream);
    let context = Context {
        device,
        ordinal,
        flags,
        is_primary,
        identity: handle as u64 >> 4 & 0xffff_ffff,
        legacy,
        per_thread: std::collections::HashMap::new(),
        broken: None,
    };
    state.contexts.insert(handle, context);
    Ok(handle)
}

/// Waits for a context's work and ends it; takes its time.
fn destroy(call: &Call, handle: usize) -> Outcome {
    let state = call.lock();
    let context = state.contexts.get(&handle).ok_or(INVALID_CONTEXT)?;
    let device = context.device;
    call.journal(0, "death");
    if context.broken.is_none() {
        let last = state.last_sequence();
        // Whatever breaks it meanwhile, it ends.
        let _ = Call::wait(call, state, |state| Ok(is_idle(state, handle, last).then_some(())));
    } else {
        drop(state);
    }
    call.driver.shared.give_birth(device, call.driver.settings.birth);
    call.driver.journal.write(call.entry, 0, "dead");
    forget(&mut call.lock(), handle);
    Ok(())
}

/// Removes a context and all that belongs to it.
fn forget(state: &mut State, handle: usize) {
    let streams = state.streams.iter().filter(|(_, it)| it.context == handle);
    let is_primary = state.contexts.get(&handle).is_some_and(|it| it.is_primary);
    let refusal = if is_primary { CONTEXT_IS_DESTROYED } else { INVALID_CONTEXT };
    for stream in streams.map(|(&it, _)| it).collect::<Vec<_>>() {
        state.remove_stream(stream);
        state.gone.insert(stream, Gone::Refused(refusal));
    }
    let events = state.events.iter().filter(|(_, it)| it.context == handle);
    let events: Vec<usize> = events.map(|(&it, _)| it).collect();
    state.gone.extend(events.iter().map(|it| (*it, Gone::Refused(CONTEXT_IS_DESTROYED))));
    state.events.retain(|_, it| it.context != handle);
    state.modules.retain(|_, it| it.context != handle);
    state.captures.retain(|_, it| it.context != handle);
    let State { functions, modules, .. } = state;
    functions.retain(|_, it| modules.contains_key(&it.module));
    state.memory.free_all(handle);
    if state.contexts.remove(&handle).is_some() {
        state.ended_contexts.insert(handle);
    }
    state.advance();
}

/// Whether everything that a context was given up to `sequence` is done.
pub fn is_idle(state: &State, context: usize, sequence: u64) -> bool {
    state.streams.values().all(|it| it.context != context || it.is_done(sequence))
}

/// Waits for all work of a context.
pub fn synchronize(call: &Call, state: MutexGuard<'static, State>, context: usize) -> Outcome {
    let last = state.last_sequence();
    call.wait(state, |state| {
        state.context(context)?;
        Ok(is_idle(state, context, last).then_some(()))
    })
}

entry! { Unlocked cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) |call| {
    let index = call.ordinal(device)?;
    let mut state = call.lock();
    if state.primaries[index].context.is_none() {
        let flags = state.primaries[index].flags;
        drop(state);
        let handle = create(call, device, flags, true)?;
        state = call.lock();
        // Another thread may have been as quick; the loser's is nobody's.
        if state.primaries[index].context.is_none() {
            state.primaries[index].context = Some(handle);
        } else {
            forget(&mut state, handle);
        }
    }
    let primary = &mut state.primaries[index];
    put(context, primary.context.unwrap_or(0))?;
    primary.retained += 1;
    Ok(())
} }

fn release(call: &Call, device: i32) -> Outcome {
    let index = call.ordinal(device)?;
    let mut state = call.lock();
    let primary = &mut state.primaries[index];
    if primary.retained == 0 {
        return Err(INVALID_CONTEXT);
    }
    primary.retained -= 1;
    if primary.retained > 0 {
        return Ok(());
    }
    let handle = primary.context.take();
    drop(state);
    handle.map_or(Ok(()), |it| destroy(call, it))
}

fn reset(call: &Call, device: i32) -> Outcome {
    let index = call.ordinal(device)?;
    // Those who retained it still count; the next use makes it anew.
    let handle = call.lock().primaries[index].context.take();
    handle.map_or(Ok(()), |it| destroy(call, it))
}

fn set_primary_flags(call: &Call, device: i32, flags: u32) -> Outcome {
    let index = call.ordinal(device)?;
    if flags & !FLAGS != 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = call.lock();
    state.primaries[index].flags = flags;
    if let Some(handle) = state.primaries[index].context
        && let Some(context) = state.contexts.get_mut(&handle)
    {
        context.flags = flags;
    }
    Ok(())
}

entry! { Unlocked cuDevicePrimaryCtxRelease(device: i32) |call| release(call, device) }
entry! { Unlocked cuDevicePrimaryCtxRelease_v2(device: i32) |call| release(call, device) }
entry! { Unlocked cuDevicePrimaryCtxReset(device: i32) |call| reset(call, device) }
entry! { Unlocked cuDevicePrimaryCtxReset_v2(device: i32) |call| reset(call, device) }

entry! { Unlocked cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) |call| {
    let index = call.ordinal(device)?;
    if call.lock().primaries[index].context.is_some() {
        return Err(PRIMARY_CONTEXT_ACTIVE);
    }
    set_primary_flags(call, device, flags)
} }

entry! { Unlocked cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) |call| {
    set_primary_flags(call, device, flags)
} }

entry! { Unlocked cuDevicePrimaryCtxGetState(
    device: i32, flags: *mut u32, active: *mut i32
) |call| {
    let index = call.ordinal(device)?;
    let state = call.lock();
    let primary = &state.primaries[index];
    put(flags, primary.flags)?;
    put(active, i32::from(primary.context.is_some()))
} }

/// Makes a context that is current from then on.
unsafe fn create_current(call: &Call, place: *mut usize, flags: u32, device: i32) -> Outcome {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    let handle = create(call, device, flags, false)?;
    with_contexts(|it| it.push(handle))?;
    // SAFETY: not null, hence valid for writing, by the contract of the header.
    unsafe { put(place, handle) }
}

entry! { Unlocked cuCtxCreate(context: *mut usize, flags: u32, device: i32) |call| {
    create_current(call, context, flags, device)
} }

entry! { Unlocked cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32) |call| {
    create_current(call, context, flags, device)
} }

entry! { Unlocked cuCtxCreate_v3(
    context: *mut usize, affinities: *const c_void, count: i32, flags: u32, device: i32
) |call| {
    let _ = (affinities, count);
    create_current(call, context, flags, device)
} }

entry! { Unlocked cuCtxCreate_v4(
    context: *mut usize, parameters: *const c_void, flags: u32, device: i32
) |call| {
    let _ = parameters;
    create_current(call, context, flags, device)
} }

fn destroy_current(call: &Call, handle: usize) -> Outcome {
    let state = call.lock();
    let context = state.contexts.get(&handle).ok_or(INVALID_CONTEXT)?;
    if context.is_primary {
        return Err(INVALID_CONTEXT);
    }
    drop(state);
    destroy(call, handle)?;
    with_contexts(|it| {
        if it.last() == Some(&handle) {
            it.pop();
        }
    })
}

entry! { Unlocked cuCtxDestroy(context: usize) |call| destroy_current(call, context) }
entry! { Unlocked cuCtxDestroy_v2(context: usize) |call| destroy_current(call, context) }

entry! { Unlocked cuCtxSetCurrent(context: usize) |call| {
    // One that has ended is let through: only what is done in it fails.
    let is_context = |state: &State| {
        state.contexts.contains_key(&context) || state.ended_contexts.contains(&context)
    };
    if context != 0 && !is_context(&call.lock()) {
        return Err(INVALID_CONTEXT);
    }
    with_contexts(|it| {
        it.pop();
        if context != 0 {
            it.push(context);
        }
    })
} }

entry! { Unlocked cuCtxGetCurrent(context: *mut usize) |call| put(context, call.context) }

fn push(call: &Call, context: usize) -> Outcome {
    if !call.lock().contexts.contains_key(&context) {
        return Err(INVALID_CONTEXT);
    }
    with_contexts(|it| it.push(context))
}

unsafe fn pop(context: *mut usize) -> Outcome {
    let popped = with_contexts(Vec::pop)?.ok_or(INVALID_CONTEXT)?;
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put_if_wanted(context, popped) };
    Ok(())
}

entry! { Unlocked cuCtxPushCurrent(context: usize) |call| push(call, context) }
entry! { Unlocked cuCtxPushCurrent_v2(context: usize) |call| push(call, context) }
entry! { Unlocked cuCtxPopCurrent(context: *mut usize) |_call| pop(context) }
entry! { Unlocked cuCtxPopCurrent_v2(context: *mut usize) |_call| pop(context) }

entry! { Context cuCtxGetDevice(device: *mut i32) |call| {
    put(device, call.lock().context(call.context)?.ordinal)
} }

entry! { Unlocked cuCtxGetDevice_v2(device: *mut i32, context: usize) |call| {
    let context = if context == 0 { call.context } else { context };
    put(device, call.lock().context(context)?.ordinal)
} }

entry! { Context cuCtxGetFlags(flags: *mut u32) |call| {
    put(flags, call.lock().context(call.context)?.flags)
} }

entry! { Unlocked cuCtxGetId(context: usize, identity: *mut u64) |call| {
    let context = if context == 0 { call.context } else { context };
    put(identity, call.lock().context(context)?.identity)
} }

entry! { Unlocked cuCtxGetApiVersion(context: usize, version: *mut u32) |call| {
    let context = if context == 0 { call.context } else { context };
    call.lock().context(context)?;
    put(version, 3020)
} }

fn synchronize_context(call: &Call, context: usize) -> Outcome {
    let mut state = call.lock();
    super::capture::forbid_in(&mut state, context)?;
    state.context(context)?;
    let last = state.last_sequence();
    call.wait_at_end(move |state| {
        state.context(context)?;
        Ok(is_idle(state, context, last).then_some(()))
    });
    Ok(())
}

entry! { Context cuCtxSynchronize() |call| synchronize_context(call, call.context) }

entry! { Unlocked cuCtxSynchronize_v2(context: usize) |call| {
    synchronize_context(call, if context == 0 { call.context } else { context })
} }

entry! { Context cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) |_call| {
    put_if_wanted(least, 0);
    put_if_wanted(greatest, -5);
    Ok(())
} }

entry! { Context cuCtxGetLimit(value: *mut usize, limit: u32) |_call| match limit {
    0 => put(value, 1024),          // the stack of a thread
    1 => put(value, 1 << 20),       // printf's buffer
    2 => put(value, 8 << 20),       // malloc's heap
    3 | 4 => put(value, 2048),
    5 | 6 => put(value, 128),
    _ => Err(UNSUPPORTED_LIMIT),
} }

entry! { Context cuCtxGetCacheConfig(value: *mut u32) |_call| put(value, 0) }
entry! { Context cuCtxGetSharedMemConfig(value: *mut u32) |_call| put(value, 1) }

accepted! {
    Context cuCtxSetLimit(limit: u32, value: usize);
    Context cuCtxSetCacheConfig(value: u32);
    Context cuCtxSetSharedMemConfig(value: u32);
    Context cuCtxSetFlags(flags: u32);
    Context cuCtxResetPersistingL2Cache();
    Context cuCtxEnablePeerAccess(peer: usize, flags: u32);
    Context cuCtxDisablePeerAccess(peer: usize);
}
