//! Which GPU a user means: by nvidia-smi's index, or by the beginning of a UUID.
//!
//! A device has one name in krex, its full UUID. Only what has to be looked up asks NVIDIA's
//! management library; a UUID in full needs no driver.

mod library;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Mutex;

use krex_core::device;
use krex_core::error::{Error, Result};

use library::{Failure, Handle, Library, status};

/// A GPU, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// nvidia-smi's; that of the whole GPU for a part.
    pub index: u32,
    pub uuid: String,
    /// What it is called, such as `NVIDIA H200`.
    pub name: String,
}

/// The device that `text` means, as krex names it: `cpu` and full UUIDs are returned as they are;
/// an index, or the beginning of a UUID, is looked up, once per process.
///
/// # Errors
/// [`Error::UnknownDevice`], [`Error::NoSuchGpu`], [`Error::Nvml`].
pub fn resolve(text: &str) -> Result<Cow<'_, str>> {
    static KNOWN: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);
    let Some(wanted) = Wanted::parse(text)? else { return Ok(Cow::Borrowed(text)) };
    let known = || KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(uuid) = known().as_ref().and_then(|it| it.get(text)) {
        return Ok(Cow::Owned(uuid.clone()));
    }
    // Without the lock: a library that hangs keeps nobody else.
    let gpu = wanted.find()?;
    device::check_name(&gpu.uuid)?;
    log::info!("device {text} is {} (GPU {}, {})", gpu.uuid, gpu.index, gpu.name);
    known().get_or_insert_default().insert(text.to_owned(), gpu.uuid.clone());
    Ok(Cow::Owned(gpu.uuid))
}

/// All GPUs, and the parts of those that are divided. Those that do not answer are left out.
///
/// # Errors
/// [`Error::Nvml`].
pub fn list() -> Result<Vec<Gpu>> {
    let library = open("all GPUs")?;
    Ok(everything(&library).map_err(|failure| nvml("all GPUs", &failure))?.collect())
}

/// What has to be looked up.
enum Wanted<'a> {
    Index(&'a str, u32),
    /// The beginning of a UUID, with its `GPU-` or `MIG-`.
    Beginning(&'a str),
}

impl<'a> Wanted<'a> {
    /// `None`: nothing, the name is complete.
    fn parse(text: &'a str) -> Result<Option<Self>> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            let index = text.parse().map_err(|_| no_such(text, "there are not that many GPUs"))?;
            return Ok(Some(Self::Index(text, index)));
        }
        if let Some(ordinal) = text.strip_prefix("cuda:") {
            let problem = format!(
                "`cuda:N` counts the devices of one process, in the order of its \
                 CUDA_VISIBLE_DEVICES, and so means another GPU in each; use nvidia-smi's index \
                 ({ordinal}, if that variable is not set), or the UUID"
            );
            return Err(no_such(text, problem));
        }
        if text.starts_with("MIG-GPU-") {
            let problem = "names of this form are those of drivers before 470; use the part's own \
                           UUID, `MIG-` and 32 digits, as `nvidia-smi -L` prints it";
            return Err(no_such(text, problem));
        }
        let begins = ["GPU-", "MIG-"].iter().find_map(|prefix| text.strip_prefix(prefix));
        let is_part = |it: &str| {
            !it.is_empty()
                && it.len() < 36
                && it.bytes().all(|it| it == b'-' || matches!(it, b'0'..=b'9' | b'a'..=b'f'))
        };
        if begins.is_some_and(is_part) {
            return Ok(Some(Self::Beginning(text)));
        }
        device::check_name(text).map(|()| None)
    }

    fn find(&self) -> Result<Gpu> {
        match *self {
            Self::Index(text, index) => by_index(&open(text)?, text, index),
            Self::Beginning(text) => {
                let library = open(text)?;
                let all = everything(&library).map_err(|failure| nvml(text, &failure))?;
                only(text, all.filter(|it| it.uuid.starts_with(text)).collect())
            }
        }
    }
}

fn by_index(library: &Library, text: &str, index: u32) -> Result<Gpu> {
    let failed = |failure| nvml(text, &failure);
    let count = library.count().map_err(failed)?;
    let handle = match library.gpu(index) {
        Ok(handle) => handle,
        Err(it) if index >= count || it.status == status::INVALID_ARGUMENT => {
            let problem = match count {
                0 => "this machine (or container) has no GPU".to_owned(),
                1 => "there is one GPU, with index 0".to_owned(),
                count => format!("there are {count} GPUs, with indices 0 to {}", count - 1),
            };
            return Err(no_such(text, problem + "; `nvidia-smi -L` lists them"));
        }
        Err(failure) => return Err(failed(failure)),
    };
    if library.is_divided(handle) {
        let problem = "this GPU is divided into parts (MIG), and only those can be used; name one \
                       by its UUID, `MIG-…`, as `nvidia-smi -L` prints it";
        return Err(no_such(text, problem));
    }
    describe(library, index, handle).map_err(failed)
}

/// The only one of those that were found.
fn only(text: &str, mut found: Vec<Gpu>) -> Result<Gpu> {
    match (found.pop(), found.len()) {
        (Some(gpu), 0) => Ok(gpu),
        (Some(_), more) => {
            let problem = format!("{} UUIDs begin like that; write more of it", more + 1);
            Err(no_such(text, problem))
        }
        (None, _) => Err(no_such(text, "no UUID begins like that; `nvidia-smi -L` lists them")),
    }
}

fn everything(library: &Library) -> std::result::Result<impl Iterator<Item = Gpu>, Failure> {
    let count = library.count()?;
    Ok((0..count).flat_map(|index| {
        let Ok(handle) = library.gpu(index) else { return Vec::new() };
        let parts = if library.is_divided(handle) { library.parts(handle) } else { Vec::new() };
        std::iter::once(handle)
            .chain(parts)
            .filter_map(|it| describe(library, index, it).ok())
            .collect()
    }))
}

fn describe(library: &Library, index: u32, handle: Handle) -> std::result::Result<Gpu, Failure> {
    let name = library.name(handle).unwrap_or_default();
    Ok(Gpu { index, uuid: library.uuid(handle)?, name })
}

fn open(text: &str) -> Result<Library> {
    Library::open().map_err(|failure| match failure {
        Some(failure) => nvml(text, &failure),
        None => Error::Nvml {
            device: text.to_owned(),
            problem: "libnvidia-ml.so.1, a part of NVIDIA's driver, is not to be found".to_owned(),
            remedy: "Install the driver (in a container: run it with its GPUs, and the \
                     capability `utility`), or name the GPU by its full UUID"
                .to_owned(),
        },
    })
}

fn nvml(text: &str, failure: &Failure) -> Error {
    let remedy = match failure.status {
        status::GPU_IS_LOST => {
            "The GPU fell off the bus: reset it or restart the machine; `dmesg | grep Xid` says more"
        }
        status::DRIVER_NOT_LOADED => "Load the kernel module: `sudo modprobe nvidia`",
        status::VERSION_MISMATCH => {
            "The driver was updated while its kernel module ran: restart the machine"
        }
        _ => "See what `nvidia-smi` says",
    };
    Error::Nvml {
        device: text.to_owned(),
        problem: format!("NVML says: {}", failure.text),
        remedy: remedy.to_owned(),
    }
}

fn no_such(text: &str, problem: impl Into<String>) -> Error {
    Error::NoSuchGpu { device: text.to_owned(), problem: problem.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

    #[test]
    fn complete_names_need_no_driver() {
        for name in ["cpu", "cpu:a", UUID, &UUID.replace("GPU", "MIG")] {
            assert_eq!(resolve(name).unwrap(), name);
        }
    }

    #[test]
    fn what_nobody_can_mean_is_refused_with_a_remedy() {
        for (name, remedy) in [
            ("cuda:1", "nvidia-smi's index (1"),
            ("99999999999", "not that many"),
            ("MIG-GPU-00112233-4455-6677-8899-aabbccddeeff/1/0", "nvidia-smi -L"),
            ("gpu", "cpu:NAME"),
            ("-1", "cpu:NAME"),
            ("GPU-", "cpu:NAME"),
            ("GPU-XY", "cpu:NAME"),
            ("", "cpu:NAME"),
        ] {
            let message = resolve(name).unwrap_err().to_string();
            assert!(message.contains(remedy) && message.contains(name), "{message}");
        }
    }

    #[test]
    fn a_beginning_has_to_be_that_of_one() {
        let gpu = |index: u32| Gpu { index, uuid: format!("GPU-{index}"), name: String::new() };
        assert_eq!(only("GPU-", vec![gpu(3)]).unwrap(), gpu(3));
        let message = only("GPU-", vec![gpu(3), gpu(4)]).unwrap_err().to_string();
        assert!(message.contains("2 UUIDs"), "{message}");
        assert!(only("GPU-", Vec::new()).is_err());
    }
}
