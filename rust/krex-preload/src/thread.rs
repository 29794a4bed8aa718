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
pub struct Thread {
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

/// The calling thread's state; found once for each call, since that takes a while.
#[inline]
pub fn current() -> &'static Thread {
    // SAFETY: the variable has no destructor, so it is there for as long as the thread runs; and a
    // reference to it cannot leave the thread, because of its cells.
    unsafe { &*THREAD.with(ptr::from_ref) }
}

impl Thread {
    /// Whether the thread is inside a wrapped call already, as seen from `frame`, which is deeper
    /// in its stack then.
    #[inline]
    pub fn is_inside(&self, frame: &Frame) -> bool {
        let outer = self.inside.get();
        outer != 0 && self.is_below(outer, frame)
    }

    #[cold]
    fn is_below(&self, outer: usize, frame: &Frame) -> bool {
        if frame.address() >= outer {
            return false;
        }
        // SAFETY: stacks grow downwards, so `outer` lies within this thread's stack, above the
        // frame that is running: readable memory, aligned as a `Frame` was. What it holds now is
        // compared only. (A signal handler on a stack of its own below is no exception: the
        // thread's stack is there, too.)
        let mark = unsafe { ptr::read_volatile(outer as *const u64) };
        mark == self.mark.get()
    }

    /// Notes that the thread is inside a wrapped call from here on.
    #[inline]
    pub fn go_inside(&self, frame: &Frame) {
        // Never the same twice in one place, so that what an earlier call left there is not it.
        let mark = self.mark.get().wrapping_add(0x9e37_79b9_7f4a_7c15) | 1;
        self.mark.set(mark);
        frame.mark.set(mark);
        self.inside.set(frame.address());
    }

    /// Notes that it is outside again. Returns false if that was noticed before.
    #[inline]
    pub fn go_outside(&self, frame: &Frame) -> bool {
        frame.mark.set(0);
        let is_ours = self.inside.get() == frame.address();
        if is_ours {
            self.inside.set(0);
        }
        is_ours
    }

    /// The thread's current context and the lane of its device; `None` outside of krex, or without
    /// a context.
    #[inline]
    pub fn place(&self) -> Option<Place> {
        // Acquire: partner of the Release in `forget_all`.
        if self.epoch.get() == EPOCH.load(Ordering::Acquire) {
            // SAFETY: the pointer is null or came from a lane, which is never freed.
            if let Some(lane) = unsafe { self.lane.get().as_ref() }
                && lane.is_usable()
            {
                return Some(Place { context: self.context.get(), lane });
            }
        }
        self.find_place()
    }

    #[cold]
    fn find_place(&self) -> Option<Place> {
        if lane::is_resting() {
            return None;
        }
        // Before the look: what ends meanwhile makes it look again.
        let epoch = EPOCH.load(Ordering::Acquire);
        let (context, ordinal) = Driver::get()?.current()?;
        let lane = lane::of_ordinal(ordinal)?;
        lane.start_helper();
        self.context.set(context);
        self.lane.set(lane);
        self.epoch.set(epoch);
        Some(Place { context, lane })
    }

    /// The thread's context may be another one.
    #[inline]
    pub fn forget(&self) {
        self.epoch.set(0);
    }
}

/// Any thread's may.
pub fn forget_all() {
    // Release: partner of the Acquire in `place`.
    EPOCH.fetch_add(1, Ordering::Release);
}
