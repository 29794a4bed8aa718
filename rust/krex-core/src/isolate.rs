//! Step 6: the holder's threads go to the reserved CPUs, and back.
//!
//! The calling thread gets a CPU of its own, all other threads of the holder, and of what descends
//! from it, share the rest. A thread's old mask is written down in the segment before it is moved.
//! What carries one of the region's two masks at the end goes back: what was moved to its old
//! mask, what was born inside to the mask of whoever bore it. A thread that chose another mask
//! inside keeps it.
//!
//! # Who restores
//! One word per tenant, `Tenant::isolation`, names the tenure and who has it in hand; it changes by
//! compare-and-swap only. The holder restores before it gives up its tenure. If the gate has been
//! taken away from it (it died, was stopped, is late), its supervisor claims the word and
//! restores. A supervisor is not hurried: the holder waits for it, and sees to it that there is
//! one, since a slow one could still be about to touch a thread. So a tenant enters its next region
//! isolated only after it found the word empty, and nothing of a later tenure is restored by
//! whoever was late for an earlier one. Each looks at the word before it touches a thread; whoever
//! moves one also afterwards, and puts it back if the word was claimed meanwhile. Restoring twice
//! does no harm: what has been restored carries no mask of the region any more.
//!
//! An entry is known by its owner word, which is never used twice.
//!
//! # What is just being born
//! The kernel copies a thread's mask when it begins to make the new one, and shows that one to
//! others only at the end. What is being made at the moment of restoring is seen by nobody, and
//! appears with the region's mask later. So, where there was more than the calling thread, masks
//! stay written down for a while, in which the supervisor looks again. A next region that comes
//! meanwhile knows such a thread by its mask, and writes down that of its creator.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::affinity::{self, CpuSet};
use crate::client::{Client, Host, SLICE};
use crate::clock::Deadline;
use crate::hooks;
use crate::layout::{Layout, MASKS, Tenant};
use crate::members::{self, Member};
use crate::process::{self, Stat};
use crate::reservation::{self, Places, Reservation};
use crate::supervision;
use crate::sync::{self, Wake};
use crate::tenant;
use crate::word::{Isolation, IsolationWord, OwnerWord, SlotState};

/// How long the holder waits for a supervisor that restores in its place, which takes milliseconds
/// once it is there.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often one looks for what was born meanwhile.
const PASSES: usize = 16;

/// The holder's threads are on reserved CPUs; they go back when this is dropped, unless
/// [`Isolated::restore`] has been called.
#[derive(Debug)]
pub(crate) struct Isolated {
    client: &'static Client,
    slot: usize,
    word: IsolationWord,
    pub(crate) reservation: Reservation,
    /// Whether the calling thread is where it belongs.
    pub(crate) is_moved: bool,
    /// What could not be done.
    pub(crate) problem: Option<String>,
    restored: AtomicBool,
    /// Where the calling thread was at the end, if not on reserved CPUs.
    moved_off: OnceLock<CpuSet>,
}

/// Isolates the holder of `tenure`, if CPUs are reserved for `device`.
#[inline]
pub(crate) fn isolate(
    client: &'static Client,
    device: usize,
    tenure: u64,
    host: &dyn Host,
) -> Option<Box<Isolated>> {
    let (record, reservation) = reservation::of(&client.segment, device)?;
    let word = IsolationWord::new(tenure, record, device);
    Some(Isolated::begin(client, word, &reservation, host))
}

impl Isolated {
    #[cold]
    fn begin(
        client: &'static Client,
        word: IsolationWord,
        reservation: &Reservation,
        host: &dyn Host,
    ) -> Box<Self> {
        let slot = client.reference().slot;
        let mut isolated = Box::new(Self {
            client,
            slot,
            word,
            reservation: *reservation,
            is_moved: false,
            problem: None,
            restored: AtomicBool::new(false),
            moved_off: OnceLock::new(),
        });
        // Each of two related tenants says that it isolates, and then looks at the other, so at
        // least one of them sees it (the handshake of `sync.rs`).
        let Ok(earlier) = isolated.take_word(host) else {
            let problem = "the supervisor has not restored the threads of an earlier region";
            isolated.problem = Some(problem.to_owned());
            isolated.restored = AtomicBool::new(true);
            return isolated;
        };
        isolated.find_crowd();
        if let Some(name) = isolated_ancestor(&client.segment, slot) {
            isolated.problem = Some(format!("its threads are in the region of {name}"));
        } else if let Err(error) = isolated.move_all(&reservation.places, earlier.as_ref()) {
            isolated.problem = Some(error);
        }
        if let Some(own) = &earlier {
            own.entries.iter().for_each(|it| {
                it.place.free(&client.segment);
            });
        }
        if !isolated.is_moved {
            isolated.restore(Some(host));
        }
        hooks::fault("isolated");
        isolated
    }

    fn tenant(&self) -> &'static Tenant {
        &self.client.segment.tenants[self.slot]
    }

    /// Makes the tenant's word this tenure's. Returns what an earlier one left, if the supervisor
    /// was not done with it; an error if that one has the threads in hand.
    fn take_word(&self, host: &dyn Host) -> Result<Option<Masks>, Late> {
        let segment = &self.client.segment;
        loop {
            let seen = self.tenant().isolation();
            if seen.is_in_hand() {
                self.finish(seen, Some(host))?;
                continue;
            }
            let masks = match seen.stage() {
                Isolation::Settling => Masks::read(segment, self.slot, seen),
                _ => None,
            };
            if swap(self.tenant(), seen, self.word) {
                return Ok(masks);
            }
        }
    }

    /// Tells those whose regions run on the same CPUs, and itself. They are on other devices, which
    /// were told to share their CPUs.
    fn find_crowd(&self) {
        let segment = &self.client.segment;
        for other in segment.live_tenants.iter().filter(|it| *it != self.slot) {
            let word = segment.tenants[other].isolation();
            let shares = word.stage() == Isolation::Active
                && reservation::read(segment, word.record())
                    .is_some_and(|it| it.cpus.meets(&self.reservation.cpus))
                && !tenant::descends_from(segment, self.slot, other)
                && !tenant::descends_from(segment, other, self.slot);
            if shares {
                // Release: partner of the Acquire in `is_crowded`.
                segment.tenants[other].crowded.store(word.0, Ordering::Release);
                self.tenant().crowded.store(self.word.0, Ordering::Release);
            }
        }
    }

    /// The mask that the calling thread had at the end, if it was not on reserved CPUs any more: it
    /// chose another, or somebody kept it off at the moment at which it entered.
    pub(crate) fn moved_off(&self) -> Option<&CpuSet> {
        self.moved_off.get()
    }

    /// Whether another region ran on the same CPUs at the same time.
    pub(crate) fn is_crowded(&self) -> bool {
        // Acquire: partner of the Release in `find_crowd`.
        self.tenant().crowded.load(Ordering::Acquire) == self.word.0
    }

    /// Moves every thread that is there. The error says what was left where it was.
    fn move_all(&mut self, places: &Places, earlier: Option<&Masks>) -> Result<(), String> {
        let segment = &self.client.segment;
        let identity = &self.client.identity;
        let caller = rustix::thread::gettid().as_raw_nonzero().get();
        let of_relatives = of_settling_relatives(segment, self.slot);
        let mut mover = Mover {
            segment,
            slot: self.slot,
            supervisor: self.client.supervisor,
            word: self.word,
            earlier: earlier.into_iter().chain(&of_relatives).collect(),
            next: 0,
        };
        let own = (identity.pid, identity.start_time);
        mover.move_thread(own, caller, &places.caller, true).map_err(|error| {
            format!("the calling thread was not moved to CPUs {}: {error}", self.reservation.cpus)
        })?;
        self.is_moved = true;
        hooks::fault("isolating");
        let mut seen = HashSet::from([caller]);
        let mut left = 0;
        let mut reason = None;
        for pass in 0..PASSES {
            let before = seen.len();
            // In the first pass nobody but the calling thread has been moved before the list was
            // made. Who appears later with a mask of the region was born with it.
            let is_born_inside = |thread: i32| {
                pass > 0 && affinity::get(thread).is_ok_and(|mask| places.include(&mask))
            };
            for Member { process, threads } in members::family(segment, self.slot) {
                let mut start_time = (process == own.0).then_some(own.1);
                for thread in threads {
                    if !seen.insert(thread) || is_born_inside(thread) {
                        continue;
                    }
                    if self.tenant().isolation() != self.word {
                        return Ok(()); // Revoked, and restored by the supervisor.
                    }
                    if start_time.is_none() {
                        start_time = Stat::of(process).map(|it| it.start_time);
                    }
                    let Some(started) = start_time else { break };
                    match mover.move_thread((process, started), thread, &places.others, false) {
                        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
                            left += 1;
                            reason = Some(error);
                        }
                        _ => {}
                    }
                }
            }
            if seen.len() == before {
                break;
            }
        }
        match reason {
            None => Ok(()),
            Some(error) => Err(format!(
                "{left} threads were not moved to CPUs {}: {error}",
                self.reservation.cpus
            )),
        }
    }

    /// Step 8: gives everybody the old mask back, before the tenure is given up; also if it was
    /// revoked, and the supervisor has not been here. One that is at it is waited for.
    pub(crate) fn restore(&self, host: Option<&dyn Host>) {
        // Relaxed: only the thread that entered comes here.
        if self.restored.swap(true, Ordering::Relaxed) {
            return;
        }
        if self.is_moved
            && let Ok(mask) = affinity::get(0)
            && !mask.without(&self.reservation.cpus).is_empty()
            // Else it was revoked, and the supervisor has moved it.
            && self.tenant().isolation() == self.word
        {
            let _ = self.moved_off.set(mask);
        }
        if self.finish(self.word, host).is_err() {
            log::warn!("the supervisor has not given this process its CPUs back yet");
        }
    }

    /// Sees to it that the tenure of `word` is restored: by this process, or by the supervisor,
    /// which may be at it. `host` starts another supervisor if that is not there.
    fn finish(&self, word: IsolationWord, host: Option<&dyn Host>) -> Result<(), Late> {
        let segment = &self.client.segment;
        let tenant = self.tenant();
        let mine = word.with_stage(Isolation::RestoredByHolder);
        let deadline = Deadline::after(PATIENCE);
        loop {
            let seen = tenant.isolation();
            let is_that = seen.with_stage(Isolation::None) == word.with_stage(Isolation::None);
            if !is_that || !seen.is_in_hand() {
                return Ok(());
            }
            if seen.stage() == Isolation::RestoredBySupervisor {
                // A segment out of use gets no other supervisor, so there its place may be taken.
                let is_left =
                    segment.is_retired() && !segment.is_supervisor_alive(self.client.supervisor);
                if !is_left {
                    if deadline.has_passed() {
                        return Err(Late);
                    }
                    let wake = sync::wait(&tenant.isolation, seen.0, deadline.left(SLICE));
                    if let (Wake::TimedOut, Some(host)) = (wake, host) {
                        self.client.revive_supervisor(host);
                    }
                    continue;
                }
            }
            if seen != mine && !swap(tenant, seen, mine) {
                continue;
            }
            hooks::fault("restoring");
            let known = [self.client.identity.pid];
            if let Some(may_appear) = restore(segment, self.slot, mine, &known)
                && end(segment, self.slot, mine, may_appear)
            {
                hooks::fault("restored");
                if may_appear {
                    supervision::ring(segment, self.client.supervisor);
                }
                return Ok(());
            }
        }
    }
}

/// The supervisor has the threads in hand, and is not done in time.
struct Late;

impl Drop for Isolated {
    fn drop(&mut self) {
        // What a fork inherits is its parent's.
        if !self.client.is_inherited() {
            self.restore(None);
        }
    }
}

fn swap(tenant: &Tenant, from: IsolationWord, to: IsolationWord) -> bool {
    // SeqCst: see `Tenant::isolation`.
    let word = &tenant.isolation;
    word.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// The name of a tenant above this one whose threads, and so this one's, are on reserved CPUs.
fn isolated_ancestor(segment: &Layout, slot: usize) -> Option<String> {
    let is_above = |other: &usize| {
        segment.tenants[*other].isolation().is_in_hand()
            && tenant::descends_from(segment, slot, *other)
    };
    segment.live_tenants.iter().find(is_above).map(|it| segment.tenants[it].name.get())
}

/// What is written down for tenants above and below this one whose masks are being settled.
fn of_settling_relatives(segment: &Layout, slot: usize) -> Vec<Masks> {
    let supervisor = segment.tenants[slot].owner().supervisor();
    let is_relative = |other: usize| {
        segment.tenants[other].owner().supervisor() == supervisor
            && (tenant::descends_from(segment, slot, other)
                || tenant::descends_from(segment, other, slot))
    };
    segment
        .live_tenants
        .iter()
        .map(|other| (other, segment.tenants[other].isolation()))
        .filter(|(other, word)| word.stage() == Isolation::Settling && is_relative(*other))
        .filter_map(|(other, word)| Masks::read(segment, other, word))
        .collect()
}

/// The reservation on whose CPUs the threads of the tenant in `slot` are now.
pub fn current(segment: &Layout, slot: usize) -> Option<Reservation> {
    let word = segment.tenants.get(slot)?.isolation();
    (word.stage() == Isolation::Active).then(|| reservation::read(segment, word.record())).flatten()
}

/// Moves threads, after it wrote their masks down.
struct Mover<'a> {
    segment: &'a Layout,
    slot: usize,
    supervisor: usize,
    word: IsolationWord,
    /// What earlier regions left that are not quite over: of this tenant, and of those above and
    /// below it.
    earlier: Vec<&'a Masks>,
    /// Where the next free entry may be.
    next: usize,
}

impl Mover<'_> {
    fn move_thread(
        &mut self,
        process: (i32, u64),
        thread: i32,
        place: &CpuSet,
        is_caller: bool,
    ) -> io::Result<()> {
        let mut old = affinity::get(thread)?;
        if let Some(earlier) = self.earlier.iter().find(|it| it.places.include(&old)) {
            old = earlier.of(process.0, thread, &old);
        }
        let entry = self.save(process, thread, &old, is_caller)?;
        if old == *place || hooks::sabotaged("isolate") {
            return Ok(());
        }
        let moved = affinity::set(thread, place).and_then(|()| {
            if affinity::get(thread)? == *place {
                return Ok(());
            }
            // Cut by a cpuset: nobody would know it again.
            affinity::set(thread, &old)?;
            Err(io::Error::other("a cpuset does not let it use all of them"))
        });
        let moved = moved.and_then(|()| {
            if self.segment.tenants[self.slot].isolation() == self.word {
                return Ok(());
            }
            // Revoked, and restored by the supervisor, perhaps before this one was moved.
            affinity::set(thread, &old)?;
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        });
        if moved.is_err() {
            entry.free(self.segment);
        }
        moved
    }

    /// Writes a thread's mask down.
    fn save(
        &mut self,
        process: (i32, u64),
        thread: i32,
        mask: &CpuSet,
        is_caller: bool,
    ) -> io::Result<Place> {
        while self.next < MASKS {
            let index = self.next;
            self.next += 1;
            self.segment.masks_mark.raise(index);
            let saved = &self.segment.masks[index];
            let free = OwnerWord(saved.owner.load(Ordering::Acquire));
            if !free.is_free() {
                continue;
            }
            let owner = free.next_of_mask(self.slot, thread, self.supervisor);
            let place = Place { index, owner };
            // AcqRel: what its last user did comes before.
            let claimed =
                saved.owner.compare_exchange(free.0, owner.0, Ordering::AcqRel, Ordering::Relaxed);
            if claimed.is_err() {
                continue;
            }
            // Release: partners of the Acquire in `Entry::read`: who reads one of these finds the
            // owner's word changed.
            saved.process.store(process.0 as u64, Ordering::Release);
            saved.start_time.store(process.1, Ordering::Release);
            saved.isolation.store(self.word.0, Ordering::Release);
            saved.is_caller.store(is_caller.into(), Ordering::Release);
            saved.mask.set(mask);
            // A supervisor that restores frees what it finds unfinished: then nothing is moved any
            // more.
            return place
                .change(self.segment, SlotState::Live)
                .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH));
        }
        Err(io::Error::other(format!("all {MASKS} places for masks are taken")))
    }
}

/// A place in the table of masks, in one use of it.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
    owner: OwnerWord,
}

impl Place {
    /// Goes on to another state, unless another came first.
    fn change(self, segment: &Layout, state: SlotState) -> Option<Self> {
        let owner = self.owner.with_state(state);
        let word = &segment.masks[self.index].owner;
        // AcqRel: whoever finds the new state comes after what was done in the old one.
        word.compare_exchange(self.owner.0, owner.0, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        Some(Self { index: self.index, owner })
    }

    fn free(self, segment: &Layout) -> bool {
        self.change(segment, SlotState::Free).is_some()
    }
}

/// A mask that was written down.
struct Entry {
    place: Place,
    process: i32,
    start_time: u64,
    isolation: IsolationWord,
    is_caller: bool,
    mask: CpuSet,
}

impl Entry {
    fn read(segment: &Layout, index: usize) -> Option<Self> {
        let saved = &segment.masks[index];
        // Acquire, throughout: partners of the Release in `Mover::save`. If the place was freed and
        // used again meanwhile, the second look at the word finds it.
        let owner = OwnerWord(saved.owner.load(Ordering::Acquire));
        if owner.is_free() {
            return None;
        }
        let entry = Self {
            place: Place { index, owner },
            process: saved.process.load(Ordering::Acquire) as i32,
            start_time: saved.start_time.load(Ordering::Acquire),
            isolation: IsolationWord(saved.isolation.load(Ordering::Acquire)),
            is_caller: saved.is_caller.load(Ordering::Acquire) != 0,
            mask: saved.mask.get(),
        };
        (saved.owner.load(Ordering::Acquire) == owner.0).then_some(entry)
    }

    fn is_complete(&self) -> bool {
        self.place.owner.state() != SlotState::Starting
    }

    fn slot(&self) -> usize {
        self.place.owner.slot_of_mask()
    }

    fn thread(&self) -> i32 {
        self.place.owner.pid()
    }

    fn supervisor(&self) -> usize {
        self.place.owner.supervisor()
    }
}

/// Whether anything is written down for anybody.
pub(crate) fn has_entries(segment: &Layout) -> bool {
    all_entries(segment).next().is_some()
}

fn all_entries(segment: &Layout) -> impl Iterator<Item = Entry> + '_ {
    let used = segment.masks_mark.used(MASKS);
    (0..used).filter_map(|index| Entry::read(segment, index))
}

/// What was written down for the tenant in `slot` and the tenure of `word`.
fn entries(segment: &Layout, slot: usize, word: IsolationWord) -> Vec<Entry> {
    let same = word.with_stage(Isolation::Active);
    all_entries(segment)
        .filter(|it| it.slot() == slot)
        .filter(|it| it.isolation == same || !it.is_complete())
        .collect()
}

/// Gives everybody who carries one of the region's masks the old one back, as long as the
/// tenant's word is `word`: `None` if it is not any more, else whether one may yet appear that was
/// being born. `known` are processes that may not be found otherwise.
fn restore(segment: &Layout, slot: usize, word: IsolationWord, known: &[i32]) -> Option<bool> {
    let is_mine = || segment.tenants[slot].isolation() == word;
    let Some(masks) = Masks::read(segment, slot, word) else { return Some(false) };
    if hooks::sabotaged("restore") {
        return Some(false);
    }
    let mut seen = 0;
    for _ in 0..PASSES {
        let mut family = members::family(segment, slot);
        let is_missing =
            |process: i32, family: &[Member]| family.iter().all(|it| it.process != process);
        for process in masks.living.iter().map(|it| &it.0).chain(known) {
            if is_missing(*process, &family) {
                family.push(Member::of(*process));
            }
        }
        seen = 0;
        let mut restored = 0;
        for Member { process, threads } in family {
            for thread in threads {
                if !is_mine() {
                    return None;
                }
                seen += 1;
                restored += usize::from(masks.restore(segment, process, thread));
            }
        }
        if restored == 0 {
            break;
        }
    }
    // The holder, if it is the only thread, is here and bears nobody. Seen from outside, one thread
    // may be in the middle of a fork.
    Some(seen > 1 || word.stage() != Isolation::RestoredByHolder)
}

/// Ends the restoring of `word`. What `may` still `appear` is looked for a while longer. Returns
/// whether the word was still that.
fn end(segment: &Layout, slot: usize, word: IsolationWord, may_appear: bool) -> bool {
    let tenant = &segment.tenants[slot];
    if may_appear {
        return swap(tenant, word, word.with_stage(Isolation::Settling));
    }
    let written = entries(segment, slot, word);
    let ended = swap(tenant, word, IsolationWord::NONE);
    if ended {
        written.iter().for_each(|it| {
            it.place.free(segment);
        });
    }
    ended
}

/// Looks once more for what was being born when the masks of `word` were restored, which the
/// tenant's word is; the `last` time it is forgotten. For its supervisor.
pub fn settle(segment: &Layout, slot: usize, word: IsolationWord, known: &[i32], last: bool) {
    if (hooks::sabotaged("settle") || restore(segment, slot, word, known).is_some()) && last {
        end(segment, slot, word, false);
    }
}

/// Which mask whom belongs to.
struct Masks {
    /// The tenant for which they were written down.
    slot: usize,
    entries: Vec<Entry>,
    /// Those processes, with their start times, that have not ended.
    living: BTreeSet<(i32, u64)>,
    places: Places,
}

impl Masks {
    /// What was written down for the tenure of `word`; `None`: nothing.
    fn read(segment: &Layout, slot: usize, word: IsolationWord) -> Option<Self> {
        let mut entries = entries(segment, slot, word);
        entries.retain(Entry::is_complete);
        let places = reservation::read(segment, word.record())?.places;
        (!entries.is_empty()).then(|| Self::new(slot, entries, places))
    }

    fn new(slot: usize, entries: Vec<Entry>, places: Places) -> Self {
        let own = std::process::id() as i32;
        let mut living: BTreeSet<(i32, u64)> =
            entries.iter().map(|it| (it.process, it.start_time)).collect();
        living.retain(|(pid, start_time)| *pid == own || process::is_alive(*pid, *start_time));
        Self { slot, entries, living, places }
    }

    /// Restores a thread, if it carries one of the region's masks. Returns whether it did and does
    /// not any more.
    fn restore(&self, segment: &Layout, process: i32, thread: i32) -> bool {
        let Ok(carried) = affinity::get(thread) else { return false };
        // In this order: who was not in another's region after the mask was read has it from here.
        if !self.places.include(&carried) || self.is_in_anothers_region(segment, process) {
            return false;
        }
        let mask = self.of(process, thread, &carried);
        if mask == carried {
            return false;
        }
        let elsewhere = || CpuSet::ALL.without(&reservation::of_all(segment));
        match affinity::set(thread, &mask) {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => false,
            // The CPUs that it had are offline, or forbidden by now.
            Err(error) => {
                log::warn!("thread {thread} cannot have CPUs {mask} back: {error}");
                affinity::set(thread, &elsewhere()).is_ok()
            }
        }
    }

    /// Whether a process is in the region of another tenant, which came later: of one that
    /// descends from this one, or the other way round. Who moved it, or the nearest process above
    /// it, has it in hand.
    fn is_in_anothers_region(&self, segment: &Layout, process: i32) -> bool {
        let supervisor = self.entries.first().map(Entry::supervisor);
        let is_in_hand = |slot: usize| {
            slot != self.slot
                && segment.tenants.get(slot).is_some_and(|it| it.isolation().is_in_hand())
        };
        let others: BTreeSet<i32> = all_entries(segment)
            .filter(|it| Some(it.supervisor()) == supervisor && it.is_complete())
            .filter(|it| is_in_hand(it.slot()))
            .map(|it| it.process)
            .collect();
        if others.is_empty() {
            return false;
        }
        let chain =
            std::iter::once(process).chain(process::ancestors(process).map(|above| above.pid));
        for process in chain {
            if others.contains(&process) {
                return true;
            }
            if self.entries.iter().any(|it| it.process == process) {
                return false;
            }
        }
        false
    }

    /// The mask that a thread had, or that whoever bore it had.
    fn of(&self, process: i32, thread: i32, carried: &CpuSet) -> CpuSet {
        let is_own = |it: &&Entry| {
            it.thread() == thread
                && it.process == process
                && self.living.contains(&(process, it.start_time))
        };
        if let Some(own) = self.entries.iter().find(is_own) {
            return own.mask;
        }
        // The two places tell who bore it, unless they are the same.
        let caller = self.entries.iter().find(|it| it.is_caller);
        let by_caller = if self.places.caller == self.places.others {
            caller.filter(|it| it.process == process)
        } else {
            caller.filter(|_| *carried == self.places.caller)
        };
        // Of the other threads of a process any may have; usually all have one mask.
        let of_process = |process: i32| {
            let mut all = self.entries.iter().filter(|it| it.process == process);
            all.clone().find(|it| !it.is_caller).or_else(|| all.next())
        };
        let above = || process::ancestors(process).find_map(|it| of_process(it.pid));
        let creator = by_caller.or_else(|| of_process(process)).or_else(above).or(caller);
        creator.map_or(*carried, |it| it.mask)
    }
}

/// Whether the tenure of `word` is over for the tenant in `slot`.
fn is_over(segment: &Layout, slot: usize, word: IsolationWord) -> bool {
    let Some(device) = segment.devices.get(word.device()) else { return true };
    let gate = device.gate().load();
    // Acquire: partner of the Release in `purge`, after which nobody excludes anybody.
    let is_retired = segment.header.retired.load(Ordering::Acquire) != 0;
    is_retired || gate.is_open() || gate.tenure() != word.tenure() || gate.holder() != slot
}

/// Restores the masks of a tenant whose tenure has ended without its doing so: it died, was
/// stopped, or is late. For the supervisor of its PID namespace, and whoever takes its place.
/// `known` are processes of the tenant that may not be found otherwise.
pub fn restore_if_over(segment: &Layout, slot: usize, known: &[i32]) {
    let tenant = &segment.tenants[slot];
    loop {
        let seen = tenant.isolation();
        if !seen.is_in_hand() || !is_over(segment, slot, seen) {
            return;
        }
        let mine = seen.with_stage(Isolation::RestoredBySupervisor);
        if seen != mine && !swap(tenant, seen, mine) {
            continue;
        }
        hooks::fault("restoring");
        log::info!("restoring the CPUs of {:?}", tenant.name.get());
        if let Some(may_appear) = restore(segment, slot, mine, known)
            && end(segment, slot, mine, may_appear)
        {
            // The holder may wait for it.
            sync::wake_all(&tenant.isolation);
            hooks::fault("restored");
        }
    }
}

/// Restores what was moved by one that died at the moment at which its tenure had been restored.
/// Once in a while; for the supervisor in slot `supervisor`.
pub fn restore_leftovers(segment: &Layout, supervisor: usize) {
    let is_left = |it: &Entry| {
        let tenant = segment.tenants.get(it.slot());
        it.supervisor() == supervisor
            && tenant.is_none_or(|it| it.isolation() == IsolationWord::NONE)
    };
    restore_each(segment, all_entries(segment).filter(is_left));
}

/// Restores, one by one, the threads that were written down. An entry is claimed first: one that
/// has changed since it was read is another's affair.
fn restore_each(segment: &Layout, entries: impl Iterator<Item = Entry>) {
    for entry in entries {
        if !entry.is_complete() {
            entry.place.free(segment); // Whoever writes it finds that, and moves nobody.
            continue;
        }
        let Some(place) = entry.place.change(segment, SlotState::Ending) else { continue };
        if let Some(reservation) = reservation::read(segment, entry.isolation.record())
            && process::is_alive(entry.process, entry.start_time)
        {
            let (slot, process, thread) = (entry.slot(), entry.process, entry.thread());
            let masks = Masks::new(slot, vec![entry], reservation.places);
            masks.restore(segment, process, thread);
        }
        place.free(segment);
    }
}

/// Frees what a tenant left whose slot is about to be freed.
pub(crate) fn forget(segment: &Layout, slot: usize) {
    // SeqCst: see `Tenant::isolation`. Nobody is left who could want to restore it.
    segment.tenants[slot].isolation.store(IsolationWord::NONE.0, Ordering::SeqCst);
    restore_each(segment, all_entries(segment).filter(|it| it.slot() == slot));
}
