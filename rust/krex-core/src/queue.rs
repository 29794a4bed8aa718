//! The queue of a device: a key per waiting tenant, no lock, no baton.
//!
//! Whoever leaves grants the turn to whoever is [`first`]. At an open gate everyone who waits can
//! compute whose turn it is. A waiter that does not take its turn (stopped, say) is passed over and
//! marked absent: nobody waits for it again, until it is there to take the mark away.

use std::time::Duration;

use crate::sync::{AtomicU64, Ordering};

/// How long the gate stays reserved for each waiter ahead before the next may take the turn. On a
/// machine with eight busy processes per core, 50 ms were at times too short to take it.
pub const TURN: Duration = Duration::from_millis(200);

/// One level of priority is worth so much waiting: who waits long enough is served before anybody
/// who comes now, whatever their priorities.
pub const AGEING: Duration = Duration::from_secs(10);

/// A place in the queue: the smallest key is first. Zero means "not queued".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(u64);

impl Key {
    /// For one that comes at `now`, in nanoseconds. Those of one priority are served in the order
    /// of their coming; one of a higher priority before all of lower ones that did not come earlier
    /// by [`AGEING`] per level.
    pub fn new(priority: i8, now: u64) -> Self {
        let handicap = (127 - i16::from(priority)) as u64; // 0 (priority 127) to 255 (-128)
        Self(now.saturating_add(handicap * AGEING.as_nanos() as u64).max(1))
    }
}

/// A tenant's entry. All zero: not queued.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Entry {
    key: AtomicU64,
    device: AtomicU64,
    /// Until when it waits: past that the turn is of no use to it, frozen or not.
    deadline: AtomicU64,
    /// 1: it did not take its turn.
    absent: AtomicU64,
}

impl Entry {
    /// Queues for `device` until `deadline`, in nanoseconds of the monotonic clock.
    pub fn join(&self, device: usize, key: Key, deadline: u64) {
        self.device.store(device as u64, Ordering::Relaxed);
        self.deadline.store(deadline, Ordering::Relaxed);
        self.show();
        // Release: whoever sees the key sees what it is for. SeqCst, since a waiter
        // that joins and then finds the gate taken relies on the leaver's wake-up.
        self.key.store(key.0, Ordering::SeqCst);
    }

    /// Says that the waiter did not take its turn.
    pub fn miss(&self) {
        // Relaxed: see `show`.
        self.absent.store(1, Ordering::Relaxed);
    }

    /// Says that the waiter is there.
    pub fn show(&self) {
        // Relaxed: a hint about time; whoever has the turn is decided by the gate alone.
        self.absent.store(0, Ordering::Relaxed);
    }

    pub fn leave(&self) {
        // SeqCst: partner of `ahead` in those who wait behind, whom the caller wakes afterwards if
        // it does not leave with the turn; and of the leaving holder's second look at the place
        // to which it handed over (`hand_over.rs`).
        self.key.store(0, Ordering::SeqCst);
    }

    /// The key, if this tenant waits for `device`.
    pub fn key_for(&self, device: usize) -> Option<Key> {
        let key = self.key.load(Ordering::SeqCst);
        (key != 0 && self.device.load(Ordering::Relaxed) == device as u64).then_some(Key(key))
    }
}

/// How many of `entries` are ahead of `mine` for `device`, and there, at `now`.
pub fn ahead<'a>(
    entries: impl Iterator<Item = (usize, &'a Entry)>,
    device: usize,
    mine: Key,
    now: u64,
) -> u32 {
    if crate::hooks::sabotaged("queue_order") {
        return 0;
    }
    present(entries, device, now).filter(|(key, _)| *key < mine).count() as u32
}

/// The slot of whoever is first for `device` among `entries`, and there, at `now`.
pub fn first<'a>(
    entries: impl Iterator<Item = (usize, &'a Entry)>,
    device: usize,
    now: u64,
) -> Option<usize> {
    let there = present(entries, device, now);
    let first = if crate::hooks::sabotaged("queue_order") { there.max() } else { there.min() };
    first.map(|(_, slot)| slot)
}

/// Who waits for `device`, is there, and would take the turn at `now`.
fn present<'a>(
    entries: impl Iterator<Item = (usize, &'a Entry)>,
    device: usize,
    now: u64,
) -> impl Iterator<Item = (Key, usize)> {
    entries
        // Relaxed: see `show`.
        .filter(|(_, entry)| entry.absent.load(Ordering::Relaxed) == 0)
        .filter(move |(_, entry)| now < entry.deadline.load(Ordering::Relaxed))
        .filter_map(move |(slot, entry)| Some((entry.key_for(device)?, slot)))
}

/// Marks those of `entries` that are ahead of `mine` as absent: `mine` overtook them.
pub fn overtake<'a>(entries: impl Iterator<Item = (usize, &'a Entry)>, device: usize, mine: Key) {
    for (_, entry) in entries {
        if entry.key_for(device).is_some_and(|key| key < mine) {
            entry.miss();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn higher_priority_first_then_whoever_came_first_and_nobody_waits_for_ever() {
        let mut keys = vec![Key::new(0, 2), Key::new(-128, 1), Key::new(127, 9), Key::new(0, 1)];
        keys.sort();
        assert_eq!(keys, vec![Key::new(127, 9), Key::new(0, 1), Key::new(0, 2), Key::new(-128, 1)]);
        let ageing = AGEING.as_nanos() as u64;
        assert!(Key::new(0, 1) < Key::new(1, 2 + ageing), "a level is worth that much waiting");
        assert!(Key::new(-128, 1) < Key::new(127, 2 + 255 * ageing));
    }
}
