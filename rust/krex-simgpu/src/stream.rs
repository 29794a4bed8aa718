//! Streams, and what is queued on them.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::Status;

/// The flag `CU_STREAM_NON_BLOCKING`: the stream ignores the legacy default stream.
pub const NON_BLOCKING: u32 = 1;

/// One recording of an event.
#[derive(Debug, Default)]
pub struct Mark(AtomicU64);

impl Mark {
    /// When it was passed, in nanoseconds of `CLOCK_MONOTONIC`.
    pub fn passed(&self) -> Option<u64> {
        // Relaxed: read and written under the process's lock.
        Some(self.0.load(Ordering::Relaxed)).filter(|&it| it > 0)
    }

    pub fn pass(&self, time: u64) {
        self.0.store(time, Ordering::Relaxed);
    }
}

/// What the end of an operation does.
#[derive(Clone, Debug)]
pub enum Effect {
    Nothing,
    /// Adds to 32-bit integers.
    Add {
        address: u64,
        count: u64,
        value: i32,
    },
    /// Fills rows with a pattern of `size` bytes.
    Fill {
        address: u64,
        pattern: u32,
        size: u64,
        width: u64,
        height: u64,
        pitch: u64,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    /// The bytes were taken from pageable memory at the time of the call.
    Store {
        to: u64,
        bytes: Arc<[u8]>,
    },
    Free {
        address: u64,
    },
    /// The context is broken from then on.
    Fault(Status),
}

/// A function of the program's, with its argument.
#[derive(Clone, Copy, Debug)]
pub struct HostCall {
    pub function: unsafe extern "C" fn(*mut c_void),
    pub data: usize,
}

/// A value in memory that a stream waits for.
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    pub address: u64,
    /// 4 or 8 bytes.
    pub size: usize,
    pub value: u64,
    /// `CU_STREAM_WAIT_VALUE_*`: at least the value (cyclic), equal to it, shares a bit with it,
    /// or has no bit that it has not.
    pub condition: u32,
}

impl Poll {
    /// Whether memory's value will do.
    pub fn accepts(&self, found: u64) -> bool {
        let shift = 64 - 8 * self.size;
        match self.condition {
            0 => ((found.wrapping_sub(self.value) << shift) as i64) >= 0,
            1 => found == self.value,
            2 => found & self.value != 0,
            _ => (!(found | self.value) << shift) != 0,
        }
    }
}

/// What an operation is.
#[derive(Clone, Debug)]
pub enum Action {
    /// Keeps the device busy for so many nanoseconds, undisturbed; infinitely many: hangs.
    Work(f64, Effect),
    /// Takes no time.
    Instant(Effect),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
    /// Waits until memory holds a value.
    Poll(Poll),
    Host(HostCall),
}

impl Action {
    /// How long it keeps the device busy.
    pub fn work(&self) -> f64 {
        if let Self::Work(nanoseconds, _) = self { *nanoseconds } else { 0.0 }
    }
}

#[derive(Debug)]
pub struct Operation {
    pub action: Action,
    /// In order of submission, over all streams of the process.
    pub sequence: u64,
    /// When it was submitted, in nanoseconds.
    pub submitted: u64,
}

#[derive(Debug)]
pub struct Stream {
    pub context: usize,
    pub device: usize,
    pub flags: u32,
    pub priority: i32,
    /// The default stream that waits for, and holds up, all blocking streams of its context.
    pub is_legacy: bool,
    pub queue: VecDeque<Operation>,
    /// The position at which the first operation ends, if it runs.
    pub running: Option<f64>,
    /// The first operation is a host function that was begun.
    pub in_host_call: bool,
    /// When the last operation ended.
    pub cursor: u64,
    /// Nanoseconds of work in the queue, without what hangs.
    queued: f64,
    queued_hangs: usize,
    /// The capture that it belongs to.
    pub capture: Option<usize>,
    /// The captured nodes on which the next one will depend.
    pub tail: Vec<usize>,
}

impl Stream {
    pub fn new(context: usize, device: usize, flags: u32, priority: i32) -> Self {
        Self {
            context,
            device,
            flags,
            priority,
            is_legacy: false,
            queue: VecDeque::new(),
            running: None,
            in_host_call: false,
            cursor: 0,
            queued: 0.0,
            queued_hangs: 0,
            capture: None,
            tail: Vec::new(),
        }
    }

    pub fn is_blocking(&self) -> bool {
        self.flags & NON_BLOCKING == 0
    }

    pub fn push(&mut self, operation: Operation) {
        let work = operation.action.work();
        if work.is_finite() {
            self.queued += work;
        } else {
            self.queued_hangs += 1;
        }
        self.queue.push_back(operation);
    }

    pub fn pop(&mut self) -> Option<Operation> {
        self.running = None;
        self.in_host_call = false;
        let operation = self.queue.pop_front()?;
        let work = operation.action.work();
        if work.is_finite() {
            self.queued -= work;
        } else {
            self.queued_hangs -= 1;
        }
        Some(operation)
    }

    /// Whether everything that was submitted up to `sequence` is done.
    pub fn is_done(&self, sequence: u64) -> bool {
        self.queue.front().is_none_or(|it| it.sequence > sequence)
    }

    /// About where its work ends, from a position on.
    pub fn work_end(&self, position: f64) -> f64 {
        if self.queued_hangs > 0 {
            return f64::INFINITY;
        }
        match self.running {
            Some(end) => end + (self.queued - self.queue[0].action.work()),
            None => position + self.queued,
        }
    }
}
