//! The protocol of krex: everything shares the device except the marked region.
//!
//! Start with `word` (what the words of the segment mean), `gate`, `flight` and `queue` (the
//! lock-free part, which loom checks), then `region` (the eight steps as the holder takes them).
//! What freezes and thaws is in the crate `krex-supervisor`.

pub mod bitmap;
pub mod flight;
pub mod gate;
pub mod hooks;
pub mod queue;
pub mod sync;
pub mod word;

#[cfg(not(loom))]
pub mod affinity;
#[cfg(not(loom))]
pub mod budget;
#[cfg(not(loom))]
pub mod cgroup;
#[cfg(not(loom))]
mod claim;
#[cfg(not(loom))]
pub mod client;
#[cfg(not(loom))]
pub mod clock;
#[cfg(not(loom))]
pub mod device;
#[cfg(not(loom))]
pub mod drain;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
pub mod evict;
#[cfg(not(loom))]
pub mod freezer;
#[cfg(not(loom))]
mod hand_over;
#[cfg(not(loom))]
pub mod isolate;
#[cfg(not(loom))]
pub mod keep_off;
#[cfg(not(loom))]
pub mod layout;
#[cfg(not(loom))]
pub mod logging;
#[cfg(not(loom))]
pub mod measure;
#[cfg(not(loom))]
pub mod members;
#[cfg(not(loom))]
pub mod process;
#[cfg(not(loom))]
pub mod recover;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub mod report;
#[cfg(not(loom))]
pub mod reservation;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
pub mod siblings;
#[cfg(not(loom))]
pub mod strangers;
#[cfg(not(loom))]
pub mod supervision;
#[cfg(not(loom))]
pub mod tenant;
#[cfg(not(loom))]
pub mod text;
#[cfg(not(loom))]
pub mod topology;
