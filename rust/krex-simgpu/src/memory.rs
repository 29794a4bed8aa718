//! The memory of devices, and the host memory that they reach.
//!
//! A device address is the address of host memory that stands for it, so that one address space
//! holds both. Each access of the device is checked against what is allocated.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::shared::Shared;
use crate::state::fault_of;
use crate::status::{ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::stream::Effect;

const ALIGNMENT: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Device,
    /// Host memory that the device reaches: it was allocated by, or registered with, the driver.
    Pinned,
    Pageable,
}

#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub bytes: u64,
    pub device: usize,
    pub context: usize,
    pub place: Place,
    /// Whether this library allocated it, rather than a caller that registered it.
    is_ours: bool,
    pub identity: u64,
}

pub struct Memory {
    ranges: BTreeMap<u64, Range>,
    shared: Arc<Shared>,
    /// Bytes per device.
    pub total: u64,
    identity: u64,
}

impl Memory {
    pub fn new(total: u64, shared: Arc<Shared>) -> Self {
        Self { ranges: BTreeMap::new(), shared, total, identity: 0 }
    }

    pub fn free_bytes(&self, device: usize) -> u64 {
        self.total.saturating_sub(self.shared.memory_used(device))
    }

    /// # Errors
    /// `INVALID_VALUE`: nothing was asked for; `OUT_OF_MEMORY`.
    pub fn allocate(
        &mut self,
        bytes: usize,
        device: usize,
        context: usize,
        place: Place,
    ) -> Outcome<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if place == Place::Device && bytes as u64 > self.free_bytes(device) {
            return Err(OUT_OF_MEMORY);
        }
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: the layout is not empty.
        let address = unsafe { alloc_zeroed(layout) } as u64;
        if address == 0 {
            return Err(OUT_OF_MEMORY);
        }
        self.insert(address, bytes as u64, device, context, place, true);
        Ok(address)
    }

    fn insert(
        &mut self,
        address: u64,
        bytes: u64,
        device: usize,
        context: usize,
        place: Place,
        is_ours: bool,
    ) {
        self.identity += 1;
        if place == Place::Device {
            self.shared.add_memory(device, bytes);
        }
        let identity = self.identity;
        self.ranges.insert(address, Range { bytes, device, context, place, is_ours, identity });
    }

    /// Takes host memory of the caller's for pinned.
    pub fn register(&mut self, address: u64, bytes: u64, device: usize, context: usize) -> Outcome {
        if address == 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        self.insert(address, bytes, device, context, Place::Pinned, false);
        Ok(())
    }

    /// # Errors
    /// `INVALID_VALUE`: nothing of this kind begins there.
    pub fn free(&mut self, address: u64, place: Place) -> Outcome {
        let range = self.ranges.get(&address).filter(|it| it.place == place);
        let range = *range.ok_or(INVALID_VALUE)?;
        self.ranges.remove(&address);
        if place == Place::Device {
            self.shared.remove_memory(range.device, range.bytes);
        }
        if range.is_ours {
            // SAFETY: it was allocated with this layout, as it was in the table, and it has
            // left the table, so nothing here will touch it again.
            unsafe {
                let layout = Layout::from_size_align_unchecked(range.bytes as usize, ALIGNMENT);
                dealloc(address as *mut u8, layout);
            }
        }
        Ok(())
    }

    /// Frees what a context had allocated.
    pub fn free_all(&mut self, context: usize) {
        let owned = self.ranges.iter().filter(|(_, it)| it.context == context);
        let owned: Vec<_> = owned.map(|(&address, it)| (address, it.place)).collect();
        for (address, place) in owned {
            let _ = self.free(address, place);
        }
    }

    /// The range that an address lies in, and where it begins.
    pub fn range(&self, address: u64) -> Option<(u64, Range)> {
        let (&start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.bytes).then_some((start, *range))
    }

    pub fn place(&self, address: u64) -> Place {
        self.range(address).map_or(Place::Pageable, |(_, it)| it.place)
    }

    /// Whether the device may touch these bytes.
    pub fn reaches(&self, address: u64, bytes: u64) -> bool {
        self.range(address).is_some_and(|(start, it)| bytes <= it.bytes - (address - start))
    }

    /// The value of 4 or 8 bytes that the device reaches.
    pub fn read(&self, address: u64, size: usize) -> Option<u64> {
        if !self.reaches(address, size as u64) {
            return None;
        }
        let mut bytes = [0; 8];
        // SAFETY: within a live range, as just checked; `size` is at most 8.
        unsafe { bytes.as_mut_ptr().copy_from(address as *const u8, size) };
        Some(u64::from_le_bytes(bytes))
    }

    /// Whether a range begins here.
    pub fn is_start(&self, address: u64, place: Place) -> bool {
        self.ranges.get(&address).is_some_and(|it| it.place == place)
    }

    /// Does what an operation does to memory.
    ///
    /// # Errors
    /// The fault that the operation is for its context.
    pub fn apply(&mut self, effect: &Effect) -> Outcome {
        let check = |address, bytes| {
            if self.reaches(address, bytes) { Ok(()) } else { Err(ILLEGAL_ADDRESS) }
        };
        match effect {
            Effect::Nothing | Effect::Fault(_) => return fault_of(effect),
            Effect::Free { address } => return self.free(*address, Place::Device),
            Effect::Add { address, count, value } => {
                check(*address, count * 4)?;
                for index in 0..*count {
                    let place = (address + index * 4) as *mut i32;
                    // SAFETY: within a live range, as just checked; the program may race with
                    // the device, as with a real one, which no reference here forbids.
                    unsafe { place.write_unaligned(place.read_unaligned().wrapping_add(*value)) };
                }
            }
            Effect::Fill { address, pattern, size, width, height, pitch } => {
                for row in 0..*height {
                    check(address + row * pitch, width * size)?;
                    for column in 0..*width {
                        let place = (address + row * pitch + column * size) as *mut u8;
                        let bytes = pattern.to_ne_bytes();
                        // SAFETY: within a live range, as just checked; `size` is at most 4.
                        unsafe { place.copy_from(bytes.as_ptr(), *size as usize) };
                    }
                }
            }
            Effect::Copy { to, from, bytes } => {
                // Pageable memory is the caller's word, as with a real driver.
                for address in [*to, *from] {
                    if self.range(address).is_some() {
                        check(address, *bytes)?;
                    }
                }
                // SAFETY: checked, or the caller of the copy vouched for its own memory until
                // the copy is done.
                unsafe { (*to as *mut u8).copy_from(*from as *const u8, *bytes as usize) };
            }
            Effect::Store { to, bytes } => {
                check(*to, bytes.len() as u64)?;
                // SAFETY: within a live range, as just checked.
                unsafe { (*to as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) };
            }
        }
        Ok(())
    }
}
