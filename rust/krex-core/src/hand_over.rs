//! Giving up a tenure: to whoever is first in the queue, or to everybody.
//!
//! A hand-over leaves the gate closed and the siblings frozen: the supervisors thaw the next holder
//! and its ancestors only, and the last one becomes a sibling once the next closes.

use crate::claim;
use crate::clock;
use crate::gate::Gate;
use crate::hooks;
use crate::layout::Layout;
use crate::queue;
use crate::recover;
use crate::supervision;
use crate::word::GateWord;

/// Ends the tenure of `word` with one swap. Returns the next holder's slot, whose supervisor was
/// rung for, or none if the gate is open: then the caller rings for the siblings'. `limit` is that
/// of the closed time, in nanoseconds; without `siblings` there is nobody whom that could starve,
/// and nobody to hand over to.
///
/// # Errors
/// The word as it is, when the tenure was revoked.
pub fn give_up(
    segment: &Layout,
    device: usize,
    word: GateWord,
    siblings: bool,
    limit: u64,
) -> Result<Option<usize>, GateWord> {
    let section = &segment.devices[device];
    let gate = section.gate();
    let now = clock::now();
    if siblings
        && !section.run.is_spent(now, limit)
        && let Some(next) = next(segment, device)
    {
        let granted = gate.hand_over(word, next)?;
        hooks::fault("handed_over");
        // SeqCst, in both: whoever leaves the queue looks at the gate afterwards, so that one of
        // us sees the other.
        if segment.tenants[next].queue.key_for(device).is_some() {
            // A hint: any supervisor repeats it.
            supervision::ring(segment, segment.tenants[next].owner().supervisor());
            return Ok(Some(next));
        }
        // It fails only if that one took the grant after all, or its supervisor saw its death.
        let _ = open(segment, device, gate, granted);
    } else {
        match siblings {
            true => section.run.opening(now),
            false => section.run.end(now),
        }
        gate.open(word)?;
    }
    hooks::fault("opened");
    Ok(None)
}

/// Opens the gate after a hand-over that came to nothing: everybody is still frozen.
///
/// # Errors
/// The word as it is, when it was no longer `granted`.
pub fn open(
    segment: &Layout,
    device: usize,
    gate: &Gate,
    granted: GateWord,
) -> Result<(), GateWord> {
    segment.devices[device].run.opening(clock::now());
    gate.open(granted)?;
    recover::ring_for(segment, segment.live_tenants.iter());
    Ok(())
}

/// The tenant that is first in the queue and could begin at once.
fn next(segment: &Layout, device: usize) -> Option<usize> {
    if hooks::sabotaged("hand_over") {
        return None;
    }
    let entries = segment.live_tenants.iter().map(|slot| (slot, &segment.tenants[slot].queue));
    queue::first(entries, device, |slot| claim::has_no_conflict(segment, slot, device))
}
