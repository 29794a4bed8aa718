//! Open captures: what is put on a capturing stream is recorded, and submits nothing.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::driver::{Driver, Relaxed, STREAM_NON_BLOCKING, status};
use crate::streams::Stream;

/// Captures that are known at one time; more keep the count raised, which costs a look per call.
const CAPTURES: usize = 64;

/// The streams on which captures began, with the lowest bit set for one that the legacy default
/// stream waits for.
static ORIGINS: [AtomicUsize; CAPTURES] = [const { AtomicUsize::new(0) }; CAPTURES];
/// The contexts of these streams.
static CONTEXTS: [AtomicUsize; CAPTURES] = [const { AtomicUsize::new(0) }; CAPTURES];
/// How many are open.
static OPEN: AtomicUsize = AtomicUsize::new(0);

const BLOCKING: usize = 1;

/// Whether any capture is open in this process.
#[inline]
pub fn any() -> bool {
    // SeqCst: a capture is noted before it begins.
    OPEN.load(Ordering::SeqCst) != 0
}

/// Whether a capture is open on a stream that the legacy default stream waits for: that one must
/// not be touched then.
pub fn any_blocking() -> bool {
    any()
        && !krex_core::hooks::sabotaged("captures")
        && ORIGINS.iter().any(|it| it.load(Ordering::SeqCst) & BLOCKING != 0)
}

/// Whether what is put on the stream now is recorded only.
#[inline]
pub fn is_capturing(stream: Stream) -> bool {
    any() && ask(stream)
}

#[cold]
fn ask(stream: Stream) -> bool {
    let Some(driver) = Driver::get() else { return false };
    let mut state = 0;
    let query = match stream.is_per_thread() {
        true => driver.stream_is_capturing_per_thread,
        false => driver.stream_is_capturing,
    };
    // SAFETY: cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *): a stream that the caller is
    // about to use, and a variable that lives through the call.
    let result = unsafe { query(stream.handle(), &raw mut state) };
    // For the legacy stream beside a blocking capture it is an error, which harms no capture.
    result == status::SUCCESS && state != 0
}

/// A capture is about to begin on the stream.
pub fn begin(driver: &Driver, context: usize, stream: Stream) {
    let blocking = stream.is_default() || {
        let mut flags = 0;
        // Other captures may be open, which the question must not break.
        let _relaxed = Relaxed::new(driver);
        // SAFETY: cuStreamGetFlags(CUstream, unsigned int *): as above; it is not capturing yet,
        // or that would break it.
        let result = unsafe { (driver.stream_get_flags)(stream.handle(), &raw mut flags) };
        result != status::SUCCESS || flags & STREAM_NON_BLOCKING == 0
    };
    // SeqCst: noted before it begins, so that the helper doesn't take the stream for a usual one.
    OPEN.fetch_add(1, Ordering::SeqCst);
    let origin = stream.handle() as usize & !BLOCKING | usize::from(blocking);
    for (place, owner) in ORIGINS.iter().zip(&CONTEXTS) {
        if place.compare_exchange(0, origin, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            // Relaxed: who ends a context doesn't begin a capture in it at the same time.
            owner.store(context, Ordering::Relaxed);
            return;
        }
    }
}

/// The capture on the stream has ended, or did not begin.
pub fn end(stream: Stream) {
    let handle = stream.handle() as usize & !BLOCKING;
    for place in &ORIGINS {
        let seen = place.load(Ordering::SeqCst);
        if seen != 0
            && seen & !BLOCKING == handle
            && place.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            OPEN.fetch_sub(1, Ordering::SeqCst);
            return;
        }
    }
}

/// The context has ended, with its captures.
pub fn forget_context(context: usize) {
    for (place, owner) in ORIGINS.iter().zip(&CONTEXTS) {
        let seen = place.load(Ordering::SeqCst);
        if seen != 0
            && owner.load(Ordering::Relaxed) == context
            && place.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            OPEN.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
