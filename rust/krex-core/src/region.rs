//! The region: the eight steps, as the holder takes them.
//!
//! 1 claim (`claim.rs`), 2 close the gate, 3 turn back and 4 drain and 5 freeze (the supervisors
//! do these; [`close`] waits for them), 6 isolate (`isolate.rs`), 7 run, 8 leave
//! ([`Region::leave`], with the verdict in `report.rs`).
//! What a step did is undone by dropping its guard, so that whatever fails midway undoes all
//! that was done, in reverse.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::budget;
use crate::claim::{Claimed, Tenure, claim};
use crate::client::{Client, Host, SLICE, ThreadLock, Waiting};
use crate::clock::{self, Deadline};
use crate::device;
use crate::drain::{self, OwnWork};
use crate::error::{Error, Result};
use crate::hand_over;
use crate::hooks;
use crate::isolate::{self, Isolated};
use crate::report::{Report, Verdict};
use crate::siblings::{self, Sibling};
use crate::supervision;
use crate::sync::Wake;
use crate::tenant;
use crate::word::{Cause, GateWord, Phase, Stage};

/// How long siblings may take to freeze, after their drain.
pub const FREEZE_LIMIT: Duration = Duration::from_secs(1);
/// How long supervisors may take to answer, beyond the limits that they keep themselves.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How long supervisors may take to look at what they froze, after the region.
pub const VERIFY_LIMIT: Duration = Duration::from_millis(250);

/// What a region is asked for with.
#[derive(Clone, Debug)]
pub struct Options {
    pub device: Option<String>,
    /// Bounds the wait for the turn.
    pub timeout: Option<Duration>,
    /// Bounds the holding.
    pub max_hold: Duration,
    /// Bounds the wait for what siblings have in flight.
    pub drain_timeout: Duration,
    /// The higher, the earlier.
    pub priority: i8,
    pub label: String,
}

/// A region that was entered.
#[derive(Debug)]
pub struct Region {
    pub(crate) client: &'static Client,
    pub(crate) device: usize,
    pub(crate) word: GateWord,
    /// It runs within a region that this process or an ancestor of it already holds.
    pub(crate) joined: bool,
    pub(crate) label: String,
    pub(crate) siblings: Vec<Sibling>,
    pub(crate) claimed_at: u64,
    pub(crate) granted_at: u64,
    pub(crate) drained_at: u64,
    /// Nanoseconds that step 6 took.
    pub(crate) isolating: u64,
    /// `None`: no CPUs are reserved, or the region that it joined isolated it.
    pub(crate) isolated: Option<Box<Isolated>>,
    pub(crate) held_at: u64,
    /// What its own processes had submitted to the device when it began.
    pub(crate) own_completed: u64,
}

/// What a region's own processes did on the device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Own {
    pub work: OwnWork,
    pub submissions: u64,
    /// How long the GPU went on after the region's last line, in nanoseconds.
    pub pending: u64,
}

/// Enters a region.
///
/// # Errors
/// [`Error::Timeout`], [`Error::Misuse`] for a second device in one process, and whatever keeps
/// the segment or the supervisor from being used. Nothing is held then.
pub fn enter(host: &dyn Host, options: &Options) -> Result<Region> {
    let claimed_at = clock::now();
    budget::max_closed()?;
    let deadline = options.timeout.map_or(Deadline::NEVER, Deadline::after);
    let client = Client::attach(host)?;
    let device = client.device(options.device.as_deref())?;
    if client.turn.is_mine() {
        return nested(client, device, options, claimed_at);
    }
    if let Some(word) = joinable(client, device) {
        return Ok(Region::joined(client, device, word, options, claimed_at));
    }
    let turn = Turn::take(client, device, deadline, host, claimed_at)?;
    client.allot(device)?;
    client.be_own_tenant(host)?;
    // Only now: what is split off shares no more than it asked for.
    client.share(device);
    let waiting = Waiting::start(client, client.flight_slot(device, host)?);
    loop {
        let tenure = match claim(client, device, options.priority, deadline, host, claimed_at)? {
            Claimed::Granted(tenure) => tenure,
            Claimed::Join(word) => {
                return Ok(Region::joined(client, device, word, options, claimed_at));
            }
        };
        hooks::fault("granted");
        match close(tenure, options, host, claimed_at) {
            Ok(region) => {
                drop(waiting);
                turn.keep(device, region.word);
                hooks::fault("held");
                return Ok(region);
            }
            // Taken away before it began, since this process was stopped, say: claim again.
            Err(Error::Revoked { .. }) if !client.segment.is_retired() => {}
            Err(error) => return Err(error),
        }
    }
}

/// The GPU that a region with `options` is about, if it may be looked at now: nobody is in a region
/// on it, this process included. A look from outside takes the driver's locks.
///
/// # Errors
/// As [`enter`], before anything is held.
pub fn gpu_at_rest(host: &dyn Host, options: &Options) -> Result<Option<String>> {
    let client = Client::attach(host)?;
    let device = client.device(options.device.as_deref())?;
    let name = client.device_name(device);
    Ok((device::is_gpu(&name) && is_at_rest(client, device)).then_some(name))
}

fn is_at_rest(client: &Client, device: usize) -> bool {
    !matches!(client.gate(device).load().phase(), Phase::Held | Phase::Leaving)
}

/// A region within a region of the same thread.
fn nested(
    client: &'static Client,
    device: usize,
    options: &Options,
    claimed_at: u64,
) -> Result<Region> {
    let outer = client.region_device.load(Ordering::Relaxed);
    if outer != device as u64 + 1 {
        return Err(Error::Misuse(format!(
            "this thread is in a region on {} already: leave it before entering one on {}",
            client.device_name((outer as usize).saturating_sub(1)),
            client.device_name(device)
        )));
    }
    let word = GateWord(client.region_word.load(Ordering::Relaxed));
    Ok(Region::joined(client, device, word, options, claimed_at))
}

/// The gate's word, if a tenant that this process descends from holds the region.
fn joinable(client: &Client, device: usize) -> Option<GateWord> {
    let word = client.gate(device).load();
    if word.phase() != Phase::Held {
        return None;
    }
    let own = client.reference();
    let is_holders_child = own.slot == word.holder()
        && client.tenant().owner().pid() != client.identity.pid
        && tenant::resolve(&client.segment, own).is_some();
    let joins = is_holders_child || tenant::descends_from(&client.segment, own.slot, word.holder());
    joins.then_some(word)
}

/// The turn among the threads of this process; given back when dropped, unless kept.
struct Turn<'a> {
    lock: &'a ThreadLock,
    client: &'a Client,
    kept: bool,
}

impl<'a> Turn<'a> {
    fn take(
        client: &'a Client,
        device: usize,
        deadline: Deadline,
        host: &dyn Host,
        started: u64,
    ) -> Result<Self> {
        if client.turn.lock(deadline, host)? {
            Ok(Self { lock: &client.turn, client, kept: false })
        } else {
            Err(client.timed_out(device, started))
        }
    }

    fn keep(mut self, device: usize, word: GateWord) {
        // Relaxed: read only by the thread that owns the turn.
        self.client.region_word.store(word.0, Ordering::Relaxed);
        self.client.region_device.store(device as u64 + 1, Ordering::Relaxed);
        self.kept = true;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.lock.unlock();
        }
    }
}

/// Steps 2 to 5: closes the gate and waits until the supervisors have turned back, drained and
/// frozen every sibling, or their time is up.
fn close(
    mut tenure: Tenure,
    options: &Options,
    host: &dyn Host,
    claimed_at: u64,
) -> Result<Region> {
    let client = tenure.client;
    let index = tenure.device;
    let segment = &client.segment;
    let number = tenure.word.tenure();
    let revoked = |_| revoked_error(client, index, number);
    let granted_at = clock::now();
    let nanoseconds = clock::nanoseconds;
    let drain_deadline = granted_at.saturating_add(nanoseconds(options.drain_timeout));
    let answer_deadline = drain_deadline
        .saturating_add(nanoseconds(FREEZE_LIMIT))
        .saturating_add(nanoseconds(ANSWER_LIMIT));
    let holding = &client.tenant().holding;
    // Relaxed: published by the swap to `Closing`.
    holding.label.set(options.label.as_bytes());
    holding.granted_at.store(granted_at, Ordering::Relaxed);
    holding.drained_at.store(granted_at, Ordering::Relaxed);
    holding.drain_deadline.store(drain_deadline, Ordering::Relaxed);
    let hold_limit = nanoseconds(options.max_hold);
    // One that stops while it closes, or leaves, keeps the others frozen no longer than that.
    let closing_deadline = answer_deadline.saturating_add(clock::SECOND);
    holding.hold_deadline.store(closing_deadline, Ordering::Relaxed);
    if !hooks::sabotaged("close") {
        tenure.close().map_err(revoked)?;
    }
    hooks::fault("closing");

    let holder = client.reference().slot;
    let mut siblings = siblings::list(segment, index, holder);
    let mut supervisors = siblings::supervisors(&siblings);
    for supervisor in &supervisors {
        supervision::ring(segment, *supervisor);
    }
    if siblings.iter().any(|it| it.supervisor != client.supervisor) {
        // Our own tells whether those of other PID namespaces are still there.
        supervision::ring(segment, client.supervisor);
    }
    loop {
        await_stage(client, index, number, &siblings, Stage::Settled, answer_deadline, host)?;
        // Those that split off from one that was just being frozen. It is by now, so this ends.
        let known = |it: &Sibling| siblings.iter().any(|old| old.reference == it.reference);
        let mut new = siblings::list(segment, index, holder);
        new.retain(|it| !known(it));
        if new.is_empty() || Deadline::at(answer_deadline).has_passed() {
            break;
        }
        siblings.append(&mut new);
        supervisors = siblings::supervisors(&siblings);
        supervisors.iter().for_each(|it| supervision::ring(segment, *it));
    }
    hooks::fault("frozen");

    let frozen_at = clock::now();
    client.allot(index)?;
    let isolated = isolate::isolate(client, index, number, host);
    let isolated_at = if isolated.is_some() { clock::now() } else { frozen_at };
    holding.hold_deadline.store(isolated_at.saturating_add(hold_limit), Ordering::Relaxed);
    if tenure.advance(Phase::Held).is_err() {
        return Err(revoked_error(client, index, number));
    }
    for sibling in &mut siblings {
        sibling.begin(segment, index, number);
    }
    if hooks::sabotaged("hold") {
        let _ = client.gate(index).open(tenure.word);
    }
    if !siblings.is_empty() && !supervisors.contains(&client.supervisor) {
        // The holder's supervisor watches its progress from here on; one that has frozen
        // siblings looks by itself.
        supervision::ring(segment, client.supervisor);
    }
    tenure.kept = true;
    Ok(Region {
        client,
        device: index,
        word: tenure.word,
        joined: false,
        label: options.label.clone(),
        drained_at: holding.drained_at.load(Ordering::Acquire).clamp(granted_at, frozen_at),
        isolating: isolated_at - frozen_at,
        isolated,
        siblings,
        claimed_at,
        granted_at,
        held_at: clock::now(),
        own_completed: drain::completed(segment, index, holder),
    })
}

/// Waits until every sibling's supervisor has come as far as `stage`. Returns whether all have.
fn await_stage(
    client: &Client,
    device: usize,
    tenure: u64,
    siblings: &[Sibling],
    stage: Stage,
    deadline: u64,
    host: &dyn Host,
) -> Result<bool> {
    let segment = &client.segment;
    let acknowledged = &segment.devices[device].acknowledged;
    let deadline = Deadline::at(deadline);
    let mut next_look = Deadline::after(Duration::from_millis(100));
    if hooks::sabotaged("await") {
        return Ok(true);
    }
    loop {
        // Acquire: partner of the supervisors' Release; read before the acknowledgements, so
        // that one that comes after them changes it and the wait returns at once.
        let seen = acknowledged.load(Ordering::Acquire);
        let is_missing = |it: &&Sibling| !it.has_reached(segment, device, tenure, stage);
        if !siblings.iter().any(|it| is_missing(&it)) {
            return Ok(true);
        }
        let word = client.gate(device).load();
        if word.tenure() != tenure || word.is_open() || segment.is_retired() {
            return Err(revoked_error(client, device, tenure));
        }
        if deadline.has_passed() {
            return Ok(false);
        }
        if next_look.has_passed() {
            next_look = Deadline::after(Duration::from_millis(100));
            let (own, others): (Vec<&Sibling>, Vec<&Sibling>) = siblings
                .iter()
                .filter(is_missing)
                .partition(|it| it.supervisor == client.supervisor);
            if !own.is_empty() {
                client.revive_supervisor(host);
            } else if others.iter().all(|it| !segment.is_supervisor_alive(it.supervisor)) {
                return Ok(false); // Nobody is there to answer for those that are missing.
            }
        }
        let wake = crate::sync::wait(acknowledged, seen, deadline.left(SLICE));
        if wake != Wake::Changed && host.interrupted() {
            return Err(Error::Interrupted);
        }
    }
}

fn revoked_error(client: &Client, device: usize, tenure: u64) -> Error {
    let revocation = client.segment.devices[device].last_revocation();
    let cause = match revocation.filter(|it| it.tenure == tenure).map(|it| it.cause) {
        Some(Cause::Deadline) => "it was held longer than max_hold (raise it, or do less inside)",
        Some(Cause::Stalled) => {
            "its holder ran on no CPU, also after the siblings had been thawed, and others waited"
        }
        Some(Cause::Died) => "its holder was taken for dead",
        Some(Cause::ByHand) => "`krex recover` ended it",
        None => "its tenure ended",
    };
    Error::Revoked { device: client.device_name(device), epoch: tenure, cause: cause.to_owned() }
}

impl Region {
    fn joined(
        client: &'static Client,
        device: usize,
        word: GateWord,
        options: &Options,
        claimed_at: u64,
    ) -> Self {
        let now = clock::now();
        let mut siblings = siblings::list(&client.segment, device, word.holder());
        for sibling in &mut siblings {
            sibling.begin(&client.segment, device, word.tenure());
        }
        Self {
            client,
            device,
            word,
            joined: true,
            label: options.label.clone(),
            siblings,
            claimed_at,
            granted_at: now,
            drained_at: now,
            isolating: 0,
            isolated: None,
            held_at: now,
            own_completed: drain::completed(&client.segment, device, word.holder()),
        }
    }

    pub fn device(&self) -> String {
        self.client.device_name(self.device)
    }

    /// The GPU that it was about, if that may be looked at now, after its end: see [`gpu_at_rest`].
    pub fn gpu_at_rest(&self) -> Option<String> {
        let name = self.device();
        let may = !self.joined && device::is_gpu(&name) && is_at_rest(self.client, self.device);
        may.then_some(name)
    }

    pub fn epoch(&self) -> u64 {
        self.word.tenure()
    }

    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// Whether a fork separates this process from the one that entered: its region is not ours.
    pub fn is_inherited(&self) -> bool {
        self.client.is_inherited()
    }

    /// Step 8: leaves the region. The report comes in every case; it says so if the region was
    /// revoked, and [`Region::revocation`] then tells the cause.
    pub fn leave(&self, host: &dyn Host) -> Report {
        let left_at = clock::now();
        hooks::fault("leaving");
        let gate = self.client.gate(self.device);
        // While it is held yet: what the region submitted belongs to it.
        let own = self.await_own_work(left_at);
        let ended_at = left_at + own.pending;
        let mut revoked = gate.load().with_phase(Phase::Open) != self.word.with_phase(Phase::Open)
            || gate.load().is_open();
        let mut verified = true;
        let mut word = self.word;
        let section = &self.client.segment.devices[self.device];
        // Siblings that the stall breaker thawed need no second look.
        let stalled = section.stalled_tenure.load(Ordering::Acquire) == self.word.tenure();
        if !self.joined && !revoked && !stalled && !self.siblings.is_empty() {
            let limit = clock::nanoseconds(VERIFY_LIMIT) + clock::SECOND;
            let holding = &self.client.tenant().holding;
            holding.hold_deadline.store(ended_at + limit, Ordering::Relaxed);
            match gate.advance(self.word, Phase::Leaving) {
                Ok(leaving) => {
                    word = leaving;
                    verified = self.verify(host, &mut revoked);
                }
                Err(_) => revoked = true,
            }
        }
        if let Some(isolated) = &self.isolated {
            isolated.restore(Some(host));
        }
        let present = siblings::list(&self.client.segment, self.device, self.word.holder());
        let mut report = self.report(ended_at, revoked, verified, &present, own);
        hooks::fault("reported");
        if !self.joined {
            // Those that came meanwhile are frozen, too.
            let siblings = !self.siblings.is_empty() || !present.is_empty();
            let limit = budget::max_closed().unwrap_or(u64::MAX);
            let segment = &self.client.segment;
            if !revoked
                && !hooks::sabotaged("open_gate")
                && hand_over::give_up(segment, self.device, word, siblings, limit).is_err()
            {
                report.verdict = Verdict::Revoked;
                report.reasons.push(self.revocation().to_string());
            }
            if !self.siblings.is_empty() {
                // With both halves killed, nobody else may come by and notice for a long time.
                self.client.revive_supervisor(host);
            }
            self.client.region_device.store(0, Ordering::Relaxed);
            self.client.turn.unlock();
        }
        report.restore = clock::now().saturating_sub(ended_at);
        report
    }

    /// Waits until the GPU has done what the region's own processes submitted. A joined region
    /// leaves that to the one that it joined.
    fn await_own_work(&self, left_at: u64) -> Own {
        let segment = &self.client.segment;
        let holder = self.word.holder();
        let completed = drain::completed(segment, self.device, holder);
        let submissions = completed.saturating_sub(self.own_completed);
        let is_over = self.client.gate(self.device).load() != self.word;
        if self.joined || is_over || hooks::sabotaged("drain_own") {
            return Own { submissions, ..Own::default() };
        }
        let work = drain::await_own(self.client, self.device, self.word.tenure());
        let pending = if work == OwnWork::default() { 0 } else { clock::now() - left_at };
        Own { work, submissions, pending }
    }

    /// Asks the supervisors whether what they froze still is.
    fn verify(&self, host: &dyn Host, revoked: &mut bool) -> bool {
        for supervisor in siblings::supervisors(&self.siblings) {
            supervision::ring(&self.client.segment, supervisor);
        }
        let deadline = clock::now() + clock::nanoseconds(VERIFY_LIMIT);
        let tenure = self.word.tenure();
        let frozen: Vec<Sibling> = self
            .siblings
            .iter()
            .filter(|it| it.is_frozen(&self.client.segment, self.device, tenure))
            .cloned()
            .collect();
        // An interruption ends the wait, not the leaving: the handler runs afterwards.
        let patient = Patient(host);
        match await_stage(
            self.client,
            self.device,
            tenure,
            &frozen,
            Stage::Verified,
            deadline,
            &patient,
        ) {
            Ok(all) => all,
            Err(_) => {
                *revoked = true;
                false
            }
        }
    }

    /// The error that says why the region was revoked.
    pub fn revocation(&self) -> Error {
        match revoked_error(self.client, self.device, self.word.tenure()) {
            Error::Revoked { device, epoch, .. } if self.joined => {
                let cause = "the region that it joined has ended".to_owned();
                Error::Revoked { device, epoch, cause }
            }
            error => error,
        }
    }
}

/// A host whose signals wait until the step is done.
struct Patient<'a>(&'a dyn Host);

impl Host for Patient<'_> {
    fn program(&self) -> Result<std::path::PathBuf> {
        self.0.program()
    }

    fn interrupted(&self) -> bool {
        false
    }
}
