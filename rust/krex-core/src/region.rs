//! The region: the eight steps, as the holder takes them.
//!
//! 1 claim ([`claim`]), 2 close the gate, 3 turn back and 4 drain and 5 freeze (the supervisors do
//! these; [`close`] waits for them), 6 isolate (not yet), 7 run, 8 leave ([`Region::leave`]).
//! What a step did is undone by dropping its guard, so that whatever fails midway undoes all
//! that was done, in reverse.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::client::{Client, Host, SLICE, ThreadLock, Waiting, Watch};
use crate::clock::{self, Deadline};
use crate::device;
use crate::error::{Error, Result};
use crate::freezer::Kind;
use crate::gate::Gate;
use crate::hooks;
use crate::queue::{self, Entry, Key};
use crate::siblings::{self, Outcome, Problem, Sibling};
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
    client: &'static Client,
    device: usize,
    word: GateWord,
    /// It runs within a region that this process or an ancestor of it already holds.
    joined: bool,
    label: String,
    siblings: Vec<Sibling>,
    claimed_at: u64,
    granted_at: u64,
    drained_at: u64,
    held_at: u64,
}

/// What krex can vouch for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Clean,
    Contended,
    Revoked,
    Unknown,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Contended => "contended",
            Self::Revoked => "revoked",
            Self::Unknown => "unknown",
        }
    }
}

/// What happened. Times are in nanoseconds.
#[derive(Clone, Debug)]
pub struct Report {
    pub device: String,
    pub epoch: u64,
    pub label: String,
    pub joined: bool,
    pub freezer: &'static str,
    pub wait: u64,
    pub drain: u64,
    pub freeze: u64,
    pub held: u64,
    pub restore: u64,
    pub time_excluded: u64,
    pub siblings: Vec<Outcome>,
    pub verdict: Verdict,
    pub reasons: Vec<String>,
}

/// Enters a region.
///
/// # Errors
/// [`Error::Timeout`], [`Error::Misuse`] for a second device in one process, and whatever keeps
/// the segment or the supervisor from being used. Nothing is held then.
pub fn enter(host: &dyn Host, options: &Options) -> Result<Region> {
    let claimed_at = clock::now();
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
    client.be_own_tenant(host)?;
    let waiting = Waiting::start(client.tenant());
    let tenure = claim(client, device, options.priority, deadline, host, claimed_at)?;
    hooks::fault("granted");
    let region = close(tenure, options, host, claimed_at)?;
    drop(waiting);
    turn.keep(device, region.word);
    hooks::fault("held");
    Ok(region)
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

/// A place in the queue; given up when dropped.
struct Queued<'a> {
    entry: &'a Entry,
    gate: &'a Gate,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.entry.leave();
        // Those behind computed their turn with us in front.
        self.gate.wake();
    }
}

/// A tenure that was granted; the gate is opened when it is dropped, unless it was kept.
struct Tenure {
    client: &'static Client,
    device: usize,
    word: GateWord,
    supervisors: Vec<usize>,
    kept: bool,
}

impl Tenure {
    fn gate(&self) -> &'static Gate {
        self.client.gate(self.device)
    }

    fn advance(&mut self, phase: Phase) -> std::result::Result<(), GateWord> {
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

/// Step 1: the turn on the device, in the order of the queue.
fn claim(
    client: &'static Client,
    device: usize,
    priority: i8,
    deadline: Deadline,
    host: &dyn Host,
    started: u64,
) -> Result<Tenure> {
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
        let seen = gate.load();
        let mut pause = SLICE;
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
                if segment.is_retired() {
                    return Err(purged(client));
                }
                match conflict(client, device) {
                    None => return Ok(tenure),
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
        pause_at(gate, seen, deadline, pause, host)?;
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
    let section = &segment.devices[index];
    let revoked = |_| revoked_error(client, index, tenure.word.tenure());
    let granted_at = clock::now();
    let nanoseconds = clock::nanoseconds;
    let drain_deadline = granted_at.saturating_add(nanoseconds(options.drain_timeout));
    let answer_deadline = drain_deadline
        .saturating_add(nanoseconds(FREEZE_LIMIT))
        .saturating_add(nanoseconds(ANSWER_LIMIT));
    // Relaxed: published by the swap to `Closing`; only a holder between `Granted` and `Closing`
    // writes here.
    section.label.set(options.label.as_bytes());
    section.granted_at.store(granted_at, Ordering::Relaxed);
    section.drained_at.store(granted_at, Ordering::Relaxed);
    section.drain_deadline.store(drain_deadline, Ordering::Relaxed);
    let hold_limit = nanoseconds(options.max_hold);
    section.hold_deadline.store(answer_deadline.saturating_add(hold_limit), Ordering::Relaxed);
    if !hooks::sabotaged("close") {
        tenure.word = client.gate(index).advance(tenure.word, Phase::Closing).map_err(revoked)?;
    }
    hooks::fault("closing");

    let holder = client.reference().slot;
    let number = tenure.word.tenure();
    let mut siblings = siblings::list(segment, index, holder);
    tenure.supervisors = siblings::supervisors(&siblings);
    for supervisor in &tenure.supervisors {
        supervision::ring(segment, *supervisor);
    }
    await_stage(client, index, number, &siblings, Stage::Settled, answer_deadline, host)?;
    hooks::fault("frozen");

    let held_at = clock::now();
    section.hold_deadline.store(held_at.saturating_add(hold_limit), Ordering::Relaxed);
    if tenure.advance(Phase::Held).is_err() {
        return Err(revoked_error(client, index, number));
    }
    for sibling in &mut siblings {
        sibling.begin(segment, index);
    }
    if hooks::sabotaged("hold") {
        let _ = client.gate(index).open(tenure.word);
    }
    if !siblings.is_empty() {
        // The holder's supervisor watches its progress from here on.
        supervision::ring(segment, client.supervisor);
    }
    tenure.kept = true;
    Ok(Region {
        client,
        device: index,
        word: tenure.word,
        joined: false,
        label: options.label.clone(),
        drained_at: section.drained_at.load(Ordering::Acquire).clamp(granted_at, held_at),
        siblings,
        claimed_at,
        granted_at,
        held_at: clock::now(),
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
        let missing: Vec<&Sibling> =
            siblings.iter().filter(|it| !it.has_reached(segment, device, tenure, stage)).collect();
        if missing.is_empty() {
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
            let (own, others): (Vec<&Sibling>, Vec<&Sibling>) =
                missing.iter().partition(|it| it.supervisor == client.supervisor);
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
        Some(Cause::Deadline) => "it was held longer than max_hold",
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
            sibling.begin(&client.segment, device);
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
            held_at: now,
        }
    }

    pub fn device(&self) -> String {
        self.client.device_name(self.device)
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
        let ended_at = clock::now();
        hooks::fault("leaving");
        let gate = self.client.gate(self.device);
        let mut revoked = gate.load().with_phase(Phase::Open) != self.word.with_phase(Phase::Open)
            || gate.load().is_open();
        let mut verified = true;
        let mut word = self.word;
        if !self.joined && !revoked && !self.siblings.is_empty() {
            match gate.advance(self.word, Phase::Leaving) {
                Ok(leaving) => {
                    word = leaving;
                    verified = self.verify(host, &mut revoked);
                }
                Err(_) => revoked = true,
            }
        }
        let present = siblings::list(&self.client.segment, self.device, self.word.holder());
        let mut report = self.report(ended_at, revoked, verified, &present);
        hooks::fault("reported");
        if !self.joined {
            if !hooks::sabotaged("open_gate") && gate.open(word).is_err() && !revoked {
                report.verdict = Verdict::Revoked;
                report.reasons.push(self.revocation().to_string());
            }
            hooks::fault("opened");
            // Those that came meanwhile are frozen, too.
            for supervisor in siblings::supervisors(self.siblings.iter().chain(&present)) {
                supervision::ring(&self.client.segment, supervisor);
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
            .filter(|it| it.has_reached(&self.client.segment, self.device, tenure, Stage::Settled))
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
        revoked_error(self.client, self.device, self.word.tenure())
    }

    fn report(&self, ended_at: u64, revoked: bool, verified: bool, present: &[Sibling]) -> Report {
        let segment = &self.client.segment;
        let tenure = self.word.tenure();
        // While the region runs nobody looks twice, so a joined one cannot be verified yet.
        let verified = verified || self.joined;
        let outcomes: Vec<Outcome> = self
            .siblings
            .iter()
            .map(|it| it.judge(segment, self.device, tenure, verified))
            .collect();
        let mut problems: Vec<Problem> =
            outcomes.iter().flat_map(|it| it.problems.clone()).collect();
        problems.extend(self.newcomers(present));
        if segment.devices[self.device].stalled_tenure.load(Ordering::Acquire) == tenure {
            let names: Vec<String> = self.siblings.iter().map(|it| it.name.clone()).collect();
            problems.insert(
                0,
                Problem {
                    certain: true,
                    text: format!(
                        "holder waited for {}: it ran on no CPU until siblings were thawed",
                        if names.len() == 1 {
                            names[0].clone()
                        } else {
                            format!("one of {}", names.join(", "))
                        }
                    ),
                },
            );
        }
        let mut reasons: Vec<String> = problems.iter().map(|it| it.text.clone()).collect();
        let verdict = if revoked {
            reasons.insert(0, self.revocation().to_string());
            Verdict::Revoked
        } else if problems.iter().any(|it| it.certain) {
            Verdict::Contended
        } else if problems.is_empty() {
            Verdict::Clean
        } else {
            Verdict::Unknown
        };
        let tenant = self.client.tenant();
        let excluded = tenant.time_excluded(clock::now());
        let reported = self.client.excluded_reported.swap(excluded, Ordering::AcqRel);
        Report {
            device: self.device(),
            epoch: tenure,
            label: self.label.clone(),
            joined: self.joined,
            freezer: Kind::from_word(tenant.freezer.load(Ordering::Relaxed)).name(),
            wait: self.granted_at.saturating_sub(self.claimed_at),
            drain: self.drained_at.saturating_sub(self.granted_at),
            freeze: self.held_at.saturating_sub(self.drained_at),
            held: ended_at.saturating_sub(self.held_at),
            restore: 0,
            time_excluded: excluded.saturating_sub(reported),
            siblings: outcomes,
            verdict,
            reasons,
        }
    }

    /// Tenants that came while the region ran. `krex run` holds its command back until the
    /// region is over; a process that attaches itself ran before, and nobody knew of it.
    fn newcomers(&self, present: &[Sibling]) -> Vec<Problem> {
        present
            .iter()
            .filter(|new| !self.siblings.iter().any(|old| old.reference == new.reference))
            .filter(|new| new.attached && !new.split)
            .map(|new| Problem {
                certain: true,
                text: format!("{} ran beside the region before it attached", new.name),
            })
            .collect()
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
