//! The thread that drains this process's streams on one device, when it is asked to.
//!
//! It never asks for a whole context while a capture is open, and never touches a capturing
//! stream: both break the capture. It records an event on each stream that may have work, and asks
//! for the event until the device has come that far.

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::time::Duration;

use krex_core::drain::{self, coverage};
use krex_core::hooks;
use krex_core::layout::Submitter;
use krex_core::word::{DrainAnswer, DrainOutcome};

use crate::captures;
use crate::driver::{CAPTURE_MODE_RELAXED, Driver, EVENT_DISABLE_TIMING, Status, status};
use crate::lane::Lane;
use crate::streams::{self, Alive, Slot, Stream};

/// The driver needs some.
const STACK: usize = 512 * 1024;
/// Pauses between two looks at an event: the first ones are short, since most drains are.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// How many looks come without any pause.
const EAGER_LOOKS: u32 = 20;
/// The request word is looked at this often, asked or not.
const REST: Duration = Duration::from_secs(3600);

/// Starts the helper of a lane. Without one the device cannot be drained, and the supervisor is
/// told so by its absence.
pub fn start(lane: &'static Lane) {
    let before = block_signals();
    let spawned = std::thread::Builder::new()
        .name("krex-drain".to_owned())
        .stack_size(STACK)
        .spawn(move || run(lane));
    if let Some(before) = before {
        // SAFETY: pthread_sigmask(how, set, old) with a mask that it returned itself.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
        };
    }
    if let Err(error) = spawned {
        log::warn!("no thread that drains: {error}");
    }
}

/// Blocks all signals in the calling thread, so that a new one never handles the program's.
fn block_signals() -> Option<libc::sigset_t> {
    // SAFETY: sigset_t is plain data, for which all zeros are valid; sigfillset and
    // pthread_sigmask write to these two variables only.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        let done = libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        (done == 0).then_some(before)
    }
}

fn run(lane: &'static Lane) {
    let (Some(driver), Some(submitter)) = (Driver::get(), lane.submitter()) else { return };
    let mut mode = CAPTURE_MODE_RELAXED;
    // SAFETY: cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *): a variable that lives
    // through the call. It concerns this thread only: what it does breaks no capture of another.
    unsafe { (driver.exchange_capture_mode)(&raw mut mode) };
    let helper = Helper { lane, driver, submitter };
    // Release: whoever sees it may ask from now on.
    submitter.coverage.fetch_or(coverage::DRAINS, Ordering::Release);
    let mut answered = 0;
    loop {
        let asked = submitter.drain.await_request(answered, REST);
        if lane.client.segment.is_retired() {
            return;
        }
        if asked == answered {
            continue;
        }
        helper.answer(asked);
        answered = asked;
    }
}

struct Helper {
    lane: &'static Lane,
    driver: &'static Driver,
    submitter: &'static Submitter,
}

/// What became of one stream.
#[derive(PartialEq, Eq)]
enum Fate {
    Drained,
    Failed(u32),
    /// It cannot be asked: a capture is open that this would break.
    Barred,
}

impl Helper {
    fn answer(&self, tenure: u64) {
        let before = self.submitter.flight().counts();
        let (mut outcome, mut count) = (DrainOutcome::Done, 0);
        let mut taken = Vec::new();
        for slot in streams::dirty(self.lane.device) {
            if !slot.take_mark() {
                continue;
            }
            taken.push(slot);
            count += 1;
            match self.drain(slot, tenure) {
                Fate::Drained => {}
                Fate::Failed(error) => {
                    log::debug!("a stream reports error {error}");
                    outcome = worse(outcome, DrainOutcome::Error);
                }
                Fate::Barred => {
                    slot.mark();
                    outcome = DrainOutcome::Incomplete;
                }
            }
        }
        for event in streams::take_orphans(self.lane.device) {
            if let Err(error) = self.finish(event) {
                log::debug!("a destroyed stream reports error {error}");
                outcome = worse(outcome, DrainOutcome::Error);
            }
        }
        if streams::has_overflowed() {
            outcome = worse(outcome, self.drain_contexts());
        }
        // SAFETY: cuCtxSetCurrent(CUcontext): none. No context is kept from ending by this thread.
        unsafe { (self.driver.context_set_current)(std::ptr::null_mut()) };
        let after = self.submitter.flight().counts();
        let admitted = |it: &krex_core::flight::Counts| it.completed.wrapping_add(it.in_flight);
        let is_quiet = before.in_flight == 0 && admitted(&before) == admitted(&after);
        if !is_quiet {
            // What was submitted meanwhile may not be behind the events.
            taken.into_iter().for_each(Slot::mark);
        }
        let is_complete = is_quiet && outcome != DrainOutcome::Incomplete;
        let answer = DrainAnswer { tenure, streams: count, outcome };
        self.submitter.drain.answer(answer, is_complete.then_some(before.completed));
        drain::ring_supervisor(self.lane.client);
    }

    /// Waits for what is on one stream.
    fn drain(&self, slot: &'static Slot, tenure: u64) -> Fate {
        // What was on it before a capture began. AcqRel: recorded before it was stored.
        let tail = slot.tail.swap(0, Ordering::AcqRel) as *mut c_void;
        if !tail.is_null()
            && let Err(error) = self.finish(tail)
        {
            return Fate::Failed(error);
        }
        // The legacy stream waits for all streams but non-blocking ones, so that it stands for
        // other threads' own default streams, too, which have no handle here. A capture on a
        // blocking stream would break by that.
        if slot.handle().is_none() && !self.await_blocking_captures(tenure) {
            return Fate::Barred;
        }
        let result = match self.record(slot) {
            Ok(Some(event)) => self.poll(event),
            Ok(None) => status::SUCCESS,
            Err(result) => result,
        };
        match result {
            status::SUCCESS => Fate::Drained,
            it if status::is_gone(it) => Fate::Drained, // With its context.
            it if status::CAPTURE_ERRORS.contains(&it) => Fate::Barred,
            it => Fate::Failed(it),
        }
    }

    /// Records an event on a stream; `None`: nothing is left on it to wait for.
    fn record(&self, slot: &'static Slot) -> Result<Option<*mut c_void>, Status> {
        let _alive = Alive::hold();
        let handle = slot.handle().unwrap_or(std::ptr::null_mut());
        let mut result = status::INVALID_HANDLE;
        for _ in 0..3 {
            let context = slot.context.load(Ordering::Relaxed);
            if context == 0 {
                return Ok(None); // It was destroyed: what it left is among the orphans.
            }
            let event = self.event_in(context)?;
            if captures::any() && self.is_capturing(handle) && !hooks::sabotaged("captures") {
                return Ok(None); // What was on it before is done.
            }
            // SAFETY: cuEventRecord(CUevent, CUstream): the event is of the current context, and
            // the stream is not destroyed meanwhile.
            result = unsafe { (self.driver.event_record)(event, handle) };
            match result {
                status::SUCCESS => return Ok(Some(event)),
                // It may have been used while another context was current.
                status::INVALID_HANDLE => {
                    match streams::owner(self.driver, Stream::given(handle, false)) {
                        Some(owner) if owner != context => {
                            slot.context.store(owner, Ordering::Relaxed);
                        }
                        _ => streams::forget_event(context),
                    }
                }
                // The context that the event was of has ended past the wrappers, and another one
                // may have its address.
                status::CONTEXT_IS_DESTROYED => streams::forget_event(context),
                it => return Err(it),
            }
        }
        Err(result)
    }

    /// Waits for an event of krex's own, the last time. One that has ended with its context has
    /// nothing before it.
    fn finish(&self, event: *mut c_void) -> Result<(), Status> {
        let result = self.poll(event);
        if status::is_gone(result) {
            return Ok(()); // Its handle may be another one's by now.
        }
        // SAFETY: cuEventDestroy(CUevent): krex's own, used here for the last time.
        unsafe { (self.driver.event_destroy)(event) };
        if result == status::SUCCESS { Ok(()) } else { Err(result) }
    }

    fn is_capturing(&self, handle: *mut c_void) -> bool {
        let mut state = 0;
        // SAFETY: cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *): the caller keeps the
        // stream alive; the variable lives through the call.
        let result = unsafe { (self.driver.stream_is_capturing)(handle, &raw mut state) };
        result != status::SUCCESS || state != 0
    }

    /// Makes a context current and returns the event for it. The caller holds [`Alive`].
    fn event_in(&self, context: usize) -> Result<*mut c_void, Status> {
        // SAFETY: cuCtxSetCurrent(CUcontext): one that a stream of ours was used in, and that does
        // not end meanwhile.
        let result = unsafe { (self.driver.context_set_current)(context as *mut c_void) };
        if result != status::SUCCESS {
            return Err(result);
        }
        if let Some(event) = streams::event_of(context) {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: cuEventCreate(CUevent *, unsigned int): a variable that lives through the call.
        let result = unsafe { (self.driver.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        if result != status::SUCCESS {
            return Err(result);
        }
        streams::keep_event(context, event);
        Ok(event)
    }

    /// Asks for an event until the device has come that far, or an error is reported. There is no
    /// limit: whoever asked for the drain has one, and later finds it done.
    fn poll(&self, event: *mut c_void) -> u32 {
        let mut looks = 0;
        let mut pause = FIRST_PAUSE;
        loop {
            // SAFETY: cuEventQuery(CUevent): krex's own event, not destroyed but by this thread.
            let result = unsafe { (self.driver.event_query)(event) };
            if result != status::NOT_READY {
                return result;
            }
            looks += 1;
            if looks > EAGER_LOOKS {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Waits until no capture is open on a blocking stream, for as long as the tenure lasts.
    fn await_blocking_captures(&self, tenure: u64) -> bool {
        let gate = self.lane.client.gate(self.lane.device);
        while captures::any_blocking() {
            let word = gate.load();
            if word.is_open() || word.tenure() != tenure {
                return false;
            }
            std::thread::sleep(LONGEST_PAUSE);
        }
        true
    }

    /// For more streams than are known one by one.
    fn drain_contexts(&self) -> DrainOutcome {
        if captures::any() {
            return DrainOutcome::Incomplete;
        }
        let mut outcome = DrainOutcome::Done;
        for context in streams::contexts(self.lane.device) {
            // SAFETY: cuCtxSetCurrent(CUcontext): one that a stream of ours was used in.
            let mut result = unsafe { (self.driver.context_set_current)(context as *mut c_void) };
            if result == status::SUCCESS {
                // SAFETY: cuCtxSynchronize(void), in the context that was just made current.
                result = unsafe { (self.driver.context_synchronize)() };
            }
            // Nothing runs in one that has ended.
            if result != status::SUCCESS && !status::is_gone(result) {
                outcome = DrainOutcome::Error;
            }
        }
        outcome
    }
}

fn worse(one: DrainOutcome, other: DrainOutcome) -> DrainOutcome {
    if (one as u64) < (other as u64) { other } else { one }
}
