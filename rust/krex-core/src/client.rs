//! This process as a user of the segment: attaching, its tenant, its submitters, its turn.

use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use crate::budget;
use crate::clock::{self, Deadline};
use crate::device;
use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::freezer::Choice;
use crate::gate::Gate;
use crate::hooks;
use crate::layout::{DEVICES, SUBMITTERS, Submitter, Tenant};
use crate::process::{self, Identity};
use crate::recover;
use crate::reservation;
use crate::segment::{self, Segment};
use crate::supervision;
use crate::sync::{self, Wake};
use crate::tenant::{self, Registration};
use crate::word::{Cause, GateWord, Reference, SlotState};

/// Nobody sleeps longer than this at a time, so that signal handlers of the host language run.
pub const SLICE: Duration = Duration::from_millis(100);

/// What the program around the core provides.
pub trait Host {
    /// Where the native program `krex` is, for starting a supervisor.
    ///
    /// # Errors
    /// If it is not to be found.
    fn program(&self) -> Result<PathBuf>;

    /// Whether to give up waiting: a signal handler raised something.
    fn interrupted(&self) -> bool;
}

/// Counts the forks between the first process and this one, so that state inherited by a fork
/// is known to be the parent's. The handler touches this one atomic and nothing else.
static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn after_fork_in_child() {
    // Relaxed: the child has one thread at this moment, and later ones are started by it.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

fn forks() -> u64 {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: pthread_atfork(NULL, NULL, child) stores the pointer of a function that lives
        // as long as the program and is async-signal-safe (one atomic addition).
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// The number of the calling thread in this process, never used twice, never zero.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

/// A lock among the threads of one process. One that was held when the process forked is free
/// in the child, whose threads do not include the owner.
#[derive(Debug, Default)]
pub struct ThreadLock {
    /// (forks, contended, thread number), or zero. The mark is in the low half, which is the one
    /// that the futex compares.
    owner: AtomicU64,
}

/// Somebody sleeps, or slept, on the lock: giving it back has to wake.
const CONTENDED: u64 = 1 << 31;
const FORKS_SHIFT: u32 = 32;
const FORKS_MASK: u64 = (1 << 32) - 1;

impl ThreadLock {
    pub const fn new() -> Self {
        Self { owner: AtomicU64::new(0) }
    }

    fn mine() -> u64 {
        ((forks() & FORKS_MASK) << FORKS_SHIFT) | (thread_number() & (CONTENDED - 1))
    }

    pub fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) & !CONTENDED == Self::mine()
    }

    /// Locks it; `Ok(false)` if the deadline passed first.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn lock(&self, deadline: Deadline, host: &dyn Host) -> Result<bool> {
        let mut wanted = Self::mine();
        loop {
            let seen = self.owner.load(Ordering::Relaxed);
            let is_parents = (seen >> FORKS_SHIFT) & FORKS_MASK != forks() & FORKS_MASK;
            if seen == 0 || is_parents {
                if self.swap(seen, wanted) {
                    return Ok(true);
                }
                continue;
            }
            if deadline.has_passed() {
                return Ok(false);
            }
            if seen & CONTENDED == 0 && !self.swap(seen, seen | CONTENDED) {
                continue;
            }
            // Others may sleep here too, so whoever wakes up keeps the mark.
            wanted |= CONTENDED;
            let wake = sync::wait(&self.owner, seen | CONTENDED, deadline.left(SLICE));
            if wake != Wake::Changed && host.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    fn swap(&self, from: u64, to: u64) -> bool {
        // Acquire: partner of the Release in `unlock`.
        self.owner.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Runs `work` with the lock held; it is given back however `work` ends.
    ///
    /// # Errors
    /// [`Error::Interrupted`], or the error of `work`.
    fn with<T>(&self, host: &dyn Host, work: impl FnOnce() -> Result<T>) -> Result<T> {
        struct Held<'a>(&'a ThreadLock);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.unlock();
            }
        }
        self.lock(Deadline::NEVER, host)?;
        let _held = Held(self);
        work()
    }

    pub fn unlock(&self) {
        // Release: partner of the Acquire in `lock`.
        if self.owner.swap(0, Ordering::Release) & CONTENDED != 0 {
            sync::wake_all(&self.owner);
        }
    }
}

/// A process's connection to the segment.
#[derive(Debug)]
pub struct Client {
    pub segment: Segment,
    pub identity: Identity,
    pub supervisor: usize,
    forks: u64,
    /// Packed [`Reference`] to the tenant that this process belongs to.
    tenant: AtomicU64,
    /// Per device: this process's submitter slot plus one.
    submitters: [AtomicU64; DEVICES],
    changing: ThreadLock,
    /// Whose turn it is, among the threads of this process, to hold a region.
    pub turn: ThreadLock,
    /// The gate word and device (plus one) of the region that `turn`'s owner is in.
    pub region_word: AtomicU64,
    pub region_device: AtomicU64,
    /// The supervisor could not be started, and that was said.
    complained: AtomicBool,
    /// Excluded time that was reported already, in nanoseconds.
    pub excluded_reported: AtomicU64,
    /// Per device: the reservation to which this process has seen, as [`reservation::seen`] marks it.
    allotted: [AtomicU64; DEVICES],
}

static CURRENT: AtomicPtr<Client> = AtomicPtr::new(std::ptr::null_mut());
static ATTACHING: ThreadLock = ThreadLock::new();

impl Client {
    /// This process's client, if it is attached and the segment is still in use.
    #[inline]
    pub fn attached() -> Option<&'static Self> {
        // Acquire: partner of the Release in `attach`.
        let pointer = CURRENT.load(Ordering::Acquire);
        // SAFETY: the pointer is null or came from `Box::leak`, whose value is never freed.
        let client = unsafe { pointer.as_ref() }?;
        (client.forks == forks() && !client.segment.is_retired()).then_some(client)
    }

    /// This process's client; attaches the process if need be: it joins the tenant that it is
    /// below, or becomes one of its own.
    ///
    /// # Errors
    /// Whatever keeps the segment or the supervisor from being used.
    pub fn attach(host: &dyn Host) -> Result<&'static Self> {
        if let Some(client) = Self::attached() {
            return Ok(client);
        }
        ATTACHING.with(host, || {
            if let Some(client) = Self::attached() {
                return Ok(client);
            }
            let client: &'static Self = Box::leak(Box::new(Self::open(host)?));
            // Release: whoever loads the pointer sees the client whole. The one that it replaces
            // (of the parent process, or of a purged segment) stays allocated, since other
            // threads may still use it.
            CURRENT.store(std::ptr::from_ref(client).cast_mut(), Ordering::Release);
            Ok(client)
        })
    }

    fn open(host: &dyn Host) -> Result<Self> {
        let segment = Segment::open_or_create(&segment::runtime_dir()?)?;
        let identity = Identity::of_self()?;
        let known = supervision::find(&segment, &identity);
        let existing = tenant::find_own(&segment, known, &identity);
        if let Some(own) = existing {
            give_back_after_exec(&segment, own, &identity);
        }
        let is_near = |reference: &Reference| {
            Some(segment.tenants[reference.slot].owner().supervisor()) == known
        };
        let (supervisor, tenant) = match (known, existing) {
            (Some(supervisor), Some(tenant)) if is_near(&tenant) => (supervisor, tenant),
            // What belongs to a tenant of another PID namespace needs a supervisor of its own.
            (_, parent) => register(&segment, &identity, host, parent)?,
        };
        Ok(Self {
            segment,
            identity,
            supervisor,
            forks: forks(),
            tenant: AtomicU64::new(Reference::pack(Some(tenant))),
            submitters: [const { AtomicU64::new(0) }; DEVICES],
            changing: ThreadLock::new(),
            turn: ThreadLock::new(),
            region_word: AtomicU64::new(0),
            region_device: AtomicU64::new(0),
            complained: AtomicBool::new(false),
            excluded_reported: AtomicU64::new(0),
            allotted: [const { AtomicU64::new(0) }; DEVICES],
        })
    }

    /// The tenant that this process belongs to.
    pub fn reference(&self) -> Reference {
        let packed = self.tenant.load(Ordering::Acquire);
        Reference::unpack(packed).unwrap_or(Reference { slot: 0, generation: u64::MAX })
    }

    pub fn tenant(&self) -> &Tenant {
        &self.segment.tenants[self.reference().slot]
    }

    pub fn gate(&self, device: usize) -> &Gate {
        self.segment.devices[device].gate()
    }

    pub fn device_name(&self, device: usize) -> String {
        self.segment.devices[device].name.get()
    }

    /// The device called `name`, or else the one that `krex run --device` named, or else `cpu`.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`], [`Error::Full`].
    pub fn device(&self, name: Option<&str>) -> Result<usize> {
        match name {
            Some(name) => {
                device::check_name(name)?;
                device::find_or_add(&self.segment, name)
            }
            None => match self.tenant().default_device.load(Ordering::Relaxed) {
                0 => device::find_or_add(&self.segment, device::DEFAULT),
                named => Ok((named as usize - 1).min(DEVICES - 1)),
            },
        }
    }

    /// Sees to it that CPUs are reserved for a device if they should be: once, and again if that has
    /// changed since.
    ///
    /// # Errors
    /// As [`reservation::allot`].
    #[inline]
    pub fn allot(&self, device: usize) -> Result<()> {
        let known = &self.allotted[device];
        // Relaxed: at worst it is looked at twice.
        if known.load(Ordering::Relaxed) != reservation::seen(&self.segment, device) {
            let seen = reservation::allot(&self.segment, device)?;
            known.store(seen, Ordering::Relaxed);
        }
        Ok(())
    }

    /// From now on this process's tenant shares the device.
    pub fn share(&self, device: usize) {
        let Some(tenant) = tenant::resolve(&self.segment, self.reference()) else { return };
        if tenant.shares(device) {
            return;
        }
        if !self.may_pass(self.gate(device).load()) {
            tenant::note_newcomer(&self.segment, device);
        }
        // SeqCst: writing half of the handshake with a closing gate (`sync.rs`).
        tenant.devices.fetch_or(1 << device, Ordering::SeqCst);
        supervision::ring(&self.segment, self.supervisor);
    }

    /// The same for a device on which this process could do nothing before, since all that it does
    /// there passes the gate: a region that runs now was not disturbed.
    pub fn share_from_birth(&self, device: usize) {
        let Some(tenant) = tenant::resolve(&self.segment, self.reference()) else { return };
        // SeqCst: writing half of the handshake with a closing gate (`sync.rs`).
        tenant.devices.fetch_or(1 << device, Ordering::SeqCst);
        // Relaxed: what a region of this process is about when it names no device. Whoever is first
        // decides; `krex run --device` was.
        let default = &tenant.default_device;
        let _ =
            default.compare_exchange(0, device as u64 + 1, Ordering::Relaxed, Ordering::Relaxed);
        supervision::ring(&self.segment, self.supervisor);
    }

    /// Makes this process the root of its tenant, splitting it off from the one it is in.
    ///
    /// # Errors
    /// Whatever keeps the supervisor from being used.
    pub fn be_own_tenant(&self, host: &dyn Host) -> Result<()> {
        let is_own = |client: &Self| {
            let reference = client.reference();
            tenant::resolve(&client.segment, reference)
                .is_some_and(|it| it.owner().pid() == client.identity.pid)
        };
        if is_own(self) {
            return Ok(());
        }
        self.changing.with(host, || {
            if is_own(self) {
                return Ok(());
            }
            let segment = &self.segment;
            // The interposer and the Python module are clients of their own within one process:
            // the other may have been here.
            let tenant = match tenant::find_rooted(segment, self.supervisor, &self.identity) {
                Some(tenant) => tenant,
                None => {
                    let parent = Some(self.reference())
                        .filter(|reference| tenant::resolve(segment, *reference).is_some());
                    register(segment, &self.identity, host, parent)?.1
                }
            };
            self.move_to(tenant);
            Ok(())
        })
    }

    /// From now on this process belongs to `tenant`, with all that it submits.
    fn move_to(&self, tenant: Reference) {
        let packed = Reference::pack(Some(tenant));
        self.tenant.store(packed, Ordering::Release);
        self.excluded_reported.store(0, Ordering::Release);
        for slot in self.segment.live_submitters.iter() {
            let submitter = &self.segment.submitters[slot];
            let owner = submitter.owner();
            if owner.pid() == self.identity.pid
                && owner.supervisor() == self.supervisor
                && submitter.start_time.load(Ordering::Acquire) == self.identity.start_time
            {
                submitter.tenant.store(packed, Ordering::Release);
            }
        }
    }

    /// Another client in this process may have moved the process to a tenant of its own.
    fn follow(&self) {
        let own = self.submitters.iter().find_map(|it| it.load(Ordering::Acquire).checked_sub(1));
        let Some(slot) = own else { return };
        let current = self.segment.submitters[slot as usize].tenant.load(Ordering::Acquire);
        if current != self.tenant.load(Ordering::Acquire) {
            self.tenant.store(current, Ordering::Release);
        }
    }

    /// The in-flight counter of this process on a device.
    ///
    /// # Errors
    /// [`Error::Full`].
    #[inline]
    pub fn flight(&self, device: usize, host: &dyn Host) -> Result<&Flight> {
        Ok(self.segment.submitters[self.flight_slot(device, host)?].flight())
    }

    /// The submitter slot of this process on a device.
    ///
    /// # Errors
    /// [`Error::Full`].
    #[inline]
    pub fn flight_slot(&self, device: usize, host: &dyn Host) -> Result<usize> {
        match self.submitters[device].load(Ordering::Acquire) {
            0 => self.add_submitter(device, host),
            slot => Ok(slot as usize - 1),
        }
    }

    #[cold]
    fn add_submitter(&self, device: usize, host: &dyn Host) -> Result<usize> {
        self.changing.with(host, || match self.submitters[device].load(Ordering::Acquire) {
            0 => self.claim_submitter(device),
            slot => Ok(slot as usize - 1),
        })
    }

    fn claim_submitter(&self, device: usize) -> Result<usize> {
        for (slot, submitter) in self.segment.submitters.iter().enumerate() {
            self.segment.submitters_mark.raise(slot);
            let Some(owner) =
                tenant::claim_slot(&submitter.owner, self.identity.pid, self.supervisor)
            else {
                continue;
            };
            submitter.start_time.store(self.identity.start_time, Ordering::Relaxed);
            submitter.tenant.store(Reference::pack(Some(self.reference())), Ordering::Relaxed);
            submitter.device.store(device as u64, Ordering::Relaxed);
            submitter.forget_stuck();
            submitter.waiting_threads.store(0, Ordering::Relaxed);
            submitter.coverage.store(0, Ordering::Relaxed);
            submitter.device_waits.store(0, Ordering::Relaxed);
            submitter.drain.reset();
            submitter.births().reset();
            submitter.flight().reset();
            // SeqCst: whoever closes the gate after a submission of this slot was counted also
            // finds the slot in the list.
            self.segment.live_submitters.insert(slot);
            submitter.owner.store(owner.with_state(SlotState::Live).0, Ordering::SeqCst);
            self.submitters[device].store(slot as u64 + 1, Ordering::Release);
            return Ok(slot);
        }
        Err(Error::Full { what: "submitter", capacity: SUBMITTERS })
    }

    /// Whether a gate closed with `word` lets this process pass: it belongs to the holder, or
    /// descends from it.
    pub fn may_pass(&self, word: GateWord) -> bool {
        self.follow();
        let own = self.reference();
        // A slot that is somebody else's by now says nothing about this process.
        tenant::resolve(&self.segment, own).is_some()
            && (word.holder() == own.slot
                || tenant::descends_from(&self.segment, own.slot, word.holder()))
    }

    /// Passes the gate of `device` and counts in flight; waits while the gate is closed.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline, [`Error::Interrupted`], [`Error::Full`].
    #[inline]
    pub fn enter_submission(
        &self,
        device: usize,
        deadline: Deadline,
        host: &dyn Host,
    ) -> Result<()> {
        let flight = self.flight(device, host)?;
        self.enter(flight, device, deadline, host)
    }

    /// The same for what makes or ends contexts, or loads code.
    ///
    /// # Errors
    /// As [`Client::enter_submission`].
    pub fn enter_birth(&self, device: usize, deadline: Deadline, host: &dyn Host) -> Result<()> {
        let slot = self.flight_slot(device, host)?;
        self.enter(self.segment.submitters[slot].births(), device, deadline, host)
    }

    #[inline]
    fn enter(
        &self,
        flight: &Flight,
        device: usize,
        deadline: Deadline,
        host: &dyn Host,
    ) -> Result<()> {
        match flight.try_enter(self.gate(device), |word| self.may_pass(word)) {
            Ok(()) => Ok(()),
            Err(refused) => self.wait_to_enter(flight, device, refused, deadline, host),
        }
    }

    #[cold]
    fn wait_to_enter(
        &self,
        flight: &Flight,
        device: usize,
        mut refused: crate::flight::Refused,
        deadline: Deadline,
        host: &dyn Host,
    ) -> Result<()> {
        let gate = self.gate(device);
        let started = clock::now();
        let _waiting = Waiting::start(self, self.flight_slot(device, host)?);
        let mut watch = Watch::default();
        loop {
            if refused.was_last {
                // A drain may have seen the short-lived count.
                supervision::ring(&self.segment, self.supervisor);
            }
            hooks::fault("turned_back");
            loop {
                let wake = gate.wait_change(refused.word, deadline.left(SLICE));
                if wake != Wake::Changed && host.interrupted() {
                    return Err(Error::Interrupted);
                }
                if gate.load() != refused.word || self.segment.is_retired() {
                    break;
                }
                if deadline.has_passed() {
                    return Err(self.timed_out(device, started));
                }
                watch.look(self, host);
            }
            match flight.try_enter(gate, |word| self.may_pass(word) || self.segment.is_retired()) {
                Ok(()) => return Ok(()),
                Err(again) => refused = again,
            }
        }
    }

    /// Ends a submission that entered.
    #[inline]
    pub fn leave_submission(&self, device: usize) {
        if let Some(submitter) = self.submitter(device) {
            self.leave(submitter.flight(), device);
        }
    }

    /// Ends what [`Client::enter_birth`] began.
    pub fn leave_birth(&self, device: usize) {
        if let Some(submitter) = self.submitter(device) {
            self.leave(submitter.births(), device);
        }
    }

    #[inline]
    fn leave(&self, flight: &Flight, device: usize) {
        if flight.leave(self.gate(device)) {
            supervision::ring(&self.segment, self.supervisor);
        }
    }

    /// The slot of this process on a device, if it has one.
    #[inline]
    pub fn submitter(&self, device: usize) -> Option<&Submitter> {
        let slot = self.submitters[device].load(Ordering::Acquire).checked_sub(1)?;
        Some(&self.segment.submitters[slot as usize])
    }

    /// The error for a wait that ended at its deadline.
    pub fn timed_out(&self, device: usize, started: u64) -> Error {
        let word = self.gate(device).load();
        let owed = self.segment.devices[device].run.open_until(budget::max_closed().unwrap_or(0));
        let state = if word.is_open() && clock::now() < owed {
            "the gate stays open for a while, for work outside of regions (see KREX_MAX_CLOSED)"
                .to_owned()
        } else if word.is_open() {
            "the gate is open, but others are ahead in the queue".to_owned()
        } else {
            let holder = self.segment.tenants.get(word.holder());
            let name = holder.map(|it| it.name.get()).unwrap_or_default();
            format!("{name:?} holds it (epoch {}); see `krex status`", word.tenure())
        };
        Error::Timeout {
            device: self.device_name(device),
            waited_s: clock::seconds(clock::now().saturating_sub(started)),
            state,
        }
    }

    /// Whether a fork lies between the process that attached and this one.
    pub fn is_inherited(&self) -> bool {
        self.forks != forks()
    }

    /// Sees to it that this process's supervisor is there and able to work: for those who get no
    /// answer, and at the end of a region.
    pub fn revive_supervisor(&self, host: &dyn Host) {
        // A segment that was removed needs none: everybody opens a new one.
        if self.segment.is_retired() || hooks::sabotaged("revive") {
            return;
        }
        let program = || host.program();
        let revived = supervision::revive(&self.segment, &self.identity, self.supervisor, program);
        match revived {
            Ok(_) => self.complained.store(false, Ordering::Relaxed),
            // Said once, though it is tried again and again.
            Err(error) if !self.complained.swap(true, Ordering::Relaxed) => log::error!("{error}"),
            Err(_) => {}
        }
    }
}

/// A process that executes another program inside a region has nobody left who could leave it.
/// One that has the segment mapped twice did not: the region is that of its other client.
fn give_back_after_exec(segment: &Segment, own: Reference, identity: &Identity) {
    let is_root = segment.tenants[own.slot].owner().pid() == identity.pid;
    if !is_root || process::mappings_of(segment.inode()) > 1 {
        return;
    }
    segment.tenants[own.slot].queue.leave();
    for index in device::in_use(segment) {
        let word = segment.devices[index].gate().load();
        if !word.is_open() && word.holder() == own.slot {
            recover::revoke(segment, index, word, Cause::Died);
        }
    }
}

/// Registers the calling process, with a running supervisor. Returns both slots.
fn register(
    segment: &Segment,
    identity: &Identity,
    host: &dyn Host,
    parent: Option<Reference>,
) -> Result<(usize, Reference)> {
    let of_parent = parent.map(|reference| &segment.tenants[reference.slot]);
    let registration = Registration {
        name: own_name(),
        devices: match of_parent {
            Some(parent) => parent.devices.load(Ordering::SeqCst),
            None => 1 << device::find_or_add(segment, device::DEFAULT)?,
        },
        default_device: of_parent
            .and_then(|it| it.default_device.load(Ordering::Relaxed).checked_sub(1))
            .map(|device| device as usize),
        parent,
        freezer: Choice::from_environment()?,
        time_limit: 0,
        on_stuck: false,
        preloaded: false,
        attached: parent.is_none(),
    };
    register_supervised(segment, identity, host, &registration)
}

/// Registers with a running supervisor, trying again if that one was just going.
///
/// # Errors
/// As [`supervision::ensure`] and [`tenant::register`].
pub fn register_supervised(
    segment: &Segment,
    identity: &Identity,
    host: &dyn Host,
    registration: &Registration,
) -> Result<(usize, Reference)> {
    let mut last = None;
    for _ in 0..8 {
        // The path is asked for only if a supervisor has to be started.
        let supervisor = match supervision::find(segment, identity)
            .filter(|slot| supervision::serves(segment, *slot))
        {
            Some(supervisor) => supervisor,
            None => supervision::ensure(segment, identity, &host.program()?)?,
        };
        match tenant::register(segment, supervisor, identity, registration) {
            Ok(tenant) => return Ok((supervisor, tenant)),
            Err(error @ Error::Supervisor(_)) => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| Error::Supervisor("it keeps ending".to_owned())))
}

/// A name for a process that was not given one: its command line's first words.
fn own_name() -> String {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let line = String::from_utf8_lossy(&line).into_owned();
    let words: Vec<&str> = line.split('\0').filter(|word| !word.is_empty()).collect();
    let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
    let mut name = words.first().map(|word| base(word)).unwrap_or_default();
    if let Some(script) = words.get(1).filter(|word| !word.starts_with('-')) {
        name = format!("{name} {}", base(script));
    }
    format!("{name} ({})", rustix::process::getpid().as_raw_nonzero())
}

/// Counts a thread of the process, and of its tenant, as waiting for as long as it lives.
pub struct Waiting<'a> {
    tenant: &'a Tenant,
    submitter: &'a Submitter,
}

impl<'a> Waiting<'a> {
    /// `submitter` is the slot of the calling process: what a process that is killed leaves in it
    /// is taken back by its cleaner.
    pub fn start(client: &'a Client, submitter: usize) -> Self {
        let (tenant, submitter) = (client.tenant(), &client.segment.submitters[submitter]);
        submitter.waiting_threads.fetch_add(1, Ordering::AcqRel);
        tenant.start_waiting(clock::now());
        Self { tenant, submitter }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.tenant.stop_waiting(1, clock::now());
        self.submitter.waiting_threads.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Looks once a second, during a long wait, whether the supervisor is still there: with both of
/// its halves killed nobody would thaw or revoke anything.
#[derive(Default)]
pub struct Watch {
    next: Option<Deadline>,
}

impl Watch {
    /// Whether a second has passed since the first or the last look.
    pub fn is_due(&mut self) -> bool {
        let due = self.next.is_some_and(Deadline::has_passed);
        if due || self.next.is_none() {
            self.next = Some(Deadline::after(Duration::from_secs(1)));
        }
        due
    }

    pub fn look(&mut self, client: &Client, host: &dyn Host) {
        if self.is_due() {
            client.revive_supervisor(host);
        }
    }
}
