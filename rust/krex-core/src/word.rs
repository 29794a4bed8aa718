//! The packed words of the segment: their bits have names here and nowhere else.

/// Bits `SHIFT .. SHIFT + WIDTH` of a 64-bit word.
#[derive(Clone, Copy)]
struct Field<const SHIFT: u32, const WIDTH: u32>;

impl<const SHIFT: u32, const WIDTH: u32> Field<SHIFT, WIDTH> {
    const MAX: u64 = (1 << WIDTH) - 1;

    const fn get(word: u64) -> u64 {
        (word >> SHIFT) & Self::MAX
    }

    const fn put(value: u64) -> u64 {
        (value & Self::MAX) << SHIFT
    }
}

/// The phase of a device's gate. Every phase but `Open` is closed for all but the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Phase {
    Open = 0,
    /// A tenant has the turn and looks whether a region on another device stands in its way.
    Granted = 1,
    /// Siblings are being turned back, drained and frozen.
    Closing = 2,
    /// The region runs.
    Held = 3,
    /// The region is over; supervisors check that what they froze is still frozen.
    Leaving = 4,
    /// As `Granted`, by the last holder, whose siblings stay frozen.
    HandedOver = 5,
}

impl Phase {
    /// The name that users see.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Open => "open",
            Phase::Granted => "granted",
            Phase::Closing => "closing",
            Phase::Held => "held",
            Phase::Leaving => "leaving",
            Phase::HandedOver => "handed_over",
        }
    }

    /// Whether a tenant has the turn, and has not begun to use it.
    pub fn is_granted(self) -> bool {
        matches!(self, Phase::Granted | Phase::HandedOver)
    }
}

type GatePhase = Field<0, 4>;
type GateHolder = Field<4, 16>;
type GateTenure = Field<20, 44>;

/// A device's gate: (tenure, holder's tenant slot, phase).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GateWord(pub u64);

impl GateWord {
    pub const fn new(tenure: u64, holder: usize, phase: Phase) -> Self {
        Self(
            GateTenure::put(tenure) | GateHolder::put(holder as u64) | GatePhase::put(phase as u64),
        )
    }

    /// The phase; a pattern that no krex writes reads as `Open`, which harms nobody for ever.
    pub const fn phase(self) -> Phase {
        match GatePhase::get(self.0) {
            1 => Phase::Granted,
            2 => Phase::Closing,
            3 => Phase::Held,
            4 => Phase::Leaving,
            5 => Phase::HandedOver,
            _ => Phase::Open,
        }
    }

    pub const fn is_open(self) -> bool {
        matches!(self.phase(), Phase::Open)
    }

    /// The tenant slot of the holder, or of the last one if the gate is open.
    pub const fn holder(self) -> usize {
        GateHolder::get(self.0) as usize
    }

    /// The number of the holder's turn: it only grows (44 bits: 500 years at 1000 a second).
    pub const fn tenure(self) -> u64 {
        GateTenure::get(self.0)
    }

    pub const fn with_phase(self, phase: Phase) -> Self {
        Self::new(self.tenure(), self.holder(), phase)
    }
}

impl std::fmt::Debug for GateWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}(tenure {}, holder {})", self.phase(), self.tenure(), self.holder())
    }
}

/// What a slot is doing: it goes Free, Starting, Live, Ending, Free. Who moves it to Ending, by one
/// swap, is its only cleaner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SlotState {
    Free = 0,
    /// Claimed, and its owner is still filling it in.
    Starting = 1,
    Live = 2,
    /// Being cleaned up.
    Ending = 3,
}

type OwnerState = Field<0, 4>;
type OwnerSupervisor = Field<4, 8>;
type OwnerPid = Field<12, 24>;
type OwnerGeneration = Field<36, 28>;

/// Who owns a slot: (generation, pid, supervisor slot, state), so that claiming a slot and saying
/// who claimed it is one compare-and-swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerWord(pub u64);

impl OwnerWord {
    pub const fn new(generation: u64, pid: i32, supervisor: usize, state: SlotState) -> Self {
        Self(
            OwnerGeneration::put(generation)
                | OwnerPid::put(pid as u64)
                | OwnerSupervisor::put(supervisor as u64)
                | OwnerState::put(state as u64),
        )
    }

    pub const fn state(self) -> SlotState {
        match OwnerState::get(self.0) {
            1 => SlotState::Starting,
            2 => SlotState::Live,
            3 => SlotState::Ending,
            _ => SlotState::Free,
        }
    }

    pub const fn supervisor(self) -> usize {
        OwnerSupervisor::get(self.0) as usize
    }

    /// The process id, as seen in the PID namespace of the slot's supervisor.
    pub const fn pid(self) -> i32 {
        OwnerPid::get(self.0) as i32
    }

    pub const fn generation(self) -> u64 {
        OwnerGeneration::get(self.0)
    }

    pub const fn with_state(self, state: SlotState) -> Self {
        Self::new(self.generation(), self.pid(), self.supervisor(), state)
    }

    pub const fn is_free(self) -> bool {
        matches!(self.state(), SlotState::Free)
    }
}

type MaskSlot = Field<36, 10>;
type MaskUse = Field<46, 18>;

/// The owner of a saved mask: the generation is (which use of the place it is, the tenant's slot).
impl OwnerWord {
    /// The word for the next use of a place that is free.
    pub const fn next_of_mask(self, slot: usize, thread: i32, supervisor: usize) -> Self {
        let owner = Self::new(0, thread, supervisor, SlotState::Starting).0;
        let uses = MaskUse::get(self.0) + 1;
        Self(owner | MaskUse::put(uses) | MaskSlot::put(slot as u64))
    }

    pub const fn slot_of_mask(self) -> usize {
        MaskSlot::get(self.0) as usize
    }
}

type ReferenceSlot = Field<0, 16>;
type ReferenceGeneration = Field<16, 28>;
type ReferenceValid = Field<63, 1>;

/// A slot together with its generation: a reference that goes stale instead of wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    pub slot: usize,
    pub generation: u64,
}

impl Reference {
    pub const fn pack(reference: Option<Self>) -> u64 {
        match reference {
            None => 0,
            Some(it) => {
                ReferenceValid::put(1)
                    | ReferenceGeneration::put(it.generation)
                    | ReferenceSlot::put(it.slot as u64)
            }
        }
    }

    pub const fn unpack(word: u64) -> Option<Self> {
        if ReferenceValid::get(word) == 0 {
            return None;
        }
        Some(Self {
            slot: ReferenceSlot::get(word) as usize,
            generation: ReferenceGeneration::get(word),
        })
    }
}

/// How far a supervisor is with a sibling, for one tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
#[repr(u64)]
pub enum Stage {
    None = 0,
    /// Turned back, drained and frozen, or given up with a reason.
    Settled = 1,
    /// Looked at again after the region.
    Verified = 2,
}

/// How a sibling was drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Drained {
    No = 0,
    /// It had nothing in flight.
    Idle = 1,
    /// Its in-flight count was waited for.
    Counted = 2,
    /// Something was still in flight, or on a stream, at the end of `drain_timeout`.
    TimedOut = 3,
    /// What it had put on its streams was waited for.
    Streams = 4,
    /// The same, and a stream reported an error: nothing runs on it any more.
    Error = 5,
}

impl Drained {
    pub fn name(self) -> &'static str {
        match self {
            Drained::No => "no",
            Drained::Idle => "idle",
            Drained::Counted => "counted",
            Drained::TimedOut => "timed out",
            Drained::Streams => "streams",
            Drained::Error => "error",
        }
    }
}

/// How a sibling was frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Frozen {
    No = 0,
    Cgroup2 = 1,
    Sigstop = 2,
    /// Ancestors of the holder run on (they read its pipes); the rest of their tree is stopped.
    AroundHolder = 3,
    /// Nothing of it was left to freeze: it ended.
    Gone = 4,
}

impl Frozen {
    pub fn name(self) -> &'static str {
        match self {
            Frozen::No => "no",
            Frozen::Cgroup2 => "cgroup2",
            Frozen::Sigstop => "sigstop",
            Frozen::AroundHolder => "all but the holder's ancestors",
            Frozen::Gone => "ended",
        }
    }
}

/// Why a supervisor could not do all that it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Obstacle {
    None = 0,
    /// The freezer reported an error.
    FreezeFailed = 1,
    /// A task did not reach the frozen state in time.
    FreezeTimedOut = 2,
    /// PID 1 of a container cannot be stopped from inside.
    IsInit = 3,
    /// Some processes of it belong to another user.
    NotPermitted = 4,
}

type AckStage = Field<0, 2>;
type AckDrained = Field<2, 3>;
type AckFrozen = Field<5, 3>;
type AckObstacle = Field<8, 4>;
type AckDisturbed = Field<12, 1>;
type AckTenure = Field<20, 44>;

/// A supervisor's acknowledgement for one tenant and device: what it did for which tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    pub tenure: u64,
    pub stage: Stage,
    pub drained: Drained,
    pub frozen: Frozen,
    pub obstacle: Obstacle,
    /// It ran during the region: thawed, continued by somebody, or its supervisor died.
    pub disturbed: bool,
}

impl Ack {
    /// Nothing was done for this tenure yet.
    pub const fn none(tenure: u64) -> Self {
        Self {
            tenure,
            stage: Stage::None,
            drained: Drained::No,
            frozen: Frozen::No,
            obstacle: Obstacle::None,
            disturbed: false,
        }
    }

    pub const fn pack(self) -> u64 {
        AckTenure::put(self.tenure)
            | AckStage::put(self.stage as u64)
            | AckDrained::put(self.drained as u64)
            | AckFrozen::put(self.frozen as u64)
            | AckObstacle::put(self.obstacle as u64)
            | AckDisturbed::put(self.disturbed as u64)
    }

    pub const fn unpack(word: u64) -> Self {
        Self {
            tenure: AckTenure::get(word),
            stage: match AckStage::get(word) {
                1 => Stage::Settled,
                2 => Stage::Verified,
                _ => Stage::None,
            },
            drained: match AckDrained::get(word) {
                1 => Drained::Idle,
                2 => Drained::Counted,
                3 => Drained::TimedOut,
                4 => Drained::Streams,
                5 => Drained::Error,
                _ => Drained::No,
            },
            frozen: match AckFrozen::get(word) {
                1 => Frozen::Cgroup2,
                2 => Frozen::Sigstop,
                3 => Frozen::AroundHolder,
                4 => Frozen::Gone,
                _ => Frozen::No,
            },
            obstacle: match AckObstacle::get(word) {
                1 => Obstacle::FreezeFailed,
                2 => Obstacle::FreezeTimedOut,
                3 => Obstacle::IsInit,
                4 => Obstacle::NotPermitted,
                _ => Obstacle::None,
            },
            disturbed: AckDisturbed::get(word) == 1,
        }
    }
}

/// How a drain went in the process itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum DrainOutcome {
    /// Nothing is left on any stream.
    Done = 1,
    /// The same, and a stream reported an error.
    Error = 2,
    /// There are streams that could not be asked.
    Incomplete = 3,
}

type AnswerOutcome = Field<0, 4>;
type AnswerStreams = Field<4, 16>;
type AnswerTenure = Field<20, 44>;

/// A process's answer to a drain request: (tenure, streams that were drained, outcome).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainAnswer {
    pub tenure: u64,
    pub streams: u64,
    pub outcome: DrainOutcome,
}

impl DrainAnswer {
    pub const fn pack(self) -> u64 {
        let streams =
            if self.streams > AnswerStreams::MAX { AnswerStreams::MAX } else { self.streams };
        AnswerTenure::put(self.tenure)
            | AnswerStreams::put(streams)
            | AnswerOutcome::put(self.outcome as u64)
    }

    pub const fn unpack(word: u64) -> Option<Self> {
        let outcome = match AnswerOutcome::get(word) {
            1 => DrainOutcome::Done,
            2 => DrainOutcome::Error,
            3 => DrainOutcome::Incomplete,
            _ => return None,
        };
        Some(Self { tenure: AnswerTenure::get(word), streams: AnswerStreams::get(word), outcome })
    }
}

/// Why a region was revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Cause {
    /// `max_hold` passed.
    Deadline = 1,
    /// The holder died.
    Died = 2,
    /// The holder ran on no CPU, also after its siblings had been thawed.
    Stalled = 3,
    /// `krex recover`.
    ByHand = 4,
}

type CauseKind = Field<0, 4>;
type CauseTenure = Field<20, 44>;

/// The last revocation of a device: (tenure, cause).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revocation {
    pub tenure: u64,
    pub cause: Cause,
}

impl Revocation {
    pub const fn pack(self) -> u64 {
        CauseTenure::put(self.tenure) | CauseKind::put(self.cause as u64)
    }

    pub const fn unpack(word: u64) -> Option<Self> {
        let cause = match CauseKind::get(word) {
            1 => Cause::Deadline,
            2 => Cause::Died,
            3 => Cause::Stalled,
            4 => Cause::ByHand,
            _ => return None,
        };
        Some(Self { tenure: CauseTenure::get(word), cause })
    }
}

type AllotmentState = Field<0, 4>;
type AllotmentRecord = Field<4, 16>;

/// Which CPUs a device's regions have: (whether somebody asked for them, the record they stand
/// in). Zero: nobody has decided yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allotment {
    pub explicit: bool,
    /// `None`: no CPUs at all.
    pub record: Option<usize>,
}

impl Allotment {
    pub const fn pack(self) -> u64 {
        let record = match self.record {
            None => 0,
            Some(record) => record as u64 + 1,
        };
        AllotmentRecord::put(record) | AllotmentState::put(if self.explicit { 2 } else { 1 })
    }

    pub const fn unpack(word: u64) -> Option<Self> {
        let explicit = match AllotmentState::get(word) {
            1 => false,
            2 => true,
            _ => return None,
        };
        let record = match AllotmentRecord::get(word) {
            0 => None,
            record => Some(record as usize - 1),
        };
        Some(Self { explicit, record })
    }
}

/// Who has the threads of a tenant in hand, for one tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Isolation {
    /// They are where they want to be.
    None = 0,
    /// They are on reserved CPUs, or on their way.
    Active = 1,
    /// The holder gives them their masks back.
    RestoredByHolder = 2,
    /// A supervisor does.
    RestoredBySupervisor = 3,
    /// They have them; the supervisor looks for what was being born at that moment.
    Settling = 4,
}

// The stage is in the low half, which is the one that a futex compares.
type IsolationStage = Field<0, 4>;
type IsolationDevice = Field<4, 8>;
type IsolationRecord = Field<12, 8>;
type IsolationTenure = Field<20, 44>;

/// The isolation of a tenant: (tenure, reservation's record, device, stage). All zero: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IsolationWord(pub u64);

impl IsolationWord {
    pub const NONE: Self = Self(0);

    pub const fn new(tenure: u64, record: usize, device: usize) -> Self {
        Self(
            IsolationTenure::put(tenure)
                | IsolationRecord::put(record as u64)
                | IsolationDevice::put(device as u64)
                | IsolationStage::put(Isolation::Active as u64),
        )
    }

    pub const fn stage(self) -> Isolation {
        match IsolationStage::get(self.0) {
            1 => Isolation::Active,
            2 => Isolation::RestoredByHolder,
            3 => Isolation::RestoredBySupervisor,
            4 => Isolation::Settling,
            _ => Isolation::None,
        }
    }

    /// Whether threads are on reserved CPUs, or just coming from there.
    pub const fn is_in_hand(self) -> bool {
        !matches!(self.stage(), Isolation::None | Isolation::Settling)
    }

    pub const fn with_stage(self, stage: Isolation) -> Self {
        Self(self.0 & !IsolationStage::put(u64::MAX) | IsolationStage::put(stage as u64))
    }

    pub const fn device(self) -> usize {
        IsolationDevice::get(self.0) as usize
    }

    pub const fn record(self) -> usize {
        IsolationRecord::get(self.0) as usize
    }

    pub const fn tenure(self) -> u64 {
        IsolationTenure::get(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_words_keep_their_parts() {
        for phase in [
            Phase::Open,
            Phase::Granted,
            Phase::Closing,
            Phase::Held,
            Phase::Leaving,
            Phase::HandedOver,
        ] {
            let word = GateWord::new((1 << 44) - 1, 65_535, phase);
            assert_eq!(
                (word.tenure(), word.holder(), word.phase()),
                ((1 << 44) - 1, 65_535, phase)
            );
        }
    }

    #[test]
    fn owner_words_keep_their_parts() {
        let word = OwnerWord::new(7, 4_194_304, 63, SlotState::Live);
        assert_eq!(
            (word.generation(), word.pid(), word.supervisor(), word.state()),
            (7, 4_194_304, 63, SlotState::Live)
        );
    }

    #[test]
    fn acknowledgements_and_references_survive_packing() {
        let ack = Ack {
            tenure: 99,
            stage: Stage::Verified,
            drained: Drained::Error,
            frozen: Frozen::AroundHolder,
            obstacle: Obstacle::NotPermitted,
            disturbed: true,
        };
        assert_eq!(Ack::unpack(ack.pack()), ack);
        let reference = Reference { slot: 1023, generation: 5 };
        assert_eq!(Reference::unpack(Reference::pack(Some(reference))), Some(reference));
        assert_eq!(Reference::unpack(Reference::pack(None)), None);
        let answer = DrainAnswer { tenure: 7, streams: 65_535, outcome: DrainOutcome::Error };
        assert_eq!(DrainAnswer::unpack(answer.pack()), Some(answer));
        assert_eq!(DrainAnswer::unpack(0), None);
        let revocation = Revocation { tenure: 3, cause: Cause::Stalled };
        assert_eq!(Revocation::unpack(revocation.pack()), Some(revocation));
        assert_eq!(Revocation::unpack(0), None);
    }

    #[test]
    fn allotments_and_isolations_survive_packing() {
        for explicit in [false, true] {
            for record in [None, Some(0), Some(63)] {
                let allotment = Allotment { explicit, record };
                assert_eq!(Allotment::unpack(allotment.pack()), Some(allotment));
            }
        }
        assert_eq!(Allotment::unpack(0), None);
        let word = IsolationWord::new((1 << 44) - 1, 63, 7);
        assert_eq!(word.stage(), Isolation::Active);
        assert!(word.is_in_hand() && !IsolationWord::NONE.is_in_hand());
        assert!(!word.with_stage(Isolation::Settling).is_in_hand());
        let stages = [Isolation::RestoredByHolder, Isolation::RestoredBySupervisor];
        for stage in stages.into_iter().chain([Isolation::Settling]) {
            let word = word.with_stage(stage);
            assert_eq!((word.tenure(), word.record(), word.device()), ((1 << 44) - 1, 63, 7));
            assert_eq!(word.stage(), stage);
        }
        assert_eq!(IsolationWord::NONE.stage(), Isolation::None);
    }
}
