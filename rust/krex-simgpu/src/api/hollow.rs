//! Entry points of which nobody needs what they do: textures, arrays, virtual memory and the like.
//! They are journaled, and take the device's time where the real ones do; memory stays as it is.
//! So each entry point that krex holds back can be called, and seen to be held back.

use super::capture::{self, Submission};
use super::{entry, put, stream_entry};
use crate::driver::Call;
use crate::graph;
use crate::status::Outcome;
use crate::stream::{Action, Effect};

/// A `CUipcMemHandle`.
#[repr(C)]
pub struct IpcHandle([u8; 64]);

fn submit(call: &Call, stream: usize, per_thread: bool, kind: &'static str) -> Outcome {
    let action = Action::Work(2_000.0, Effect::Nothing);
    let submission = Submission { action, kind, node: graph::EMPTY };
    capture::submit(call, stream, per_thread, submission)?;
    Ok(())
}

/// Work that takes its time in a stream: a parameter, or 0.
macro_rules! submissions {
    ($($kind:ident $stream:tt $name:ident $(, $variant:ident)?
        ($($argument:ident: $type:ty),*);)*) => {
        $(submissions! { @one $kind $stream $name $(, $variant)? ($($argument: $type),*) })*
    };
    (@one $kind:ident $stream:tt $name:ident, $variant:ident($($argument:ident: $type:ty),*)) => {
        stream_entry! { Context $name, $variant($($argument: $type),*) |call, per_thread| {
            $(let _ = &$argument;)*
            submit(call, $stream, per_thread, stringify!($kind))
        } }
    };
    (@one $kind:ident $stream:tt $name:ident($($argument:ident: $type:ty),*)) => {
        entry! { Context $name($($argument: $type),*) |call| {
            $(let _ = &$argument;)*
            submit(call, $stream, false, stringify!($kind))
        } }
    };
}

/// What makes something: a handle that stands for nothing.
macro_rules! makers {
    ($($name:ident($place:ident: *mut $wide:ty $(, $argument:ident: $type:ty)*);)*) => {
        $(entry! { Context $name($place: *mut $wide $(, $argument: $type)*) |call| {
            $(let _ = &$argument;)*
            call.journal(0, "resource");
            let handle = call.lock().new_handle();
            put($place, handle as $wide)
        } })*
    };
}

/// What changes or ends something.
macro_rules! changes {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(entry! { Unlocked $name($($argument: $type),*) |call| {
            $(let _ = &$argument;)*
            call.journal(0, "resource");
            Ok(())
        } })*
    };
}

submissions! {
    copy stream cuFabricCpyBatchAsync, cuFabricCpyBatchAsync_ptsz(num_ops: usize, op_list: usize, flags: u64, stream: usize);
    other stream cuGraphicsMapResources, cuGraphicsMapResources_ptsz(count: u32, resources: usize, stream: usize);
    other stream cuGraphicsUnmapResources, cuGraphicsUnmapResources_ptsz(count: u32, resources: usize, stream: usize);
    other 0 cuGreenCtxRecordEvent(h_ctx: usize, h_event: usize);
    other 0 cuGreenCtxWaitEvent(h_ctx: usize, h_event: usize);
    other stream cuMemBatchDecompressAsync, cuMemBatchDecompressAsync_ptsz(params_array: usize, count: usize, flags: u32, error_index: usize, stream: usize);
    other stream cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync_ptsz(dptrs: usize, sizes: usize, count: usize, prefetch_locs: usize, prefetch_loc_idxs: usize, num_prefetch_locs: usize, flags: u64, stream: usize);
    other stream cuMemDiscardBatchAsync, cuMemDiscardBatchAsync_ptsz(dptrs: usize, sizes: usize, count: usize, flags: u64, stream: usize);
    other stream cuMemMapArrayAsync, cuMemMapArrayAsync_ptsz(map_info_list: usize, count: u32, stream: usize);
    other stream cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync_ptsz(dptrs: usize, sizes: usize, count: usize, prefetch_locs: usize, prefetch_loc_idxs: usize, num_prefetch_locs: usize, flags: u64, stream: usize);
    copy 0 cuMemcpy2D(p_copy: usize);
    copy stream cuMemcpy2DAsync(p_copy: usize, stream: usize);
    copy 0 cuMemcpy2DUnaligned(p_copy: usize);
    copy 0 cuMemcpy3D(p_copy: usize);
    copy 0 cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(p_copy: usize);
    copy stream cuMemcpy3DAsync(p_copy: usize, stream: usize);
    copy stream cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(p_copy: usize, stream: usize);
    copy stream cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz(num_ops: usize, op_list: usize, fail_idx: usize, flags: u64, stream: usize);
    copy stream cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz(num_ops: usize, op_list: usize, flags: u64, stream: usize);
    copy 0 cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(p_copy: usize);
    copy stream cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(p_copy: usize, stream: usize);
    copy stream cuMemcpy3DWithAttributesAsync, cuMemcpy3DWithAttributesAsync_ptsz(op: usize, flags: u64, stream: usize);
    copy 0 cuMemcpyAtoA(dst_array: usize, dst_offset: u32, src_array: usize, src_offset: u32, byte_count: u32);
    copy 0 cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(dst_array: usize, dst_offset: usize, src_array: usize, src_offset: usize, byte_count: usize);
    copy 0 cuMemcpyAtoD(dst_device: u32, src_array: usize, src_offset: u32, byte_count: u32);
    copy 0 cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(dst_device: u64, src_array: usize, src_offset: usize, byte_count: usize);
    copy 0 cuMemcpyAtoH(dst_host: usize, src_array: usize, src_offset: u32, byte_count: u32);
    copy 0 cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(dst_host: usize, src_array: usize, src_offset: usize, byte_count: usize);
    copy stream cuMemcpyAtoHAsync(dst_host: usize, src_array: usize, src_offset: u32, byte_count: u32, stream: usize);
    copy stream cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(dst_host: usize, src_array: usize, src_offset: usize, byte_count: usize, stream: usize);
    copy 0 cuMemcpyDtoA(dst_array: usize, dst_offset: u32, src_device: u32, byte_count: u32);
    copy 0 cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(dst_array: usize, dst_offset: usize, src_device: u64, byte_count: usize);
    copy 0 cuMemcpyDtoD(dst_device: u32, src_device: u32, byte_count: u32);
    copy stream cuMemcpyDtoDAsync(dst_device: u32, src_device: u32, byte_count: u32, stream: usize);
    copy 0 cuMemcpyDtoH(dst_host: usize, src_device: u32, byte_count: u32);
    copy stream cuMemcpyDtoHAsync(dst_host: usize, src_device: u32, byte_count: u32, stream: usize);
    copy 0 cuMemcpyHtoA(dst_array: usize, dst_offset: u32, src_host: usize, byte_count: u32);
    copy 0 cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(dst_array: usize, dst_offset: usize, src_host: usize, byte_count: usize);
    copy stream cuMemcpyHtoAAsync(dst_array: usize, dst_offset: u32, src_host: usize, byte_count: u32, stream: usize);
    copy stream cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(dst_array: usize, dst_offset: usize, src_host: usize, byte_count: usize, stream: usize);
    copy 0 cuMemcpyHtoD(dst_device: u32, src_host: usize, byte_count: u32);
    copy stream cuMemcpyHtoDAsync(dst_device: u32, src_host: usize, byte_count: u32, stream: usize);
    memset 0 cuMemsetD16(dst_device: u32, us: u16, n: u32);
    memset 0 cuMemsetD2D16(dst_device: u32, dst_pitch: u32, us: u16, width: u32, height: u32);
    memset 0 cuMemsetD2D32(dst_device: u32, dst_pitch: u32, ui: u32, width: u32, height: u32);
    memset 0 cuMemsetD2D8(dst_device: u32, dst_pitch: u32, uc: u8, width: u32, height: u32);
    memset 0 cuMemsetD32(dst_device: u32, ui: u32, n: u32);
    memset 0 cuMemsetD8(dst_device: u32, uc: u8, n: u32);
    other stream cuSignalExternalSemaphoresAsync, cuSignalExternalSemaphoresAsync_ptsz(ext_sem_array: usize, params_array: usize, num_ext_sems: u32, stream: usize);
    other stream cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(stream: usize, dptr: u64, length: usize, flags: u32);
    other stream cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz(stream: usize, count: u32, param_array: usize, flags: u32);
    other stream cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(stream: usize, count: u32, param_array: usize, flags: u32);
    other stream cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz(ext_sem_array: usize, params_array: usize, num_ext_sems: u32, stream: usize);
    other 0 cuLaunchCooperativeKernelMultiDevice(launch_params_list: usize, num_devices: u32, flags: u32);
}

makers! {
    cuArray3DCreate(p_handle: *mut usize, p_allocate_array: usize);
    cuArray3DCreate_v2(p_handle: *mut usize, p_allocate_array: usize);
    cuArrayCreate(p_handle: *mut usize, p_allocate_array: usize);
    cuArrayCreate_v2(p_handle: *mut usize, p_allocate_array: usize);
    cuExternalMemoryGetMappedBuffer(dev_ptr: *mut usize, ext_mem: usize, buffer_desc: usize);
    cuExternalMemoryGetMappedMipmappedArray(mipmap: *mut usize, ext_mem: usize, mipmap_desc: usize);
    cuGreenCtxStreamCreate(ph_stream: *mut usize, green_ctx: usize, flags: u32, priority: i32);
    cuImportExternalMemory(ext_mem_out: *mut usize, mem_handle_desc: usize);
    cuImportExternalSemaphore(ext_sem_out: *mut usize, sem_handle_desc: usize);
    cuIpcOpenMemHandle(pdptr: *mut usize, handle: IpcHandle, flags: u32);
    cuIpcOpenMemHandle_v2(pdptr: *mut usize, handle: IpcHandle, flags: u32);
    cuMemAddressReserve(ptr: *mut usize, size: usize, alignment: usize, addr: u64, flags: u64);
    cuMemAlloc(dptr: *mut u32, bytesize: u32);
    cuMemAllocPitch(dptr: *mut u32, p_pitch: usize, width_in_bytes: u32, height: u32, element_size_bytes: u32);
    cuMemCreate(handle: *mut usize, size: usize, prop: usize, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut usize, os_handle: usize, sh_handle_type: u32);
    cuMemPoolImportFromShareableHandle(pool_out: *mut usize, handle: usize, handle_type: u32, flags: u64);
    cuMemPoolImportPointer(ptr_out: *mut usize, pool: usize, share_data: usize);
    cuMipmappedArrayCreate(p_handle: *mut usize, p_mipmapped_array_desc: usize, num_mipmap_levels: u32);
    cuMulticastCreate(mc_handle: *mut usize, prop: usize);
    cuSurfObjectCreate(p_surf_object: *mut usize, p_res_desc: usize);
    cuTexObjectCreate(p_tex_object: *mut usize, p_res_desc: usize, p_tex_desc: usize, p_res_view_desc: usize);
    cuGreenCtxCreate(ph_ctx: *mut usize, desc: usize, dev: i32, flags: u32);
}

changes! {
    cuArrayDestroy(h_array: usize);
    cuDestroyExternalMemory(ext_mem: usize);
    cuDestroyExternalSemaphore(ext_sem: usize);
    cuDeviceGraphMemTrim(device: i32);
    cuFlushGPUDirectRDMAWrites(target: u32, scope: u32);
    cuGraphExecUpdate(h_graph_exec: usize, h_graph: usize, h_error_node_out: usize, update_result_out: usize);
    cuGraphicsUnregisterResource(resource: usize);
    cuIpcCloseMemHandle(dptr: u64);
    cuLogicalEndpointAddDevice(le_id: u64, dev: i32);
    cuLogicalEndpointBindAddr(le_id: u64, dev: i32, offset: u64, ptr: usize, size: u64, flags: u64);
    cuLogicalEndpointBindMem(le_id: u64, dev: i32, offset: u64, mem_handle: u64, mem_offset: u64, size: u64, flags: u64);
    cuLogicalEndpointCreate(le_id: u64, prop: usize);
    cuLogicalEndpointDestroy(le_id: u64);
    cuLogicalEndpointImport(le_id: u64, handle: usize, handle_type: u32);
    cuLogicalEndpointUnbind(le_id: u64, dev: i32, offset: u64, size: u64);
    cuMemAddressFree(ptr: u64, size: usize);
    cuMemAllocHost(pp: usize, bytesize: u32);
    cuMemFree(dptr: u32);
    cuMemHostRegister(p: usize, bytesize: usize, flags: u32);
    cuMemMap(ptr: u64, size: usize, offset: usize, handle: u64, flags: u64);
    cuMemRelease(handle: u64);
    cuMemSetAccess(ptr: u64, size: usize, desc: usize, count: usize);
    cuMemUnmap(ptr: u64, size: usize);
    cuMipmappedArrayDestroy(h_mipmapped_array: usize);
    cuMulticastAddDevice(mc_handle: u64, dev: i32);
    cuMulticastBindAddr(mc_handle: u64, mc_offset: usize, memptr: u64, size: usize, flags: u64);
    cuMulticastBindAddr_v2(mc_handle: u64, dev: i32, mc_offset: usize, memptr: u64, size: usize, flags: u64);
    cuMulticastBindMem(mc_handle: u64, mc_offset: usize, mem_handle: u64, mem_offset: usize, size: usize, flags: u64);
    cuMulticastBindMem_v2(mc_handle: u64, dev: i32, mc_offset: usize, mem_handle: u64, mem_offset: usize, size: usize, flags: u64);
    cuMulticastUnbind(mc_handle: u64, dev: i32, mc_offset: usize, size: usize);
    cuSurfObjectDestroy(surf_object: u64);
    cuTexObjectDestroy(tex_object: u64);
    cuGreenCtxDestroy(h_ctx: usize);
}
