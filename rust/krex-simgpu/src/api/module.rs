//! Modules, libraries, kernels and functions.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use super::capture;
use super::{accepted, entry, put, put_if_wanted};
use crate::driver::Call;
use crate::memory::Place;
use crate::module::{Function, Module};
use crate::program::Program;
use crate::state::State;
use crate::status::{
    FILE_NOT_FOUND, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND,
    Outcome,
};

/// How machine code begins: ELF, and a fat binary.
const MACHINE_CODE: [[u8; 4]; 2] = [*b"\x7fELF", [0x50, 0xed, 0x55, 0xba]];

/// # Safety
/// `image` is null, machine code of one of the kinds that begin so, or text with its end.
unsafe fn read_image(image: *const c_char) -> Outcome<Program> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: text has at least its end, machine code is longer: each byte is looked at only if
    // the one before it wasn't an end.
    let begins_so = |start: &[u8; 4]| unsafe {
        start.iter().enumerate().all(|(index, &byte)| image.add(index).read() as u8 == byte)
    };
    if MACHINE_CODE.iter().any(begins_so) {
        return Err(NO_BINARY_FOR_GPU);
    }
    // SAFETY: not machine code, hence text, by the contract above.
    let text = unsafe { CStr::from_ptr(image) };
    Program::parse(text.to_str().map_err(|_| INVALID_IMAGE)?)
}

/// Makes the module of a program in the current context, or a library (context 0).
fn load(call: &Call, program: Arc<Program>, context: usize) -> Outcome<usize> {
    call.journal(0, "module");
    let mut state = call.lock();
    if context != 0 {
        let device = state.context(context)?.device;
        drop(state);
        call.driver.shared.give_birth(device, call.driver.settings.module);
        state = call.lock();
    }
    let handle = state.new_handle();
    let mut functions = Vec::new();
    for kernel in &program.kernels {
        let function = state.new_handle();
        let made = Function { module: handle, kernel: Arc::clone(kernel) };
        state.functions.insert(function, made);
        functions.push((kernel.name.clone(), function));
    }
    let mut globals = HashMap::new();
    for (name, bytes) in program.globals.iter().filter(|_| context != 0) {
        let device = state.context(context)?.device;
        let address = state.memory.allocate(*bytes, device, context, Place::Device)?;
        globals.insert(name.clone(), (address, *bytes));
    }
    let module = Module { context, functions, globals, program, loaded: HashMap::new() };
    state.modules.insert(handle, module);
    Ok(handle)
}

fn unload(state: &mut State, handle: usize) -> Outcome {
    let module = state.modules.remove(&handle).ok_or(INVALID_HANDLE)?;
    for (_, function) in &module.functions {
        state.functions.remove(function);
    }
    for &(address, _) in module.globals.values() {
        let _ = state.memory.free(address, Place::Device);
    }
    for &loaded in module.loaded.values() {
        let _ = unload(state, loaded);
    }
    Ok(())
}

unsafe fn load_current(call: &Call, module: *mut usize, image: *const c_char) -> Outcome {
    if module.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: what the caller gave, by the contract of the header.
    let program = unsafe { read_image(image)? };
    let handle = load(call, Arc::new(program), call.context)?;
    // SAFETY: as above.
    unsafe { put(module, handle) }
}

/// # Safety
/// `name` is null or text with its end.
unsafe fn read_file(name: *const c_char) -> Outcome<CString> {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, hence text.
    let name = OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes());
    let mut bytes = std::fs::read(name).map_err(|_| FILE_NOT_FOUND)?;
    bytes.retain(|&it| it != 0);
    CString::new(bytes).map_err(|_| INVALID_IMAGE)
}

entry! { Context cuModuleLoadData(module: *mut usize, image: *const c_char) |call| {
    load_current(call, module, image)
} }

entry! { Context cuModuleLoadDataEx(
    module: *mut usize, image: *const c_char,
    count: u32, options: *const u32, values: *const *const c_void,
) |call| {
    let _ = (count, options, values);
    load_current(call, module, image)
} }

entry! { Context cuModuleLoadFatBinary(module: *mut usize, image: *const c_char) |call| {
    load_current(call, module, image)
} }

entry! { Context cuModuleLoad(module: *mut usize, name: *const c_char) |call| {
    let text = read_file(name)?;
    load_current(call, module, text.as_ptr())
} }

entry! { Context cuModuleUnload(module: usize) |call| {
    let mut state = call.lock();
    capture::forbid_unsafe(&mut state)?;
    call.journal(0, "module");
    unload(&mut state, module)
} }

entry! { Unlocked cuModuleGetLoadingMode(mode: *mut u32) |_call| put(mode, 1) }

/// # Safety
/// `name` is null or text with its end.
unsafe fn find(state: &State, module: usize, name: *const c_char) -> Outcome<usize> {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, hence text.
    let name = unsafe { CStr::from_ptr(name) };
    let module = state.modules.get(&module).ok_or(INVALID_HANDLE)?;
    let found = module.functions.iter().find(|(it, _)| it.as_c_str() == name);
    found.map(|it| it.1).ok_or(NOT_FOUND)
}

unsafe fn find_global(
    call: &Call,
    module: usize,
    name: *const c_char,
    address: *mut u64,
    bytes: *mut usize,
) -> Outcome {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    let state = call.lock();
    let module = state.modules.get(&module).ok_or(INVALID_HANDLE)?;
    // SAFETY: not null, hence text; the places are null or valid, by the contract of the header.
    unsafe {
        let &(found, size) = module.globals.get(CStr::from_ptr(name)).ok_or(NOT_FOUND)?;
        put_if_wanted(address, found);
        put_if_wanted(bytes, size);
    }
    Ok(())
}

entry! { Context cuModuleGetFunction(
    function: *mut usize, module: usize, name: *const c_char
) |call| {
    let found = find(&call.lock(), module, name)?;
    put(function, found)
} }

entry! { Context cuModuleGetGlobal_v2(
    address: *mut u64, bytes: *mut usize, module: usize, name: *const c_char
) |call| find_global(call, module, name, address, bytes) }

entry! { Context cuModuleGetFunctionCount(count: *mut u32, module: usize) |call| {
    put(count, call.lock().modules.get(&module).ok_or(INVALID_HANDLE)?.functions.len() as u32)
} }

unsafe fn load_library(call: &Call, library: *mut usize, image: *const c_char) -> Outcome {
    if library.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: what the caller gave, by the contract of the header.
    unsafe {
        let program = read_image(image)?;
        put(library, load(call, Arc::new(program), 0)?)
    }
}

entry! { Unlocked cuLibraryLoadData(
    library: *mut usize, image: *const c_char,
    options: *const u32, values: *const *const c_void, count: u32,
    library_options: *const u32, library_values: *const *const c_void, library_count: u32,
) |call| {
    let _ = (options, values, count, library_options, library_values, library_count);
    load_library(call, library, image)
} }

entry! { Unlocked cuLibraryLoadFromFile(
    library: *mut usize, name: *const c_char,
    options: *const u32, values: *const *const c_void, count: u32,
    library_options: *const u32, library_values: *const *const c_void, library_count: u32,
) |call| {
    let _ = (options, values, count, library_options, library_values, library_count);
    let text = read_file(name)?;
    load_library(call, library, text.as_ptr())
} }

entry! { Unlocked cuLibraryUnload(library: usize) |call| {
    call.journal(0, "module");
    unload(&mut call.lock(), library)
} }

entry! { Unlocked cuLibraryGetKernel(
    kernel: *mut usize, library: usize, name: *const c_char
) |call| {
    let found = find(&call.lock(), library, name)?;
    put(kernel, found)
} }

entry! { Unlocked cuLibraryGetKernelCount(count: *mut u32, library: usize) |call| {
    put(count, call.lock().modules.get(&library).ok_or(INVALID_HANDLE)?.functions.len() as u32)
} }

/// The module of a library in the current context, loaded if it isn't yet.
fn library_module(call: &Call, library: usize) -> Outcome<usize> {
    let state = call.lock();
    let found = state.modules.get(&library).ok_or(INVALID_HANDLE)?;
    if let Some(&module) = found.loaded.get(&call.context) {
        return Ok(module);
    }
    let program = Arc::clone(&found.program);
    drop(state);
    let module = load(call, program, call.context)?;
    if let Some(library) = call.lock().modules.get_mut(&library) {
        library.loaded.insert(call.context, module);
    }
    Ok(module)
}

entry! { Context cuLibraryGetModule(module: *mut usize, library: usize) |call| {
    put(module, library_module(call, library)?)
} }

entry! { Context cuLibraryGetGlobal(
    address: *mut u64, bytes: *mut usize, library: usize, name: *const c_char
) |call| {
    let module = library_module(call, library)?;
    find_global(call, module, name, address, bytes)
} }

entry! { Context cuKernelGetFunction(function: *mut usize, kernel: usize) |call| {
    let state = call.lock();
    let found = state.functions.get(&kernel).ok_or(INVALID_HANDLE)?;
    let (library, name) = (found.module, found.kernel.name.clone());
    drop(state);
    let module = library_module(call, library)?;
    let found = find(&call.lock(), module, name.as_ptr())?;
    put(function, found)
} }

entry! { Unlocked cuKernelGetLibrary(library: *mut usize, kernel: usize) |call| {
    put(library, call.lock().functions.get(&kernel).ok_or(INVALID_HANDLE)?.module)
} }

unsafe fn name_of(call: &Call, place: *mut *const c_char, function: usize) -> Outcome {
    let state = call.lock();
    let function = state.functions.get(&function).ok_or(INVALID_HANDLE)?;
    // SAFETY: null or valid; the text lives as long as the module.
    unsafe { put(place, function.kernel.name.as_ptr()) }
}

entry! { Unlocked cuFuncGetName(name: *mut *const c_char, function: usize) |call| {
    name_of(call, name, function)
} }

entry! { Unlocked cuKernelGetName(name: *mut *const c_char, kernel: usize) |call| {
    name_of(call, name, kernel)
} }

entry! { Unlocked cuFuncGetModule(module: *mut usize, function: usize) |call| {
    put(module, call.lock().functions.get(&function).ok_or(INVALID_HANDLE)?.module)
} }

unsafe fn parameter(
    call: &Call,
    function: usize,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Outcome {
    let state = call.lock();
    let kernel = &state.functions.get(&function).ok_or(INVALID_HANDLE)?.kernel;
    let parameter = kernel.parameters.get(index).ok_or(INVALID_VALUE)?;
    // SAFETY: null or valid, by the contract of the header.
    unsafe {
        put(offset, kernel.offsets()[index])?;
        put_if_wanted(size, parameter.size());
    }
    Ok(())
}

entry! { Unlocked cuFuncGetParamInfo(
    function: usize, index: usize, offset: *mut usize, size: *mut usize
) |call| parameter(call, function, index, offset, size) }

entry! { Unlocked cuKernelGetParamInfo(
    kernel: usize, index: usize, offset: *mut usize, size: *mut usize
) |call| parameter(call, kernel, index, offset, size) }

unsafe fn attribute(call: &Call, place: *mut i32, which: u32, function: usize) -> Outcome {
    if !call.lock().functions.contains_key(&function) {
        return Err(INVALID_HANDLE);
    }
    let value = match which {
        0 => 1024, // threads per block
        4 => 16,   // registers
        5 | 6 => 90,
        8 => 48 * 1024, // dynamic shared memory
        1..=17 => 0,
        _ => return Err(INVALID_VALUE),
    };
    // SAFETY: null or valid, by the contract of the header.
    unsafe { put(place, value) }
}

entry! { Unlocked cuFuncGetAttribute(value: *mut i32, which: u32, function: usize) |call| {
    attribute(call, value, which, function)
} }

entry! { Unlocked cuKernelGetAttribute(
    value: *mut i32, which: u32, kernel: usize, device: i32
) |call| {
    let _ = device;
    attribute(call, value, which, kernel)
} }

entry! { Unlocked cuFuncIsLoaded(loaded: *mut u32, function: usize) |call| {
    if !call.lock().functions.contains_key(&function) {
        return Err(INVALID_HANDLE);
    }
    put(loaded, 1)
} }

accepted! {
    Unlocked cuFuncLoad(function: usize);
    Unlocked cuFuncSetAttribute(function: usize, which: u32, value: i32);
    Unlocked cuFuncSetCacheConfig(function: usize, value: u32);
    Unlocked cuFuncSetSharedMemConfig(function: usize, value: u32);
    Unlocked cuKernelSetAttribute(which: u32, value: i32, kernel: usize, device: i32);
    Unlocked cuKernelSetCacheConfig(kernel: usize, value: u32, device: i32);
}

entry! { Context cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut i32, function: usize, size: i32, shared: usize
) |_call| {
    let _ = (function, shared);
    put(blocks, 2048 / size.max(64))
} }

entry! { Context cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut i32, function: usize, size: i32, shared: usize, flags: u32
) |_call| {
    let _ = (function, shared, flags);
    put(blocks, 2048 / size.max(64))
} }
