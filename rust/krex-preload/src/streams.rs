//! Which streams may have work on them.
//!
//! A table of fixed size, without locks where something is submitted: a stream is looked up, and
//! marked as dirty *before* the driver is called. The helper takes the mark away before it asks the
//! stream; if anything was submitted while it was at that, it puts the marks back.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use krex_core::client::ThreadLock;
use krex_core::clock::Deadline;

use crate::driver::{Driver, EVENT_DISABLE_TIMING, status};
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
static ORPHANS: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

/// Held by who destroys a stream or a context, and by the helper for each single call.
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
pub fn known(place: Place, stream: Stream) -> Option<&'static Slot> {
    find(stream.key(place.context))
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

/// Records an event behind what is on the stream now; the stream's context is current. The stream
/// is not asked first: in the program's own thread and capture mode that would break a capture.
pub fn record_tail(driver: &Driver, stream: Stream) -> Option<usize> {
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

/// The stream is about to be destroyed, with work on it, maybe. The caller holds [`Alive`].
pub fn leave_orphan(driver: &Driver, place: Place, stream: Stream) {
    let Some(slot) = known(place, stream).filter(|it| it.is_dirty()) else { return };
    let Some(event) = record_tail(driver, stream) else { return };
    // AcqRel: the helper that takes it sees it recorded.
    let free = ORPHANS
        .iter()
        .find(|it| it.compare_exchange(0, event, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    if free.is_none() {
        // The slot keeps its mark under no name: its context is drained as a whole.
        OVERFLOWED.store(true, Ordering::Release);
        // SAFETY: an event of our own, recorded or not.
        unsafe { (driver.event_destroy)(event as *mut c_void) };
    }
    slot.take_mark();
}

/// Takes the events that destroyed streams have left.
pub fn orphans() -> impl Iterator<Item = &'static AtomicUsize> {
    ORPHANS.iter().filter(|it| it.load(Ordering::Acquire) != 0)
}

/// The stream has been destroyed. The caller holds [`Alive`].
pub fn forget(place: Place, stream: Stream) {
    let key = stream.key(place.context);
    places(key).filter(|slot| slot.key() == key).for_each(drop_slot);
}

/// The context has ended, with its streams. The caller holds [`Alive`].
pub fn forget_context(context: usize) {
    SLOTS
        .iter()
        .filter(|it| it.context.load(Ordering::Relaxed) == context && !matches!(it.key(), 0 | GONE))
        .for_each(drop_slot);
}

/// All were the parent process's.
pub fn forget_all() {
    SLOTS.iter().filter(|it| !matches!(it.key(), 0 | GONE)).for_each(drop_slot);
    ORPHANS.iter().for_each(|it| it.store(0, Ordering::Relaxed));
}

fn drop_slot(slot: &'static Slot) {
    slot.dirty.store(false, Ordering::Relaxed);
    slot.tail.store(0, Ordering::Relaxed);
    slot.context.store(0, Ordering::Relaxed);
    // Release: partner of the AcqRel of who takes the place.
    slot.key.store(GONE, Ordering::Release);
}
