//! Which streams may have work on them.
//!
//! A table of fixed size, without locks where something is submitted: a stream is looked up, and
//! marked as dirty *before* the driver is called. The helper takes the mark away before it asks the
//! stream; if anything was submitted while it was at that, it puts the marks back.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use krex_core::client::ThreadLock;
use krex_core::clock::Deadline;

use crate::driver::{Driver, EVENT_DISABLE_TIMING, Relaxed, status};
use crate::host::Preloaded;
use crate::thread::Place;

/// A stream as a program names it.
#[derive(Clone, Copy)]
pub struct Stream {
    handle: usize,
    per_thread: bool,
}

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl Stream {
    /// The stream of a call that names none.
    #[inline]
    pub fn default(per_thread: bool) -> Self {
        Self { handle: 0, per_thread }
    }

    #[inline]
    pub fn given(handle: *mut c_void, per_thread: bool) -> Self {
        Self { handle: handle as usize, per_thread }
    }

    /// The stream that stands `offset` bytes into a structure.
    #[inline]
    pub fn inside(structure: *mut c_void, offset: usize, per_thread: bool) -> Self {
        if structure.is_null() {
            return Self::default(per_thread); // The driver will refuse it.
        }
        // SAFETY: the driver's function reads the structure, too: the caller vouches for it.
        let handle = unsafe { structure.cast::<u8>().add(offset).cast::<usize>().read_unaligned() };
        Self { handle, per_thread }
    }

    /// As the driver takes it.
    pub fn handle(self) -> *mut c_void {
        self.handle as *mut c_void
    }

    /// Whether it is one of the default streams.
    pub fn is_default(self) -> bool {
        matches!(self.handle, 0 | LEGACY | PER_THREAD)
    }

    pub fn is_per_thread(self) -> bool {
        self.handle == PER_THREAD || (self.handle == 0 && self.per_thread)
    }

    /// One number for one stream: default streams are different ones in each context. Handles are
    /// addresses, so that their low bits are free.
    fn key(self, context: usize) -> usize {
        match self.handle {
            0 if self.per_thread => context | PER_THREAD,
            0 => context | LEGACY,
            special @ (LEGACY | PER_THREAD) => context | special,
            handle => handle,
        }
    }
}

/// How many streams are known at one time. A program with more is drained by context.
const STREAMS: usize = 4096;
/// How far from its place a stream may be.
const REACH: usize = 64;
/// A place whose stream has gone.
const GONE: usize = usize::MAX;

/// A stream that was used.
pub struct Slot {
    /// Zero: free, and nothing was ever behind it.
    key: AtomicUsize,
    pub context: AtomicUsize,
    /// The device's section plus one.
    pub device: AtomicUsize,
    dirty: AtomicBool,
    /// An event behind all that was on it when a capture began on it.
    pub tail: AtomicUsize,
}

static SLOTS: [Slot; STREAMS] = [const {
    Slot {
        key: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        device: AtomicUsize::new(0),
        dirty: AtomicBool::new(false),
        tail: AtomicUsize::new(0),
    }
}; STREAMS];

/// A stream did not find a place: from then on whole contexts are drained.
static OVERFLOWED: AtomicBool = AtomicBool::new(false);

/// Events behind the work of streams that were destroyed with work on them.
static ORPHANS: [Orphan; 64] = [const {
    Orphan { event: AtomicUsize::new(0), context: AtomicUsize::new(0), device: AtomicUsize::new(0) }
}; 64];

struct Orphan {
    /// Zero: free.
    event: AtomicUsize,
    context: AtomicUsize,
    /// The device's section plus one.
    device: AtomicUsize,
}

/// Contexts, and the helpers' own events in them. Used under the lock below, which ends contexts,
/// too: another context may have the same address, and another event that of an ended one.
static EVENTS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Held by who destroys a stream or a context, and by the helper for each few calls.
static LIFETIMES: ThreadLock = ThreadLock::new();

/// Keeps streams and contexts from being destroyed while it lives.
pub struct Alive(());

impl Alive {
    pub fn hold() -> Self {
        // It waits without limit and is never interrupted.
        let _ = LIFETIMES.lock(Deadline::NEVER, &Preloaded);
        Self(())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        LIFETIMES.unlock();
    }
}

impl Slot {
    pub fn key(&self) -> usize {
        self.key.load(Ordering::Acquire)
    }

    /// The driver's handle; `None`: one of the default streams.
    pub fn handle(&self) -> Option<*mut c_void> {
        let key = self.key();
        (key & (LEGACY | PER_THREAD) == 0).then_some(key as *mut c_void)
    }

    pub fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    /// Takes the mark away; returns whether there was one.
    pub fn take_mark(&self) -> bool {
        // AcqRel: what was written with the mark is seen by who takes it.
        self.dirty.swap(false, Ordering::AcqRel)
    }

    #[inline]
    pub fn mark(&self) {
        // Release: who finds it dirty sees its context and device. No look first: the helper may
        // be taking the mark away at this moment.
        self.dirty.store(true, Ordering::Release);
    }
}

fn places(key: usize) -> impl Iterator<Item = &'static Slot> {
    // Handles are addresses: their middle bits differ.
    let start = (key ^ (key >> 16)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..REACH).map(move |step| &SLOTS[(start + step) % STREAMS])
}

/// The slot of a stream, if it was used before.
#[inline]
fn find(key: usize) -> Option<&'static Slot> {
    for slot in places(key) {
        match slot.key.load(Ordering::Acquire) {
            seen if seen == key => return Some(slot),
            0 => return None,
            _ => {}
        }
    }
    None
}

/// Something is about to be put on the stream.
#[inline]
pub fn mark(place: Place, stream: Stream) -> Option<&'static Slot> {
    let key = stream.key(place.context);
    let slot = match find(key) {
        Some(slot) => slot,
        None => add(key)?,
    };
    // Relaxed: published by the mark. Who uses one stream at the same time stores the same.
    slot.context.store(place.context, Ordering::Relaxed);
    slot.device.store(place.lane.device + 1, Ordering::Relaxed);
    slot.mark();
    Some(slot)
}

#[cold]
fn add(key: usize) -> Option<&'static Slot> {
    for slot in places(key) {
        let seen = slot.key.load(Ordering::Acquire);
        if seen == key {
            return Some(slot);
        }
        if seen != 0 && seen != GONE {
            continue;
        }
        // AcqRel: what its last user left comes before what the new one stores.
        match slot.key.compare_exchange(seen, key, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(slot),
            Err(now) if now == key => return Some(slot),
            Err(_) => {}
        }
    }
    OVERFLOWED.store(true, Ordering::Release);
    None
}

/// The slot of a stream, for what has to be known before the driver is called.
pub fn known(context: usize, stream: Stream) -> Option<&'static Slot> {
    find(stream.key(context))
}

/// Slots with work, on a device.
pub fn dirty(device: usize) -> impl Iterator<Item = &'static Slot> {
    SLOTS
        .iter()
        .filter(move |slot| slot.is_dirty() && slot.device.load(Ordering::Relaxed) == device + 1)
}

pub fn has_overflowed() -> bool {
    OVERFLOWED.load(Ordering::Acquire)
}

/// The context of any stream on a device, for when single streams are not known.
pub fn contexts(device: usize) -> Vec<usize> {
    let mut contexts: Vec<usize> = SLOTS
        .iter()
        .filter(|slot| !matches!(slot.key(), 0 | GONE))
        .filter(|slot| slot.device.load(Ordering::Relaxed) == device + 1)
        .map(|slot| slot.context.load(Ordering::Relaxed))
        .collect();
    contexts.sort_unstable();
    contexts.dedup();
    contexts
}

/// Records an event behind what is on the stream now. The stream is not asked first: in the
/// program's own thread and capture mode that would break a capture.
pub fn record_tail(driver: &Driver, stream: Stream) -> Option<usize> {
    record_here(driver, stream).or_else(|| {
        // It may be of another context than the thread's: the event has to be of the same.
        let context = owner(driver, stream)?;
        let mut before = std::ptr::null_mut();
        // SAFETY: cuCtxGetCurrent(CUcontext *) and cuCtxSetCurrent(CUcontext): a variable that
        // lives through the call, and a context that the driver has just named.
        unsafe {
            if (driver.context_get_current)(&raw mut before) != status::SUCCESS
                || (driver.context_set_current)(context as *mut c_void) != status::SUCCESS
            {
                return None;
            }
        }
        let event = record_here(driver, stream);
        // SAFETY: as above; it was the thread's own.
        unsafe { (driver.context_set_current)(before) };
        event
    })
}

fn record_here(driver: &Driver, stream: Stream) -> Option<usize> {
    let mut event = std::ptr::null_mut();
    let record = match stream.is_per_thread() {
        true => driver.event_record_per_thread,
        false => driver.event_record,
    };
    // SAFETY: cuEventCreate(CUevent *, unsigned int) and cuEventRecord(CUevent, CUstream): a stream
    // that the program is about to use, and a variable that lives through the call.
    unsafe {
        if (driver.event_create)(&raw mut event, EVENT_DISABLE_TIMING) != status::SUCCESS {
            return None;
        }
        if record(event, stream.handle()) != status::SUCCESS {
            (driver.event_destroy)(event);
            return None;
        }
    }
    Some(event as usize)
}

/// The context that a stream is of; `None`: a default one, or one that has ended with its context.
pub fn owner(driver: &Driver, stream: Stream) -> Option<usize> {
    if stream.is_default() {
        return None;
    }
    let mut context = std::ptr::null_mut();
    let _relaxed = Relaxed::new(driver);
    // SAFETY: cuStreamGetCtx(CUstream, CUcontext *): a stream that is not destroyed meanwhile, and
    // a variable that lives through the call.
    let result = unsafe { (driver.stream_get_context)(stream.handle(), &raw mut context) };
    (result == status::SUCCESS).then_some(context as usize)
}

/// The stream is about to be destroyed, with work on it, maybe. The caller holds [`Alive`].
pub fn leave_orphan(driver: &Driver, context: usize, stream: Stream) {
    let Some(slot) = known(context, stream).filter(|it| it.is_dirty()) else { return };
    let Some(event) = record_tail(driver, stream) else { return };
    add_orphan(event, slot);
    slot.take_mark();
}

/// An event that is waited for when its stream is no more. The caller holds [`Alive`].
fn add_orphan(event: usize, slot: &Slot) {
    let Some(free) = ORPHANS.iter().find(|it| it.event.load(Ordering::Relaxed) == 0) else {
        // Whole contexts are drained from now on.
        OVERFLOWED.store(true, Ordering::Release);
        if let Some(driver) = Driver::get() {
            // SAFETY: cuEventDestroy(CUevent): one of our own, used here for the last time.
            unsafe { (driver.event_destroy)(event as *mut c_void) };
        }
        return;
    };
    // Relaxed: all that touches them holds the lock.
    free.context.store(slot.context.load(Ordering::Relaxed), Ordering::Relaxed);
    free.device.store(slot.device.load(Ordering::Relaxed), Ordering::Relaxed);
    free.event.store(event, Ordering::Relaxed);
}

/// Takes the events that destroyed streams of a device have left.
pub fn take_orphans(device: usize) -> Vec<*mut c_void> {
    let _alive = Alive::hold();
    ORPHANS
        .iter()
        .filter(|it| it.device.load(Ordering::Relaxed) == device + 1)
        .map(|it| it.event.swap(0, Ordering::Relaxed) as *mut c_void)
        .filter(|event| !event.is_null())
        .collect()
}

/// The helper's event for a context. The caller holds [`Alive`].
pub fn event_of(context: usize) -> Option<*mut c_void> {
    let events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    events.iter().find(|(of, _)| *of == context).map(|(_, event)| *event as *mut c_void)
}

/// Keeps the helper's event for a context. The caller holds [`Alive`].
pub fn keep_event(context: usize, event: *mut c_void) {
    let mut events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    events.push((context, event as usize));
}

/// The context has ended, with that event. The caller holds [`Alive`].
pub fn forget_event(context: usize) {
    let mut events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    events.retain(|(of, _)| *of != context);
}

/// The stream has been destroyed. The caller holds [`Alive`].
pub fn forget(context: usize, stream: Stream) {
    let key = stream.key(context);
    for slot in places(key).filter(|slot| slot.key() == key) {
        // AcqRel: the helper may be taking it. What was before a capture goes on without it.
        let tail = slot.tail.swap(0, Ordering::AcqRel);
        if tail != 0 {
            add_orphan(tail, slot);
        }
        drop_slot(slot);
    }
}

/// The context has ended, with its streams and events. The caller holds [`Alive`].
pub fn forget_context(context: usize) {
    SLOTS
        .iter()
        .filter(|it| it.context.load(Ordering::Relaxed) == context && !matches!(it.key(), 0 | GONE))
        .for_each(drop_slot);
    ORPHANS
        .iter()
        .filter(|it| it.context.load(Ordering::Relaxed) == context)
        .for_each(|it| it.event.store(0, Ordering::Relaxed));
    forget_event(context);
}

/// All were the parent process's.
pub fn forget_all() {
    SLOTS.iter().filter(|it| !matches!(it.key(), 0 | GONE)).for_each(drop_slot);
    ORPHANS.iter().for_each(|it| it.event.store(0, Ordering::Relaxed));
    // Whoever held it at the fork is not here.
    if let Ok(mut events) = EVENTS.try_lock() {
        events.clear();
    }
}

fn drop_slot(slot: &'static Slot) {
    slot.dirty.store(false, Ordering::Relaxed);
    slot.tail.store(0, Ordering::Relaxed);
    slot.context.store(0, Ordering::Relaxed);
    // Release: partner of the AcqRel of who takes the place.
    slot.key.store(GONE, Ordering::Release);
}
