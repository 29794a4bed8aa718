//! The binding: `krex._krex`. It converts, and releases the interpreter while it waits; what is
//! done is done in `krex-core`.

mod convert;
mod gate;
mod gpu;
mod host;
mod look;
mod measure;
mod region;
mod snapshot;
mod submission;

/// The native part of krex.
#[pyo3::pymodule(gil_used = false)]
mod _krex {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::gate::{InFlightCounter, SharedMemoryGate};
    #[pymodule_export]
    use crate::gpu::{gpus, resolve_device};
    #[pymodule_export]
    use crate::look::strangers;
    #[pymodule_export]
    use crate::measure::time_open_gate;
    #[pymodule_export]
    use crate::region::{Critical, Region, Report, Sibling};
    #[pymodule_export]
    use crate::snapshot::{evict, group_prefix, planned_reservation, recover, snapshot};
    #[pymodule_export]
    use crate::submission::{Submission, set_activity};

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    const LAYOUT: u32 = krex_core::layout::LAYOUT;

    #[pymodule_export]
    const SEGMENT_SIZE: usize = krex_core::layout::SIZE;

    /// Whether test switches are compiled in; never in a release.
    #[pymodule_export]
    const TEST_HOOKS: bool = cfg!(feature = "test-hooks");

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::host::start_log();
        Ok(())
    }
}
