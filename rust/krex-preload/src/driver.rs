//! The driver's own functions, as krex uses them itself, past the wrappers.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::lookup;

/// A `CUresult`.
pub type Status = u32;

/// The results that matter here.
pub mod status {
    pub const SUCCESS: u32 = 0;
    pub const INVALID_CONTEXT: u32 = 201;
    pub const INVALID_HANDLE: u32 = 400;
    pub const NOT_FOUND: u32 = 500;
    pub const NOT_READY: u32 = 600;
    pub const CONTEXT_IS_DESTROYED: u32 = 709;
    /// The lowest and highest of the errors about captures.
    pub const CAPTURE_ERRORS: std::ops::RangeInclusive<u32> = 900..=908;

    /// Whether an event or a stream has ended with its context: nothing is left to wait for.
    pub fn is_gone(result: u32) -> bool {
        matches!(result, INVALID_CONTEXT | INVALID_HANDLE | CONTEXT_IS_DESTROYED)
    }
}

pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const CAPTURE_MODE_RELAXED: c_int = 2;

type Handle = *mut c_void;

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:literal ($($type:ty),*);)*) => {
        /// The functions; found once, when the first context is made.
        pub struct Driver {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        fn find() -> Option<Driver> {
            $(
                let address = lookup::symbol($name);
                if address.is_null() {
                    log::info!("the driver has no {}", $name.to_string_lossy());
                    return None;
                }
                // SAFETY: the driver's function of this name has this type, see cuda.h.
                let $field = unsafe {
                    std::mem::transmute::<Handle, unsafe extern "C" fn($($type),*) -> Status>(address)
                };
            )*
            Some(Driver { $($field,)* })
        }
    };
}

functions! {
    context_get_current = c"cuCtxGetCurrent"(*mut Handle);
    context_set_current = c"cuCtxSetCurrent"(Handle);
    context_get_device = c"cuCtxGetDevice"(*mut c_int);
    device_get_name = c"cuDeviceGetName"(*mut c_char, c_int, c_int);
    /// Of a MIG instance it tells the instance's.
    device_get_uuid = c"cuDeviceGetUuid_v2"(*mut [u8; 16], c_int);
    context_synchronize = c"cuCtxSynchronize"();
    primary_get_state = c"cuDevicePrimaryCtxGetState"(c_int, *mut c_uint, *mut c_int);
    event_create = c"cuEventCreate"(*mut Handle, c_uint);
    event_destroy = c"cuEventDestroy_v2"(Handle);
    event_query = c"cuEventQuery"(Handle);
    event_record = c"cuEventRecord"(Handle, Handle);
    event_record_per_thread = c"cuEventRecord_ptsz"(Handle, Handle);
    stream_get_context = c"cuStreamGetCtx"(Handle, *mut Handle);
    stream_get_flags = c"cuStreamGetFlags"(Handle, *mut c_uint);
    stream_is_capturing = c"cuStreamIsCapturing"(Handle, *mut c_int);
    stream_is_capturing_per_thread = c"cuStreamIsCapturing_ptsz"(Handle, *mut c_int);
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode"(*mut c_int);
}

/// The calling thread's calls break no capture while it lives, unless they concern its stream.
pub struct Relaxed<'a> {
    driver: &'a Driver,
    mode: c_int,
}

impl<'a> Relaxed<'a> {
    pub fn new(driver: &'a Driver) -> Self {
        let mut it = Self { driver, mode: CAPTURE_MODE_RELAXED };
        it.exchange();
        it
    }

    fn exchange(&mut self) {
        // SAFETY: cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *): a variable that lives
        // through the call.
        unsafe { (self.driver.exchange_capture_mode)(&raw mut self.mode) };
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        self.exchange();
    }
}

impl Driver {
    /// The functions, if the driver is loaded and has all of them.
    pub fn get() -> Option<&'static Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        DRIVER.get_or_init(find).as_ref()
    }

    /// The calling thread's context and the number of its device.
    pub fn current(&self) -> Option<(usize, i32)> {
        let (mut context, mut ordinal) = (std::ptr::null_mut(), 0);
        // SAFETY: cuCtxGetCurrent(CUcontext *) and cuCtxGetDevice(CUdevice *) write to the two
        // variables, which live through the calls.
        let known = unsafe {
            (self.context_get_current)(&raw mut context) == status::SUCCESS
                && !context.is_null()
                && (self.context_get_device)(&raw mut ordinal) == status::SUCCESS
        };
        known.then_some((context as usize, ordinal))
    }

    /// krex's name for a device.
    pub fn name_of(&self, ordinal: i32) -> Option<String> {
        let mut uuid = [0; 16];
        let mut name = [0; 128];
        // SAFETY: cuDeviceGetUuid(CUuuid *, CUdevice) writes 16 bytes, and
        // cuDeviceGetName(char *, int, CUdevice) at most as many as it is told.
        let known = unsafe {
            (self.device_get_uuid)(&raw mut uuid, ordinal) == status::SUCCESS
                && (self.device_get_name)(name.as_mut_ptr(), 127, ordinal) == status::SUCCESS
        };
        // SAFETY: zero-terminated: the last byte was not the driver's to write.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_bytes();
        // The UUID alone doesn't tell a part of a device from a whole one; its name does.
        let is_mig = name.windows(5).any(|it| it == b" MIG ");
        known.then(|| krex_core::device::gpu_name(uuid, is_mig))
    }
}
