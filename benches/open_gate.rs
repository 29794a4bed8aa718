//! What passing an open gate costs, beside what it cannot cost less than.
//!
//! Through the real code, on a mapped segment, alternated in one process with the bare floor (two
//! atomic additions, which is what counting in flight takes) and with a pair of flock(2) calls.
//! Prints a line of JSON per kind and number of threads: medians over the rounds, in nanoseconds
//! of CPU time per pass; the ratio is the median of each round's own ratio to the floor.

use std::fs::File;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use krex_core::flight::Flight;
use krex_core::gate::Gate;
use krex_core::segment::Segment;
use rustix::fs::FlockOperation;
use rustix::time::{ClockId, clock_gettime};

const THREADS: [usize; 3] = [1, 2, 4];
const MOST_THREADS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Two atomic additions.
    Floor,
    /// Enter and leave.
    Pass,
    /// The same with a look at the gate first, as `krex.submission()` does.
    LookAndPass,
    /// A shared lock, taken and given back.
    Flock,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Floor, Self::Pass, Self::LookAndPass, Self::Flock];

    fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Pass => "pass",
            Self::LookAndPass => "look_and_pass",
            Self::Flock => "flock",
        }
    }

    fn passes(self) -> u32 {
        match self {
            Self::Flock => 20_000,
            _ => 500_000,
        }
    }
}

/// What one thread passes through.
struct Lane<'a> {
    gate: &'a Gate,
    flight: &'a Flight,
    floor: &'a AtomicU64,
    file: &'a File,
}

impl Lane<'_> {
    fn run(&self, kind: Kind) {
        let passes = kind.passes();
        match kind {
            Kind::Floor => {
                for _ in 0..passes {
                    black_box(self.floor).fetch_add(1, Ordering::SeqCst);
                    black_box(self.floor).fetch_sub(1, Ordering::SeqCst);
                }
            }
            Kind::Pass => {
                for _ in 0..passes {
                    let entered = black_box(self.flight).try_enter(black_box(self.gate), |_| false);
                    assert!(entered.is_ok());
                    black_box(black_box(self.flight).leave(black_box(self.gate)));
                }
            }
            Kind::LookAndPass => {
                for _ in 0..passes {
                    assert!(black_box(self.flight).try_enter_quickly(black_box(self.gate)));
                    black_box(black_box(self.flight).leave(black_box(self.gate)));
                }
            }
            Kind::Flock => {
                for _ in 0..passes {
                    rustix::fs::flock(self.file, FlockOperation::LockShared).unwrap();
                    rustix::fs::flock(self.file, FlockOperation::Unlock).unwrap();
                }
            }
        }
    }
}

/// Nanoseconds of CPU time that the calling thread has used.
fn cpu_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Nanoseconds of CPU time per pass, as the mean of the threads.
fn measure(lanes: &[Lane<'_>], kind: Kind) -> f64 {
    let ready = AtomicUsize::new(0);
    let used = std::thread::scope(|scope| {
        let threads: Vec<_> = lanes
            .iter()
            .map(|lane| {
                let ready = &ready;
                scope.spawn(move || {
                    // Not asleep when the last one comes: a wake-up takes longer than the loop.
                    ready.fetch_add(1, Ordering::SeqCst);
                    while ready.load(Ordering::SeqCst) < lanes.len() {
                        std::thread::yield_now();
                    }
                    let before = cpu_time();
                    lane.run(kind);
                    cpu_time() - before
                })
            })
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).sum::<f64>()
    });
    used / lanes.len() as f64 / f64::from(kind.passes())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn main() {
    // `cargo bench` adds --bench; `cargo test --benches` does not: then one round is enough.
    let words: Vec<String> = std::env::args().skip(1).collect();
    let rounds = words
        .iter()
        .position(|word| word == "--rounds")
        .and_then(|place| words.get(place + 1)?.parse().ok())
        .unwrap_or(if words.iter().any(|it| it == "--bench") { 21 } else { 1 });
    let directory = Directory(PathBuf::from(format!("/dev/shm/krex-bench-{}", std::process::id())));
    let segment = Segment::open_or_create(&directory.0).unwrap();
    let gate = segment.devices[0].gate();
    let floors: [Line; MOST_THREADS] = Default::default();
    let files: Vec<File> =
        (0..MOST_THREADS).map(|_| File::create(directory.0.join("lock")).unwrap()).collect();
    for shared in [false, true] {
        for threads in THREADS {
            if shared && threads == 1 {
                continue;
            }
            let lanes: Vec<Lane<'_>> = (0..threads)
                .map(|thread| {
                    let place = if shared { 0 } else { thread };
                    Lane {
                        gate,
                        flight: segment.submitters[place].flight(),
                        floor: &floors[place].0,
                        file: &files[thread],
                    }
                })
                .collect();
            let mut times: [Vec<f64>; Kind::ALL.len()] = Default::default();
            for round in 0..rounds {
                // Another one begins each time, so that none always follows the same.
                for step in 0..Kind::ALL.len() {
                    let place = (round + step) % Kind::ALL.len();
                    times[place].push(measure(&lanes, Kind::ALL[place]));
                }
            }
            for (place, kind) in Kind::ALL.into_iter().enumerate() {
                let ratios = times[place].iter().zip(&times[0]).map(|(time, floor)| time / floor);
                println!(
                    "{{\"kind\":\"{}\",\"threads\":{threads},\"shared\":{shared},\
                     \"ns\":{:.2},\"ratio\":{:.3},\"rounds\":{rounds}}}",
                    kind.name(),
                    median(times[place].clone()),
                    median(ratios.collect()),
                );
            }
        }
    }
}
