//! Step 1: the turn on a device, in the order of the queue.

use std::time::Duration;

use crate::client::{Client, Host, SLICE, Watch};
use crate::clock::{self, Deadline};
use crate::device;
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::hooks;
use crate::queue::{self, Entry, Key};
use crate::supervision;
use crate::sync::Wake;
use crate::tenant;
use crate::word::{GateWord, Phase};

/// A place in the queue; given up when dropped.
struct Queued<'a> {
    entry: &'a Entry,
    gate: &'a Gate,
}

impl Queued<'_> {
    /// Leaves with the turn: nobody else can take it now, so nobody is woken.
    fn leave_with_turn(self) {
        self.entry.leave();
        std::mem::forget(self);
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.entry.leave();
        // Those behind computed their turn with us in front.
        self.gate.wake();
    }
}

/// A tenure that was granted; the gate is opened when it is dropped, unless it was kept.
pub(crate) struct Tenure {
    pub(crate) client: &'static Client,
    pub(crate) device: usize,
    pub(crate) word: GateWord,
    pub(crate) supervisors: Vec<usize>,
    pub(crate) kept: bool,
}

impl Tenure {
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
    let entry = &client.tenant().queue;
    let entries = || segment.live_tenants.iter().map(|slot| &segment.tenants[slot].queue);
    let mut queued: Option<(Queued<'_>, Key)> = None;
    let mut open_since: Option<(GateWord, u64)> = None;
    let mut watch = Watch::default();
    loop {
        if segment.is_retired() {
            return Err(purged(client));
        }
        if queued.is_some() {
            entry.show();
        }
        let seen = gate.load();
        if seen.phase() == Phase::Held && tenant::descends_from(segment, slot, seen.holder()) {
            return Ok(Claimed::Join(seen));
        }
        let mut pause = SLICE;
        let mut reserved_for = None;
        // A place in the queue is needed as soon as anybody else is there.
        if queued.is_none() && (!seen.is_open() || entries().any(|it| it.key_for(device).is_some()))
        {
            let key = Key::new(priority, queue::draw_ticket(&segment.devices[device].tickets));
            entry.join(device, key);
            queued = Some((Queued { entry, gate }, key));
            hooks::fault("queued");
            continue;
        }
        if seen.is_open() || hooks::sabotaged("exclusive") {
            let ahead = queued.as_ref().map_or(0, |(_, key)| queue::ahead(entries(), device, *key));
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
                let tenure = Tenure { client, device, word, supervisors: Vec::new(), kept: false };
                if let (true, Some((_, key))) = (ahead > 0, &queued) {
                    queue::overtake(entries(), device, *key);
                }
                if segment.is_retired() {
                    return Err(purged(client));
                }
                match conflict(client, device) {
                    None => {
                        if let Some((place, _)) = queued.take() {
                            place.leave_with_turn();
                        }
                        return Ok(Claimed::Granted(tenure));
                    }
                    Some(other) => {
                        drop(tenure);
                        open_since = None;
                        let other_gate = client.gate(other);
                        let word = other_gate.load();
                        if !word.is_open() {
                            pause_at(other_gate, word, deadline, SLICE, host)?;
                        }
                        if deadline.has_passed() {
                            return Err(client.timed_out(other, started));
                        }
                        continue;
                    }
                }
            }
            pause = Duration::from_nanos(patience - waited).min(SLICE);
        }
        if deadline.has_passed() {
            return Err(client.timed_out(device, started));
        }
        let ahead = || queued.as_ref().map_or(0, |(_, key)| queue::ahead(entries(), device, *key));
        let still = || reserved_for.is_none_or(|before| ahead() == before);
        let wake = gate.wait_while(seen, deadline.left(pause), still);
        if wake != Wake::Changed && host.interrupted() {
            return Err(Error::Interrupted);
        }
        watch.look(client, host);
    }
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

/// Another device on which a region stands in the way of one on `device`: its holder would have
/// to be frozen for ours, or we for its. Of two that were granted at the same moment, the one on
/// the lower device goes first: each took its turn before it looked, so at least one of them
/// sees the other (the handshake of `sync.rs` once more).
fn conflict(client: &Client, device: usize) -> Option<usize> {
    let segment = &client.segment;
    let own = client.reference().slot;
    let mut patience = 1000;
    for other in device::with_regions(segment).filter(|other| *other != device) {
        loop {
            let word = client.gate(other).load();
            let holder = word.holder();
            let Some(tenant) = segment.tenants.get(holder) else {
                break;
            };
            let concerned = tenant.shares(device) || client.tenant().shares(other);
            let related = holder == own
                || tenant::descends_from(segment, own, holder)
                || tenant::descends_from(segment, holder, own);
            if word.is_open() || !concerned || related {
                break;
            }
            if word.phase() == Phase::Granted && device < other && patience > 0 {
                // It is about to see us and to step back, or to go on, having looked before.
                patience -= 1;
                client.gate(other).wait_change(word, Duration::from_millis(1));
                continue;
            }
            return Some(other);
        }
    }
    None
}
