//! Stand-in until the launcher exists: prints the version.

#![cfg_attr(not(test), no_main)]

/// C's `main`, so that Rust's runtime leaves the signal dispositions alone.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    println!("krex {}", env!("CARGO_PKG_VERSION"));
    0
}
