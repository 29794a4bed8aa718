//! How far the work of a device has come.
//!
//! All running work of a device advances at one rate, so one number says how far each has come:
//! the device's *position*, in nanoseconds of undisturbed work. Work that starts at position P
//! and takes W ends at position P + W. In real time the position advances at
//! 1 / (busy processes x stretch), where a process is busy until the position passes the end of
//! its last work. Everything needed to compute the position at a later time is known beforehand,
//! so it is right however late anybody looks, and also if the looker was stopped meanwhile.

/// What was known of a device at one moment.
#[derive(Clone, Debug)]
pub struct Clock {
    /// When, in nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
    /// The position at that time.
    pub position: f64,
    /// Where the work of this process ends.
    pub own_end: f64,
    /// Where the work of each other process ends; in rising order.
    pub other_ends: Vec<f64>,
    /// By how much births and deaths slow everything; 1 when there are none.
    pub stretch: f64,
    /// A point before that one, for questions about the past.
    pub earlier: Option<(u64, f64)>,
}

impl Clock {
    /// How many processes are busy at a position.
    fn busy(&self, position: f64) -> usize {
        let others = self.other_ends.len() - self.other_ends.partition_point(|&it| it <= position);
        others + usize::from(self.own_end > position)
    }

    /// Where the number of busy processes changes next.
    fn next_change(&self, position: f64) -> f64 {
        let index = self.other_ends.partition_point(|&it| it <= position);
        let other = self.other_ends.get(index).copied().unwrap_or(f64::INFINITY);
        if self.own_end > position { other.min(self.own_end) } else { other }
    }

    /// Real nanoseconds per nanosecond of work.
    fn slowness(&self, position: f64) -> f64 {
        self.busy(position).max(1) as f64 * self.stretch
    }

    /// The position at a time.
    pub fn position_at(&self, time: u64) -> f64 {
        if time <= self.time {
            return self.earlier_position(time);
        }
        let (mut left, mut position) = ((time - self.time) as f64, self.position);
        loop {
            let slowness = self.slowness(position);
            let change = self.next_change(position);
            let needed = (change - position) * slowness;
            if needed >= left {
                return position + left / slowness;
            }
            left -= needed;
            position = change;
        }
    }

    /// When a position is or was reached. `u64::MAX`: never, as things are.
    pub fn time_of(&self, wanted: f64) -> u64 {
        if wanted <= self.position {
            return self.earlier_time(wanted);
        }
        if wanted.is_infinite() {
            return u64::MAX;
        }
        let (mut passed, mut position) = (0.0, self.position);
        while position < wanted {
            let next = self.next_change(position).min(wanted);
            passed += (next - position) * self.slowness(position);
            position = next;
        }
        self.time + passed.ceil() as u64
    }

    fn earlier_position(&self, time: u64) -> f64 {
        match self.earlier {
            Some((before, position)) if before < self.time && time >= before => {
                let share = (time - before) as f64 / (self.time - before) as f64;
                position + (self.position - position) * share
            }
            // Nothing is known: as if nobody had been busy.
            _ => self.position - (self.time - time) as f64,
        }
    }

    fn earlier_time(&self, wanted: f64) -> u64 {
        match self.earlier {
            Some((before, position)) if position < self.position && wanted >= position => {
                let share = (wanted - position) / (self.position - position);
                before + ((self.time - before) as f64 * share) as u64
            }
            _ => self.time.saturating_sub((self.position - wanted) as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(own_end: f64, other_ends: &[f64], stretch: f64) -> Clock {
        let other_ends = other_ends.to_vec();
        Clock { time: 1000, position: 500.0, own_end, other_ends, stretch, earlier: None }
    }

    #[test]
    fn alone_takes_as_long_as_it_says() {
        assert_eq!(clock(600.0, &[], 1.0).time_of(600.0), 1100);
        assert_eq!(clock(600.0, &[], 1.0).position_at(1050), 550.0);
    }

    #[test]
    fn two_busy_processes_halve_the_rate_until_one_is_done() {
        let clock = clock(600.0, &[550.0], 1.0);
        // 50 at half the rate, then 50 alone.
        assert_eq!(clock.time_of(600.0), 1150);
        assert_eq!(clock.position_at(1100), 550.0);
        assert_eq!(clock.position_at(1125), 575.0);
    }

    #[test]
    fn births_stretch() {
        assert_eq!(clock(600.0, &[], 1.5).time_of(600.0), 1150);
    }

    #[test]
    fn endless_work_never_ends_and_still_slows() {
        let clock = clock(600.0, &[f64::INFINITY], 1.0);
        assert_eq!(clock.time_of(600.0), 1200);
        assert_eq!(clock.time_of(f64::INFINITY), u64::MAX);
        assert_eq!(clock.position_at(1100), 550.0);
    }

    #[test]
    fn the_past_lies_between_two_known_points() {
        let mut clock = clock(0.0, &[], 1.0);
        clock.earlier = Some((800, 400.0));
        assert_eq!(clock.position_at(900), 450.0);
        assert_eq!(clock.time_of(450.0), 900);
    }
}
