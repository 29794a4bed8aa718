//! A stand-in for NVIDIA's driver library, `libcuda.so.1`, for tests on machines without a GPU.
//!
//! Programs that use the driver through its interface run on it unchanged, as far as they load no
//! machine code: a kernel is a line of text that says how long it takes and what it does to memory
//! (see `program.rs`). Streams are asynchronous and take real time. The device is shared by all
//! processes with the same `KREX_SIMGPU_DIR`: they slow each other (see `clock.rs`), and so do the
//! births and deaths of contexts. What each variable does is in `settings.rs` and `faults.rs`.
//!
//! Loading the library does nothing; `cuInit` opens the device; the first submission starts a
//! thread. It is never part of the wheel.

mod api;
mod clock;
mod device;
mod driver;
mod engine;
mod faults;
mod graph;
mod journal;
mod memory;
mod module;
mod program;
mod settings;
mod shared;
mod state;
mod status;
mod stream;
mod system;
