//! Time, sleep, ids, and cancellation.

use std::ffi::c_int;
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

/// Holds a thread's cancellation off. A cancelled thread unwinds, and may do so only where
/// nothing is half-done and no panic is caught.
#[derive(Debug)]
pub struct NoCancel {
    before: c_int,
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

unsafe extern "C-unwind" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

impl NoCancel {
    pub fn new() -> Self {
        let mut before = 0;
        // SAFETY: `before` is a valid place to write to.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before }
    }

    /// The one place where a cancelled thread may end.
    pub fn pause(&self) {
        let mut disabled = 0;
        // SAFETY: as above. If this unwinds, the caller's frames are ready for it.
        unsafe {
            pthread_setcancelstate(self.before, &raw mut disabled);
            pthread_testcancel();
            pthread_setcancelstate(DISABLE, &raw mut disabled);
        }
    }
}

impl Drop for NoCancel {
    fn drop(&mut self) {
        let mut disabled = 0;
        // SAFETY: as above.
        unsafe { pthread_setcancelstate(self.before, &raw mut disabled) };
    }
}

/// Ends the process as a driver does that reads through a handle that is none.
pub fn crash(why: &str) -> ! {
    eprintln!("krex-simgpu: {why}");
    // SAFETY: raise(signal) and abort(void) have no conditions.
    unsafe {
        libc::raise(libc::SIGSEGV);
        libc::abort()
    }
}
