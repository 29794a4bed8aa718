//! What krex knows of the drivers of GPU vendors.
//!
//! The tables are plain text; `krex-preload` generates its wrappers from them, and a test compares
//! them with the vendor's header.

pub mod abi;
pub mod table;

/// The functions of the CUDA driver.
pub const CUDA: &str = include_str!("../cuda.table");
