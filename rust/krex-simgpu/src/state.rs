//! What one process has made with the driver, and how its streams move on.
//!
//! Nothing moves by itself: whoever holds the state can call [`State::advance`], which does all
//! that is due by now, with the times at which it was due. The engine (see `engine.rs`) calls it
//! when nobody else does.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::clock::Clock;
use crate::device::Visible;
use crate::graph::{Capture, Executable, Graph};
use crate::journal::Journal;
use crate::memory::Memory;
use crate::module::{Function, Module};
use crate::settings::Settings;
use crate::shared::{DEVICES, Shared};
use crate::status::{
    CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_HANDLE, Outcome, Status, UNKNOWN,
};
use crate::stream::{Action, Effect, HostCall, Mark, Operation, Stream};
use crate::system;

#[derive(Debug)]
pub struct Context {
    /// The device's index among all, whatever is visible.
    pub device: usize,
    pub ordinal: i32,
    pub flags: u32,
    pub is_primary: bool,
    pub identity: u64,
    pub legacy: usize,
    /// The default streams of threads.
    pub per_thread: HashMap<u32, usize>,
    /// What broke it; every call returns it from then on.
    pub broken: Option<Status>,
}

#[derive(Debug, Default)]
pub struct Primary {
    pub context: Option<usize>,
    pub retained: u32,
    pub flags: u32,
}

#[derive(Debug)]
pub struct Event {
    pub context: usize,
    pub flags: u32,
    /// The last recording.
    pub mark: Option<Arc<Mark>>,
    /// The last recording was captured: the capture, and the nodes before it.
    pub captured: Option<(usize, Vec<usize>)>,
}

/// What is left of a handle.
#[derive(Clone, Copy, Debug)]
pub enum Gone {
    /// Its context has ended: what calls with it return.
    Refused(Status),
    /// A stream that was destroyed: calls with it crash.
    Destroyed,
}

pub struct State {
    pub shared: Arc<Shared>,
    pub journal: Arc<Journal>,
    pub devices: Vec<Visible>,
    pub primaries: Vec<Primary>,
    pub contexts: HashMap<usize, Context>,
    pub streams: BTreeMap<usize, Stream>,
    pub events: HashMap<usize, Event>,
    pub modules: HashMap<usize, Module>,
    pub functions: HashMap<usize, Function>,
    pub graphs: HashMap<usize, Graph>,
    /// Handles of nodes: the graph, and the index in it.
    pub nodes: HashMap<usize, (usize, usize)>,
    pub executables: HashMap<usize, Executable>,
    pub captures: HashMap<usize, Capture>,
    pub memory: Memory,
    /// Streams that were destroyed, and streams and events of contexts that have ended.
    pub gone: HashMap<usize, Gone>,
    pub ended_contexts: HashSet<usize>,
    pub host_calls: VecDeque<(usize, HostCall)>,
    /// Streams whose handles are gone, and that end with their work.
    pub orphans: Vec<usize>,
    pub has_engine: bool,
    /// When the engine will look by itself.
    pub engine_deadline: u64,
    /// Since the last look: something ended, so that whoever waits should look.
    pub changed: bool,
    sequence: u64,
    handle: usize,
    pending: u32,
    deadline: u64,
    earlier: [Option<(u64, f64)>; DEVICES],
}

/// Others' work can change when one's own ends; looked at this often, in nanoseconds.
const LOOK: u64 = 1_000_000;

impl State {
    pub fn new(
        settings: &Settings,
        devices: Vec<Visible>,
        shared: Arc<Shared>,
        journal: Arc<Journal>,
    ) -> Self {
        Self {
            primaries: devices.iter().map(|_| Primary::default()).collect(),
            memory: Memory::new(settings.memory, Arc::clone(&shared)),
            shared,
            journal,
            devices,
            contexts: HashMap::new(),
            streams: BTreeMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            nodes: HashMap::new(),
            executables: HashMap::new(),
            captures: HashMap::new(),
            gone: HashMap::new(),
            ended_contexts: HashSet::new(),
            host_calls: VecDeque::new(),
            orphans: Vec::new(),
            has_engine: false,
            engine_deadline: u64::MAX,
            changed: false,
            sequence: 0,
            handle: 0x5100_0000_0000,
            pending: 0,
            deadline: u64::MAX,
            earlier: [None; DEVICES],
        }
    }

    /// A handle that nothing else has; never dereferenced.
    pub fn new_handle(&mut self) -> usize {
        self.handle += 0x10;
        self.handle
    }

    /// A context that can be used.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`: there was never one; `CONTEXT_IS_DESTROYED`; or what broke it.
    pub fn context(&self, handle: usize) -> Outcome<&Context> {
        match self.contexts.get(&handle) {
            Some(Context { broken: Some(status), .. }) => Err(*status),
            Some(context) => Ok(context),
            None if handle > 0x5100_0000_0000 && handle <= self.handle => Err(CONTEXT_IS_DESTROYED),
            None => Err(INVALID_CONTEXT),
        }
    }

    pub fn stream(&mut self, handle: usize) -> Outcome<&mut Stream> {
        let refusal = self.refusal(handle);
        self.streams.get_mut(&handle).ok_or(refusal)
    }

    pub fn event(&mut self, handle: usize) -> Outcome<&mut Event> {
        let refusal = self.refusal(handle);
        self.events.get_mut(&handle).ok_or(refusal)
    }

    /// What a call returns for a handle that means nothing, or no longer.
    pub fn refusal(&self, handle: usize) -> Status {
        match self.gone.get(&handle) {
            Some(Gone::Refused(status)) => *status,
            _ => INVALID_HANDLE,
        }
    }

    /// Crashes as the driver does if the handle is that of a destroyed stream.
    pub fn touch_stream(&self, handle: usize) {
        if matches!(self.gone.get(&handle), Some(Gone::Destroyed)) {
            system::crash("a call with a stream that was destroyed");
        }
    }

    /// The number of the last operation that was submitted.
    pub fn last_sequence(&self) -> u64 {
        self.sequence
    }

    /// Queues an operation, and starts it if nothing is before it. Returns its number.
    pub fn enqueue(&mut self, stream: usize, action: Action) -> Outcome<u64> {
        self.sequence += 1;
        let (sequence, submitted) = (self.sequence, system::now());
        self.stream(stream)?.push(Operation { action, sequence, submitted });
        self.set_pending(self.pending + 1);
        self.advance();
        Ok(sequence)
    }

    fn set_pending(&mut self, pending: u32) {
        if (self.pending == 0) != (pending == 0) {
            let kind = if pending == 0 { "idle" } else { "busy" };
            self.journal.write("-", 0, kind);
        }
        self.pending = pending;
        // Release: partner of the look by `cuCheckpointProcessLock`.
        self.shared.own().pending.store(pending, std::sync::atomic::Ordering::Release);
    }

    /// Does everything that is due.
    pub fn advance(&mut self) {
        let now = system::now();
        let mut devices: Vec<usize> = self.contexts.values().map(|it| it.device).collect();
        devices.sort_unstable();
        devices.dedup();
        let mut clocks: Vec<Option<Clock>> = vec![None; DEVICES];
        for &device in &devices {
            let mut clock = self.shared.clock(device);
            clock.earlier = self.earlier[device].filter(|it| it.0 < clock.time);
            clocks[device] = Some(clock);
        }
        let handles: Vec<usize> = self.streams.keys().copied().collect();
        loop {
            let mut moved = false;
            for &handle in &handles {
                while self.step(handle, &mut clocks, now) {
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        self.orphans.retain(|it| match self.streams.get(it) {
            Some(stream) if !stream.queue.is_empty() => true,
            _ => {
                self.streams.remove(it);
                false
            }
        });
        let mut deadline = u64::MAX;
        for device in devices {
            let Some(clock) = &mut clocks[device] else { continue };
            let position = clock.position_at(now);
            self.earlier[device] = Some((now, position));
            let streams = self.streams.values().filter(|it| it.device == device);
            let busy = streams.filter(|it| it.running.is_some() || !it.queue.is_empty());
            let (mut end, mut next, mut runs) = (position, f64::INFINITY, false);
            for stream in busy {
                end = end.max(stream.work_end(position));
                next = next.min(stream.running.unwrap_or(f64::INFINITY));
                runs |= stream.running.is_some();
                if matches!(stream.queue.front(), Some(Operation { action: Action::Poll(_), .. })) {
                    deadline = deadline.min(now + LOOK);
                }
            }
            if !runs {
                // All of it waits for something else than the device.
                end = position;
            }
            // What ended already is left as it is: nobody counts it any more.
            if end > position || clock.own_end > position {
                self.shared.set_work_end(device, end);
                clock.own_end = end;
            }
            if next < f64::INFINITY {
                deadline = deadline.min(clock.time_of(next));
                if self.shared.is_shared(clock) {
                    deadline = deadline.min(now + LOOK);
                }
            }
        }
        self.deadline = deadline;
    }

    /// When something is due next.
    pub fn deadline(&self) -> u64 {
        self.deadline
    }

    /// When all that a stream's operation waits for was done; `None`: not yet.
    fn barrier(&self, handle: usize, sequence: u64) -> Option<u64> {
        let stream = &self.streams[&handle];
        let mut time = 0;
        let mut wait_for = |other: &Stream| {
            time = time.max(other.cursor);
            other.is_done(sequence)
        };
        let is_free = if stream.is_legacy {
            let others = self.streams.iter().filter(|(it, other)| {
                **it != handle && other.context == stream.context && other.is_blocking()
            });
            others.fold(true, |free, (_, other)| wait_for(other) && free)
        } else if stream.is_blocking() {
            let legacy = self.contexts.get(&stream.context).map(|it| it.legacy);
            legacy.and_then(|it| self.streams.get(&it)).is_none_or(wait_for)
        } else {
            true
        };
        is_free.then_some(time)
    }

    /// Moves the first operation of a stream on; returns whether there was anything to do.
    fn step(&mut self, handle: usize, clocks: &mut [Option<Clock>], now: u64) -> bool {
        let Some(stream) = self.streams.get(&handle) else { return false };
        let Some(operation) = stream.queue.front() else { return false };
        let Some(clock) = clocks[stream.device].as_mut() else { return false };
        if let Some(end) = stream.running {
            let time = clock.time_of(end);
            if time <= now {
                self.finish(handle, time);
            }
            return time <= now;
        }
        if stream.in_host_call {
            return false;
        }
        let Some(free) = self.barrier(handle, operation.sequence) else { return false };
        let mut ready = operation.submitted.max(stream.cursor).max(free);
        match &operation.action {
            Action::Work(nanoseconds, _) => {
                let nanoseconds = *nanoseconds;
                let start = clock.position_at(ready);
                if clock.own_end <= start && ready > clock.time {
                    // It was idle until then: from there on it counts as busy.
                    clock.earlier = Some((clock.time, clock.position));
                    (clock.time, clock.position) = (ready, start);
                }
                clock.own_end = clock.own_end.max(start + nanoseconds);
                if let Some(stream) = self.streams.get_mut(&handle) {
                    stream.running = Some(start + nanoseconds);
                }
            }
            Action::Instant(_) | Action::Record(_) => self.finish(handle, ready),
            Action::Wait(mark) => {
                let Some(passed) = mark.passed() else { return false };
                ready = ready.max(passed);
                self.finish(handle, ready);
            }
            Action::Poll(poll) => {
                // Unreachable memory is no reason to wait.
                if self.memory.read(poll.address, poll.size).is_some_and(|it| !poll.accepts(it)) {
                    return false;
                }
                self.finish(handle, now.max(ready));
            }
            Action::Host(call) => {
                self.host_calls.push_back((handle, *call));
                if let Some(stream) = self.streams.get_mut(&handle) {
                    stream.in_host_call = true;
                }
            }
        }
        true
    }

    /// Ends the first operation of a stream, at a time, with its effect.
    pub fn finish(&mut self, handle: usize, time: u64) {
        let Some(stream) = self.streams.get_mut(&handle) else { return };
        let Some(operation) = stream.pop() else { return };
        stream.cursor = time;
        let context = stream.context;
        self.set_pending(self.pending - 1);
        self.changed = true;
        match operation.action {
            Action::Work(_, effect) | Action::Instant(effect) => {
                if let Err(status) = self.memory.apply(&effect) {
                    self.break_context(context, status);
                }
            }
            Action::Record(mark) => mark.pass(time),
            Action::Wait(_) | Action::Poll(_) | Action::Host(_) => {}
        }
    }

    /// Makes every later call in a context return `status`, and drops what it had queued.
    pub fn break_context(&mut self, handle: usize, status: Status) {
        let Some(context) = self.contexts.get_mut(&handle) else { return };
        context.broken.get_or_insert(if status == 0 { UNKNOWN } else { status });
        self.drop_queues(handle);
    }

    /// Drops what a context has queued.
    pub fn drop_queues(&mut self, context: usize) {
        let handles: Vec<usize> = self.streams.keys().copied().collect();
        for handle in handles {
            if self.streams.get(&handle).is_some_and(|it| it.context == context) {
                self.drop_queue(handle);
            }
        }
    }

    fn drop_queue(&mut self, handle: usize) {
        let now = system::now();
        let Some(stream) = self.streams.get_mut(&handle) else { return };
        let mut dropped = 0;
        while let Some(operation) = stream.pop() {
            dropped += 1;
            if let Action::Record(mark) = operation.action {
                mark.pass(now);
            }
        }
        self.host_calls.retain(|it| it.0 != handle);
        self.set_pending(self.pending - dropped);
        self.changed = true;
    }

    /// Ends a stream that has nothing queued, or whose queue may be dropped.
    pub fn remove_stream(&mut self, handle: usize) {
        self.drop_queue(handle);
        self.streams.remove(&handle);
    }
}

/// The effects that only a fault has are told apart here, so that memory knows none.
pub fn fault_of(effect: &Effect) -> Outcome {
    if let Effect::Fault(status) = effect { Err(*status) } else { Ok(()) }
}
