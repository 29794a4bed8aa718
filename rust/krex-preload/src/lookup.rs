//! How programs find the wrappers by name, and the wrappers the driver's functions.
//!
//! A wrapper is exported under the driver's name, so that whatever is linked to the driver binds
//! to it. `dlsym` is overridden for the exact names of the wrappers. It has to be a jump, not a
//! call: the C library's `dlsym` looks at who called it, for `RTLD_NEXT` and for namespaces.
//!
//! `dlvsym` is left alone: the driver's symbols have no versions.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::lane;
use crate::wrappers::{COUNT, HARMLESS, WRAPPERS};

/// The driver's functions, by the index of their wrapper; null: not looked for yet.
static REAL: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];

/// The C library's `dlsym`.
static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The first version of `dlsym`'s symbol: every C library of this architecture has it, also those
/// in which it moved to another library.
#[cfg(target_arch = "x86_64")]
const DLSYM_VERSION: &CStr = c"GLIBC_2.2.5";
#[cfg(target_arch = "aarch64")]
const DLSYM_VERSION: &CStr = c"GLIBC_2.17";

/// The name under which the driver is loaded.
pub const DRIVER: &CStr = c"libcuda.so.1";

/// What `dlsym` is to do, in the two registers of a return value.
#[repr(C)]
struct Choice {
    address: *const c_void,
    /// Not zero: return the address; zero: let the C library answer.
    decided: usize,
}

const UNDECIDED: Choice = Choice { address: ptr::null(), decided: 0 };

impl Choice {
    fn decided(address: *const c_void) -> Self {
        Self { address, decided: 1 }
    }
}

/// `void *dlsym(void *restrict handle, const char *restrict symbol)`
///
/// <https://man7.org/linux/man-pages/man3/dlsym.3.html>
///
/// # Safety
/// As the C library's.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void {
    // Both arguments are kept, the stack is aligned to 16 bytes for the call, and left as it was
    // found for the jump, so that the C library sees our caller.
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {choose}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jne 2f",
        "jmp qword ptr [rip + {real}]",
        "2:",
        "ret",
        choose = sym choose,
        real = sym REAL_DLSYM,
    )
}

/// `void *dlsym(void *restrict handle, const char *restrict symbol)`
///
/// # Safety
/// As the C library's.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {choose}",
        "mov x2, x0",
        "mov x3, x1",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbnz x3, 2f",
        "adrp x16, {real}",
        "ldr x16, [x16, :lo12:{real}]",
        "br x16",
        "2:",
        "mov x0, x2",
        "ret",
        choose = sym choose,
        real = sym REAL_DLSYM,
    )
}

/// Decides what `dlsym` returns. Called for every symbol of every program: it allocates nothing
/// and takes no lock for names that are not the driver's.
extern "C" fn choose(handle: *mut c_void, symbol: *const c_char) -> Choice {
    let Some(real) = real_dlsym() else {
        return Choice::decided(ptr::null());
    };
    if symbol.is_null() {
        return UNDECIDED;
    }
    // SAFETY: dlsym's caller passes a zero-terminated string; the second byte is read only if the
    // first is not the last.
    let begins = unsafe { *symbol == b'c' as c_char && *symbol.add(1) == b'u' as c_char };
    if !begins || handle == libc::RTLD_NEXT {
        return UNDECIDED;
    }
    // SAFETY: a zero-terminated string, as above.
    let name = unsafe { CStr::from_ptr(symbol) };
    let Some(index) = find(name) else {
        notice_unknown(real, handle, name);
        return UNDECIDED;
    };
    let wrapper = WRAPPERS[index].address;
    if handle == libc::RTLD_DEFAULT {
        // Our own export would be found, also where there is no driver.
        let found = self::real(index).is_some();
        forget_error();
        return match found {
            true => Choice::decided(wrapper),
            // SAFETY: both arguments are the caller's. There is no such symbol behind us, so this
            // fails, and leaves its message for dlerror.
            false => Choice::decided(unsafe { real(libc::RTLD_NEXT, symbol) }),
        };
    }
    // SAFETY: both arguments are the caller's; with a handle the result doesn't depend on who asks.
    let address = unsafe { real(handle, symbol) };
    match address.is_null() {
        // Asked again, the C library leaves its message.
        true => UNDECIDED,
        false => Choice::decided(adopt(index, address)),
    }
}

/// The C library's `dlsym`, found by a way that does not lead here.
fn real_dlsym() -> Option<Dlsym> {
    let mut address = REAL_DLSYM.load(Ordering::Acquire);
    if address.is_null() {
        // SAFETY: dlvsym(handle, symbol, version) with zero-terminated strings. RTLD_NEXT: the
        // first behind this library.
        address =
            unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), DLSYM_VERSION.as_ptr()) };
        // Release: nothing is published with it but the address; everybody finds the same.
        REAL_DLSYM.store(address, Ordering::Release);
    }
    // SAFETY: the C library's dlsym has this type; a null pointer becomes `None`.
    unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(address) }
}

/// The index of the wrapper of an exported function.
pub fn find(name: &CStr) -> Option<usize> {
    WRAPPERS.binary_search_by(|it| it.name.cmp(name)).ok()
}

/// The wrapper whose address this is.
pub fn is_wrapper(address: *const c_void) -> bool {
    WRAPPERS.iter().any(|it| ptr::eq(it.address, address))
}

/// Whether the table says that nothing has to be done about it.
pub fn is_harmless(name: &str) -> bool {
    HARMLESS.binary_search(&name).is_ok()
}

/// Exchanges the address of a driver's function for its wrapper, which calls that address from
/// now on. A second driver in one process is left alone, and said.
pub fn adopt(index: usize, address: *mut c_void) -> *const c_void {
    let wrapper = &WRAPPERS[index];
    if ptr::eq(address, wrapper.address) {
        return address;
    }
    let slot = &REAL[index];
    // AcqRel: whoever calls through the address sees the library that it is in as loaded.
    let known =
        slot.compare_exchange(ptr::null_mut(), address, Ordering::AcqRel, Ordering::Acquire);
    match known {
        Ok(_) => {
            keep_loaded(address);
            wrapper.address
        }
        Err(known) if known == address => wrapper.address,
        Err(_) => {
            if wrapper.submits {
                lane::note_incomplete(wrapper.name);
            }
            address
        }
    }
}

/// The wrapper for a function of the driver that lies at another address than the one that is
/// exported: whichever was found first is called.
pub fn stand_in(index: usize, address: *mut c_void) -> *const c_void {
    let wrapper = WRAPPERS[index].address;
    if !ptr::eq(address, wrapper) {
        // AcqRel: as in `adopt`.
        let _ = REAL[index].compare_exchange(
            ptr::null_mut(),
            address,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }
    wrapper
}

/// The driver's function that belongs to a wrapper.
#[inline]
pub fn real(index: usize) -> Option<ptr::NonNull<c_void>> {
    // Acquire: partner of the AcqRel in `adopt`.
    match ptr::NonNull::new(REAL[index].load(Ordering::Acquire)) {
        None => find_real(index),
        known => known,
    }
}

#[cold]
fn find_real(index: usize) -> Option<ptr::NonNull<c_void>> {
    let address = ptr::NonNull::new(symbol(WRAPPERS[index].name))?;
    adopt(index, address.as_ptr());
    ptr::NonNull::new(REAL[index].load(Ordering::Acquire))
}

/// The address of a symbol of the driver: of the next library that has it, in the order in which
/// the program loaded them, or of the driver that is loaded out of that order.
pub fn symbol(name: &CStr) -> *mut c_void {
    let Some(real) = real_dlsym() else { return ptr::null_mut() };
    // SAFETY: a zero-terminated string; RTLD_NEXT means: behind this library.
    let address = unsafe { real(libc::RTLD_NEXT, name.as_ptr()) };
    if !address.is_null() {
        return address;
    }
    // SAFETY: dlopen(filename, flags) with RTLD_NOLOAD loads nothing: it returns a handle if the
    // library is there, and the handle is kept: it must not go while wrappers lead into it.
    let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: a handle that was just opened, and a zero-terminated string.
    unsafe { real(handle, name.as_ptr()) }
}

/// The address of a symbol in a library, which is loaded if need be.
pub fn symbol_of(library: &CStr, name: &CStr) -> *mut c_void {
    let Some(real) = real_dlsym() else { return ptr::null_mut() };
    // SAFETY: dlopen(filename, flags) with a zero-terminated string; the handle is kept.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: a handle that was just opened, and a zero-terminated string.
    unsafe { real(handle, name.as_ptr()) }
}

/// Takes a reference to the library that `address` is in, so that a program's `dlclose` doesn't
/// unload it: wrappers lead into it. Once for each library.
fn keep_loaded(address: *mut c_void) {
    static KEPT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    // SAFETY: `info` is plain data, for which all zeros are valid, and dladdr fills it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr(address, info) accepts any address.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return;
    }
    // Relaxed: twice does no harm.
    if KEPT.swap(info.dli_fbase, Ordering::Relaxed) != info.dli_fbase {
        // SAFETY: the name that dladdr returned is zero-terminated; nothing is loaded anew.
        unsafe { libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    }
}

/// Somebody asks the driver by name for a function that the table doesn't have.
fn notice_unknown(real: Dlsym, handle: *mut c_void, name: &CStr) {
    let text = name.to_bytes();
    let is_drivers = text.get(2).is_some_and(u8::is_ascii_uppercase);
    let Ok(text) = name.to_str() else { return };
    if !is_drivers || handle == libc::RTLD_DEFAULT || !is_suspicious(text) {
        return;
    }
    // SAFETY: the caller's own arguments.
    let address = unsafe { real(handle, name.as_ptr()) };
    // SAFETY: as in `keep_loaded`.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr accepts any address.
    let known = !address.is_null() && unsafe { libc::dladdr(address, &raw mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return;
    }
    // SAFETY: the name that dladdr returned is zero-terminated.
    let file = unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes();
    // Other libraries of the vendor have functions with such names, too.
    if file.rsplit(|it| *it == b'/').next().is_some_and(|it| it.starts_with(b"libcuda.so")) {
        lane::note_incomplete(name);
    }
}

/// Whether a function that is in no table looks like one that submits. Those for graphics libraries
/// have headers of their own, and every runtime asks for them, whoever uses them: seen with every
/// cudart, CuPy, JAX and torch. They are not gated (decision 010).
pub fn is_suspicious(name: &str) -> bool {
    const GRAPHICS: [&str; 4] = ["cuGL", "cuEGL", "cuVDPAU", "cuD3D"];
    if GRAPHICS.iter().any(|it| name.starts_with(it)) {
        return false;
    }
    const SUBMIT: [&str; 11] = [
        "Launch",
        "Memcpy",
        "Memset",
        "Prefetch",
        "Async",
        "Upload",
        "WriteValue",
        "WaitValue",
        "MemOp",
        "Record",
        "Submit",
    ];
    !is_harmless(name) && SUBMIT.iter().any(|it| name.contains(it))
}

/// What our own look-ups left for `dlerror` is not the program's.
fn forget_error() {
    // SAFETY: dlerror has no preconditions.
    unsafe { libc::dlerror() };
}
