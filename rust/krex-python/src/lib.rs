//! Stand-in until the binding exists: the version.

/// The native part of krex.
#[pyo3::pymodule(gil_used = false)]
mod _krex {
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
