//! Waiting for the end of processes: the worker's second thread.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use krex_core::layout::TENANTS;
use krex_core::segment::Segment;
use krex_core::supervision;
use rustix::event::epoll;

/// Root processes, and the keeper, that have ended: noted by the thread that waits for pidfds.
pub struct Exits {
    pub epoll: OwnedFd,
    pub tenants: [AtomicBool; TENANTS],
    pub keeper: AtomicBool,
}

/// The index that stands for the keeper.
pub const KEEPER: u64 = TENANTS as u64;

impl Exits {
    /// Wants to know when the process of `pidfd` ends.
    ///
    /// # Errors
    /// If the kernel has no room for it.
    pub fn watch(&self, pidfd: &impl AsFd, index: u64) -> rustix::io::Result<()> {
        epoll::add(
            &self.epoll,
            pidfd,
            epoll::EventData::new_u64(index),
            epoll::EventFlags::IN | epoll::EventFlags::ONESHOT,
        )
    }

    /// Waits for ended processes, and rings; the body of the worker's second thread.
    pub fn wait(&self, segment: &Segment, slot: usize) {
        let mut buffer = Vec::with_capacity(64);
        loop {
            buffer.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut buffer), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log::error!("epoll_wait: {error}");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            for event in &buffer {
                let index = event.data.u64();
                let flag = if index == KEEPER {
                    &self.keeper
                } else {
                    &self.tenants[index as usize % TENANTS]
                };
                // Release: a mere hint; the worker asks the pidfd itself.
                flag.store(true, Ordering::Release);
            }
            supervision::ring(segment, slot);
        }
    }
}
