//! The one driver of a process, and the way into every entry point.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};

use crate::faults::{FaultSource, Faults};
use crate::journal::Journal;
use crate::settings::Settings;
use crate::shared::Shared;
use crate::state::State;
use crate::status::{
    INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED, Outcome, SUCCESS, Status, UNKNOWN,
};
use crate::system::NoCancel;
use crate::{device, engine, graph, system};

pub struct Driver {
    pub settings: Settings,
    pub shared: Arc<Shared>,
    pub journal: Arc<Journal>,
    faults: FaultSource,
    state: Mutex<State>,
    /// How often something ended, roughly; waited on as a futex.
    changes: AtomicU32,
    waiters: AtomicU32,
    /// Something is due earlier than the engine thinks.
    pub engine: Condvar,
}

static DRIVER: OnceLock<Outcome<Driver>> = OnceLock::new();

/// The process that called `cuInit`; 0 before that.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The contexts that a thread has pushed; the last one is current.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(graph::GLOBAL) };
}

impl Driver {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|it| it.into_inner())
    }

    /// Tells those who wait that something ended, if something did.
    pub fn notify(&self, state: &mut State) {
        if std::mem::take(&mut state.changed) {
            // Relaxed, both: changed and read under the state's lock, except that a waiter may
            // leave at any time, and one that left needs no waking.
            self.changes.fetch_add(1, Ordering::Relaxed);
            if self.waiters.load(Ordering::Relaxed) > 0 {
                system::futex_wake(&self.changes);
            }
        }
    }

    /// Moves everything on and asks `done`; `None`: not yet, and what to sleep for.
    fn look<T>(
        &'static self,
        entry: &str,
        context: usize,
        done: &mut dyn FnMut(&mut State) -> Outcome<Option<T>>,
    ) -> Outcome<Result<T, Sleep>> {
        if let Some(status) = self.faults.read(entry).status {
            return Err(status);
        }
        let mut state = self.lock();
        state.advance();
        self.kick(&mut state);
        if context != 0 {
            state.context(context)?;
        }
        if let Some(value) = done(&mut state)? {
            return Ok(Ok(value));
        }
        let left = state.deadline().saturating_sub(system::now());
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let seen = self.changes.load(Ordering::Relaxed);
        // At least now and then: others' deaths change what is due.
        Ok(Err(Sleep { seen, nanoseconds: left.clamp(1, 50_000_000) }))
    }

    fn sleep(&self, sleep: &Sleep) {
        system::futex_wait(&self.changes, sleep.seen, sleep.nanoseconds);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }

    /// After work was queued: makes sure that somebody moves it on.
    fn kick(&'static self, state: &mut State) {
        engine::ensure(self, state);
        if state.deadline() < state.engine_deadline || !state.host_calls.is_empty() {
            self.engine.notify_one();
        }
        self.notify(state);
    }
}

/// How long to sleep, unless something ends.
struct Sleep {
    seen: u32,
    nanoseconds: u64,
}

/// `cuInit`.
pub fn initialise() -> Outcome {
    // Acquire: partner of the release below; whoever sees the owner sees the driver.
    let owner = OWNER.load(Ordering::Acquire);
    if owner != 0 && owner != system::process_id() {
        return Err(NOT_INITIALIZED); // A forked child, which a driver doesn't follow.
    }
    let driver = DRIVER.get_or_init(|| {
        let settings = Settings::from_environment();
        let devices = device::visible(&settings)?;
        let shared = Arc::new(Shared::open(&settings)?);
        let journal = Arc::new(Journal::open(&settings));
        let state = State::new(&settings, devices, Arc::clone(&shared), Arc::clone(&journal));
        let faults =
            FaultSource { text: settings.faults.clone(), file: settings.faults_file.clone() };
        Ok(Driver {
            settings,
            shared,
            journal,
            faults,
            state: Mutex::new(state),
            changes: AtomicU32::new(0),
            waiters: AtomicU32::new(0),
            engine: Condvar::new(),
        })
    });
    driver.as_ref().map_err(|it| *it)?;
    OWNER.store(system::process_id(), Ordering::Release);
    Ok(())
}

fn driver() -> Outcome<&'static Driver> {
    // Acquire: see `initialise`.
    if OWNER.load(Ordering::Acquire) != system::process_id() {
        return Err(NOT_INITIALIZED);
    }
    match DRIVER.get() {
        Some(Ok(driver)) => Ok(driver),
        _ => Err(NOT_INITIALIZED),
    }
}

/// What an entry point needs before it does anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// An initialised driver; not held back by a lock, nor failing with a broken device.
    Driver,
    /// The same, unless the process is locked or a failure was asked for.
    Unlocked,
    /// Also a context that is current and not broken.
    Context,
}

/// What a call waits for before it returns.
type Done = Box<dyn FnMut(&mut State) -> Outcome<Option<()>>>;

/// One call of an entry point.
pub struct Call {
    pub driver: &'static Driver,
    pub entry: &'static str,
    /// The current context; 0: none.
    pub context: usize,
    pub faults: Faults,
    last: RefCell<Option<Done>>,
}

/// Runs what cannot unwind any further: a panic is the status `UNKNOWN`.
fn run_caught<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(UNKNOWN))
}

/// Runs an entry point that needs no driver.
pub fn run_free(body: impl FnOnce() -> Outcome) -> Status {
    let _no_cancel = NoCancel::new();
    run_caught(body).err().unwrap_or(SUCCESS)
}

/// Runs an entry point; waits at its end for what it said.
///
/// A thread that is cancelled while it waits there unwinds from here, through the caller.
pub fn run(need: Need, entry: &'static str, body: impl FnOnce(&Call) -> Outcome) -> Status {
    let no_cancel = NoCancel::new();
    let begun = run_caught(|| {
        let driver = driver()?;
        let pass = if need == Need::Driver { None } else { Some(Pass::new(driver)) };
        let call = Call::new(driver, need, entry)?;
        body(&call)?;
        let done = call.last.take();
        Ok(done.map(|done| Waiting { call, done, _pass: pass }))
    });
    let mut waiting = match begun {
        Ok(Some(waiting)) => waiting,
        Ok(None) => return SUCCESS,
        Err(status) => return status,
    };
    loop {
        let Call { driver, entry, context, .. } = waiting.call;
        match run_caught(|| driver.look(entry, context, &mut waiting.done)) {
            Ok(Ok(())) => return SUCCESS,
            Ok(Err(sleep)) => {
                driver.sleep(&sleep);
                no_cancel.pause();
            }
            Err(status) => return status,
        }
    }
}

/// A call that has done everything but to wait.
struct Waiting {
    call: Call,
    done: Done,
    /// Given back at the end, also if that is a cancellation.
    _pass: Option<Pass>,
}

/// A call that a lock on this process has to wait for.
struct Pass(&'static Driver);

impl Pass {
    fn new(driver: &'static Driver) -> Self {
        let slot = driver.shared.own();
        loop {
            // SeqCst, both, and their partners in `cuCheckpointProcessLock`, which locks, then
            // reads the count: either this call sees the lock, or the locker sees this call.
            slot.in_calls.fetch_add(1, Ordering::SeqCst);
            if slot.locked.load(Ordering::SeqCst) == 0 {
                return Self(driver);
            }
            slot.in_calls.fetch_sub(1, Ordering::SeqCst);
            system::futex_wait(&slot.locked, 1, 100_000_000);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        // SeqCst: a locker that reads 0 sees all that the call did.
        self.0.shared.own().in_calls.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Call {
    fn new(driver: &'static Driver, need: Need, entry: &'static str) -> Outcome<Self> {
        let faults = driver.faults.read(entry);
        let mut call = Self { driver, entry, context: 0, faults, last: RefCell::new(None) };
        if need == Need::Driver {
            return Ok(call);
        }
        if let Some(status) = call.faults.status {
            return Err(status);
        }
        call.context = current_context();
        if need == Need::Context {
            if call.context == 0 {
                return Err(INVALID_CONTEXT);
            }
            driver.lock().context(call.context)?;
        }
        Ok(call)
    }

    pub fn lock(&self) -> MutexGuard<'static, State> {
        self.driver.lock()
    }

    pub fn journal(&self, stream: usize, kind: &str) {
        self.driver.journal.write(self.entry, stream, kind);
    }

    /// After work was queued: makes sure that somebody moves it on.
    pub fn kick(&self, state: &mut State) {
        self.driver.kick(state);
    }

    /// Waits until `done` says something else than `None`, and then goes on.
    ///
    /// # Errors
    /// What `done` returned, or what broke the current context meanwhile.
    pub fn wait<T>(
        &self,
        state: MutexGuard<'static, State>,
        mut done: impl FnMut(&mut State) -> Outcome<Option<T>>,
    ) -> Outcome<T> {
        drop(state);
        loop {
            match self.driver.look(self.entry, self.context, &mut done)? {
                Ok(value) => return Ok(value),
                Err(sleep) => self.driver.sleep(&sleep),
            }
        }
    }

    /// The same as the last thing that a call does: its thread can be cancelled there.
    pub fn wait_at_end(&self, done: impl FnMut(&mut State) -> Outcome<Option<()>> + 'static) {
        *self.last.borrow_mut() = Some(Box::new(done));
    }

    /// The index of a visible device.
    pub fn ordinal(&self, ordinal: i32) -> Outcome<usize> {
        let count = self.lock().devices.len();
        let index = usize::try_from(ordinal).ok().filter(|&it| it < count);
        index.ok_or(crate::status::INVALID_DEVICE)
    }
}

/// The thread's current context; 0: none.
pub fn current_context() -> usize {
    let read = CONTEXTS.try_with(|it| it.borrow().last().copied());
    read.ok().flatten().unwrap_or(0)
}

/// Changes the thread's stack of contexts.
pub fn with_contexts<T>(change: impl FnOnce(&mut Vec<usize>) -> T) -> Outcome<T> {
    CONTEXTS.try_with(|it| change(&mut it.borrow_mut())).map_err(|_| INVALID_VALUE)
}

/// How this thread's calls and others' captures get along.
pub fn capture_mode() -> u32 {
    CAPTURE_MODE.try_with(Cell::get).unwrap_or(graph::GLOBAL)
}

pub fn set_capture_mode(mode: u32) {
    let _ = CAPTURE_MODE.try_with(|it| it.set(mode));
}
