//! The device as all processes see it: one file, mapped by everybody.
//!
//! There is no lock in it that a dead process could keep. A process owns a slot, writes to
//! nothing else, and holds a record lock on the slot's byte of another file, which the kernel
//! releases at its death. Whoever can take the byte of a slot in use knows that its owner is
//! gone, and clears the slot under that lock.
//!
//! A device's position (see `clock.rs`) is known at an *anchor*: a time and the position then.
//! Each slot has two anchors per device. Moving it on means to write into whichever of one's own
//! two isn't in use, and to swap the device's `head`, which names the one in use.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::clock::Clock;
use crate::settings::Settings;
use crate::status::{OPERATING_SYSTEM, OUT_OF_MEMORY, Outcome};
use crate::system;

pub const DEVICES: usize = 8;
const SLOTS: usize = 256;

/// Part of the file's name: files of another layout are another device.
const LAYOUT: u32 = 1;

/// Low bits of a head: which anchor. High bits: how often it was moved.
const ANCHOR_BITS: u32 = 16;

const FREE: u32 = 0;
const LIVE: u32 = 1;
/// The owner is gone; its work lives on until the teardown is over.
const DYING: u32 = 2;

/// How often others' deaths are looked for, in nanoseconds.
const LOOK: u64 = 5_000_000;

/// All zero: position 0 at time 0, so that the position of an unused device is the time.
#[repr(C)]
struct Anchor {
    time: AtomicU64,
    /// The bits of an `f64`.
    position: AtomicU64,
}

#[repr(C)]
struct Device {
    head: AtomicU64,
    anchors: [[Anchor; 2]; SLOTS],
}

/// What everybody may know of one process.
#[repr(C)]
pub struct Slot {
    state: AtomicU32,
    process: AtomicU32,
    dead_since: AtomicU64,
    /// 1: locked by `cuCheckpointProcessLock`; calls wait on this word.
    pub locked: AtomicU32,
    /// Threads inside an entry point that a lock holds back.
    pub in_calls: AtomicU32,
    /// Operations that were submitted and are not done.
    pub pending: AtomicU32,
    unused: AtomicU32,
    /// The position at which the work on each device ends: the bits of an `f64`.
    work_end: [AtomicU64; DEVICES],
    /// Bytes allocated on each device.
    memory: [AtomicU64; DEVICES],
    /// Contexts and modules that are being made or destroyed on each device.
    births: [AtomicU32; DEVICES],
}

#[repr(C)]
struct Segment {
    devices: [Device; DEVICES],
    /// One more than the highest slot ever used.
    used: AtomicU32,
    slots: [Slot; SLOTS],
}

/// A process's hold on the shared device.
pub struct Shared {
    segment: NonNull<Segment>,
    /// The slots' bytes; then one byte for the turn to give birth. Never closed: closing any
    /// descriptor of a file gives up all of a process's record locks on it.
    locks: Option<File>,
    slot: usize,
    teardown: u64,
    stretch: f64,
    last_look: AtomicU64,
    // Neither record locks nor anchors of one's own exclude threads of one process.
    birth: Mutex<()>,
    anchoring: Mutex<()>,
    looking: Mutex<()>,
}

// SAFETY: all of the segment is atomics, and its mapping lives as long as the process.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps the device and takes a slot.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM`: the directory cannot be used; `OUT_OF_MEMORY`: no slot is free.
    pub fn open(settings: &Settings) -> Outcome<Self> {
        let (segment, locks) = match &settings.directory {
            Some(directory) => {
                let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
                made.map_err(|_| OPERATING_SYSTEM)?;
                let open = |name: String| {
                    let mut options = OpenOptions::new();
                    options.read(true).write(true).create(true).truncate(false).mode(0o600);
                    options.open(directory.join(name)).map_err(|_| OPERATING_SYSTEM)
                };
                let file = open(format!("device.{LAYOUT}"))?;
                file.set_len(size_of::<Segment>() as u64).map_err(|_| OPERATING_SYSTEM)?;
                (map(Some(&file))?, Some(open(format!("locks.{LAYOUT}"))?))
            }
            None => (map(None)?, None),
        };
        let mut shared = Self {
            segment,
            locks,
            slot: 0,
            teardown: settings.teardown,
            stretch: settings.stretch,
            last_look: AtomicU64::new(0),
            birth: Mutex::new(()),
            anchoring: Mutex::new(()),
            looking: Mutex::new(()),
        };
        shared.slot = shared.claim().ok_or(OUT_OF_MEMORY)?;
        shared.look_for_dead();
        Ok(shared)
    }

    fn segment(&self) -> &Segment {
        // SAFETY: mapped for good by `map`, of this size, and all zero bytes are valid.
        unsafe { self.segment.as_ref() }
    }

    pub fn own(&self) -> &Slot {
        &self.segment().slots[self.slot]
    }

    /// The slot of a process, if it lives and uses this device.
    pub fn slot_of(&self, process: u32) -> Option<&Slot> {
        self.used_slots().iter().find(|slot| {
            // Acquire: partner of the release in `claim`, so that `process` is the owner's.
            slot.state.load(Ordering::Acquire) == LIVE
                && slot.process.load(Ordering::Relaxed) == process
        })
    }

    fn used_slots(&self) -> &[Slot] {
        // Relaxed: a slot that is not seen yet has no work that was submitted before this.
        let used = self.segment().used.load(Ordering::Relaxed) as usize;
        &self.segment().slots[..used.min(SLOTS)]
    }

    fn claim(&self) -> Option<usize> {
        for (index, slot) in self.segment().slots.iter().enumerate() {
            // Relaxed: what counts is the look under the lock.
            if slot.state.load(Ordering::Relaxed) != FREE || !self.try_lock(index) {
                continue;
            }
            // Acquire: partner of the release with which the last owner's slot was cleared.
            if slot.state.load(Ordering::Acquire) != FREE {
                self.unlock(index);
                continue;
            }
            slot.process.store(system::process_id(), Ordering::Relaxed);
            self.segment().used.fetch_max(index as u32 + 1, Ordering::Relaxed);
            // Release: whoever sees it live sees whose it is.
            slot.state.store(LIVE, Ordering::Release);
            return Some(index);
        }
        None
    }

    fn record_lock(&self, byte: usize, kind: libc::c_int, command: libc::c_int) -> bool {
        let Some(file) = &self.locks else { return true };
        // SAFETY: a `flock` of zeros is valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = byte as libc::off_t;
        lock.l_len = 1;
        // The bare system call, which is no cancellation point.
        // SAFETY: fcntl(F_SETLK) reads `lock`, which outlives the call.
        let attempt = || unsafe {
            libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, &raw const lock)
        };
        loop {
            let interrupted = || std::io::Error::last_os_error().kind() == ErrorKind::Interrupted;
            match attempt() {
                0 => return true,
                _ if command == libc::F_SETLKW && interrupted() => {}
                _ => return false,
            }
        }
    }

    fn try_lock(&self, byte: usize) -> bool {
        self.record_lock(byte, libc::F_WRLCK, libc::F_SETLK)
    }

    fn unlock(&self, byte: usize) {
        self.record_lock(byte, libc::F_UNLCK, libc::F_SETLK);
    }

    /// Clears the slots of the dead, once their teardown is over.
    pub fn look_for_dead(&self) {
        let Ok(_looking) = self.looking.try_lock() else { return };
        if self.locks.is_none() {
            return;
        }
        let now = system::now();
        self.last_look.store(now, Ordering::Relaxed); // Only a hint.
        for (index, slot) in self.used_slots().iter().enumerate() {
            let state = slot.state.load(Ordering::Relaxed);
            if index == self.slot || state == FREE || !self.try_lock(index) {
                continue;
            }
            // From here to the unlock nobody else changes this slot.
            if state == LIVE && slot.state.load(Ordering::Relaxed) == LIVE {
                slot.dead_since.store(now, Ordering::Relaxed);
                slot.state.store(DYING, Ordering::Release);
            }
            let since = slot.dead_since.load(Ordering::Relaxed);
            if slot.state.load(Ordering::Relaxed) == DYING && now >= since + self.teardown {
                self.clear(slot);
            }
            self.unlock(index);
        }
    }

    fn clear(&self, slot: &Slot) {
        for device in 0..DEVICES {
            self.anchor(device);
            slot.work_end[device].store(0, Ordering::Relaxed);
            slot.memory[device].store(0, Ordering::Relaxed);
            slot.births[device].store(0, Ordering::Relaxed);
        }
        slot.in_calls.store(0, Ordering::Relaxed);
        slot.pending.store(0, Ordering::Relaxed);
        slot.locked.store(0, Ordering::Relaxed);
        slot.process.store(0, Ordering::Relaxed);
        // Release: partner of `claim`, whose owner starts from zeros.
        slot.state.store(FREE, Ordering::Release);
    }

    /// What is known of a device now.
    pub fn clock(&self, device: usize) -> Clock {
        let now = system::now();
        if now > self.last_look.load(Ordering::Relaxed) + LOOK && self.others_matter(device) {
            self.look_for_dead();
        }
        self.read_clock(device).1
    }

    /// Whether others have, or had when they died, something on any device.
    pub fn others_work(&self) -> bool {
        (0..DEVICES).any(|it| self.others_matter(it))
    }

    fn others_matter(&self, device: usize) -> bool {
        let position = self.read_clock(device).1.position_at(system::now());
        self.used_slots().iter().enumerate().any(|(index, slot)| {
            let state = slot.state.load(Ordering::Relaxed);
            let end = f64::from_bits(slot.work_end[device].load(Ordering::Relaxed));
            let births = slot.births[device].load(Ordering::Relaxed);
            index != self.slot && state != FREE && (state == DYING || end > position || births > 0)
        })
    }

    fn read_clock(&self, device: usize) -> (u64, Clock) {
        let record = &self.segment().devices[device];
        let (head, time, position) = loop {
            // Acquire: partner of the swap in `anchor`, so that the anchor is seen whole.
            let head = record.head.load(Ordering::Acquire);
            let index = (head & ((1 << ANCHOR_BITS) - 1)) as usize % (2 * SLOTS);
            let anchor = &record.anchors[index / 2][index % 2];
            let time = anchor.time.load(Ordering::Relaxed);
            let position = f64::from_bits(anchor.position.load(Ordering::Relaxed));
            // Orders the two loads above before the one below: an anchor that its owner has
            // begun to write again is not in use any more, and the head says so.
            fence(Ordering::Acquire);
            if record.head.load(Ordering::Relaxed) == head {
                break (head, time, position);
            }
        };
        let mut others = Vec::new();
        let mut stretched = false;
        let mut own_end = 0.0;
        for (index, slot) in self.used_slots().iter().enumerate() {
            let state = slot.state.load(Ordering::Acquire);
            let end = f64::from_bits(slot.work_end[device].load(Ordering::Acquire));
            // A dying process is being torn down, which disturbs as a birth does.
            stretched |= state == DYING || slot.births[device].load(Ordering::Acquire) > 0;
            if index == self.slot {
                own_end = end;
            } else if state != FREE && end > position {
                others.push(end);
            }
        }
        others.sort_by(f64::total_cmp);
        let stretch = if stretched { self.stretch } else { 1.0 };
        (head, Clock { time, position, own_end, other_ends: others, stretch, earlier: None })
    }

    /// Moves the device's anchor to now; whoever changes what its rate depends on does so right
    /// after, so that the change counts from then on only.
    fn anchor(&self, device: usize) {
        let _anchoring = self.anchoring.lock().unwrap_or_else(|it| it.into_inner());
        let record = &self.segment().devices[device];
        loop {
            let (head, clock) = self.read_clock(device);
            let now = system::now();
            if now <= clock.time {
                return;
            }
            let current = (head & ((1 << ANCHOR_BITS) - 1)) as usize;
            let index = if current == 2 * self.slot { current + 1 } else { 2 * self.slot };
            let anchor = &record.anchors[self.slot][index % 2];
            anchor.time.store(now, Ordering::Relaxed);
            anchor.position.store(clock.position_at(now).to_bits(), Ordering::Relaxed);
            let next = ((head >> ANCHOR_BITS) + 1) << ANCHOR_BITS | index as u64;
            // Release: publishes the anchor. Acquire: the next turn of the loop reads another's.
            let swapped =
                record.head.compare_exchange(head, next, Ordering::AcqRel, Ordering::Acquire);
            if swapped.is_ok() {
                return;
            }
        }
    }

    /// Says where this process's work on a device ends. Not to be called by two threads at once.
    pub fn set_work_end(&self, device: usize, position: f64) {
        let word = &self.own().work_end[device];
        if f64::from_bits(word.load(Ordering::Relaxed)) != position {
            self.anchor(device);
            // Release: partner of the load in `read_clock`, after the anchor.
            word.store(position.to_bits(), Ordering::Release);
        }
    }

    /// Whether anything but this process's own work sets the pace of a device.
    pub fn is_shared(&self, clock: &Clock) -> bool {
        !clock.other_ends.is_empty() || clock.stretch > 1.0
    }

    /// Does what takes the driver some time on a device, one process after another, while
    /// everybody's work slows.
    pub fn give_birth(&self, device: usize, nanoseconds: u64) {
        let _turn = self.birth.lock().unwrap_or_else(|it| it.into_inner());
        self.record_lock(SLOTS, libc::F_WRLCK, libc::F_SETLKW);
        let births = &self.own().births[device];
        self.anchor(device);
        // Release: partner of the load in `read_clock`, after the anchor.
        births.fetch_add(1, Ordering::Release);
        system::sleep_until(system::now() + nanoseconds);
        self.anchor(device);
        births.fetch_sub(1, Ordering::Release);
        self.unlock(SLOTS);
    }

    /// Bytes allocated on a device, by everybody.
    pub fn memory_used(&self, device: usize) -> u64 {
        // Relaxed: a sum, of what others may change at any time.
        self.used_slots().iter().map(|it| it.memory[device].load(Ordering::Relaxed)).sum()
    }

    pub fn add_memory(&self, device: usize, bytes: u64) {
        self.own().memory[device].fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn remove_memory(&self, device: usize, bytes: u64) {
        self.own().memory[device].fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn map(file: Option<&File>) -> Outcome<NonNull<Segment>> {
    let (flags, descriptor) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: mmap() of a new range, placed by the kernel; nobody else has it.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), size_of::<Segment>(), protection, flags, descriptor, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(OPERATING_SYSTEM);
    }
    NonNull::new(address.cast()).ok_or(OPERATING_SYSTEM)
}
