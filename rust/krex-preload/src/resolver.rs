//! `cuGetProcAddress`: most programs come by the driver's functions through it alone.
//!
//! The driver is asked first. What it returns is then exchanged for the wrapper of the function at
//! that address, so that versions and per-thread variants need no rules of ours. Where the address
//! is none that the driver exports, name, version and mode tell which function it is.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver::{Status, status};
use crate::wrappers::{COUNT, RENAMED, WRAPPERS};
use crate::{lane, lookup};

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM` and `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// Asks the driver, then exchanges the address.
pub fn resolve(
    symbol: *mut c_void,
    function: *mut c_void,
    version: i32,
    flags: u64,
    per_thread_by_default: bool,
    work: impl FnOnce() -> Status,
) -> Status {
    let result = work();
    let function = function.cast::<*mut c_void>();
    if result != status::SUCCESS || function.is_null() || symbol.is_null() {
        return result;
    }
    // SAFETY: the driver accepted `symbol` as a zero-terminated string.
    let name = unsafe { CStr::from_ptr(symbol.cast::<c_char>()) };
    // SAFETY: the driver has just written to where `function` points.
    let address = unsafe { *function };
    let Ok(text) = name.to_str() else { return result };
    if address.is_null() || !text.starts_with("cu") {
        return result;
    }
    let version = u32::try_from(version).unwrap_or(0);
    let per_thread = flags & PER_THREAD != 0 || (per_thread_by_default && flags & LEGACY == 0);
    if krex_core::hooks::sabotaged("exchange") {
        return result;
    }
    let found = match exported_at(address, text, per_thread) {
        Some(index) => Some(lookup::adopt(index, address)),
        None => named(text, version, per_thread).map(|index| lookup::stand_in(index, address)),
    };
    match found {
        // SAFETY: the caller's variable, as above.
        Some(wrapper) => unsafe { *function = wrapper.cast_mut() },
        None if lookup::is_suspicious(text) && !lookup::is_wrapper(address) => {
            lane::note_incomplete(name);
        }
        None => {}
    }
    result
}

/// Since when the driver hands the function out under a name; `None`: it never does.
fn since(index: usize, bare: &str) -> Option<u32> {
    if WRAPPERS[index].base == bare {
        return Some(WRAPPERS[index].since);
    }
    let renamed = RENAMED.iter().find(|(name, _, place)| *name == bare && *place == index);
    renamed.map(|(_, since, _)| *since)
}

/// The wrapper of the function that the driver exports at `address`. One address can have several
/// names, of versions that do the same: that which was asked for is nearest.
fn exported_at(address: *mut c_void, name: &str, per_thread: bool) -> Option<usize> {
    let bare = bare(name);
    (0..COUNT).filter(|index| exported(*index) == address).max_by_key(|index| {
        (since(*index, bare).is_some(), WRAPPERS[*index].per_thread == per_thread)
    })
}

/// The wrapper of the function that the driver has for a name, a version and a mode.
fn named(name: &str, version: u32, per_thread: bool) -> Option<usize> {
    let bare = bare(name);
    let newest = |mode: bool| {
        (0..COUNT)
            .filter(|index| WRAPPERS[*index].per_thread == mode)
            .filter_map(|index| since(index, bare).map(|since| (since, index)))
            .filter(|(since, _)| *since <= version)
            .max()
            .map(|(_, index)| index)
    };
    // Most functions have no variant for the mode.
    if per_thread { newest(true).or_else(|| newest(false)) } else { newest(false) }
}

fn bare(name: &str) -> &str {
    let name = ["_ptsz", "_ptds"].iter().find_map(|it| name.strip_suffix(it)).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|it| it.is_ascii_digit()) => base,
        _ => name,
    }
}

/// What the driver exports under a wrapper's name.
fn exported(index: usize) -> *mut c_void {
    static EXPORTED: [AtomicPtr<c_void>; COUNT] =
        [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];
    // Looked for, and not there.
    let absent = ptr::dangling_mut::<c_void>();
    // Relaxed: everybody finds the same.
    let known = EXPORTED[index].load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let found = lookup::symbol(WRAPPERS[index].name);
    let found = if found.is_null() { absent } else { found };
    EXPORTED[index].store(found, Ordering::Relaxed);
    found
}
