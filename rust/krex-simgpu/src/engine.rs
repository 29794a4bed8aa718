//! The thread that moves streams on while nobody calls, and that runs host functions.

use std::time::Duration;

use crate::driver::Driver;
use crate::state::State;
use crate::system;

/// How often the deaths of others are looked for, in nanoseconds.
const LOOK: u64 = 10_000_000;

/// Starts the engine of this process, unless it runs.
pub fn ensure(driver: &'static Driver, state: &mut State) {
    if state.has_engine {
        return;
    }
    state.has_engine = true;
    // The program's signals are for its own threads.
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid places to write to; the first is filled before it is used.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let spawned = std::thread::Builder::new().name("simgpu".into()).spawn(move || run(driver));
    // SAFETY: `before` was filled above.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
    state.has_engine = spawned.is_ok();
}

fn run(driver: &'static Driver) {
    // Time-outs to the microsecond, not to the usual 50.
    // SAFETY: prctl(PR_SET_TIMERSLACK) takes a number.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    let mut state = driver.lock();
    loop {
        if let Some((stream, call)) = state.host_calls.pop_front() {
            drop(state);
            // SAFETY: the program gave this function for being called with this argument.
            unsafe { (call.function)(call.data as *mut _) };
            state = driver.lock();
            if state.streams.get(&stream).is_some_and(|it| it.in_host_call) {
                state.finish(stream, system::now());
            }
        }
        state.advance();
        driver.notify(&mut state);
        if !state.host_calls.is_empty() {
            continue;
        }
        state.engine_deadline = state.deadline();
        let mut left = state.engine_deadline.saturating_sub(system::now());
        if driver.shared.others_work() {
            // Their deaths are to be noticed when they happen, not when it next matters here.
            left = left.min(LOOK);
            driver.shared.look_for_dead();
        }
        let wait = Duration::from_nanos(left.min(u64::MAX / 2));
        if left > 0 {
            let waited = driver.engine.wait_timeout(state, wait);
            state = waited.unwrap_or_else(|it| it.into_inner()).0;
        }
        state.engine_deadline = 0; // Awake: no need to wake it.
    }
}
