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
    match index_of(address, text, version, per_thread) {
        // SAFETY: the caller's variable, as above.
        Some(index) => unsafe { *function = lookup::adopt(index, address).cast_mut() },
        None if lookup::is_suspicious(text) && !lookup::is_wrapper(address) => {
            lane::note_incomplete(name);
        }
        None => {}
    }
    result
}

/// The wrapper of the driver's function at `address`, which it returned for a name, a version and
/// a mode.
fn index_of(address: *mut c_void, name: &str, version: u32, per_thread: bool) -> Option<usize> {
    let bare = bare(name);
    let renamed =
        |index: usize| RENAMED.iter().find(|(other, _, place)| *other == bare && *place == index);
    let is_named = |index: usize| WRAPPERS[index].base == bare || renamed(index).is_some();
    // One address can have several names: versions that do the same.
    let exported = |index: usize| exported(index) == address;
    let fits = |index: &usize| WRAPPERS[*index].per_thread == per_thread;
    let candidates = || (0..COUNT).filter(|index| is_named(*index));
    if let Some(index) = candidates()
        .find(|index| exported(*index) && fits(index))
        .or_else(|| candidates().find(|index| exported(*index)))
        .or_else(|| (0..COUNT).find(|index| exported(*index)))
    {
        return Some(index);
    }
    let since = |index: usize| renamed(index).map_or(WRAPPERS[index].since, |it| it.1);
    let newest = |mode: bool| {
        candidates()
            .filter(|index| WRAPPERS[*index].per_thread == mode && since(*index) <= version)
            .max_by_key(|index| since(*index))
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
