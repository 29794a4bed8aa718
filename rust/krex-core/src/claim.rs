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
use crate::siblings;
use crate::supervision;
use crate::sync::Wake;
use crate::tenant;
use crate::word::{GateWord, Phase};

/// A place in the queue; given up when dropped.
struct Place {
    client: &'static Client,
    device: usize,
    slot: usize,
    key: Key,
}

impl Place {
    fn take(client: &'static Client, device: usize, slot: usize, priority: i8) -> Self {
        let key = Key::new(priority, clock::now());
        client.segment.tenants[slot].queue.join(device, key);
        hooks::fault("queued");
        Self { client, device, slot, key }
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

    /// Leaves without having had the turn, unless it was granted to this place meanwhile: who
    /// hands over looks at the place once more after its swap, and we at the gate after leaving.
    fn leave(self) -> Option<GateWord> {
        let granted = self.give_up();
        std::mem::forget(self);
        granted
    }

    fn give_up(&self) -> Option<GateWord> {
        self.entry().leave();
        let gate = self.client.gate(self.device);
        // Those behind computed their turn with us in front.
        gate.wake();
        granted_to(gate.load(), self.slot)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(word) = self.give_up() {
            // Granted too late to be of use. It fails only if the leaver noticed.
            let (segment, gate) = (&self.client.segment, self.client.gate(self.device));
            let _ = hand_over::open(segment, self.device, gate, word);
        }
    }
}

/// The word, if it grants the turn to the tenant in `slot`.
fn granted_to(word: GateWord, slot: usize) -> Option<GateWord> {
    (word.phase() == Phase::Granted && word.holder() == slot).then_some(word)
}

/// A tenure that was granted; the gate is opened when it is dropped, unless it was kept.
pub(crate) struct Tenure {
    pub(crate) client: &'static Client,
    pub(crate) device: usize,
    pub(crate) word: GateWord,
    pub(crate) supervisors: Vec<usize>,
    pub(crate) kept: bool,
    /// In the queue, until the gate is closing.
    place: Option<Place>,
}

impl Tenure {
    fn new(client: &'static Client, device: usize, word: GateWord) -> Self {
        Self { client, device, word, supervisors: Vec::new(), kept: false, place: None }
    }

    /// It was handed over under a closed gate: if it comes to nothing, siblings wait to be thawed.
    fn handed_over(client: &'static Client, device: usize, word: GateWord) -> Self {
        let siblings = siblings::list(&client.segment, device, word.holder());
        let mut tenure = Self::new(client, device, word);
        tenure.supervisors = siblings::supervisors(&siblings);
        tenure
    }

    /// Step 2: closes the gate.
    pub(crate) fn close(&mut self) -> std::result::Result<(), GateWord> {
        self.advance(Phase::Closing)?;
        if let Some(place) = self.place.take() {
            place.leave_with_turn();
        }
        Ok(())
    }

    fn gate(&self) -> &'static Gate {
        self.client.gate(self.device)
    }

    pub(crate) fn advance(&mut self, phase: Phase) -> std::result::Result<(), GateWord> {
        self.word = self.gate().advance(self.word, phase)?;
        Ok(())
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        if !self.kept {
            self.client.segment.devices[self.device].run.opening(clock::now());
            // It fails only if the tenure was revoked, which opened the gate.
            let _ = self.gate().open(self.word);
            for supervisor in &self.supervisors {
                supervision::ring(&self.client.segment, *supervisor);
            }
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
    let entries = || segment.live_tenants.iter().map(|slot| &segment.tenants[slot].queue);
    let ahead = |place: &Option<Place>| {
        place.as_ref().map_or(0, |place| queue::ahead(entries(), device, place.key))
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
        // A place in the queue is needed as soon as anybody else is there.
        if place.is_none() && (!seen.is_open() || entries().any(|it| it.key_for(device).is_some()))
        {
            place = Some(Place::take(client, device, slot, priority));
            continue;
        }
        let mut pause = SLICE;
        let mut reserved_for = None;
        let mut tenure = None;
        if let (Some(word), Some(_)) = (granted_to(seen, slot), &place) {
            tenure = Some(Tenure::handed_over(client, device, word));
        } else if place.is_some() && deadline.has_passed() {
            // A grant that was made already wins.
            let granted = place.take().and_then(Place::leave);
            let Some(word) = granted else {
                return Err(client.timed_out(device, started));
            };
            tenure = Some(Tenure::handed_over(client, device, word));
        } else if let Some(owed) = time_owed(client, device, slot) {
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
                let Some(word) = gate.try_grant(slot) else {
                    continue;
                };
                segment.devices[device].run.closed(clock::now());
                if let (true, Some(place)) = (ahead > 0, &place) {
                    queue::overtake(entries(), device, place.key);
                }
                tenure = Some(Tenure::new(client, device, word));
            }
            pause = Duration::from_nanos(patience.saturating_sub(waited)).min(SLICE);
        }
        let Some(mut tenure) = tenure else {
            let still = || reserved_for.is_none_or(|before| ahead(&place) == before);
            let wake = gate.wait_while(seen, deadline.left(pause), still);
            if wake != Wake::Changed && host.interrupted() {
                return Err(Error::Interrupted);
            }
            watch.look(client, host);
            continue;
        };
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

/// For how long the gate has to stay open yet, if others share the device: their work outside of
/// regions comes first.
fn time_owed(client: &Client, device: usize, slot: usize) -> Option<Duration> {
    let segment = &client.segment;
    let until = segment.devices[device].run.open_until(budget::max_closed().ok()?);
    if until == 0 || !client.gate(device).load().is_open() {
        return None;
    }
    let left = until.checked_sub(clock::now()).filter(|left| *left > 0)?;
    let is_other = |it: usize| it != slot && segment.tenants[it].shares(device);
    segment.live_tenants.iter().any(is_other).then(|| Duration::from_nanos(left))
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

/// Another device on which a region stands in the way of one on `device`. Of two that were granted
/// at the same moment, the one on the lower device goes first: each took its turn before it looked,
/// so at least one of them sees the other (the handshake of `sync.rs` once more).
fn conflict(client: &Client, device: usize) -> Option<usize> {
    let segment = &client.segment;
    let mut patience = 1000;
    for other in device::with_regions(segment) {
        while let Some(word) = in_the_way(segment, client.reference().slot, device, other) {
            if word.phase() != Phase::Granted || device > other || patience == 0 {
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
