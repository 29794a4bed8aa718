//! What the wrappers do around the driver's functions, by class.
//!
//! A wrapped call passes the gate of its device, counts in flight, and only then goes inside: calls
//! that the driver makes on its way are not gated again, or a drain would wait for itself. The end
//! is a guard's: a thread's cancellation unwinds through it.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::captures;
use crate::driver::{Driver, Status, status};
use crate::lane::{self, Kind, Lane};
use crate::streams::{self, Alive, Stream};
use crate::thread::{self, Frame, Place, Thread};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
const GRAPH_UPLOAD: u64 = 2;

/// A call that passed the gate.
struct Admitted<'a> {
    thread: &'static Thread,
    lane: &'static Lane,
    kind: Kind,
    frame: &'a Frame,
}

impl<'a> Admitted<'a> {
    /// Passes the gate; `None` if the call cannot be counted, and goes on all the same.
    #[inline]
    fn enter(
        thread: &'static Thread,
        lane: &'static Lane,
        kind: Kind,
        frame: &'a Frame,
    ) -> Option<Self> {
        if !lane.enter(kind) {
            return None;
        }
        // Only now: a signal handler may submit while its thread waits at the gate.
        thread.go_inside(frame);
        Some(Self { thread, lane, kind, frame })
    }
}

impl Drop for Admitted<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.thread.go_outside(self.frame) {
            self.lane.leave(self.kind);
        }
    }
}

/// Where the calling thread is, unless it is inside a wrapped call already.
#[inline]
fn place(thread: &Thread, frame: &Frame) -> Option<Place> {
    if thread.is_inside(frame) { None } else { thread.place() }
}

/// Puts work on a stream.
#[inline]
pub fn submission(stream: Stream, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame).filter(|_| !captures::is_capturing(stream)) else {
        return work();
    };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Submission, &frame);
    streams::mark(place, stream);
    work()
}

/// Puts work on the stream of each launch in a list.
pub fn submissions(
    list: *mut c_void,
    count: u32,
    entry: usize,
    offset: usize,
    work: impl FnOnce() -> Status,
) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame) else { return work() };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Submission, &frame);
    if !list.is_null() {
        for index in 0..count as usize {
            // SAFETY: the driver reads `count` launches there, too: the caller vouches for them.
            let launch = unsafe { list.cast::<u8>().add(index * entry) };
            streams::mark(place, Stream::inside(launch.cast(), offset, false));
        }
    }
    work()
}

/// Has a stream wait for an event. If that is one of a capture, the stream joins the capture, and
/// cannot be asked for what was on it before.
pub fn wait_event(stream: Stream, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame).filter(|_| !captures::is_capturing(stream)) else {
        return work();
    };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Submission, &frame);
    if captures::any() {
        note_tail(place, stream);
    }
    streams::mark(place, stream);
    work()
}

/// Remembers the end of what is on a stream now: a capture may begin on it.
fn note_tail(place: Place, stream: Stream) {
    let Some(driver) = Driver::get() else { return };
    let Some(slot) = streams::known(place.context, stream).filter(|it| it.is_dirty()) else {
        return;
    };
    if let Some(event) = streams::record_tail(driver, stream) {
        // AcqRel: the helper that takes it sees it recorded.
        let before = slot.tail.swap(event, Ordering::AcqRel);
        if before != 0 {
            // SAFETY: cuEventDestroy(CUevent): recorded earlier on the same stream, so that the
            // new one covers it.
            unsafe { (driver.event_destroy)(before as *mut c_void) };
        }
    }
}

/// Allocates, maps or frees.
#[inline]
pub fn resource(work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame) else { return work() };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Submission, &frame);
    work()
}

/// Instantiates a graph, and may copy it to the device.
pub fn upload(
    parameters: *mut c_void,
    offset: usize,
    per_thread: bool,
    work: impl FnOnce() -> Status,
) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame) else { return work() };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Submission, &frame);
    // SAFETY: the driver reads the flags, the first member, too.
    if !parameters.is_null() && unsafe { *parameters.cast::<u64>() } & GRAPH_UPLOAD != 0 {
        streams::mark(place, Stream::inside(parameters, offset, per_thread));
    }
    work()
}

/// Destroys a stream.
pub fn stream_end(stream: Stream, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    if thread.is_inside(&frame) {
        return work();
    }
    // A thread without a context can destroy it, too; nobody may touch it after that.
    let place = thread.place();
    let context = place.map_or(0, |it| it.context);
    if place.is_none() && streams::known(context, stream).is_none() {
        return work();
    }
    let is_capturing = captures::is_capturing(stream);
    let _admitted = place.and_then(|it| Admitted::enter(thread, it.lane, Kind::Submission, &frame));
    let _alive = Alive::hold();
    if !is_capturing && let Some(driver) = Driver::get() {
        streams::leave_orphan(driver, context, stream);
    }
    let result = work();
    if result == status::SUCCESS {
        captures::end(stream);
        streams::forget(context, stream);
    }
    result
}

/// Loads or unloads code.
pub fn birth(work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame) else { return work() };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Birth, &frame);
    work()
}

/// Makes a context on a device, which the driver stores in `made`.
pub fn context_birth(
    ordinal: i32,
    made: *mut c_void,
    is_primary: bool,
    work: impl FnOnce() -> Status,
) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    if thread.is_inside(&frame) {
        return work();
    }
    let Some(lane) = lane::of_ordinal(ordinal) else { return work() };
    let admitted = Admitted::enter(thread, lane, Kind::Birth, &frame);
    let result = work();
    drop(admitted);
    if result == status::SUCCESS {
        if is_primary && !made.is_null() {
            // SAFETY: the driver has just stored the context there.
            lane.primary.store(unsafe { *made.cast::<usize>() }, Ordering::Relaxed);
        }
        // Most of these make it the thread's current one.
        thread.forget();
        lane.start_helper();
    }
    result
}

/// Ends a context.
pub fn context_death(context: *mut c_void, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    if thread.is_inside(&frame) {
        return work();
    }
    // A thread without a context can end one, too.
    let _admitted =
        thread.place().and_then(|it| Admitted::enter(thread, it.lane, Kind::Birth, &frame));
    let _alive = Alive::hold();
    let result = work();
    if result == status::SUCCESS {
        forget_context(context as usize);
        thread::forget_all();
    }
    result
}

/// Ends the primary context of a device, if nobody else uses it.
pub fn primary_death(ordinal: i32, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    if thread.is_inside(&frame) {
        return work();
    }
    let Some(lane) = lane::of_ordinal(ordinal) else { return work() };
    let _admitted = Admitted::enter(thread, lane, Kind::Birth, &frame);
    let _alive = Alive::hold();
    let result = work();
    let (mut flags, mut active) = (0, 1);
    if let Some(driver) = Driver::get() {
        // SAFETY: cuDevicePrimaryCtxGetState(CUdevice, unsigned int *, int *) writes to two
        // variables that live through the call.
        unsafe { (driver.primary_get_state)(ordinal, &raw mut flags, &raw mut active) };
    }
    if result == status::SUCCESS && active == 0 {
        forget_context(lane.primary.swap(0, Ordering::Relaxed));
        thread::forget_all();
    }
    result
}

/// A context has ended, with all that was in it. The caller holds [`Alive`].
fn forget_context(context: usize) {
    if context == 0 {
        return; // None that anybody used.
    }
    streams::forget_context(context);
    captures::forget_context(context);
}

/// Begins a capture.
pub fn capture_begin(stream: Stream, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    let Some(place) = place(thread, &frame).filter(|_| !captures::is_capturing(stream)) else {
        return work();
    };
    let _admitted = Admitted::enter(thread, place.lane, Kind::Submission, &frame);
    let Some(driver) = Driver::get() else { return work() };
    note_tail(place, stream);
    captures::begin(driver, place.context, stream);
    let result = work();
    if result != status::SUCCESS {
        captures::end(stream);
    }
    result
}

/// Ends a capture.
pub fn capture_end(stream: Stream, work: impl FnOnce() -> Status) -> Status {
    let (thread, frame) = (thread::current(), Frame::new());
    if thread.is_inside(&frame) {
        return work();
    }
    let result = work();
    // Where another thread may not end it, that fails, and ends it all the same. On a stream that
    // merely joined it, it goes on.
    if captures::any() && (result == status::SUCCESS || !captures::is_capturing(stream)) {
        captures::end(stream);
    }
    result
}

/// Changes the thread's context.
pub fn context_change(work: impl FnOnce() -> Status) -> Status {
    let result = work();
    thread::current().forget();
    result
}

/// Waits for the device: whoever does has work there, though it uses no CPU.
pub fn wait(work: impl FnOnce() -> Status) -> Status {
    struct Waiting<'a>(&'a krex_core::layout::Submitter);
    impl Drop for Waiting<'_> {
        fn drop(&mut self) {
            // Relaxed: somebody looks at it now and then.
            self.0.device_waits.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let (thread, frame) = (thread::current(), Frame::new());
    let _waiting =
        place(thread, &frame).and_then(|place| place.lane.submitter()).map(|submitter| {
            submitter.device_waits.fetch_add(1, Ordering::Relaxed);
            Waiting(submitter)
        });
    work()
}
