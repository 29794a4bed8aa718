//! Ending tenants: at the time limit of `krex run --timeout`, and those that are evicted.

use std::sync::atomic::Ordering;

use krex_core::clock::{self, SECOND};
use krex_core::freezer::ProcessTable;
use krex_core::tenant;

use crate::charge::Charge;
use crate::worker::Worker;

/// From SIGTERM to SIGKILL.
const GRACE: u64 = 5 * SECOND;

impl Worker<'_> {
    /// Ends tenants whose time limit is over, or that are evicted, with all that were split off
    /// from them.
    pub(crate) fn enforce_limits(&mut self, processes: &mut ProcessTable) {
        let now = clock::now();
        let limited = |charge: &Charge<'_>| {
            charge.tenant().time_limit.load(Ordering::Acquire) != 0
                || charge.tenant().evicted.load(Ordering::Acquire) != 0
        };
        let slots: Vec<usize> =
            self.charges.iter().filter(|(_, it)| limited(it)).map(|(slot, _)| *slot).collect();
        for slot in slots {
            let segment = self.segment;
            let family: Vec<usize> = self
                .charges
                .keys()
                .copied()
                .filter(|it| *it == slot || tenant::descends_from(segment, *it, slot))
                .collect();
            let killing = match self.charges[&slot].terminated_at {
                Some(terminated_at) if now >= terminated_at + GRACE => true,
                Some(terminated_at) => {
                    self.wake_at(terminated_at + GRACE);
                    continue;
                }
                None if segment.tenants[slot].evicted.load(Ordering::Acquire) != 0 => {
                    self.wake_at(now + GRACE);
                    false
                }
                None => {
                    let tenant = &segment.tenants[slot];
                    // What one of them was kept from, the command as a whole was.
                    let excluded = family.iter().map(|it| segment.tenants[*it].time_excluded(now));
                    let since = tenant.registered_at.load(Ordering::Acquire);
                    let used =
                        now.saturating_sub(since).saturating_sub(excluded.max().unwrap_or(0));
                    let limit = tenant.time_limit.load(Ordering::Acquire);
                    if used < limit {
                        self.wake_at(now.saturating_add(limit - used));
                        continue;
                    }
                    self.wake_at(now + GRACE);
                    false
                }
            };
            for member in family {
                if let Some(charge) = self.charges.get_mut(&member) {
                    charge.terminated_at.get_or_insert(now);
                    charge.end(killing, processes);
                }
            }
        }
    }
}
