//! Graphs.

use std::ffi::c_void;
use std::sync::Arc;

use super::capture::{self, add_node};
use super::{entry, put, put_if_wanted, stream_entry};
use crate::driver::Call;
use crate::graph::{self, Executable, Graph, Node};
use crate::state::State;
use crate::status::{INVALID_HANDLE, INVALID_VALUE, Outcome};
use crate::stream::{Action, Effect, HostCall, Mark};

entry! { Unlocked cuGraphCreate(place: *mut usize, flags: u32) |call| {
    let _ = flags;
    let mut state = call.lock();
    let handle = state.new_handle();
    state.graphs.insert(handle, Graph::default());
    put(place, handle)
} }

entry! { Unlocked cuGraphDestroy(graph: usize) |call| {
    let mut state = call.lock();
    state.graphs.remove(&graph).ok_or(INVALID_HANDLE)?;
    state.nodes.retain(|_, it| it.0 != graph);
    Ok(())
} }

entry! { Unlocked cuGraphClone(clone: *mut usize, graph: usize) |call| {
    let mut state = call.lock();
    let copy = state.graphs.get(&graph).ok_or(INVALID_HANDLE)?.clone();
    let handle = state.new_handle();
    state.graphs.insert(handle, copy);
    put(clone, handle)
} }

/// The handle of a node, made when it is asked for.
fn node_handle(state: &mut State, graph: usize, index: usize) -> usize {
    let known = state.nodes.iter().find(|(_, it)| **it == (graph, index));
    if let Some((&handle, _)) = known {
        return handle;
    }
    let handle = state.new_handle();
    state.nodes.insert(handle, (graph, index));
    handle
}

entry! { Unlocked cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) |call| {
    let mut state = call.lock();
    let total = state.graphs.get(&graph).ok_or(INVALID_HANDLE)?.nodes.len();
    if count.is_null() {
        return Err(INVALID_VALUE);
    }
    if !nodes.is_null() {
        for index in 0..count.read() {
            let handle =
                if index < total { node_handle(&mut state, graph, index) } else { 0 };
            nodes.add(index).write(handle);
        }
        put(count, count.read().min(total))
    } else {
        put(count, total)
    }
} }

entry! { Unlocked cuGraphNodeGetType(node: usize, kind: *mut u32) |call| {
    let state = call.lock();
    let &(graph, index) = state.nodes.get(&node).ok_or(INVALID_HANDLE)?;
    let graph = state.graphs.get(&graph).ok_or(INVALID_HANDLE)?;
    put(kind, graph.nodes.get(index).ok_or(INVALID_HANDLE)?.kind)
} }

/// Adds a node that depends on others.
///
/// # Safety
/// `needs` is null or a list of `count`.
unsafe fn add(
    call: &Call,
    place: *mut usize,
    graph: usize,
    needs: *const usize,
    count: usize,
    kind: u32,
    action: Option<Action>,
) -> Outcome {
    let mut state = call.lock();
    let mut indices = Vec::new();
    for index in 0..count {
        if needs.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a list of `count`.
        let handle = unsafe { needs.add(index).read() };
        let &(owner, node) = state.nodes.get(&handle).ok_or(INVALID_VALUE)?;
        if owner != graph {
            return Err(INVALID_VALUE);
        }
        indices.push(node);
    }
    let nodes = &mut state.graphs.get_mut(&graph).ok_or(INVALID_HANDLE)?.nodes;
    nodes.push(Node { action, kind, needs: indices });
    let index = nodes.len() - 1;
    let handle = node_handle(&mut state, graph, index);
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put(place, handle) }
}

entry! { Unlocked cuGraphAddEmptyNode(
    node: *mut usize, graph: usize, needs: *const usize, count: usize
) |call| add(call, node, graph, needs, count, graph::EMPTY, None) }

/// The beginning of `CUDA_KERNEL_NODE_PARAMS`, of either version; the second has a kernel and a
/// context behind it.
#[repr(C)]
pub struct KernelParameters {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    parameters: *const *const u8,
    extra: *const usize,
}

#[repr(C)]
pub struct KernelParameters2 {
    start: KernelParameters,
    kernel: usize,
    context: usize,
}

entry! { Unlocked cuGraphAddKernelNode(
    node: *mut usize, graph: usize, needs: *const usize, count: usize,
    parameters: *const KernelParameters,
) |call| {
    let it = parameters.as_ref().ok_or(INVALID_VALUE)?;
    let action = super::launch::action(&call.lock(), it.function, it.parameters, it.extra)?;
    add(call, node, graph, needs, count, graph::KERNEL, Some(action))
} }

entry! { Unlocked cuGraphAddKernelNode_v2(
    node: *mut usize, graph: usize, needs: *const usize, count: usize,
    parameters: *const KernelParameters2,
) |call| {
    let it = parameters.as_ref().ok_or(INVALID_VALUE)?;
    let function = if it.start.function == 0 { it.kernel } else { it.start.function };
    let start = &it.start;
    let action = super::launch::action(&call.lock(), function, start.parameters, start.extra)?;
    add(call, node, graph, needs, count, graph::KERNEL, Some(action))
} }

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
pub struct HostParameters {
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: usize,
}

entry! { Unlocked cuGraphAddHostNode(
    node: *mut usize, graph: usize, needs: *const usize, count: usize,
    parameters: *const HostParameters,
) |call| {
    let it = parameters.as_ref().ok_or(INVALID_VALUE)?;
    let function = it.function.ok_or(INVALID_VALUE)?;
    let action = Action::Host(HostCall { function, data: it.data });
    add(call, node, graph, needs, count, graph::HOST, Some(action))
} }

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
pub struct FillParameters {
    address: u64,
    pitch: usize,
    value: u32,
    size: u32,
    width: usize,
    height: usize,
}

entry! { Unlocked cuGraphAddMemsetNode(
    node: *mut usize, graph: usize, needs: *const usize, count: usize,
    parameters: *const FillParameters, context: usize,
) |call| {
    let _ = context;
    let it = parameters.as_ref().ok_or(INVALID_VALUE)?;
    let action = super::memory::fill_action(
        call, it.address, it.pitch, it.value, it.size, it.width, it.height,
    )?;
    add(call, node, graph, needs, count, graph::MEMSET, Some(action))
} }

unsafe fn instantiate(call: &Call, place: *mut usize, graph: usize) -> Outcome {
    let mut state = call.lock();
    let graph = state.graphs.get(&graph).ok_or(INVALID_VALUE)?.clone();
    let handle = state.new_handle();
    call.journal(handle, "instantiate");
    state.executables.insert(handle, Executable { graph, context: call.context, last: None });
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put(place, handle) }
}

entry! { Context cuGraphInstantiate(
    executable: *mut usize, graph: usize, node: *mut usize, log: *mut i8, bytes: usize
) |call| {
    let _ = (node, log, bytes);
    instantiate(call, executable, graph)
} }

entry! { Context cuGraphInstantiate_v2(
    executable: *mut usize, graph: usize, node: *mut usize, log: *mut i8, bytes: usize
) |call| {
    let _ = (node, log, bytes);
    instantiate(call, executable, graph)
} }

entry! { Context cuGraphInstantiateWithFlags(
    executable: *mut usize, graph: usize, flags: u64
) |call| {
    let _ = flags;
    instantiate(call, executable, graph)
} }

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
pub struct InstantiateParameters {
    flags: u64,
    stream: usize,
    failed: usize,
    result: u32,
}

stream_entry! { Context cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(
    executable: *mut usize, graph: usize, parameters: *mut InstantiateParameters
) |call, per_thread| {
    const UPLOAD: u64 = 2;
    let parameters = parameters.as_mut().ok_or(INVALID_VALUE)?;
    (parameters.failed, parameters.result) = (0, 0);
    instantiate(call, executable, graph)?;
    if parameters.flags & UPLOAD != 0 {
        upload(call, executable.read(), parameters.stream, per_thread)?;
    }
    Ok(())
} }

entry! { Unlocked cuGraphExecDestroy(executable: usize) |call| {
    call.lock().executables.remove(&executable).map(drop).ok_or(INVALID_VALUE)
} }

entry! { Unlocked cuGraphExecGetFlags(executable: usize, flags: *mut u64) |call| {
    if !call.lock().executables.contains_key(&executable) {
        return Err(INVALID_VALUE);
    }
    put(flags, 0)
} }

entry! { Unlocked cuGraphExecUpdate_v2(
    executable: usize, graph: usize, result: *mut [usize; 3]
) |call| {
    let mut state = call.lock();
    let graph = state.graphs.get(&graph).ok_or(INVALID_VALUE)?.clone();
    put_if_wanted(result, [0; 3]);
    state.executables.get_mut(&executable).ok_or(INVALID_VALUE)?.graph = graph;
    Ok(())
} }

/// Launches behind the last launch of the same: the nodes one after the other. Branches that could
/// run side by side don't, which takes longer and is otherwise as allowed.
fn launch(call: &Call, executable: usize, stream: usize, per_thread: bool) -> Outcome {
    let mut state = call.lock();
    let stream = super::stream::resolve(call, &mut state, stream, per_thread)?;
    let found = state.executables.get(&executable).ok_or(INVALID_VALUE)?;
    let (context, last) = (found.context, found.last.clone());
    let nodes = found.graph.nodes.clone();
    if context != state.stream(stream)?.context {
        return Err(INVALID_VALUE);
    }
    capture::forbid_implicit(&mut state, stream)?;
    call.journal(stream, "graph");
    if let Some(capture) = capture::active(&mut state, stream)? {
        for node in nodes {
            add_node(&mut state, stream, capture, node.kind, node.action);
        }
        return Ok(());
    }
    if let Some(last) = last {
        state.enqueue(stream, Action::Wait(last))?;
    }
    for mut action in nodes.into_iter().filter_map(|it| it.action) {
        if call.faults.hang && action.work() > 0.0 {
            action = Action::Work(f64::INFINITY, Effect::Nothing);
        }
        state.enqueue(stream, action)?;
    }
    let end = Arc::new(Mark::default());
    state.enqueue(stream, Action::Record(Arc::clone(&end)))?;
    if let Some(executable) = state.executables.get_mut(&executable) {
        executable.last = Some(end);
    }
    call.kick(&mut state);
    Ok(())
}

fn upload(call: &Call, executable: usize, stream: usize, per_thread: bool) -> Outcome {
    if !call.lock().executables.contains_key(&executable) {
        return Err(INVALID_VALUE);
    }
    let action = Action::Work(5_000.0, Effect::Nothing);
    let submission = capture::Submission { action, kind: "graph", node: graph::EMPTY };
    capture::submit(call, stream, per_thread, submission)?;
    Ok(())
}

stream_entry! { Unlocked cuGraphLaunch, cuGraphLaunch_ptsz(
    executable: usize, stream: usize
) |call, per_thread| launch(call, executable, stream, per_thread) }

stream_entry! { Unlocked cuGraphUpload, cuGraphUpload_ptsz(
    executable: usize, stream: usize
) |call, per_thread| upload(call, executable, stream, per_thread) }
