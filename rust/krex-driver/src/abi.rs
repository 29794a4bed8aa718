//! How the types of the driver's parameters are passed.
//!
//! Only size and kind matter to a wrapper, which passes everything on: pointers and handles are
//! addresses, and enumerations are unsigned numbers of four bytes. The test of the header compares
//! each line with the compiler's view. A structure of one machine word goes where a number of the
//! same size goes.

/// (type in C, type in Rust, bytes).
pub const TYPES: &[(&str, &str, usize)] = &[
    ("unsigned char", "u8", 1),
    ("unsigned short", "u16", 2),
    ("int", "i32", 4),
    ("unsigned int", "u32", 4),
    ("unsigned long long", "u64", 8),
    ("size_t", "usize", 8),
    ("cuuint32_t", "u32", 4),
    ("cuuint64_t", "u64", 8),
    ("CUdevice", "i32", 4),
    ("CUdeviceptr", "u64", 8),
    ("CUdeviceptr_v1", "u32", 4),
    ("CUmemGenericAllocationHandle", "u64", 8),
    ("CUtexObject", "u64", 8),
    ("CUsurfObject", "u64", 8),
    ("CUlogicalEndpointId", "u32", 4),
    // Enumerations.
    ("CUresult", "u32", 4),
    ("CUstreamCaptureMode", "u32", 4),
    ("CUmemAllocationHandleType", "u32", 4),
    ("CUmem_advise", "u32", 4),
    ("CUflushGPUDirectRDMAWritesTarget", "u32", 4),
    ("CUflushGPUDirectRDMAWritesScope", "u32", 4),
    ("CUlimit", "u32", 4),
    ("CUlogicalEndpointIpcHandleType", "u32", 4),
    // Structures, by value.
    ("CUmemLocation", "u64", 8),
    ("CUipcMemHandle", "IpcMemHandle", 64),
    // Handles and functions.
    ("CUstream", "Address", 8),
    ("CUcontext", "Address", 8),
    ("CUevent", "Address", 8),
    ("CUarray", "Address", 8),
    ("CUmipmappedArray", "Address", 8),
    ("CUgraph", "Address", 8),
    ("CUgraphExec", "Address", 8),
    ("CUgraphicsResource", "Address", 8),
    ("CUfunction", "Address", 8),
    ("CUkernel", "Address", 8),
    ("CUlibrary", "Address", 8),
    ("CUmodule", "Address", 8),
    ("CUmemoryPool", "Address", 8),
    ("CUgreenCtx", "Address", 8),
    ("CUdevResourceDesc", "Address", 8),
    ("CUexternalMemory", "Address", 8),
    ("CUexternalSemaphore", "Address", 8),
    ("CUhostFn", "Address", 8),
    ("CUstreamCallback", "Address", 8),
    ("CUgraphRecaptureCallback", "Address", 8),
];

/// Where structures hold a stream: (structure, member, offset).
pub const STREAMS: &[(&str, &str, usize)] = &[
    ("CUlaunchConfig", "hStream", CONFIG_STREAM),
    ("CUDA_LAUNCH_PARAMS", "hStream", LIST_STREAM),
    ("CUDA_GRAPH_INSTANTIATE_PARAMS", "hUploadStream", UPLOAD_STREAM),
];
pub const CONFIG_STREAM: usize = 32;
pub const LIST_STREAM: usize = 40;
pub const UPLOAD_STREAM: usize = 8;
/// Bytes of one launch in a list of them, a `CUDA_LAUNCH_PARAMS`.
pub const LIST_ENTRY: usize = 56;

/// The type in Rust with which a parameter is passed; `None` if it is not known.
pub fn rust_type(c_type: &str) -> Option<&'static str> {
    if c_type.ends_with('*') {
        return Some("Address");
    }
    TYPES.iter().find(|(name, _, _)| *name == c_type).map(|(_, rust, _)| *rust)
}
