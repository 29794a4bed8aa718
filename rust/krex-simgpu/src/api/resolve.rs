//! Finding entry points by name, version, and meaning of stream 0.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use super::put;
use super::put_if_wanted;
use super::table::rows;
use crate::driver::run_free;
use crate::settings::driver_version;
use crate::status::{INVALID_VALUE, NOT_FOUND, Outcome, Status};

/// One entry point in one form.
pub struct Row {
    pub base: &'static str,
    /// The first version of CUDA that has it.
    pub since: i32,
    pub function: usize,
    /// The one with a default stream per thread; 0: there is none.
    pub variant: usize,
}

/// Flags: the legacy default stream, or one per thread.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// `CU_GET_PROC_ADDRESS_*`.
const FOUND: u32 = 0;
const NO_SUCH_SYMBOL: u32 = 1;
const NOT_IN_VERSION: u32 = 2;

fn table() -> &'static [Row] {
    static TABLE: OnceLock<Vec<Row>> = OnceLock::new();
    TABLE.get_or_init(rows)
}

/// The newest form that `version` has of an entry point, or why there is none.
fn find(base: &str, version: i32, per_thread: bool) -> Result<usize, u32> {
    let rows = table().iter().filter(|it| it.base == base && it.since <= driver_version());
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return Err(NO_SUCH_SYMBOL);
    }
    let row = rows.filter(|it| it.since <= version).max_by_key(|it| it.since);
    let row = row.ok_or(NOT_IN_VERSION)?;
    Ok(if per_thread && row.variant != 0 { row.variant } else { row.function })
}

/// # Safety
/// As for `cuGetProcAddress`: pointers are null or valid.
unsafe fn resolve(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut u32,
    default_flags: u64,
) -> Outcome {
    if symbol.is_null() || place.is_null() || flags & !(LEGACY | PER_THREAD) != 0 {
        return Err(INVALID_VALUE);
    }
    if version > driver_version() {
        return Err(INVALID_VALUE);
    }
    let flags = if flags == 0 { default_flags } else { flags };
    // SAFETY: not null, hence text.
    let base = unsafe { CStr::from_ptr(symbol) }.to_str().map_err(|_| NOT_FOUND)?;
    let found = find(base, version, flags & PER_THREAD != 0);
    // SAFETY: null or valid, by the contract above.
    unsafe {
        put_if_wanted(status, found.map_or_else(|it| it, |_| FOUND));
        put(place, found.unwrap_or(0) as *mut c_void)?;
    }
    // Not found is no error, whoever asks for the status or not: there is no address then.
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> Status {
    // SAFETY: the same contract.
    run_free(|| unsafe { resolve(symbol, place, version, flags, std::ptr::null_mut(), LEGACY) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut u32,
) -> Status {
    // SAFETY: the same contract.
    run_free(|| unsafe { resolve(symbol, place, version, flags, status, LEGACY) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2_ptsz(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut u32,
) -> Status {
    // SAFETY: the same contract.
    run_free(|| unsafe { resolve(symbol, place, version, flags, status, PER_THREAD) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_has_nothing_twice() {
        let keys: Vec<_> = table().iter().map(|it| (it.base, it.since)).collect();
        assert!(keys.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn the_version_chooses_the_form() {
        assert_eq!(find("cuCtxGetDevice", 12000, false), Ok(row("cuCtxGetDevice", 2000)));
        assert_eq!(find("cuCtxGetDevice", 13000, false), Ok(row("cuCtxGetDevice", 13000)));
        assert_eq!(find("cuMemAllocAsync", 11000, false), Err(NOT_IN_VERSION));
        assert_eq!(find("cuNothing", 13000, false), Err(NO_SUCH_SYMBOL));
        assert_ne!(find("cuLaunchKernel", 13000, false), find("cuLaunchKernel", 13000, true));
    }

    fn row(base: &str, since: i32) -> usize {
        table().iter().find(|it| (it.base, it.since) == (base, since)).unwrap().function
    }
}
