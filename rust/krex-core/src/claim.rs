//! Step 1: the turn on a device, in the order of the queue.

use std::time::Duration;

use crate::budget;
use crate::client::{Client, Host, SLICE, Watch};
use crate::clock::{self, Deadline};
use crate::device;
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::hand_over;
use crate::hooks;
use crate::layout::Layout;
use crate::queue::{self, Entry, Key};
use crate::sync::Wake;
use crate::tenant;
use crate::word::{GateWord, Phase};

/// A place in the queue; given up when dropped.
struct Place {
    client: &'static Client,
    device: usize,
    slot: usize,
}

impl Place {
    fn take(
        client: &'static Client,
        device: usize,
        slot: usize,
        key: Key,
        deadline: Deadline,
    ) -> Self {
        client.segment.tenants[slot].queue.join(device, key, deadline.time());
        hooks::fault("queued");
        Self { client, device, slot }
    }

    fn entry(&self) -> &Entry {
        &self.client.segment.tenants[self.slot].queue
    }

    /// Leaves with the turn, once the gate is closing: before, whoever handed over would take this
    /// for giving up. Nobody else can take the turn now, so nobody is woken.
    fn leave_with_turn(self) {
        self.entry().leave();
        std::mem::forget(self);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.entry().leave();
        let (segment, gate) = (&self.client.segment, self.client.gate(self.device));
        // Those behind computed their turn with us in front.
        gate.wake();
        // Who hands over looks at the place once more after its swap, and we at the gate after
        // leaving: one of us opens it.
        if let Some(word) = granted_to(gate.load(), self.slot) {
            let _ = hand_over::open(segment, self.device, word);
        }
    }
}

/// The word, if by it the turn was handed over to the tenant in `slot`.
fn granted_to(word: GateWord, slot: usize) -> Option<GateWord> {
    (word.phase() == Phase::HandedOver && word.holder() == slot).then_some(word)
}

/// A tenure that was granted; the gate is opened when it is dropped, unless it was kept.
pub(crate) struct Tenure {
    pub(crate) client: &'static Client,
    pub(crate) device: usize,
    pub(crate) word: GateWord,
    pub(crate) kept: bool,
    /// In the queue, until the gate is closing.
    place: Option<Place>,
}

impl Tenure {
    /// Step 2: closes the gate.
    pub(crate) fn close(&mut self) -> std::result::Result<(), GateWord> {
        self.advance(Phase::Closing)?;
        if let Some(place) = self.place.take() {
            place.leave_with_turn();
        }
        Ok(())
    }

    pub(crate) fn advance(&mut self, phase: Phase) -> std::result::Result<(), GateWord> {
        self.word = self.client.gate(self.device).advance(self.word, phase)?;
        Ok(())
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        if !self.kept {
            // It fails only if the tenure was revoked, which opened the gate.
            let _ = hand_over::open(&self.client.segment, self.device, self.word);
        }
    }
}

/// How a claim ended.
pub(crate) enum Claimed {
    Granted(Tenure),
    /// An ancestor of this process has entered meanwhile: its region is joined.
    Join(GateWord),
}

/// Step 1: the turn on the device, in the order of the queue.
pub(crate) fn claim(
    client: &'static Client,
    device: usize,
    priority: i8,
    deadline: Deadline,
    host: &dyn Host,
    started: u64,
) -> Result<Claimed> {
    let segment = &client.segment;
    let gate = client.gate(device);
    let slot = client.reference().slot;
    let key = Key::new(priority, started);
    let ahead = |place: &Option<Place>| match place {
        Some(_) => queue::ahead(waiting(segment, device), device, key, clock::now()),
        None => 0,
    };
    let is_anyone_queued = || {
        segment.live_tenants.iter().any(|it| segment.tenants[it].queue.key_for(device).is_some())
    };
    let mut place: Option<Place> = None;
    let mut open_since: Option<(GateWord, u64)> = None;
    let mut watch = Watch::default();
    loop {
        if segment.is_retired() {
            return Err(purged(client));
        }
        if let Some(place) = &place {
            place.entry().show();
        }
        let seen = gate.load();
        if seen.phase() == Phase::Held && tenant::descends_from(segment, slot, seen.holder()) {
            return Ok(Claimed::Join(seen));
        }
        let owed = if seen.is_open() { time_owed(client, device, slot) } else { None };
        // A place in the queue is needed as soon as anybody else is there.
        if place.is_none() && (!seen.is_open() || owed.is_some() || is_anyone_queued()) {
            place = Some(Place::take(client, device, slot, key, deadline));
            continue;
        }
        let mut pause = SLICE;
        let mut reserved_for = None;
        let mut granted = granted_to(seen, slot);
        if granted.is_some() {
            // Also past the deadline: a grant that was made already wins.
        } else if place.is_some() && deadline.has_passed() {
            return Err(client.timed_out(device, started));
        } else if let Some(owed) = owed {
            pause = owed.min(SLICE);
        } else if seen.is_open() || hooks::sabotaged("exclusive") {
            let ahead = ahead(&place);
            reserved_for = Some(ahead);
            let patience = clock::nanoseconds(queue::TURN).saturating_mul(ahead.into());
            let waited = match ahead {
                0 => 0,
                _ => {
                    let since = open_since.filter(|(word, _)| *word == seen).map(|it| it.1);
                    let since = since.unwrap_or_else(clock::now);
                    open_since = Some((seen, since));
                    clock::now().saturating_sub(since)
                }
            };
            if waited >= patience {
                granted = gate.try_grant(slot);
                if granted.is_none() {
                    continue;
                }
                segment.devices[device].run.closed(clock::now());
                if ahead > 0 {
                    queue::overtake(waiting(segment, device), device, key);
                }
            }
            pause = Duration::from_nanos(patience.saturating_sub(waited)).min(SLICE);
        }
        let Some(word) = granted else {
            let still = || reserved_for.is_none_or(|before| ahead(&place) == before);
            let wake = gate.wait_while(seen, deadline.left(pause), still);
            if wake != Wake::Changed && host.interrupted() {
                return Err(Error::Interrupted);
            }
            watch.look(client, host);
            continue;
        };
        let mut tenure = Tenure { client, device, word, kept: false, place: None };
        if segment.is_retired() {
            return Err(purged(client));
        }
        let Some(other) = conflict(client, device) else {
            tenure.place = place;
            return Ok(Claimed::Granted(tenure));
        };
        drop(tenure);
        open_since = None;
        let word = client.gate(other).load();
        if !word.is_open() {
            pause_at(client.gate(other), word, deadline, SLICE, host)?;
        }
        if deadline.has_passed() {
            return Err(client.timed_out(other, started));
        }
    }
}

/// Who waits in the queue for `device` and could begin at once, with slots.
pub(crate) fn waiting(layout: &Layout, device: usize) -> impl Iterator<Item = (usize, &Entry)> {
    let waits = move |slot: &usize| layout.tenants[*slot].queue.key_for(device).is_some();
    layout
        .live_tenants
        .iter()
        .filter(waits)
        .filter(move |slot| has_no_conflict(layout, *slot, device))
        .map(|slot| (slot, &layout.tenants[slot].queue))
}

/// For how long an open gate has to stay open yet, if somebody has work to do meanwhile.
fn time_owed(client: &Client, device: usize, slot: usize) -> Option<Duration> {
    let segment = &client.segment;
    let until = segment.devices[device].run.open_until(budget::max_closed().ok()?);
    if until == 0 {
        return None;
    }
    let left = until.checked_sub(clock::now()).filter(|left| *left > 0)?;
    hand_over::is_shared(segment, device, slot).then(|| Duration::from_nanos(left))
}

fn pause_at(
    gate: &Gate,
    seen: GateWord,
    deadline: Deadline,
    pause: Duration,
    host: &dyn Host,
) -> Result<()> {
    let wake = gate.wait_change(seen, deadline.left(pause));
    if wake != Wake::Changed && host.interrupted() {
        return Err(Error::Interrupted);
    }
    Ok(())
}

fn purged(client: &Client) -> Error {
    Error::segment(
        client.segment.directory(),
        "was purged while this process waited",
        "Enter the region again: a new segment is made",
    )
}

/// So many milliseconds a claim waits for another to step back: less than a grant lasts.
const PATIENCE: u32 = 100;

/// Another device on which a region stands in the way of one on `device`. Of two that were granted
/// at the same moment, the one on the lower device goes first: each took its turn before it looked,
/// so at least one of them sees the other (the handshake of `sync.rs` once more).
fn conflict(client: &Client, device: usize) -> Option<usize> {
    let segment = &client.segment;
    let mut patience = PATIENCE;
    for other in device::with_regions(segment) {
        while let Some(word) = in_the_way(segment, client.reference().slot, device, other) {
            if !word.phase().is_granted() || device > other || patience == 0 {
                return Some(other);
            }
            // It is about to see us and to step back, or to go on, having looked before.
            patience -= 1;
            client.gate(other).wait_change(word, Duration::from_millis(1));
        }
    }
    None
}

/// Whether no region on another device stands in the way of one of the tenant in `slot`.
pub(crate) fn has_no_conflict(segment: &Layout, slot: usize, device: usize) -> bool {
    device::with_regions(segment).all(|other| in_the_way(segment, slot, device, other).is_none())
}

/// The gate of the device `other`, if its holder would have to be frozen for a region of the tenant
/// in `slot` on `device`, or the tenant for that one's.
fn in_the_way(segment: &Layout, slot: usize, device: usize, other: usize) -> Option<GateWord> {
    if other == device {
        return None;
    }
    let word = segment.devices[other].gate().load();
    let holder = word.holder();
    let concerned =
        segment.tenants.get(holder)?.shares(device) || segment.tenants[slot].shares(other);
    let related = holder == slot
        || tenant::descends_from(segment, slot, holder)
        || tenant::descends_from(segment, holder, slot);
    (!word.is_open() && concerned && !related).then_some(word)
}
