//! The only door to atomics, fences and futexes.
//!
//! Everything that is shared between processes goes through here, so that `loom` can take the
//! place of the hardware and of the kernel (`--cfg loom`) and walk through every interleaving.
//!
//! # Memory ordering, once for the whole crate
//!
//! Two handshakes in krex are of the *store-buffering* kind: each side writes its own word and
//! then reads the other's, and at least one of them must see the other.
//!
//! * a submission raises its in-flight count, then reads the gate; a holder closes the gate,
//!   then reads the counts (`flight.rs`);
//! * a tenant registers its slot, then reads the gate; a holder closes the gate, then lists the
//!   slots (`tenant.rs`); and likewise for a sleeper's count and the gate (`gate.rs`).
//!
//! Acquire and release are not enough for those. The writes are SeqCst read-modify-writes, and
//! the reads SeqCst loads, so that all four are in the single total order of SeqCst operations,
//! in which one of the two writes comes first and the other side's read follows it. Loom treats
//! SeqCst accesses as AcqRel only, therefore [`fence_between`] adds an explicit fence under loom;
//! natively it compiles to nothing, since a SeqCst access pair already is what the memory model
//! asks for (on x86-64 the locked instruction is itself the barrier).

use std::time::Duration;

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Stands between the write and the read of a store-buffering handshake (see the module's text).
#[inline(always)]
pub fn fence_between() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// Why a [`wait`] returned. The caller looks at its predicate again in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Woken, or the word no longer had the expected value.
    Changed,
    /// The time was up.
    TimedOut,
    /// A signal handler ran.
    Interrupted,
}

/// `futex(FUTEX_WAIT)` on the low half of `word`, shared between processes.
///
/// Sleeps only if the word still holds `expected`; the kernel compares and queues under one lock,
/// so a change followed by [`wake_all`] is never missed. Only the low 32 bits are compared: a
/// caller's words differ there whenever its predicate does.
///
/// <https://man7.org/linux/man-pages/man2/futex.2.html>
#[cfg(not(loom))]
pub fn wait(word: &AtomicU64, expected: u64, timeout: Duration) -> Wake {
    use rustix::thread::futex;
    let timeout = futex::Timespec {
        tv_sec: timeout.as_secs().min(1 << 31) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    match futex::wait(low_half(word), futex::Flags::empty(), expected as u32, Some(&timeout)) {
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Wake::Changed,
        Err(rustix::io::Errno::INTR) => Wake::Interrupted,
        // Only ETIMEDOUT is left: address, alignment and time are valid by construction.
        Err(_) => Wake::TimedOut,
    }
}

/// `futex(FUTEX_WAKE, INT_MAX)`: wakes every sleeper on `word`, in any process.
#[cfg(not(loom))]
pub fn wake_all(word: &AtomicU64) {
    use rustix::thread::futex;
    // An error would mean a bad address, which a reference cannot be.
    let _ = futex::wake(low_half(word), futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(not(loom))]
fn low_half(word: &AtomicU64) -> &AtomicU32 {
    const { assert!(cfg!(target_endian = "little"), "the futex is the low half of the word") };
    let pointer: *const AtomicU64 = word;
    // SAFETY: an AtomicU64 is 8 readable and writable bytes, aligned to 8, so its first 4 bytes
    // are a valid AtomicU32 for as long as the reference lives. The half is only handed to the
    // kernel, which reads it atomically; no Rust code accesses it at this width.
    unsafe { &*pointer.cast::<AtomicU32>() }
}

#[cfg(loom)]
mod modelled {
    //! A futex for loom: compare and sleep under one lock, as the kernel does, and wake nobody who
    //! sleeps on another word. Time-outs do not happen: sleeping for ever is what loom reports as
    //! a deadlock, so that a lost wake-up fails the model.
    use super::{AtomicU64, Duration, Ordering, Wake};
    use loom::sync::{Condvar, Mutex};

    /// Who sleeps, and on which word.
    #[derive(Default)]
    struct Sleepers {
        next: usize,
        asleep: Vec<(usize, *const AtomicU64)>,
    }

    // SAFETY: the pointers are only compared.
    unsafe impl Send for Sleepers {}

    loom::lazy_static! {
        static ref BUCKET: (Mutex<Sleepers>, Condvar) = Default::default();
    }

    pub fn wait(word: &AtomicU64, expected: u64, _timeout: Duration) -> Wake {
        let mut sleepers = BUCKET.0.lock().unwrap();
        if word.load(Ordering::SeqCst) as u32 == expected as u32 {
            let own = sleepers.next;
            sleepers.next += 1;
            sleepers.asleep.push((own, word));
            while sleepers.asleep.iter().any(|(number, _)| *number == own) {
                sleepers = BUCKET.1.wait(sleepers).unwrap();
            }
        }
        Wake::Changed
    }

    pub fn wake_all(word: &AtomicU64) {
        let mut sleepers = BUCKET.0.lock().unwrap();
        sleepers.asleep.retain(|(_, other)| !std::ptr::eq(*other, word));
        BUCKET.1.notify_all();
    }
}
#[cfg(loom)]
pub use modelled::{wait, wake_all};
