//! This process on one device: its slot in the segment, and its helper.

use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use krex_core::client::{Client, ThreadLock};
use krex_core::clock::{self, Deadline, SECOND};
use krex_core::drain::coverage;
use krex_core::error::Result;
use krex_core::layout::Submitter;
use krex_core::segment;

use crate::driver::Driver;
use crate::host::{self, Preloaded};
use crate::{helper, streams, thread};

/// Devices of one process.
const ORDINALS: usize = 64;

static LANES: [AtomicPtr<Lane>; ORDINALS] = [const { AtomicPtr::new(ptr::null_mut()) }; ORDINALS];
static CHANGING: ThreadLock = ThreadLock::new();

/// Attaching failed, or there is nothing to attach to: not tried again before this time.
static RESTS_UNTIL: AtomicU64 = AtomicU64::new(0);
/// That was said, if it is worth saying.
static COMPLAINED: AtomicBool = AtomicBool::new(false);
/// The process uses functions that no table knows.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// A device of this process. Never freed: threads keep references.
pub struct Lane {
    pub client: &'static Client,
    /// The device's section in the segment.
    pub device: usize,
    has_helper: AtomicBool,
    /// The primary context, while it is known; zero: none.
    pub primary: AtomicUsize,
}

/// What a call is counted as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Submission,
    Birth,
}

impl Lane {
    /// Whether it is this process's (not its parent's), and of a segment that is in use.
    #[inline]
    pub fn is_usable(&self) -> bool {
        Client::attached().is_some_and(|client| ptr::eq(client, self.client))
    }

    /// Passes the gate; waits while it is closed. Returns whether the call counts.
    #[inline]
    pub fn enter(&self, kind: Kind) -> bool {
        let entered = match kind {
            Kind::Submission => {
                self.client.enter_submission(self.device, Deadline::NEVER, &Preloaded)
            }
            Kind::Birth => self.client.enter_birth(self.device, Deadline::NEVER, &Preloaded),
        };
        entered.inspect_err(|error| complain(&error.to_string())).is_ok()
    }

    #[inline]
    pub fn leave(&self, kind: Kind) {
        match kind {
            Kind::Submission => self.client.leave_submission(self.device),
            Kind::Birth => self.client.leave_birth(self.device),
        }
    }

    pub fn submitter(&self) -> Option<&Submitter> {
        self.client.submitter(self.device)
    }

    /// Has a helper from now on: there is a context.
    pub fn start_helper(&'static self) {
        // AcqRel: one of those who come at the same time starts it.
        if !self.has_helper.load(Ordering::Relaxed) && !self.has_helper.swap(true, Ordering::AcqRel)
        {
            helper::start(self);
        }
    }
}

/// Whether attaching failed so recently that it is not tried again yet.
pub fn is_resting() -> bool {
    let until = RESTS_UNTIL.load(Ordering::Relaxed);
    until != 0 && clock::now() < until
}

/// The lane of the driver's device number `ordinal`; attaches the process if need be. `None`: not
/// under krex, or it cannot be used.
pub fn of_ordinal(ordinal: i32) -> Option<&'static Lane> {
    let slot = LANES.get(usize::try_from(ordinal).ok()?)?;
    known(slot).or_else(|| make(slot, ordinal))
}

fn known(slot: &AtomicPtr<Lane>) -> Option<&'static Lane> {
    // Acquire: partner of the Release in `make`.
    // SAFETY: the pointer is null or came from `Box::leak`.
    let lane: &'static Lane = unsafe { slot.load(Ordering::Acquire).as_ref() }?;
    lane.is_usable().then_some(lane)
}

#[cold]
fn make(slot: &AtomicPtr<Lane>, ordinal: i32) -> Option<&'static Lane> {
    if is_resting() {
        return None;
    }
    if !CHANGING.lock(Deadline::NEVER, &Preloaded).ok()? {
        return None;
    }
    host::start_log();
    // A thread that is cancelled midway would leave the process half attached.
    let _uncancelled = Uncancelled::begin();
    // A panic must not reach the program.
    let lane = known(slot).map_or_else(
        || catch_unwind(AssertUnwindSafe(|| attach(ordinal))).unwrap_or(Ok(None)),
        |lane| Ok(Some(lane)),
    );
    let lane = match lane {
        Ok(lane) => lane,
        Err(error) => {
            complain(&error.to_string());
            None
        }
    };
    match lane {
        Some(lane) => {
            RESTS_UNTIL.store(0, Ordering::Relaxed);
            // Release: whoever loads the pointer sees the lane whole.
            slot.store(ptr::from_ref(lane).cast_mut(), Ordering::Release);
        }
        None => RESTS_UNTIL.store(clock::now() + SECOND, Ordering::Relaxed),
    }
    CHANGING.unlock();
    lane
}

/// Puts the calling thread's cancellation off for as long as it lives.
struct Uncancelled {
    before: libc::c_int,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// `PTHREAD_CANCEL_DISABLE`
const CANCEL_DISABLE: libc::c_int = 1;

impl Uncancelled {
    fn begin() -> Self {
        let mut before = 0;
        // SAFETY: pthread_setcancelstate(int, int *): a variable that lives through the call.
        unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as above; the state is the one that the thread had.
        unsafe { pthread_setcancelstate(self.before, &raw mut self.before) };
    }
}

/// Makes this process a tenant that shares the device.
fn attach(ordinal: i32) -> Result<Option<&'static Lane>> {
    let Some(name) = Driver::get().and_then(|driver| driver.name_of(ordinal)) else {
        return Ok(None);
    };
    let client = match Client::attached() {
        Some(client) => client,
        None => {
            if !segment::runtime_dir()?.join("segment").exists() {
                return Ok(None); // Nobody uses krex here.
            }
            // What is known of streams is of the process that forked this one.
            streams::forget_all();
            thread::forget_all();
            Client::attach(&Preloaded)?
        }
    };
    let device = client.device(Some(&name))?;
    client.be_own_tenant(&Preloaded)?;
    // Relaxed: read after a region; it became so before anything was submitted.
    client.tenant().preloaded.store(1, Ordering::Relaxed);
    client.share_from_birth(device);
    let submitter = &client.segment.submitters[client.flight_slot(device, &Preloaded)?];
    if INCOMPLETE.load(Ordering::Relaxed) {
        submitter.coverage.fetch_or(coverage::INCOMPLETE, Ordering::Release);
    }
    log::debug!("{} is a tenant on {name}", client.identity.pid);
    Ok(Some(Box::leak(Box::new(Lane {
        client,
        device,
        has_helper: AtomicBool::new(false),
        primary: AtomicUsize::new(0),
    }))))
}

/// The process came by a function that submits, or may, past the wrappers.
pub fn note_incomplete(name: &CStr) {
    host::start_log();
    if !INCOMPLETE.swap(true, Ordering::Relaxed) {
        log::info!("{} is not known: what goes through it is not gated", name.to_string_lossy());
    }
    for slot in &LANES {
        if let Some(submitter) = known(slot).and_then(|lane| lane.submitter()) {
            submitter.coverage.fetch_or(coverage::INCOMPLETE, Ordering::Release);
        }
    }
}

fn complain(problem: &str) {
    if !COMPLAINED.swap(true, Ordering::Relaxed) {
        log::warn!("this process is not gated: {problem}");
    }
}
