//! What is known of the calling thread.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::Driver;
use crate::lane::{self, Lane};

/// Counts what may have changed any thread's context: contexts that ended.
static EPOCH: AtomicU64 = AtomicU64::new(1);

/// A context, and the lane of its device.
#[derive(Clone, Copy)]
pub struct Place {
    pub context: usize,
    pub lane: &'static Lane,
}

/// State of one thread. It needs no initialisation and no destructor, so that it can be used at
/// any moment of a thread's life.
struct Thread {
    /// The address of the outermost [`Frame`]; zero: outside of any wrapped call.
    inside: Cell<usize>,
    /// What [`Frame::mark`] has to hold for the frame to be that of the call.
    mark: Cell<u64>,
    /// The current context, if `epoch` still is that of the process.
    epoch: Cell<u64>,
    context: Cell<usize>,
    lane: Cell<*const Lane>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            inside: Cell::new(0),
            mark: Cell::new(0),
            epoch: Cell::new(0),
            context: Cell::new(0),
            lane: Cell::new(ptr::null()),
        }
    };
}

/// Lies on the stack for as long as a wrapped call runs. A `longjmp` out of the driver leaves the
/// thread's state behind, but not the frame: then the thread is not inside any more.
#[repr(C)]
pub struct Frame {
    mark: Cell<u64>,
}

impl Frame {
    #[inline]
    pub const fn new() -> Self {
        Self { mark: Cell::new(0) }
    }

    fn address(&self) -> usize {
        ptr::from_ref(self).addr()
    }
}

/// Whether the calling thread is inside a wrapped call already, as seen from `frame`, which is
/// deeper in its stack then.
#[inline]
pub fn is_inside(frame: &Frame) -> bool {
    THREAD.with(|thread| {
        let outer = thread.inside.get();
        outer != 0 && is_below(thread, outer, frame)
    })
}

#[cold]
fn is_below(thread: &Thread, outer: usize, frame: &Frame) -> bool {
    if frame.address() >= outer {
        return false;
    }
    // SAFETY: stacks grow downwards, so `outer` lies within this thread's stack, above the frame
    // that is running: readable memory, aligned as a `Frame` was. What it holds now is compared
    // only. (A signal handler on a stack of its own below is no exception: the thread's stack is
    // there, too.)
    let mark = unsafe { ptr::read_volatile(outer as *const u64) };
    mark == thread.mark.get()
}

/// Notes that the thread is inside a wrapped call from here on.
#[inline]
pub fn go_inside(frame: &Frame) {
    THREAD.with(|thread| {
        // Never the same twice in one place, so that what an earlier call left there is not it.
        let mark = thread.mark.get().wrapping_add(0x9e37_79b9_7f4a_7c15) | 1;
        thread.mark.set(mark);
        frame.mark.set(mark);
        thread.inside.set(frame.address());
    });
}

/// Notes that it is outside again. Returns false if that was noticed before.
#[inline]
pub fn go_outside(frame: &Frame) -> bool {
    THREAD.with(|thread| {
        frame.mark.set(0);
        let is_ours = thread.inside.get() == frame.address();
        if is_ours {
            thread.inside.set(0);
        }
        is_ours
    })
}

/// The thread's current context and the lane of its device; `None` outside of krex, or without a
/// context.
#[inline]
pub fn place() -> Option<Place> {
    THREAD.with(|thread| {
        // Acquire: partner of the Release in `forget_all`.
        if thread.epoch.get() == EPOCH.load(Ordering::Acquire) {
            // SAFETY: the pointer is null or came from a lane, which is never freed.
            if let Some(lane) = unsafe { thread.lane.get().as_ref() }
                && lane.is_usable()
            {
                return Some(Place { context: thread.context.get(), lane });
            }
        }
        find_place(thread)
    })
}

#[cold]
fn find_place(thread: &Thread) -> Option<Place> {
    if lane::is_resting() {
        return None;
    }
    // Before the look: what ends meanwhile makes it look again.
    let epoch = EPOCH.load(Ordering::Acquire);
    let (context, ordinal) = Driver::get()?.current()?;
    let lane = lane::of_ordinal(ordinal)?;
    lane.start_helper();
    thread.context.set(context);
    thread.lane.set(lane);
    thread.epoch.set(epoch);
    Some(Place { context, lane })
}

/// The calling thread's context may be another one.
#[inline]
pub fn forget() {
    THREAD.with(|thread| thread.epoch.set(0));
}

/// Any thread's may.
pub fn forget_all() {
    // Release: partner of the Acquire in `place`.
    EPOCH.fetch_add(1, Ordering::Release);
}
