//! Devices by name: `cpu`, `cpu:NAME` for a group of commands of its own, and a GPU by its UUID.

use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::layout::{DEVICES, Layout};
use crate::process::hash;
use crate::text::SharedText;

/// The device that is used when nobody names one.
pub const DEFAULT: &str = "cpu";

/// Prefix of the sections behind `SharedMemoryGate`: no tenant is ever frozen for those.
pub const GATE_PREFIX: &str = "gate:";

/// Checks a device's name.
///
/// # Errors
/// [`Error::UnknownDevice`].
pub fn check_name(name: &str) -> Result<()> {
    let group = match name.split_once(':') {
        None if name == DEFAULT || is_gpu(name) => return Ok(()),
        Some(("cpu", group)) => group,
        _ => return Err(Error::UnknownDevice(name.to_owned())),
    };
    check_label(group).map_err(|()| Error::UnknownDevice(name.to_owned()))
}

/// Whether a name is that of a GPU, or of a part of one: `GPU-` or `MIG-` and a UUID.
pub fn is_gpu(name: &str) -> bool {
    let uuid = ["GPU-", "MIG-"].iter().find_map(|prefix| name.strip_prefix(prefix));
    uuid.is_some_and(|uuid| {
        uuid.len() == 36
            && uuid.bytes().enumerate().all(|(place, byte)| match place {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte),
            })
    })
}

/// The name of the GPU with these bytes as its UUID.
pub fn gpu_name(uuid: [u8; 16], is_mig: bool) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let prefix = if is_mig { "MIG" } else { "GPU" };
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("{prefix}-{}", parts.join("-"))
}

/// Checks the name of a `SharedMemoryGate`.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_gate_name(name: &str) -> Result<()> {
    check_label(name).map_err(|()| {
        Error::Invalid(format!(
            "the gate's name is {name:?}; use 1 to {LABEL} of the characters a-z A-Z 0-9 . _ -"
        ))
    })
}

const LABEL: usize = SharedText::<8>::CAPACITY - GATE_PREFIX.len();

fn check_label(label: &str) -> std::result::Result<(), ()> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let fits = !label.is_empty() && label.len() <= LABEL && label.bytes().all(good);
    if fits { Ok(()) } else { Err(()) }
}

/// The section of the device `name`, taken into use if need be. The name was checked before.
///
/// # Errors
/// [`Error::Full`].
pub fn find_or_add(layout: &Layout, name: &str) -> Result<usize> {
    let hash = hash(name.as_bytes());
    for (index, device) in layout.devices.iter().enumerate() {
        // Sections are taken in order and never given back, so all who look for one name walk
        // the same path: it cannot be added twice.
        let seen = match device.hash.compare_exchange(0, hash, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => hash,
            Err(seen) => seen,
        };
        if seen == hash {
            // Everybody who comes by writes the same text, so it does not matter who is first.
            if device.name.is_empty() {
                device.name.set(name.as_bytes());
            }
            return Ok(index);
        }
    }
    Err(Error::Full { what: "device", capacity: DEVICES })
}

/// The indices of the devices in use.
pub fn in_use(layout: &Layout) -> impl Iterator<Item = usize> + '_ {
    (0..DEVICES).take_while(|index| layout.devices[*index].hash.load(Ordering::Acquire) != 0)
}

/// Those of them that regions are about: all but the gates of `SharedMemoryGate`.
pub fn with_regions(layout: &Layout) -> impl Iterator<Item = usize> + '_ {
    in_use(layout).filter(|index| !layout.devices[*index].name.starts_with(GATE_PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        let gpu = gpu_name(std::array::from_fn(|place| 17 * place as u8), false);
        assert_eq!(gpu, "GPU-00112233-4455-6677-8899-aabbccddeeff");
        for name in ["cpu", "cpu:0", "cpu:numa-1", "cpu:a.b_c", &gpu, &gpu_name([0; 16], true)] {
            check_name(name).unwrap();
        }
        for name in [&gpu[..39], "GPU-", &gpu.to_uppercase(), &format!("{gpu}0")] {
            check_name(name).unwrap_err();
        }
        let long = format!("cpu:{}", "x".repeat(60));
        for name in ["", "gpu", "0", "CPU", "cpu:", "cpu:a b", "cpu:a/b", "gate:x", &long] {
            let message = check_name(name).unwrap_err().to_string();
            assert!(message.contains("cpu:NAME"), "{message}");
        }
        check_gate_name("mine").unwrap();
        assert!(check_gate_name("").is_err());
    }
}
