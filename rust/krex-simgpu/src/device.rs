//! The devices that a process sees.

use std::ffi::CString;

use crate::settings::Settings;
use crate::shared::DEVICES;
use crate::status::{INVALID_DEVICE, NO_DEVICE, Outcome};

/// A device, as `CUDA_VISIBLE_DEVICES` leaves it visible.
#[derive(Debug)]
pub struct Visible {
    /// Its index among all.
    pub index: usize,
    pub name: CString,
    pub uuid: [u8; 16],
}

/// The identifier of the device with an index.
pub fn uuid(index: usize) -> [u8; 16] {
    let mut bytes = *b"krex-simgpu\0\0\0\0\0";
    bytes[15] = index as u8;
    bytes
}

/// As `nvidia-smi -L` writes it.
fn uuid_text(index: usize) -> String {
    let mut text = String::from("GPU-");
    for (position, byte) in uuid(index).into_iter().enumerate() {
        if matches!(position, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The visible devices, in order, at least one. The list ends before its first entry that names no
/// device.
///
/// # Errors
/// `NO_DEVICE`: there is none; `INVALID_DEVICE`: one is named twice.
pub fn visible(settings: &Settings) -> Outcome<Vec<Visible>> {
    let count = settings.devices.min(DEVICES);
    let all = (0..count).map(uuid_text).collect::<Vec<_>>();
    let indices = match &settings.visible {
        None => (0..count).collect(),
        Some(list) => chosen(list, &all)?,
    };
    if indices.is_empty() {
        return Err(NO_DEVICE);
    }
    let device = |index| Visible { index, name: CString::from(c"krex simgpu"), uuid: uuid(index) };
    Ok(indices.into_iter().map(device).collect())
}

fn chosen(list: &str, all: &[String]) -> Outcome<Vec<usize>> {
    let mut indices = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let index = if entry.starts_with("GPU-") {
            // The beginning of an identifier will do, if only one device has it.
            let mut matches = (0..all.len()).filter(|&it| all[it].starts_with(entry));
            matches.next().filter(|_| matches.next().is_none())
        } else {
            entry.parse::<usize>().ok().filter(|&it| it < all.len())
        };
        let Some(index) = index else { break };
        if indices.contains(&index) {
            return Err(INVALID_DEVICE);
        }
        indices.push(index);
    }
    Ok(indices)
}

/// A `CUdevice_attribute`; 0 for those that a plain compute device lacks.
pub fn attribute(number: i32, index: usize) -> Option<i32> {
    const KIB: i32 = 1024;
    Some(match number {
        1 => 1024,              // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024,          // MAX_BLOCK_DIM_X, Y
        4 => 64,                // MAX_BLOCK_DIM_Z
        5 => i32::MAX,          // MAX_GRID_DIM_X
        6 | 7 => 65535,         // MAX_GRID_DIM_Y, Z
        8 => 48 * KIB,          // MAX_SHARED_MEMORY_PER_BLOCK
        9 => 64 * KIB,          // TOTAL_CONSTANT_MEMORY
        10 => 32,               // WARP_SIZE
        11 => i32::MAX,         // MAX_PITCH
        12 => 64 * KIB,         // MAX_REGISTERS_PER_BLOCK
        13 => 1_500_000,        // CLOCK_RATE, kHz
        14 => 512,              // TEXTURE_ALIGNMENT
        15 | 31 | 41 => 1,      // GPU_OVERLAP, CONCURRENT_KERNELS, UNIFIED_ADDRESSING
        16 => 16,               // MULTIPROCESSOR_COUNT
        19 => 1,                // CAN_MAP_HOST_MEMORY
        33 => index as i32 + 1, // PCI_BUS_ID
        36 => 2_000_000,        // MEMORY_CLOCK_RATE, kHz
        37 => 256,              // GLOBAL_MEMORY_BUS_WIDTH
        38 => 32 * KIB * KIB,   // L2_CACHE_SIZE
        39 => 2048,             // MAX_THREADS_PER_MULTIPROCESSOR
        40 => 2,                // ASYNC_ENGINE_COUNT
        75 => 9,                // COMPUTE_CAPABILITY_MAJOR
        76 => 0,                // COMPUTE_CAPABILITY_MINOR
        78 => 1,                // STREAM_PRIORITIES_SUPPORTED
        81 => 228 * KIB,        // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        82 => 64 * KIB,         // MAX_REGISTERS_PER_MULTIPROCESSOR
        90 | 91 => 1,           // COMPUTE_PREEMPTION, CAN_USE_HOST_POINTER
        92..=94 => 1,           // CAN_USE_STREAM_MEM_OPS and its like
        95 => 1,                // COOPERATIVE_LAUNCH
        97 => 227 * KIB,        // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        106 => 32,              // MAX_BLOCKS_PER_MULTIPROCESSOR
        115 => 1,               // MEMORY_POOLS_SUPPORTED
        number if (1..=200).contains(&number) => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_chosen_by_index_and_by_identifier() {
        let all: Vec<String> = (0..4).map(uuid_text).collect();
        assert_eq!(all[1], "GPU-6b726578-2d73-696d-6770-750000000001");
        assert_eq!(chosen("2,0", &all), Ok(vec![2, 0]));
        assert_eq!(chosen(&all[3], &all), Ok(vec![3]));
        assert_eq!(chosen("1,7,2", &all), Ok(vec![1]));
        assert_eq!(chosen("", &all), Ok(vec![]));
        assert_eq!(chosen("1,1", &all), Err(INVALID_DEVICE));
        assert_eq!(chosen("GPU-6b726578", &all), Ok(vec![]));
    }
}
