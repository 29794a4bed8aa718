//! `libnvidia-ml.so.1`, NVIDIA's management library (NVML), opened when it is needed.
//!
//! It is part of the driver and found by the dynamic linker's rules, as every other user of it
//! finds it. It is never closed again: it has state of its own that others in the process may use.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// What a call that failed returned, with NVML's own words for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub status: c_int,
    pub text: String,
}

/// Values of `nvmlReturn_t`.
pub mod status {
    use std::ffi::c_int;

    pub const SUCCESS: c_int = 0;
    pub const INVALID_ARGUMENT: c_int = 2;
    pub const DRIVER_NOT_LOADED: c_int = 9;
    pub const FUNCTION_NOT_FOUND: c_int = 13;
    pub const GPU_IS_LOST: c_int = 15;
    pub const VERSION_MISMATCH: c_int = 18;
}

/// An `nvmlDevice_t`: a pointer into the library, valid from `nvmlInit_v2` to `nvmlShutdown`.
#[derive(Clone, Copy, Debug)]
pub struct Handle(*mut c_void);

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE` and `NVML_DEVICE_NAME_V2_BUFFER_SIZE`.
const TEXT: usize = 96;

type Plain = unsafe extern "C" fn() -> c_int;
type GetNumber = unsafe extern "C" fn(*mut c_uint) -> c_int;
type GetHandle = unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_int;
type GetPart = unsafe extern "C" fn(*mut c_void, c_uint, *mut *mut c_void) -> c_int;
type GetText = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_int;
type GetNumberOf = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_int;
type GetMode = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> c_int;
type Explain = unsafe extern "C" fn(c_int) -> *const c_char;

/// The library, initialised; dropping it shuts it down (NVML counts who uses it).
pub struct Library(*mut c_void);

impl Library {
    /// Opens and initialises it. `Err(None)`: there is none.
    ///
    /// # Errors
    /// What `nvmlInit_v2` says.
    pub fn open() -> Result<Self, Option<Failure>> {
        // SAFETY: dlopen(name, RTLD_LAZY | RTLD_LOCAL): a zero-terminated constant. NVML's
        // initialisers are those that every other user of it runs.
        let handle = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY) };
        if handle.is_null() {
            return Err(None);
        }
        let library = Self(handle);
        let started = library.function::<Plain>(c"nvmlInit_v2").and_then(|init| {
            // SAFETY: nvmlReturn_t nvmlInit_v2(void), of the library that was just opened.
            library.check(unsafe { init() })
        });
        match started {
            Ok(()) => Ok(library),
            Err(failure) => {
                // Not initialised, so there is nothing to shut down.
                std::mem::forget(library);
                Err(Some(failure))
            }
        }
    }

    /// A function of the library. Its type is the caller's word.
    fn function<F: Copy>(&self, name: &CStr) -> Result<F, Failure> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: dlsym(handle, name): a handle that dlopen returned and a constant string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            let text = format!("this driver has no {}", name.to_string_lossy());
            return Err(Failure { status: status::FUNCTION_NOT_FOUND, text });
        }
        // SAFETY: both are of a pointer's size (asserted above); the types in this file are those
        // of nvml.h for the names with which they are asked for.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }

    fn check(&self, returned: c_int) -> Result<(), Failure> {
        if returned == status::SUCCESS {
            return Ok(());
        }
        let text = self.function::<Explain>(c"nvmlErrorString").ok().and_then(|explain| {
            // SAFETY: const char *nvmlErrorString(nvmlReturn_t) takes any number, also before
            // nvmlInit, and returns a constant.
            let text = unsafe { explain(returned) };
            // SAFETY: a zero-terminated string that lives as long as the library, or null.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
        });
        let text = text.map_or_else(|| "?".to_owned(), |it| it.to_string_lossy().into_owned());
        Err(Failure { status: returned, text: format!("{text} ({returned})") })
    }

    /// How many GPUs there are.
    ///
    /// # Errors
    /// What NVML says.
    pub fn count(&self) -> Result<u32, Failure> {
        let function = self.function::<GetNumber>(c"nvmlDeviceGetCount_v2")?;
        let mut count = 0;
        // SAFETY: nvmlDeviceGetCount_v2(unsigned int *): a variable of that type.
        self.check(unsafe { function(&raw mut count) })?;
        Ok(count)
    }

    /// The GPU with this index: PCI order, as nvidia-smi counts.
    ///
    /// # Errors
    /// What NVML says; `INVALID_ARGUMENT` past the last one.
    pub fn gpu(&self, index: u32) -> Result<Handle, Failure> {
        let function = self.function::<GetHandle>(c"nvmlDeviceGetHandleByIndex_v2")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: nvmlDeviceGetHandleByIndex_v2(unsigned int, nvmlDevice_t *): a variable for it.
        self.check(unsafe { function(index, &raw mut handle) })?;
        Ok(Handle(handle))
    }

    /// # Errors
    /// What NVML says.
    pub fn uuid(&self, device: Handle) -> Result<String, Failure> {
        self.text(c"nvmlDeviceGetUUID", device)
    }

    /// What it is called, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// What NVML says.
    pub fn name(&self, device: Handle) -> Result<String, Failure> {
        self.text(c"nvmlDeviceGetName", device)
    }

    fn text(&self, name: &CStr, device: Handle) -> Result<String, Failure> {
        let function = self.function::<GetText>(name)?;
        let mut text = [0_u8; TEXT];
        // SAFETY: nvmlDeviceGetUUID and nvmlDeviceGetName (nvmlDevice_t, char *, unsigned int):
        // a handle of this library, and a buffer with its length.
        self.check(unsafe { function(device.0, text.as_mut_ptr().cast(), TEXT as c_uint) })?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// Whether the GPU is divided into parts (MIG), so that nobody can use it as a whole.
    pub fn is_divided(&self, device: Handle) -> bool {
        let Ok(function) = self.function::<GetMode>(c"nvmlDeviceGetMigMode") else { return false };
        let (mut current, mut pending) = (0, 0);
        // SAFETY: nvmlDeviceGetMigMode(nvmlDevice_t, unsigned int *, unsigned int *): a handle of
        // this library and two variables.
        let returned = unsafe { function(device.0, &raw mut current, &raw mut pending) };
        returned == status::SUCCESS && current != 0
    }

    /// The parts of a GPU that is divided.
    pub fn parts(&self, device: Handle) -> Vec<Handle> {
        let (Ok(limit), Ok(get)) = (
            self.function::<GetNumberOf>(c"nvmlDeviceGetMaxMigDeviceCount"),
            self.function::<GetPart>(c"nvmlDeviceGetMigDeviceHandleByIndex"),
        ) else {
            return Vec::new();
        };
        let mut count = 0;
        // SAFETY: nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t, unsigned int *): a handle of this
        // library and a variable.
        if unsafe { limit(device.0, &raw mut count) } != status::SUCCESS {
            return Vec::new();
        }
        let part = |index| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t, unsigned int,
            // nvmlDevice_t *): likewise. Places without a part are NOT_FOUND.
            let returned = unsafe { get(device.0, index, &raw mut handle) };
            (returned == status::SUCCESS).then_some(Handle(handle))
        };
        (0..count.min(64)).filter_map(part).collect()
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if let Ok(shutdown) = self.function::<Plain>(c"nvmlShutdown") {
            // SAFETY: nvmlReturn_t nvmlShutdown(void), after a successful nvmlInit_v2. No handle
            // outlives this: they are only used through the library that is dropped here.
            unsafe { shutdown() };
        }
    }
}
