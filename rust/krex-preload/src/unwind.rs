//! The unwinder of the process, whichever was linked here.
//!
//! A thread that is cancelled unwinds through the wrappers, and the C library does that with
//! `libgcc_s.so.1`. The landing pads here then call back into an unwinder, which has to be the same
//! one: its data have no common layout. A portable build links another, statically (zig's), and a
//! thread that was cancelled inside of the driver crashed. So the functions of the unwinder are
//! defined here, hidden from everybody else, and lead to the library that the C library uses.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::lookup;

const COUNT: usize = 14;

const NAMES: [&CStr; COUNT] = [
    c"_Unwind_Backtrace",
    c"_Unwind_DeleteException",
    c"_Unwind_FindEnclosingFunction",
    c"_Unwind_GetCFA",
    c"_Unwind_GetDataRelBase",
    c"_Unwind_GetIP",
    c"_Unwind_GetIPInfo",
    c"_Unwind_GetLanguageSpecificData",
    c"_Unwind_GetRegionStart",
    c"_Unwind_GetTextRelBase",
    c"_Unwind_RaiseException",
    c"_Unwind_Resume",
    c"_Unwind_SetGR",
    c"_Unwind_SetIP",
];

static FUNCTIONS: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];

/// Finds the function with a number. Without it nothing can go on: the process is in the middle of
/// unwinding.
extern "C" fn find(number: usize) -> *mut c_void {
    let address = lookup::symbol_of(c"libgcc_s.so.1", NAMES[number]);
    if address.is_null() {
        std::process::abort();
    }
    // Relaxed: everybody finds the same, and nothing is published with it.
    FUNCTIONS[number].store(address, Ordering::Relaxed);
    address
}

// Each jumps, so that the unwinder sees the caller's frame as it is. None takes more than three
// arguments; the fourth and following registers for arguments need not be kept.
macro_rules! forward {
    ($($number:literal $name:literal)*) => {
        $(
            #[cfg(target_arch = "x86_64")]
            core::arch::global_asm!(
                ".text",
                concat!(".globl ", $name),
                concat!(".hidden ", $name),
                concat!(".type ", $name, ",@function"),
                concat!($name, ":"),
                "mov r11, qword ptr [rip + {functions} + 8 * {number}]",
                "test r11, r11",
                "je 2f",
                "jmp r11",
                "2:",
                "push rdi",
                "push rsi",
                "push rdx",
                "mov edi, {number}",
                "call {find}",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp rax",
                concat!(".size ", $name, ", . - ", $name),
                functions = sym FUNCTIONS,
                find = sym find,
                number = const $number,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::global_asm!(
                ".text",
                ".p2align 2",
                concat!(".globl ", $name),
                concat!(".hidden ", $name),
                concat!(".type ", $name, ",%function"),
                concat!($name, ":"),
                "adrp x16, {functions}",
                "add x16, x16, :lo12:{functions}",
                "ldr x16, [x16, 8 * {number}]",
                "cbz x16, 2f",
                "br x16",
                "2:",
                "stp x0, x1, [sp, #-32]!",
                "stp x2, x30, [sp, #16]",
                "mov x0, {number}",
                "bl {find}",
                "mov x16, x0",
                "ldp x2, x30, [sp, #16]",
                "ldp x0, x1, [sp], #32",
                "br x16",
                concat!(".size ", $name, ", . - ", $name),
                functions = sym FUNCTIONS,
                find = sym find,
                number = const $number,
            );
        )*
    };
}

forward! {
    0 "_Unwind_Backtrace"
    1 "_Unwind_DeleteException"
    2 "_Unwind_FindEnclosingFunction"
    3 "_Unwind_GetCFA"
    4 "_Unwind_GetDataRelBase"
    5 "_Unwind_GetIP"
    6 "_Unwind_GetIPInfo"
    7 "_Unwind_GetLanguageSpecificData"
    8 "_Unwind_GetRegionStart"
    9 "_Unwind_GetTextRelBase"
    10 "_Unwind_RaiseException"
    11 "_Unwind_Resume"
    12 "_Unwind_SetGR"
    13 "_Unwind_SetIP"
}
