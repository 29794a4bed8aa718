//! What passing an open gate costs, beside what it cannot cost less than.
//!
//! Through the real code, on a mapped segment, alternated in one process with the bare floor (two
//! atomic additions, which is what counting in flight takes), and with a POSIX semaphore and
//! flock(2), of which each thread has its own. Prints a line of JSON per kind and number of
//! threads: medians over the rounds, in nanoseconds of CPU time per pass; the ratio is the median
//! of each round's own ratio to the floor.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use krex_core::measure::{Lane, Pair};
use krex_core::segment::Segment;

const THREADS: [usize; 3] = [1, 2, 4];
const MOST_THREADS: usize = 4;
const PASSES: u32 = 500_000;

/// Nanoseconds of CPU time per pass, as the mean of the threads.
fn measure(lanes: &[Lane<'_>], pair: Pair) -> f64 {
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
                    lane.time(pair, PASSES)
                })
            })
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).sum::<f64>()
    });
    used / lanes.len() as f64
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
    for shared in [false, true] {
        for threads in THREADS {
            if shared && threads == 1 {
                continue;
            }
            let lanes: Vec<Lane<'_>> = (0..threads)
                .map(|thread| {
                    let place = if shared { 0 } else { thread };
                    let flight = segment.submitters[place].flight();
                    Lane::new(gate, flight, &floors[place].0).unwrap()
                })
                .collect();
            let mut times: [Vec<f64>; Pair::ALL.len()] = Default::default();
            for round in 0..rounds {
                // Another one begins each time, so that none always follows the same.
                for step in 0..Pair::ALL.len() {
                    let place = (round + step) % Pair::ALL.len();
                    times[place].push(measure(&lanes, Pair::ALL[place]));
                }
            }
            for (place, pair) in Pair::ALL.into_iter().enumerate() {
                let ratios = times[place].iter().zip(&times[0]).map(|(time, floor)| time / floor);
                println!(
                    "{{\"kind\":\"{}\",\"threads\":{threads},\"shared\":{shared},\
                     \"ns\":{:.2},\"ratio\":{:.3},\"rounds\":{rounds}}}",
                    pair.name(),
                    median(times[place].clone()),
                    median(ratios.collect()),
                );
            }
        }
    }
}
