//! Time, sleep and process ids, by system calls that are no cancellation points: a cancelled
//! thread must not unwind through this library half-way.

use std::sync::atomic::AtomicU32;

/// Now, in nanoseconds of `CLOCK_MONOTONIC`.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to, and the clock exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Sleeps while `word` has `value`, for at most this long; also returns for no reason.
pub fn futex_wait(word: &AtomicU32, value: u32, nanoseconds: u64) {
    let limit = libc::timespec {
        tv_sec: (nanoseconds / 1_000_000_000) as libc::time_t,
        tv_nsec: (nanoseconds % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: futex(FUTEX_WAIT): word and limit outlive the call.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const limit)
    };
}

/// Wakes all who sleep on `word`, in any process.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: futex(FUTEX_WAKE) only uses the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps until a time of `CLOCK_MONOTONIC`.
pub fn sleep_until(time: u64) {
    let word = AtomicU32::new(0);
    loop {
        let left = time.saturating_sub(now());
        if left == 0 {
            return;
        }
        futex_wait(&word, 0, left);
    }
}

pub fn process_id() -> u32 {
    std::process::id()
}

pub fn thread_id() -> u32 {
    // SAFETY: gettid() takes nothing and cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Appends to a file in one piece.
pub fn append(descriptor: i32, text: &[u8]) {
    // SAFETY: write(2) reads `text`, which outlives the call.
    unsafe { libc::syscall(libc::SYS_write, descriptor, text.as_ptr(), text.len()) };
}
