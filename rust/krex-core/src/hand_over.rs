//! Giving up a tenure: to whoever is first in the queue, or to everybody.
//!
//! A hand-over leaves the gate closed and the siblings frozen: the supervisors thaw the next holder
//! and its family only, and the last one becomes a sibling once the next closes.

use crate::claim;
use crate::clock;
use crate::hooks;
use crate::layout::Layout;
use crate::queue;
use crate::recover;
use crate::tenant;
use crate::word::GateWord;

/// Ends the tenure of `word` with one swap, and rings for whoever has to act on it: nobody, if
/// there are no `siblings`. `limit` is that of the closed time, in nanoseconds.
///
/// # Errors
/// The word as it is, when the tenure was revoked.
pub fn give_up(
    segment: &Layout,
    device: usize,
    word: GateWord,
    siblings: bool,
    limit: u64,
) -> Result<(), GateWord> {
    let section = &segment.devices[device];
    let gate = section.gate();
    let now = clock::now();
    if siblings
        && !section.run.is_spent(now, limit)
        && let Some(next) = next(segment, device)
    {
        let granted = gate.hand_over(word, next)?;
        hooks::fault("handed_over");
        // SeqCst, in all: whoever leaves the queue looks at the gate afterwards, and so does a
        // claim on another device that stands in the way. One of us sees the other.
        if segment.tenants[next].queue.key_for(device).is_some()
            && claim::has_no_conflict(segment, next, device)
        {
            let family =
                |slot: &usize| *slot == next || tenant::descends_from(segment, next, *slot);
            recover::ring_for(segment, segment.live_tenants.iter().filter(family));
        } else {
            // It fails if somebody else was faster: the one that gave up, or took it after all.
            let _ = open(segment, device, granted);
        }
        return Ok(());
    }
    match is_shared(segment, device, word.holder()) {
        true => section.note_opening(word),
        false => section.run.end(now),
    }
    gate.open(word)?;
    hooks::fault("opened");
    if siblings {
        recover::ring_for(segment, segment.live_tenants.iter());
    }
    Ok(())
}

/// Opens the gate, and rings for everybody: they may be frozen.
///
/// # Errors
/// The word as it is, when it was no longer `word`.
pub fn open(segment: &Layout, device: usize, word: GateWord) -> Result<(), GateWord> {
    let section = &segment.devices[device];
    section.note_opening(word);
    section.gate().open(word)?;
    hooks::fault("revoking");
    recover::ring_for(segment, segment.live_tenants.iter());
    Ok(())
}

/// The tenant that is first in the queue and could begin at once.
fn next(segment: &Layout, device: usize) -> Option<usize> {
    if hooks::sabotaged("hand_over") {
        return None;
    }
    queue::first(claim::waiting(segment, device), device, clock::now())
}

/// Whether anybody shares the device with the tenant in `slot` whose work closed time could starve:
/// not its family.
pub fn is_shared(segment: &Layout, device: usize, slot: usize) -> bool {
    segment.live_tenants.iter().any(|other| {
        other != slot
            && segment.tenants[other].shares(device)
            && !tenant::descends_from(segment, other, slot)
            && !tenant::descends_from(segment, slot, other)
    })
}
