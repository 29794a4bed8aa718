//! Events.

use std::sync::Arc;

use super::capture;
use super::{entry, put, stream_entry};
use crate::driver::Call;
use crate::state::{Event, State};
use crate::status::{CAPTURED_EVENT, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome};
use crate::stream::{Action, Mark};

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;

entry! { Context cuEventCreate(event: *mut usize, flags: u32) |call| {
    if flags & !7 != 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = call.lock();
    let handle = state.new_handle();
    put(event, handle)?;
    let made = Event { context: call.context, flags, mark: None, captured: None };
    state.events.insert(handle, made);
    Ok(())
} }

fn destroy(call: &Call, event: usize) -> Outcome {
    let mut state = call.lock();
    let refusal = state.refusal(event);
    state.events.remove(&event).map(drop).ok_or(refusal)
}

entry! { Unlocked cuEventDestroy(event: usize) |call| destroy(call, event) }
entry! { Unlocked cuEventDestroy_v2(event: usize) |call| destroy(call, event) }

fn record(call: &Call, event: usize, stream: usize, per_thread: bool) -> Outcome {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    let context = state.event(event)?.context;
    if state.stream(stream)?.context != context {
        return Err(INVALID_HANDLE);
    }
    if capture::record_event(&mut state, stream, event)? {
        return Ok(());
    }
    call.journal(stream, "event");
    let mark = Arc::new(Mark::default());
    let recorded = state.event(event)?;
    recorded.captured = None;
    recorded.mark = Some(Arc::clone(&mark));
    state.enqueue(stream, Action::Record(mark))?;
    call.kick(&mut state);
    Ok(())
}

stream_entry! { Unlocked cuEventRecord, cuEventRecord_ptsz(
    event: usize, stream: usize
) |call, per_thread| record(call, event, stream, per_thread) }

stream_entry! { Unlocked cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(
    event: usize, stream: usize, flags: u32
) |call, per_thread| {
    let _ = flags;
    record(call, event, stream, per_thread)
} }

/// The last recording of an event; `None`: there was none.
fn mark(state: &mut State, event: usize) -> Outcome<Option<Arc<Mark>>> {
    let found = state.event(event)?;
    let (context, mark, captured) = (found.context, found.mark.clone(), found.captured.clone());
    state.context(context)?;
    if let Some((capture, _)) = captured {
        capture::invalidate(state, capture);
        return Err(CAPTURED_EVENT);
    }
    Ok(mark)
}

entry! { Unlocked cuEventQuery(event: usize) |call| {
    let mut state = call.lock();
    capture::forbid_unsafe(&mut state)?;
    let mark = mark(&mut state, event)?;
    state.advance();
    call.kick(&mut state);
    let context = state.event(event)?.context;
    state.context(context)?;
    if mark.is_none_or(|it| it.passed().is_some()) { Ok(()) } else { Err(NOT_READY) }
} }

entry! { Unlocked cuEventSynchronize(event: usize) |call| {
    let mut state = call.lock();
    capture::forbid_unsafe(&mut state)?;
    let context = state.event(event)?.context;
    if let Some(mark) = mark(&mut state, event)? {
        call.wait_at_end(move |state| {
            state.context(context)?;
            Ok(mark.passed().map(drop))
        });
    }
    Ok(())
} }

unsafe fn elapsed(call: &Call, milliseconds: *mut f32, start: usize, end: usize) -> Outcome {
    let mut state = call.lock();
    state.advance();
    call.kick(&mut state);
    let mut times = [0; 2];
    for (time, event) in times.iter_mut().zip([start, end]) {
        if state.event(event)?.flags & NO_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let mark = mark(&mut state, event)?.ok_or(INVALID_HANDLE)?;
        *time = mark.passed().ok_or(NOT_READY)?;
    }
    let nanoseconds = times[1] as f64 - times[0] as f64;
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put(milliseconds, (nanoseconds / 1e6) as f32) }
}

entry! { Unlocked cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) |call| {
    elapsed(call, milliseconds, start, end)
} }

entry! { Unlocked cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) |call| {
    elapsed(call, milliseconds, start, end)
} }

entry! { Unlocked cuCtxRecordEvent(context: usize, event: usize) |call| {
    let mut state = call.lock();
    let context = if context == 0 { call.context } else { context };
    capture::forbid_in(&mut state, context)?;
    // Recorded behind everything that the context has: the legacy stream waits for all
    // blocking ones, and the others are waited for one by one.
    let legacy = state.context(context)?.legacy;
    let others = state.streams.iter().filter(|(_, it)| it.context == context && !it.is_blocking());
    for stream in others.map(|(&it, _)| it).collect::<Vec<_>>() {
        let mark = Arc::new(Mark::default());
        state.enqueue(stream, Action::Record(Arc::clone(&mark)))?;
        state.enqueue(legacy, Action::Wait(mark))?;
    }
    drop(state);
    record(call, event, legacy, false)
} }

entry! { Unlocked cuCtxWaitEvent(context: usize, event: usize) |call| {
    let mut state = call.lock();
    let context = if context == 0 { call.context } else { context };
    capture::forbid_in(&mut state, context)?;
    state.context(context)?;
    if let Some(mark) = mark(&mut state, event)? {
        let streams = state.streams.iter().filter(|(_, it)| it.context == context);
        for stream in streams.map(|(&it, _)| it).collect::<Vec<_>>() {
            state.enqueue(stream, Action::Wait(Arc::clone(&mark)))?;
        }
        call.kick(&mut state);
    }
    Ok(())
} }
