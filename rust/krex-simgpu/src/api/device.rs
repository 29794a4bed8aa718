//! Initialisation, devices and errors.

use std::ffi::{CStr, c_char};

use super::{entry, put};
use crate::driver::{self, run_free};
use crate::status::{self, INVALID_DEVICE, INVALID_VALUE, Status};
use crate::{device, settings};

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> Status {
    run_free(|| if flags == 0 { driver::initialise() } else { Err(INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> Status {
    // SAFETY: the caller's pointer is null or valid.
    run_free(|| unsafe { put(version, settings::driver_version()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: Status, text: *mut *const c_char) -> Status {
    run_free(|| {
        let name = status::name(error);
        // SAFETY: the caller's pointer is null or valid.
        unsafe { put(text, name.map_or(std::ptr::null(), CStr::as_ptr))? };
        if name.is_some() { Ok(()) } else { Err(INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: Status, text: *mut *const c_char) -> Status {
    // SAFETY: the same contract. A stand-in has no better words than the name.
    unsafe { cuGetErrorName(error, text) }
}

entry! { Unlocked cuDeviceGetCount(count: *mut i32) |call| {
    put(count, call.lock().devices.len() as i32)
} }

entry! { Unlocked cuDeviceGet(device: *mut i32, ordinal: i32) |call| {
    call.ordinal(ordinal)?;
    put(device, ordinal)
} }

entry! { Unlocked cuDeviceGetName(name: *mut c_char, length: i32, device: i32) |call| {
    let index = call.ordinal(device)?;
    let text = call.lock().devices[index].name.clone();
    copy_text(&text, name, length)
} }

/// Copies text into a buffer, cut where the buffer ends.
///
/// # Safety
/// `buffer` is null or has room for `length` bytes.
unsafe fn copy_text(text: &CStr, buffer: *mut c_char, length: i32) -> status::Outcome {
    if buffer.is_null() || length <= 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = text.to_bytes();
    let count = bytes.len().min(length as usize - 1);
    // SAFETY: `count` bytes and the end fit into the buffer.
    unsafe {
        buffer.copy_from(bytes.as_ptr().cast(), count);
        buffer.add(count).write(0);
    }
    Ok(())
}

entry! { Unlocked cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) |call| {
    let index = call.ordinal(device)?;
    put(uuid, call.lock().devices[index].uuid)
} }

entry! { Unlocked cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) |call| {
    let index = call.ordinal(device)?;
    put(uuid, call.lock().devices[index].uuid)
} }

entry! { Unlocked cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) |call| {
    call.ordinal(device)?;
    put(bytes, call.lock().memory.total as usize)
} }

entry! { Unlocked cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) |call| {
    let index = call.ordinal(device)?;
    let index = call.lock().devices[index].index;
    put(value, device::attribute(attribute, index).ok_or(INVALID_VALUE)?)
} }

entry! { Unlocked cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: i32) |call| {
    call.ordinal(device)?;
    put(major, 9)?;
    put(minor, 0)
} }

entry! { Unlocked cuDeviceGetPCIBusId(text: *mut c_char, length: i32, device: i32) |call| {
    let index = call.ordinal(device)?;
    let index = call.lock().devices[index].index;
    let address = std::ffi::CString::new(format!("0000:{:02x}:00.0", index + 1));
    copy_text(&address.map_err(|_| INVALID_VALUE)?, text, length)
} }

entry! { Unlocked cuDeviceGetByPCIBusId(device: *mut i32, text: *const c_char) |call| {
    if text.is_null() {
        return Err(INVALID_VALUE);
    }
    let wanted = CStr::from_ptr(text).to_string_lossy().to_lowercase();
    let state = call.lock();
    let is_it = |index: usize| format!("0000:{:02x}:00.0", index + 1).ends_with(&wanted);
    let ordinal = state.devices.iter().position(|it| is_it(it.index));
    put(device, ordinal.ok_or(INVALID_DEVICE)? as i32)
} }

entry! { Unlocked cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) |call| {
    call.ordinal(device)?;
    call.ordinal(peer)?;
    put(can, i32::from(device != peer))
} }
