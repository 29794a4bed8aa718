//! What passing an open gate costs, beside what it cannot cost less than, and beside other locks.
//!
//! The loops of the bench `open_gate`, and, through the binding, of `krex bench gate`.

use std::cell::UnsafeCell;
use std::fs::File;
use std::hint::black_box;
use std::io;

use rustix::fs::{FlockOperation, MemfdFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::flight::Flight;
use crate::gate::Gate;
use crate::sync::{AtomicU64, Ordering};

/// Two things that are done one after the other, and measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pair {
    /// Two atomic additions: counting in flight cannot cost less.
    Floor,
    /// Enter and leave.
    Pass,
    /// The same with a look at the gate first, as `krex.submission()` does.
    LookAndPass,
    /// `sem_wait(3)` and `sem_post(3)`, with nobody else there.
    Semaphore,
    /// `flock(2)`, taken and given back.
    Flock,
}

impl Pair {
    pub const ALL: [Self; 5] =
        [Self::Floor, Self::Pass, Self::LookAndPass, Self::Semaphore, Self::Flock];

    pub fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Pass => "pass",
            Self::LookAndPass => "look_and_pass",
            Self::Semaphore => "semaphore",
            Self::Flock => "flock",
        }
    }

    /// How many fit into one measurement of `passes`: a system call takes a hundred times longer.
    fn count(self, passes: u32) -> u32 {
        if self == Self::Flock { (passes / 25).max(1) } else { passes.max(1) }
    }
}

/// What one thread passes through.
pub struct Lane<'a> {
    gate: &'a Gate,
    flight: &'a Flight,
    floor: &'a AtomicU64,
    semaphore: Semaphore,
    file: File,
}

impl<'a> Lane<'a> {
    /// A lane through `gate`, which has to be open, with a semaphore and a file of its own.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn new(gate: &'a Gate, flight: &'a Flight, floor: &'a AtomicU64) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("krex-measure", MemfdFlags::CLOEXEC)?;
        Ok(Self { gate, flight, floor, semaphore: Semaphore::new()?, file: file.into() })
    }

    /// Nanoseconds of the thread's CPU time per pair, about `passes` of them.
    ///
    /// # Panics
    /// When the gate is closed.
    pub fn time(&self, pair: Pair, passes: u32) -> f64 {
        let count = pair.count(passes);
        match pair {
            Pair::Floor => time(count, || {
                let floor = black_box(self.floor);
                floor.fetch_add(1, Ordering::SeqCst);
                floor.fetch_sub(1, Ordering::SeqCst);
            }),
            Pair::Pass => time(count, || {
                let (gate, flight) = (black_box(self.gate), black_box(self.flight));
                assert!(flight.try_enter(gate, |_| false).is_ok());
                black_box(flight.leave(gate));
            }),
            Pair::LookAndPass => time(count, || {
                let (gate, flight) = (black_box(self.gate), black_box(self.flight));
                assert!(flight.try_enter_quickly(gate));
                black_box(flight.leave(gate));
            }),
            Pair::Semaphore => time(count, || {
                self.semaphore.wait();
                self.semaphore.post();
            }),
            Pair::Flock => time(count, || {
                let _ = black_box(rustix::fs::flock(&self.file, FlockOperation::LockExclusive));
                let _ = black_box(rustix::fs::flock(&self.file, FlockOperation::Unlock));
            }),
        }
    }
}

/// Nanoseconds of the thread's CPU time that `work` takes each of `count` times.
fn time(count: u32, work: impl Fn()) -> f64 {
    let before = cpu_time();
    for _ in 0..count {
        work();
    }
    (cpu_time() - before) / f64::from(count)
}

/// Nanoseconds of CPU time that the calling thread has used.
fn cpu_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// A POSIX semaphore that lets one at a time through, as one that processes share.
struct Semaphore(Box<UnsafeCell<libc::sem_t>>);

// SAFETY: semaphores are made to be used by several threads at once; nobody else looks inside.
unsafe impl Sync for Semaphore {}
// SAFETY: the box keeps it at its address, wherever its owner is.
unsafe impl Send for Semaphore {}

impl Semaphore {
    fn new() -> io::Result<Self> {
        // SAFETY: all zero is a valid value of this plain C structure; `sem_init` sets the rest.
        let semaphore = Self(Box::new(UnsafeCell::new(unsafe { std::mem::zeroed() })));
        // SAFETY: the pointer is that of a live sem_t that nobody uses yet.
        match unsafe { libc::sem_init(semaphore.0.get(), 1, 1) } {
            0 => Ok(semaphore),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn wait(&self) {
        // SAFETY: the pointer is that of a live, initialised sem_t.
        unsafe { libc::sem_wait(black_box(self.0.get())) };
    }

    fn post(&self) {
        // SAFETY: as above.
        unsafe { libc::sem_post(black_box(self.0.get())) };
    }
}

impl Drop for Semaphore {
    fn drop(&mut self) {
        // SAFETY: it is initialised, and whoever drops it is the only one left.
        unsafe { libc::sem_destroy(self.0.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_takes_time_and_leaves_nothing_behind() {
        let (gate, flight, floor) = (Gate::default(), Flight::default(), AtomicU64::new(0));
        let lane = Lane::new(&gate, &flight, &floor).unwrap();
        for pair in Pair::ALL {
            assert!(lane.time(pair, 100_000) > 0.0, "{}", pair.name());
        }
        assert_eq!(flight.counts().in_flight, 0);
        assert_eq!(floor.load(Ordering::SeqCst), 0);
    }
}
