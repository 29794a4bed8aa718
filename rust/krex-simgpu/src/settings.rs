//! What tests choose through the environment. Read when the process calls `cuInit`.

use std::env;
use std::path::PathBuf;

/// See `docs/testing.md` for what each variable is for.
#[derive(Debug)]
pub struct Settings {
    /// Where the shared device lives; without it the device is this process's own.
    pub directory: Option<PathBuf>,
    pub devices: usize,
    pub visible: Option<String>,
    /// Bytes of memory per device.
    pub memory: u64,
    /// As in `cuDriverGetVersion`.
    pub version: i32,
    pub journal: bool,
    /// Nanoseconds that creating or destroying a context takes.
    pub birth: u64,
    /// Nanoseconds that loading a module takes.
    pub module: u64,
    /// Nanoseconds for which a dead process's work lives on.
    pub teardown: u64,
    /// By how much births and deaths slow the work of everybody.
    pub stretch: f64,
    /// Directives for failures: see `faults.rs`.
    pub faults: String,
    pub faults_file: Option<PathBuf>,
}

impl Settings {
    pub fn from_environment() -> Self {
        let milliseconds = |name, default: f64| (number(name, default) * 1e6) as u64;
        Self {
            directory: path("KREX_SIMGPU_DIR"),
            devices: number("KREX_SIMGPU_DEVICES", 1.0) as usize,
            visible: env::var("CUDA_VISIBLE_DEVICES").ok(),
            memory: number("KREX_SIMGPU_MEMORY", 16.0 * 1024.0 * 1024.0 * 1024.0) as u64,
            version: driver_version(),
            journal: env::var_os("KREX_SIMGPU_JOURNAL").is_some_and(|it| it != "0"),
            birth: milliseconds("KREX_SIMGPU_BIRTH_MS", 20.0),
            module: milliseconds("KREX_SIMGPU_MODULE_MS", 5.0),
            teardown: milliseconds("KREX_SIMGPU_TEARDOWN_MS", 20.0),
            stretch: number("KREX_SIMGPU_STRETCH", 1.5),
            faults: env::var("KREX_SIMGPU_FAULTS").unwrap_or_default(),
            faults_file: path("KREX_SIMGPU_FAULTS_FILE"),
        }
    }
}

/// The version of CUDA that this driver stands for; asked for before `cuInit`, too.
pub fn driver_version() -> i32 {
    number("KREX_SIMGPU_VERSION", 13000.0) as i32
}

fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from)
}

fn number(name: &str, default: f64) -> f64 {
    env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(default)
}
