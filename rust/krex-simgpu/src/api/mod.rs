//! The exported entry points, by subject. Names, arguments and results are those of `cuda.h`.

// Signatures are the header's; where a function has many parameters, it is not ours to change.
#![allow(clippy::too_many_arguments, clippy::missing_safety_doc)]

mod capture;
mod checkpoint;
mod context;
mod copy;
mod device;
mod event;
mod graph;
mod hollow;
mod launch;
mod memory;
mod module;
mod resolve;
mod stream;
mod table;

use crate::status::{INVALID_VALUE, Outcome};

/// Stores a result.
///
/// # Errors
/// `INVALID_VALUE`: the caller gave no place for it.
///
/// # Safety
/// `place` is null or valid for writing, as the header asks of callers.
unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, hence valid, by the contract above.
    unsafe { place.write(value) };
    Ok(())
}

/// Stores a result if the caller wants it.
///
/// # Safety
/// As for [`put`].
unsafe fn put_if_wanted<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: not null, hence valid, by the contract above.
        unsafe { place.write(value) };
    }
}

/// Defines an exported entry point: `entry! { Need name(argument: type) |call| body }`.
macro_rules! entry {
    ($need:ident $name:ident($($argument:ident: $type:ty),* $(,)?) |$call:ident| $body:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $crate::status::Status {
            $crate::driver::run($crate::driver::Need::$need, stringify!($name), |$call| {
                // SAFETY: the caller keeps the contract of the header: pointers that it gives
                // are null, which is checked, or valid for what the function does with them.
                #[allow(unused_unsafe)]
                unsafe { $body }
            })
        }
    };
}

/// Defines two entry points, one for each meaning of stream 0; `per_thread` tells which it is:
/// `stream_entry! { Need name, name_ptsz(argument: type) |call, per_thread| body }`.
macro_rules! stream_entry {
    ($need:ident $name:ident, $variant:ident($($argument:ident: $type:ty),* $(,)?)
        |$call:ident, $per_thread:ident| $body:expr) => {
        $crate::api::entry! { $need $name($($argument: $type),*) |$call| {
            let $per_thread = false;
            $body
        } }
        $crate::api::entry! { $need $variant($($argument: $type),*) |$call| {
            let $per_thread = true;
            $body
        } }
    };
}

/// Defines entry points that do nothing.
macro_rules! accepted {
    ($($need:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        $($crate::api::entry! { $need $name($($argument: $type),*) |_call| {
            $(let _ = $argument;)*
            Ok(())
        } })*
    };
}

use {accepted, entry, stream_entry};
