//! What lies in the segment. A change of any type here asks for a new [`LAYOUT`] number.
//!
//! All types are `repr(C)`, hold no pointers, and are valid when all bytes are zero; every field
//! that another process may write is atomic. What is read from here is never trusted as an index,
//! length or process id without a check.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::affinity::SharedCpuSet;
use crate::bitmap::Bitmap;
use crate::budget::Run;
use crate::clock;
use crate::drain::DrainWords;
use crate::flight::Flight;
use crate::gate::Gate;
use crate::queue::Entry;
use crate::text::SharedText;
use crate::word::{Ack, GateWord, IsolationWord, OwnerWord, Reference, Revocation};

/// The number of this layout: two krex versions work together if theirs are equal.
pub const LAYOUT: u32 = 4;

pub const DEVICES: usize = 64;
pub const TENANTS: usize = 1024;
pub const SUBMITTERS: usize = 4096;
pub const SUPERVISORS: usize = 64;
/// Processes that can be stopped by SIGSTOP at one time, on the whole machine.
pub const STOPPED: usize = 16_384;
/// Different reservations of CPUs, on the whole machine.
pub const RESERVATIONS: usize = 64;
/// Threads that can be on reserved CPUs at one time, on the whole machine.
pub const MASKS: usize = 4096;

/// The first bytes of the file. These never change, in any version.
pub const MAGIC: u64 = u64::from_le_bytes(*b"krex\x00seg");

/// The header, whose layout is the same in every version of krex.
#[repr(C, align(4096))]
pub struct Header {
    pub magic: AtomicU64,
    /// [`LAYOUT`] of the version that created the file.
    pub layout: AtomicU64,
    /// Size of the file in bytes.
    pub size: AtomicU64,
    /// Set once when the segment was taken out of use: open a new one.
    pub retired: AtomicU64,
    /// Version of the creator, for messages.
    pub version: SharedText<4>,
}

/// How many slots of a table were ever in use, so that the rest of it, which may be megabytes, is
/// never touched.
#[repr(C)]
#[derive(Debug)]
pub struct Mark {
    used: AtomicU64,
}

impl Mark {
    /// Slot `index` is about to be claimed.
    pub fn raise(&self, index: usize) {
        // SeqCst, before the claim: whoever scans after a claim looks as far as its slot.
        if self.used.load(Ordering::Relaxed) <= index as u64 {
            self.used.fetch_max(index as u64 + 1, Ordering::SeqCst);
        }
    }

    /// The number of slots to look at, of `capacity`.
    pub fn used(&self, capacity: usize) -> usize {
        (self.used.load(Ordering::SeqCst) as usize).min(capacity)
    }
}

/// A device. Devices are found by the hash of their name and are never freed.
#[repr(C, align(128))]
pub struct Device {
    /// Hash of the name; zero: not in use.
    pub hash: AtomicU64,
    pub name: SharedText<8>,
    /// The tenure whose siblings were thawed because its holder ran on no CPU.
    pub stalled_tenure: AtomicU64,
    /// The tenure during which a sibling was thawed, expectedly or not.
    pub disturbed_tenure: AtomicU64,
    /// The tenure during which a process came that had run beside it, unknown to krex.
    pub newcomer_tenure: AtomicU64,
    /// Packed [`Revocation`]: the last one.
    pub revocation: AtomicU64,
    pub run: Run,
    /// Packed [`crate::word::Allotment`]: the CPUs that are kept for its regions.
    pub reservation: AtomicU64,
    pub gate: DeviceGate,
    /// Counts acknowledgements: the holder sleeps here.
    pub acknowledged: AtomicU64,
}

/// The gate on cache lines of its own: every submission reads it.
#[repr(C, align(128))]
pub struct DeviceGate(pub Gate);

impl Device {
    pub fn gate(&self) -> &Gate {
        &self.gate.0
    }

    /// Notes that the gate is about to be opened from `word`; nothing if that is over already.
    pub fn note_opening(&self, word: GateWord) {
        if self.gate().load() == word {
            self.run.opening(clock::now());
        }
    }

    pub fn last_revocation(&self) -> Option<Revocation> {
        Revocation::unpack(self.revocation.load(Ordering::Acquire))
    }
}

/// What a tenant says about the region that it holds. It is in the tenant's own slot, and the gate
/// names the slot: one that lost its tenure writes where nobody looks any more.
#[repr(C)]
pub struct Holding {
    pub label: SharedText<8>,
    pub granted_at: AtomicU64,
    /// When siblings that are not drained by then are frozen all the same.
    pub drain_deadline: AtomicU64,
    /// When the last sibling was drained; the supervisors raise it.
    pub drained_at: AtomicU64,
    /// When the region is revoked.
    pub hold_deadline: AtomicU64,
}

/// A tenant: a process tree that is frozen as one unit.
#[repr(C, align(128))]
pub struct Tenant {
    /// Packed [`OwnerWord`]; its pid is the root process.
    pub owner: AtomicU64,
    /// Start time of the root process, in clock ticks since boot.
    pub start_time: AtomicU64,
    /// Packed [`Reference`] to the tenant that this one was split off from.
    pub parent: AtomicU64,
    /// Bit i: shares device i.
    pub devices: AtomicU64,
    /// The device that `krex run --device` named first, plus one; zero: none was named.
    pub default_device: AtomicU64,
    pub queue: Entry,
    pub holding: Holding,
    /// What the command says that it does: [`Activity`].
    pub activity: AtomicU64,
    /// [`crate::freezer::Kind`] with which it is frozen.
    pub freezer: AtomicU64,
    pub registered_at: AtomicU64,
    /// 1: it attached itself while it ran, instead of being started by `krex run`.
    pub attached: AtomicU64,
    /// 1: its processes are started with the interposer, or one of them was seen to have it.
    pub preloaded: AtomicU64,
    /// Limit of `--timeout` in nanoseconds; zero: none.
    pub time_limit: AtomicU64,
    /// 1: `--on-stuck=kill`; it is ended when a drain gives it up.
    pub on_stuck: AtomicU64,
    /// 1: its supervisor is to end it (`evict.rs`).
    pub evicted: AtomicU64,
    /// Nanoseconds spent frozen; since when it is frozen now (zero: it is not).
    pub frozen_total: AtomicU64,
    pub frozen_since: AtomicU64,
    /// The same for waiting: in the queue, or at a closed gate.
    pub waiting_total: AtomicU64,
    pub waiting_since: AtomicU64,
    /// How many threads wait, and for how long the tenant had been frozen when they began.
    pub waiting_threads: AtomicU64,
    pub frozen_before: AtomicU64,
    pub name: SharedText<8>,
    /// The cgroup's path below the mount of cgroup v2, if it has one of its own.
    pub cgroup: SharedText<64>,
    /// Packed [`IsolationWord`]: its threads are on reserved CPUs. Who is told to put that right
    /// sleeps here.
    pub isolation: AtomicU64,
    /// The [`IsolationWord`] for which another region ran on the same CPUs.
    pub crowded: AtomicU64,
    /// Reserved CPUs which some of its threads could not be kept off, having no others.
    pub on_reserved: SharedCpuSet,
    /// The mask of the first of its threads that had to do without reserved CPUs, from before;
    /// known when `narrowed` says [`crate::word::SlotState::Live`].
    pub narrowed: AtomicU64,
    pub before: SharedCpuSet,
    /// Packed [`Ack`]s, one per device.
    pub acks: [AtomicU64; DEVICES],
}

impl Tenant {
    pub fn owner(&self) -> OwnerWord {
        // SeqCst: reading half of the registration handshake (`sync.rs`).
        OwnerWord(self.owner.load(Ordering::SeqCst))
    }

    pub fn parent(&self) -> Option<Reference> {
        Reference::unpack(self.parent.load(Ordering::Acquire))
    }

    pub fn isolation(&self) -> IsolationWord {
        // SeqCst: who claims the restoring is decided by swaps on this word; the reads that lead
        // to them are in the same order, with the gate's.
        IsolationWord(self.isolation.load(Ordering::SeqCst))
    }

    pub fn ack(&self, device: usize) -> Ack {
        Ack::unpack(self.acks[device].load(Ordering::Acquire))
    }

    pub fn shares(&self, device: usize) -> bool {
        self.devices.load(Ordering::SeqCst) & (1 << device) != 0
    }

    /// A thread begins to wait; pair it with [`Tenant::stop_waiting`].
    pub fn start_waiting(&self, now: u64) {
        if self.waiting_threads.fetch_add(1, Ordering::AcqRel) == 0 {
            self.frozen_before.store(self.time_frozen(now), Ordering::Release);
            self.waiting_since.store(now, Ordering::Release);
        }
    }

    /// So many threads wait no more.
    pub fn stop_waiting(&self, threads: u64, now: u64) {
        let fewer = |waiting: u64| Some(waiting.saturating_sub(threads));
        let before = self.waiting_threads.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer);
        if before.is_ok_and(|before| before > 0 && before <= threads) {
            let waited = self.time_waiting(now);
            self.waiting_since.store(0, Ordering::Release);
            self.waiting_total.fetch_add(waited, Ordering::AcqRel);
        }
    }

    /// Nanoseconds so far in which the tenant was frozen.
    fn time_frozen(&self, now: u64) -> u64 {
        let since = self.frozen_since.load(Ordering::Acquire);
        let running = if since == 0 { 0 } else { now.saturating_sub(since) };
        self.frozen_total.load(Ordering::Acquire) + running
    }

    /// Nanoseconds that it waits by now, without those in which it was frozen: who waits in the
    /// queue is usually frozen, too, and no time counts twice.
    fn time_waiting(&self, now: u64) -> u64 {
        match self.waiting_since.load(Ordering::Acquire) {
            0 => 0,
            since => {
                let before = self.frozen_before.load(Ordering::Acquire);
                let frozen = self.time_frozen(now).saturating_sub(before);
                now.saturating_sub(since).saturating_sub(frozen)
            }
        }
    }

    /// Nanoseconds so far in which the tenant was frozen, or waited.
    pub fn time_excluded(&self, now: u64) -> u64 {
        let waited = self.waiting_total.load(Ordering::Acquire) + self.time_waiting(now);
        self.time_frozen(now) + waited
    }
}

/// What a command says that it is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    Idle = 0,
    Compiling = 1,
    WarmingUp = 2,
}

impl Activity {
    pub const ALL: [Self; 3] = [Self::Idle, Self::Compiling, Self::WarmingUp];

    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Compiling => "compiling",
            Self::WarmingUp => "warming_up",
        }
    }

    pub fn from_word(word: u64) -> Self {
        Self::ALL.into_iter().find(|it| *it as u64 == word).unwrap_or(Self::Idle)
    }
}

/// A process that submits to one device.
#[repr(C, align(128))]
pub struct Submitter {
    /// Packed [`OwnerWord`].
    pub owner: AtomicU64,
    pub start_time: AtomicU64,
    /// Packed [`Reference`] to its tenant.
    pub tenant: AtomicU64,
    pub device: AtomicU64,
    /// Its part of the tenant's waiting threads.
    pub waiting_threads: AtomicU64,
    /// [`Submitter::progress`] plus one when a drain gave it up; later holders look only once,
    /// as long as it has completed no more.
    pub stuck_at: AtomicU64,
    /// When that was, in nanoseconds, and for which tenure; zero: never since it was last drained.
    pub stuck_since: AtomicU64,
    pub stuck_tenure: AtomicU64,
    /// The tenure for which its helper owed an answer then; zero: it owed none.
    pub stuck_owing: AtomicU64,
    /// Bits of [`crate::drain::coverage`].
    pub coverage: AtomicU64,
    /// Threads that wait for the device inside of the driver.
    pub device_waits: AtomicU64,
    pub drain: DrainWords,
    /// Contexts that are being made or ended, code that is being loaded.
    pub births: SubmitterFlight,
    pub flight: SubmitterFlight,
}

/// The counts on a cache line of their own: every submission writes them.
#[repr(C, align(128))]
pub struct SubmitterFlight(pub Flight);

impl Submitter {
    pub fn owner(&self) -> OwnerWord {
        OwnerWord(self.owner.load(Ordering::SeqCst))
    }

    pub fn tenant(&self) -> Option<Reference> {
        Reference::unpack(self.tenant.load(Ordering::Acquire))
    }

    pub fn flight(&self) -> &Flight {
        &self.flight.0
    }

    pub fn births(&self) -> &Flight {
        &self.births.0
    }

    /// Calls of both kinds that are inside of the driver now.
    pub fn in_flight(&self) -> u64 {
        self.flight().counts().in_flight + self.births().counts().in_flight
    }

    /// A number that grows with everything that it completes.
    pub fn progress(&self) -> u64 {
        self.flight().counts().completed.wrapping_add(self.births().counts().completed)
    }

    /// Whether its interposer said that of itself.
    pub fn covers(&self, what: u64) -> bool {
        // Acquire: partner of the Release with which a helper says that it is there.
        self.coverage.load(Ordering::Acquire) & what != 0
    }
}

/// The supervisor pair of one PID namespace and user.
#[repr(C, align(128))]
pub struct Supervisor {
    /// Hash of (PID namespace, user); zero: not in use.
    pub key: AtomicU64,
    /// Counts the pairs that served here, upwards; odd: the pair accepts tenants.
    pub session: AtomicU64,
    pub keeper: AtomicU64,
    pub worker: AtomicU64,
    /// Rung (incremented) when there is something to look at: the worker sleeps here.
    pub doorbell: AtomicU64,
}

/// A process that a supervisor stopped by SIGSTOP and has to continue.
#[repr(C)]
pub struct Stopped {
    /// Packed [`OwnerWord`], with the tenant's slot as generation.
    pub owner: AtomicU64,
    pub start_time: AtomicU64,
}

/// CPUs that are kept for regions. It does not change as long as a device names it.
#[repr(C)]
pub struct Reservation {
    /// A [`crate::word::SlotState`]: complete when live.
    pub state: AtomicU64,
    pub cpus: SharedCpuSet,
    pub off: SharedCpuSet,
    pub caller: SharedCpuSet,
    pub others: SharedCpuSet,
}

/// A thread that was moved to reserved CPUs, and the mask that it had before.
#[repr(C)]
pub struct SavedMask {
    /// Packed [`OwnerWord`] of a mask; its pid is the thread.
    pub owner: AtomicU64,
    /// The thread's process, and that one's start time.
    pub process: AtomicU64,
    pub start_time: AtomicU64,
    /// Packed [`IsolationWord`] for which it was moved.
    pub isolation: AtomicU64,
    /// 1: the thread that entered the region.
    pub is_caller: AtomicU64,
    pub mask: SharedCpuSet,
}

/// The whole file.
#[repr(C)]
pub struct Layout {
    pub header: Header,
    pub tenants_mark: Mark,
    pub submitters_mark: Mark,
    pub stopped_mark: Mark,
    pub masks_mark: Mark,
    pub live_tenants: Bitmap<{ TENANTS / 64 }>,
    pub live_submitters: Bitmap<{ SUBMITTERS / 64 }>,
    pub devices: [Device; DEVICES],
    pub supervisors: [Supervisor; SUPERVISORS],
    pub tenants: [Tenant; TENANTS],
    pub submitters: [Submitter; SUBMITTERS],
    pub stopped: [Stopped; STOPPED],
    pub reservations: [Reservation; RESERVATIONS],
    pub masks: [SavedMask; MASKS],
}

impl Layout {
    /// How many tenant slots were ever in use.
    pub fn tenants_used(&self) -> usize {
        self.tenants_mark.used(TENANTS)
    }

    /// How many submitter slots were ever in use.
    pub fn submitters_used(&self) -> usize {
        self.submitters_mark.used(SUBMITTERS)
    }
}

/// Size of the file in bytes.
pub const SIZE: usize = size_of::<Layout>();

const _: () = {
    assert!(DEVICES <= 64, "a tenant's devices are the bits of one word");
    assert!(TENANTS <= 1 << 16, "a gate's holder has 16 bits");
    assert!(TENANTS <= 1 << 10, "a saved mask's tenant has 10 bits");
    assert!(SUBMITTERS <= 1 << 16, "a reference's slot has 16 bits");
    assert!(SUPERVISORS <= 1 << 8, "an owner's supervisor has 8 bits");
    assert!(RESERVATIONS <= 1 << 8, "an isolation's record has 8 bits");
    assert!(align_of::<Layout>() <= 4096, "a mapping is aligned to a page");
    assert!(size_of::<Header>() == 4096, "the header never changes");
};
