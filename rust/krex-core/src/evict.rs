//! Ending a tenant: by hand, and when work that it submitted never ends.
//!
//! Only its supervisor reaches into a tenant, whatever PID namespace it is in: this leaves word in
//! its slot and rings. SIGTERM comes first, and SIGKILL after some seconds.

use std::path::Path;
use std::sync::atomic::Ordering;

use crate::client::Host;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::process::Identity;
use crate::segment::Segment;
use crate::supervision;
use crate::word::{Reference, SlotState};

/// A tenant that is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted {
    pub name: String,
    /// As its own PID namespace numbers it.
    pub pid: i32,
}

/// Whether a drain gave up a process of the tenant, which has not come on since.
pub fn is_stuck(segment: &Layout, tenant: Reference) -> bool {
    segment.live_submitters.iter().map(|slot| &segment.submitters[slot]).any(|it| {
        it.owner().state() == SlotState::Live && it.tenant() == Some(tenant) && it.is_stuck()
    })
}

fn order(segment: &Layout, slot: usize) {
    let tenant = &segment.tenants[slot];
    // Release: comes before the ring.
    tenant.evicted.store(1, Ordering::Release);
    supervision::ring(segment, tenant.owner().supervisor());
}

/// Has those ended that `who` means: a tenant's name, or the id of its first process or of one
/// that submits; `None`: everybody. `only_stuck` spares those that are not stuck.
///
/// # Errors
/// [`Error::Misuse`] if nobody, or several of the same name, are meant; and whatever keeps the
/// segment or the supervisor from being used.
pub fn evict(
    directory: &Path,
    host: &dyn Host,
    who: Option<&str>,
    only_stuck: bool,
) -> Result<Vec<Evicted>> {
    let nobody = |who: &str| {
        Error::Misuse(format!(
            "no tenant is called {who:?}, or has a process of that number; see `krex status`"
        ))
    };
    let Some(segment) = Segment::open(directory)? else {
        return who.map_or(Ok(Vec::new()), |who| Err(nobody(who)));
    };
    let identity = Identity::of_self()?;
    let own = supervision::find(&segment, &identity);
    let mut meant = Vec::new();
    for slot in segment.live_tenants.iter() {
        let tenant = &segment.tenants[slot];
        let owner = tenant.owner();
        let reference = Reference { slot, generation: owner.generation() };
        if owner.state() == SlotState::Live
            && who.is_none_or(|it| means(&segment, own, reference, it))
        {
            meant.push(reference);
        }
    }
    let name = |it: &Reference| segment.tenants[it.slot].name.get();
    let pid = |it: &Reference| segment.tenants[it.slot].owner().pid();
    if let Some(who) = who {
        if meant.is_empty() {
            return Err(nobody(who));
        }
        if meant.len() > 1 && !only_stuck {
            let pids: Vec<String> = meant.iter().map(|it| pid(it).to_string()).collect();
            return Err(Error::Misuse(format!(
                "{} tenants are called {who:?}: name one by its process id ({})",
                meant.len(),
                pids.join(", ")
            )));
        }
    }
    meant.retain(|it| !only_stuck || is_stuck(&segment, *it));
    // Before it ends: then the slot is its cleaner's.
    let evicted = meant.iter().map(|it| Evicted { name: name(it), pid: pid(it) }).collect();
    for reference in &meant {
        order(&segment, reference.slot);
    }
    let is_own = |it: &Reference| Some(segment.tenants[it.slot].owner().supervisor()) == own;
    if let (Some(own), true) = (own, meant.iter().any(is_own)) {
        supervision::revive(&segment, &identity, own, || host.program())?;
    }
    Ok(evicted)
}

/// Whether a user who writes `who` means this tenant.
fn means(segment: &Layout, own: Option<usize>, tenant: Reference, who: &str) -> bool {
    let it = &segment.tenants[tenant.slot];
    let Ok(pid) = who.parse::<i32>() else { return it.name.get() == who };
    let is = |owner: crate::word::OwnerWord| owner.pid() == pid && Some(owner.supervisor()) == own;
    it.name.get() == who
        || is(it.owner())
        || segment.live_submitters.iter().map(|slot| &segment.submitters[slot]).any(|it| {
            it.owner().state() == SlotState::Live && it.tenant() == Some(tenant) && is(it.owner())
        })
}
