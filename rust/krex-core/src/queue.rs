//! The queue of a device: a (priority, ticket) per waiting tenant, no lock, no baton.
//!
//! Nobody passes the turn on. Everyone who waits can compute whose turn it is. A waiter that does
//! not take its turn (stopped, say) is overtaken after [`TURN`] and marked absent: nobody waits
//! for it again, until it is there to take the mark away.

use std::time::Duration;

use crate::sync::{AtomicU64, Ordering};

/// How long the gate stays reserved for each waiter ahead before the next may take the turn. On a
/// machine with eight busy processes per core, 50 ms were at times too short to take it.
pub const TURN: Duration = Duration::from_millis(200);

const TICKET_BITS: u32 = 56;

/// A place in the queue: the smallest key is first. Zero means "not queued".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(u64);

impl Key {
    /// A higher `priority` comes first; within one priority, the lower `ticket`.
    pub fn new(priority: i8, ticket: u64) -> Self {
        let rank = (127 - i16::from(priority)) as u64; // 0 (priority 127) to 255 (priority -128)
        Self((rank << TICKET_BITS) | (ticket & ((1 << TICKET_BITS) - 1)))
    }
}

/// Draws the next ticket; tickets start at 1, so that no key is zero.
pub fn draw_ticket(counter: &AtomicU64) -> u64 {
    // Relaxed: only its uniqueness and growth count; the order of two that draw at the same
    // time is anybody's.
    counter.fetch_add(1, Ordering::Relaxed) + 1
}

/// A tenant's entry. All zero: not queued.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Entry {
    key: AtomicU64,
    device: AtomicU64,
    /// 1: it did not take its turn.
    absent: AtomicU64,
}

impl Entry {
    pub fn join(&self, device: usize, key: Key) {
        self.device.store(device as u64, Ordering::Relaxed);
        self.show();
        // Release: whoever sees the key sees the device that it is for. SeqCst, since a waiter
        // that joins and then finds the gate taken relies on the leaver's wake-up.
        self.key.store(key.0, Ordering::SeqCst);
    }

    /// Says that the waiter is there.
    pub fn show(&self) {
        // Relaxed: a hint about time; whoever has the turn is decided by the gate alone.
        self.absent.store(0, Ordering::Relaxed);
    }

    pub fn leave(&self) {
        // SeqCst: partner of `ahead` in those who wait behind; the caller wakes them afterwards.
        self.key.store(0, Ordering::SeqCst);
    }

    /// The key, if this tenant waits for `device`.
    pub fn key_for(&self, device: usize) -> Option<Key> {
        let key = self.key.load(Ordering::SeqCst);
        (key != 0 && self.device.load(Ordering::Relaxed) == device as u64).then_some(Key(key))
    }
}

/// How many of `entries` are ahead of `mine` for `device`, and there.
pub fn ahead<'a>(entries: impl Iterator<Item = &'a Entry>, device: usize, mine: Key) -> u32 {
    if crate::hooks::sabotaged("queue_order") {
        return 0;
    }
    // Relaxed: see `show`.
    entries
        .filter(|entry| entry.key_for(device).is_some_and(|key| key < mine))
        .filter(|entry| entry.absent.load(Ordering::Relaxed) == 0)
        .count() as u32
}

/// Marks those of `entries` that are ahead of `mine` as absent: `mine` overtook them.
pub fn overtake<'a>(entries: impl Iterator<Item = &'a Entry>, device: usize, mine: Key) {
    for entry in entries.filter(|entry| entry.key_for(device).is_some_and(|key| key < mine)) {
        // Relaxed: see `show`.
        entry.absent.store(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn higher_priority_first_then_lower_ticket() {
        let mut keys = vec![Key::new(0, 2), Key::new(-128, 1), Key::new(127, 9), Key::new(0, 1)];
        keys.sort();
        assert_eq!(keys, vec![Key::new(127, 9), Key::new(0, 1), Key::new(0, 2), Key::new(-128, 1)]);
    }
}
