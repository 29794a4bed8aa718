//! Submitting, which while a stream is captured makes nodes of a graph instead; and what may not
//! be done meanwhile.
//!
//! Some calls are *unsafe* during a capture: what they do could be part of what is captured, and
//! isn't. A thread may not make them (1) while a capture runs that it began itself, unless that
//! one is relaxed, or (2) while another thread's global one runs. A thread whose own mode is
//! thread-local is free of (2); one whose mode is relaxed of both. A forbidden call fails, and the
//! captures that forbid it are invalid from then on.

use super::{put, put_if_wanted, stream_entry};
use crate::driver::{Call, capture_mode, set_capture_mode};
use crate::graph::{self, Capture, Graph, Node};
use crate::state::State;
use crate::status::{
    ILLEGAL_STATE, INVALID_VALUE, Outcome, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED,
    STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNJOINED,
    STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD,
};
use crate::stream::Action;
use crate::system;

/// What a caller submits to a stream.
pub struct Submission {
    pub action: Action,
    /// For the journal.
    pub kind: &'static str,
    pub node: u32,
}

impl Submission {
    pub fn kernel(action: Action) -> Self {
        Self { action, kind: "launch", node: graph::KERNEL }
    }

    pub fn copy(action: Action) -> Self {
        Self { action, kind: "copy", node: graph::MEMCPY }
    }

    pub fn fill(action: Action) -> Self {
        Self { action, kind: "memset", node: graph::MEMSET }
    }

    pub fn host(action: Action) -> Self {
        Self { action, kind: "host", node: graph::HOST }
    }
}

/// What became of a submission.
pub enum Submitted {
    /// The stream, and the operation's number.
    Queued(usize, u64),
    Captured,
}

/// Submits to the stream that the caller means.
///
/// # Errors
/// What is wrong with the stream, its context, or a capture that this would break.
pub fn submit(
    call: &Call,
    handle: usize,
    per_thread: bool,
    submission: Submission,
) -> Outcome<Submitted> {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, handle, per_thread)?;
    forbid_implicit(&mut state, stream)?;
    call.journal(stream, submission.kind);
    if let Some(capture) = active(&mut state, stream)? {
        add_node(&mut state, stream, capture, submission.node, Some(submission.action));
        return Ok(Submitted::Captured);
    }
    let sequence = state.enqueue(stream, submission.action)?;
    call.kick(&mut state);
    Ok(Submitted::Queued(stream, sequence))
}

/// The capture that a stream belongs to.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED`.
pub fn active(state: &mut State, stream: usize) -> Outcome<Option<usize>> {
    let Some(capture) = state.stream(stream)?.capture else { return Ok(None) };
    match state.captures.get(&capture) {
        Some(it) if it.is_invalid => Err(STREAM_CAPTURE_INVALIDATED),
        Some(_) => Ok(Some(capture)),
        None => Ok(None),
    }
}

/// Adds a node behind what a stream has captured.
pub fn add_node(
    state: &mut State,
    stream: usize,
    capture: usize,
    kind: u32,
    action: Option<Action>,
) {
    let Some(stream) = state.streams.get_mut(&stream) else { return };
    let Some(capture) = state.captures.get_mut(&capture) else { return };
    let needs = std::mem::take(&mut stream.tail);
    capture.graph.nodes.push(Node { action, kind, needs });
    stream.tail.push(capture.graph.nodes.len() - 1);
}

pub fn invalidate(state: &mut State, capture: usize) {
    if let Some(capture) = state.captures.get_mut(&capture) {
        capture.is_invalid = true;
    }
}

/// Fails if the legacy stream would have to wait for a stream that is captured.
pub fn forbid_implicit(state: &mut State, stream: usize) -> Outcome {
    let (context, is_legacy) = {
        let it = state.stream(stream)?;
        (it.context, it.is_legacy)
    };
    if !is_legacy {
        return Ok(());
    }
    let blocking = state.streams.values().filter(|it| it.context == context && it.is_blocking());
    let captures: Vec<usize> = blocking.filter_map(|it| it.capture).collect();
    if captures.is_empty() {
        return Ok(());
    }
    captures.into_iter().for_each(|it| invalidate(state, it));
    Err(STREAM_CAPTURE_IMPLICIT)
}

/// Fails if a stream is captured, or stands for one that is.
pub fn forbid_on(state: &mut State, stream: usize) -> Outcome {
    forbid_implicit(state, stream)?;
    let Some(capture) = state.stream(stream)?.capture else { return Ok(()) };
    invalidate(state, capture);
    Err(STREAM_CAPTURE_UNSUPPORTED)
}

/// Fails if anything of a context is captured.
pub fn forbid_in(state: &mut State, context: usize) -> Outcome {
    let mut forbidden = false;
    for capture in state.captures.values_mut().filter(|it| it.context == context) {
        capture.is_invalid = true;
        forbidden = true;
    }
    if forbidden { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Fails if a capture forbids this thread's unsafe calls.
pub fn forbid_unsafe(state: &mut State) -> Outcome {
    let (mode, thread) = (capture_mode(), system::thread_id());
    if mode == graph::RELAXED {
        return Ok(());
    }
    let mut forbidden = false;
    for capture in state.captures.values_mut() {
        let forbids = if capture.thread == thread {
            capture.mode != graph::RELAXED
        } else {
            mode == graph::GLOBAL && capture.mode == graph::GLOBAL
        };
        if forbids {
            capture.is_invalid = true;
            forbidden = true;
        }
    }
    if forbidden { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// A stream goes away: its capture, if it has one, cannot go on.
pub fn abandon(state: &mut State, stream: usize) {
    if let Some(capture) = state.streams.get(&stream).and_then(|it| it.capture) {
        invalidate(state, capture);
    }
}

/// Records an event in a stream that is captured; returns whether it is.
pub fn record_event(state: &mut State, stream: usize, event: usize) -> Outcome<bool> {
    forbid_implicit(state, stream)?;
    let Some(capture) = active(state, stream)? else { return Ok(false) };
    let tail = state.stream(stream)?.tail.clone();
    let event = state.event(event)?;
    event.mark = None;
    event.captured = Some((capture, tail));
    Ok(true)
}

/// Makes a captured stream wait for an event, or a stream for a captured event, which makes the
/// stream part of the capture; returns whether either was so.
pub fn wait_event(state: &mut State, stream: usize, event: usize) -> Outcome<bool> {
    forbid_implicit(state, stream)?;
    let own = active(state, stream)?;
    let captured = state.event(event)?.captured.clone();
    match (own, captured) {
        (None, None) => Ok(false),
        (Some(own), None) => {
            // What is captured cannot wait for what isn't.
            if state.event(event)?.mark.is_some() {
                invalidate(state, own);
                return Err(STREAM_CAPTURE_ISOLATION);
            }
            Ok(true)
        }
        (Some(own), Some((capture, _))) if own != capture => {
            invalidate(state, own);
            invalidate(state, capture);
            Err(STREAM_CAPTURE_MERGE)
        }
        (_, Some((capture, tail))) => {
            if !state.captures.contains_key(&capture) {
                return Err(INVALID_VALUE);
            }
            let stream = state.stream(stream)?;
            stream.capture = Some(capture);
            for node in tail {
                if !stream.tail.contains(&node) {
                    stream.tail.push(node);
                }
            }
            Ok(true)
        }
    }
}

fn begin(
    call: &Call,
    stream: usize,
    per_thread: bool,
    mode: u32,
    target: Option<usize>,
) -> Outcome {
    if mode > graph::RELAXED {
        return Err(INVALID_VALUE);
    }
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    let found = state.stream(stream)?;
    if found.is_legacy {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if found.capture.is_some() {
        return Err(ILLEGAL_STATE);
    }
    let context = found.context;
    let handle = state.new_handle();
    let capture = Capture {
        context,
        origin: stream,
        mode,
        thread: system::thread_id(),
        is_invalid: false,
        graph: Graph::default(),
        target,
    };
    state.captures.insert(handle, capture);
    let stream = state.stream(stream)?;
    stream.capture = Some(handle);
    stream.tail.clear();
    call.journal(handle, "capture");
    Ok(())
}

stream_entry! { Unlocked cuStreamBeginCapture, cuStreamBeginCapture_ptsz(
    stream: usize
) |call, per_thread| begin(call, stream, per_thread, graph::GLOBAL, None) }

stream_entry! { Unlocked cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(
    stream: usize, mode: u32
) |call, per_thread| begin(call, stream, per_thread, mode, None) }

stream_entry! { Unlocked cuStreamEndCapture, cuStreamEndCapture_ptsz(
    stream: usize, graph: *mut usize
) |call, per_thread| {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    put_if_wanted(graph, 0);
    let handle = state.stream(stream)?.capture.ok_or(ILLEGAL_STATE)?;
    let capture = state.captures.get(&handle).ok_or(ILLEGAL_STATE)?;
    if capture.origin != stream {
        invalidate(&mut state, handle);
        return Err(STREAM_CAPTURE_UNMATCHED);
    }
    let tail = state.stream(stream)?.tail.clone();
    for stream in state.streams.values_mut().filter(|it| it.capture == Some(handle)) {
        stream.capture = None;
        stream.tail.clear();
    }
    let capture = state.captures.remove(&handle).ok_or(ILLEGAL_STATE)?;
    // Another thread may not end it, and does.
    if capture.mode != graph::RELAXED && capture.thread != system::thread_id() {
        return Err(STREAM_CAPTURE_WRONG_THREAD);
    }
    if capture.is_invalid {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    if capture.graph.leaves().iter().any(|it| !tail.contains(it)) {
        return Err(STREAM_CAPTURE_UNJOINED);
    }
    let made = capture.target.unwrap_or_else(|| state.new_handle());
    let target = state.graphs.entry(made).or_default();
    let offset = target.nodes.len();
    for mut node in capture.graph.nodes {
        node.needs.iter_mut().for_each(|it| *it += offset);
        target.nodes.push(node);
    }
    put(graph, made)
} }

stream_entry! { Unlocked cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(
    stream: usize, graph: usize, dependencies: *const usize, edges: *const u8, count: usize,
    mode: u32,
) |call, per_thread| {
    // What it depends on runs earlier anyway: nodes are launched in order.
    let _ = (dependencies, edges, count);
    if !call.lock().graphs.contains_key(&graph) {
        return Err(INVALID_VALUE);
    }
    begin(call, stream, per_thread, mode, Some(graph))
} }

/// 0: no capture, 1: active, 2: invalid; and the capture.
fn capture_status(state: &mut State, stream: usize) -> Outcome<(u32, usize)> {
    let Some(handle) = state.stream(stream)?.capture else { return Ok((0, 0)) };
    Ok(match state.captures.get(&handle) {
        Some(it) if it.is_invalid => (2, handle),
        Some(_) => (1, handle),
        None => (0, 0),
    })
}

stream_entry! { Unlocked cuStreamIsCapturing, cuStreamIsCapturing_ptsz(
    stream: usize, status: *mut u32
) |call, per_thread| {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    forbid_implicit_query(&mut state, stream)?;
    put(status, capture_status(&mut state, stream)?.0)
} }

/// Asking about the legacy stream while a blocking one is captured: an error, harmless.
fn forbid_implicit_query(state: &mut State, stream: usize) -> Outcome {
    let (context, is_legacy) = {
        let it = state.stream(stream)?;
        (it.context, it.is_legacy)
    };
    let mut blocking = state.streams.values().filter(|it| it.context == context);
    if is_legacy && blocking.any(|it| it.is_blocking() && it.capture.is_some()) {
        return Err(STREAM_CAPTURE_IMPLICIT);
    }
    Ok(())
}

stream_entry! { Unlocked cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(
    stream: usize, status: *mut u32, identity: *mut u64
) |call, per_thread| {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    forbid_implicit_query(&mut state, stream)?;
    let (found, capture) = capture_status(&mut state, stream)?;
    put(status, found)?;
    put_if_wanted(identity, capture as u64);
    Ok(())
} }

stream_entry! { Unlocked cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(
    stream: usize, status: *mut u32, identity: *mut u64, graph: *mut usize,
    dependencies: *mut *const usize, count: *mut usize,
) |call, per_thread| {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    forbid_implicit_query(&mut state, stream)?;
    let (found, capture) = capture_status(&mut state, stream)?;
    put(status, found)?;
    put_if_wanted(identity, capture as u64);
    // The graph is not to be had before its end.
    put_if_wanted(graph, 0);
    put_if_wanted(dependencies, std::ptr::null());
    put_if_wanted(count, 0);
    Ok(())
} }

stream_entry! { Unlocked cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(
    stream: usize, status: *mut u32, identity: *mut u64, graph: *mut usize,
    dependencies: *mut *const usize, edges: *mut *const u8, count: *mut usize,
) |call, per_thread| {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    forbid_implicit_query(&mut state, stream)?;
    let (found, capture) = capture_status(&mut state, stream)?;
    put(status, found)?;
    put_if_wanted(identity, capture as u64);
    put_if_wanted(graph, 0);
    put_if_wanted(dependencies, std::ptr::null());
    put_if_wanted(edges, std::ptr::null());
    put_if_wanted(count, 0);
    Ok(())
} }

super::entry! { Unlocked cuThreadExchangeStreamCaptureMode(mode: *mut u32) |_call| {
    if mode.is_null() || mode.read() > graph::RELAXED {
        return Err(INVALID_VALUE);
    }
    let wanted = mode.read();
    mode.write(capture_mode());
    set_capture_mode(wanted);
    Ok(())
} }
