//! Locking another process out of the driver, and letting it in again.

use std::sync::atomic::Ordering;

use super::{entry, put};
use crate::driver::Call;
use crate::shared::Slot;
use crate::status::{
    ILLEGAL_STATE, INVALID_VALUE, NOT_INITIALIZED, NOT_READY, NOT_SUPPORTED, Outcome,
};
use crate::system;

/// The first version of CUDA whose driver has it.
pub const SINCE: i32 = 12080;

/// `CU_PROCESS_STATE_*`.
const RUNNING: u32 = 0;
const LOCKED: u32 = 1;

const LOOK: u64 = 200_000;

fn slot<'a>(call: &Call, process: i32) -> Outcome<&'a Slot>
where
    'static: 'a,
{
    if call.driver.settings.version < SINCE {
        return Err(NOT_SUPPORTED);
    }
    call.driver.shared.look_for_dead();
    let process = u32::try_from(process).map_err(|_| INVALID_VALUE)?;
    call.driver.shared.slot_of(process).ok_or(NOT_INITIALIZED)
}

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub struct LockArguments {
    milliseconds: u32,
    reserved: u32,
    reserved_too: [u64; 7],
}

fn lock(call: &Call, process: i32, milliseconds: u32) -> Outcome {
    let slot = slot(call, process)?;
    if call.faults.lock_refused {
        return Err(NOT_SUPPORTED);
    }
    // SeqCst: see `Pass::new`.
    let taken = slot.locked.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst);
    if taken.is_err() {
        return Err(ILLEGAL_STATE);
    }
    let deadline = match milliseconds {
        0 => u64::MAX,
        some => system::now() + u64::from(some) * 1_000_000,
    };
    // What was submitted is done first, and who is inside comes out.
    while call.faults.lock_hangs
        || slot.in_calls.load(Ordering::SeqCst) > 0
        || slot.pending.load(Ordering::SeqCst) > 0
    {
        if system::now() >= deadline && !call.faults.lock_hangs {
            release(slot);
            return Err(NOT_READY);
        }
        system::sleep_until(system::now() + LOOK);
    }
    Ok(())
}

fn release(slot: &Slot) {
    slot.locked.store(0, Ordering::SeqCst);
    system::futex_wake(&slot.locked);
}

entry! { Driver cuCheckpointProcessLock(process: i32, arguments: *const LockArguments) |call| {
    lock(call, process, arguments.as_ref().map_or(0, |it| it.milliseconds))
} }

entry! { Driver cuCheckpointProcessUnlock(process: i32, arguments: *const u64) |call| {
    let _ = arguments;
    let slot = slot(call, process)?;
    if slot.locked.load(Ordering::SeqCst) == 0 {
        return Err(ILLEGAL_STATE);
    }
    release(slot);
    Ok(())
} }

entry! { Driver cuCheckpointProcessGetState(process: i32, state: *mut u32) |call| {
    let locked = slot(call, process)?.locked.load(Ordering::SeqCst) != 0;
    put(state, if locked { LOCKED } else { RUNNING })
} }
