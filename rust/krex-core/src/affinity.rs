//! Sets of CPUs, and which of them a thread may run on.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// The number of CPUs that a set can name. Threads that may run on others, too, are left alone.
pub const CPUS: usize = 1024;
const WORDS: usize = CPUS / 64;

/// A set of CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuSet {
    words: [u64; WORDS],
}

impl CpuSet {
    pub const ALL: Self = Self { words: [u64::MAX; WORDS] };

    pub fn insert(&mut self, cpu: usize) {
        if let Some(word) = self.words.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    pub fn contains(&self, cpu: usize) -> bool {
        self.words.get(cpu / 64).is_some_and(|word| word & (1 << (cpu % 64)) != 0)
    }

    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..CPUS).filter(|cpu| self.contains(*cpu))
    }

    pub fn first(&self) -> Option<usize> {
        self.iter().next()
    }

    /// Those of `self` that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        self.combine(other, |own, others| own & !others)
    }

    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.combine(other, |own, others| own | others)
    }

    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |own, others| own & others)
    }

    pub fn meets(&self, other: &Self) -> bool {
        !self.intersection(other).is_empty()
    }

    fn combine(&self, other: &Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self { words: std::array::from_fn(|index| with(self.words[index], other.words[index])) }
    }

    /// Reads a list as taskset(1) and the kernel write it: `0-3,8,10-14:2`. An empty one has none.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong.
    pub fn parse(list: &str) -> Result<Self> {
        let mut set = Self::default();
        if list.trim().is_empty() {
            return Ok(set);
        }
        for part in list.split(',').map(str::trim) {
            let cpus = parse_part(part).ok_or_else(|| {
                Error::Invalid(format!(
                    "{part:?} is not a list of CPUs (0 to {}). Write it as taskset does: 2-3, or \
                     0,4-7, or 8-14:2",
                    CPUS - 1
                ))
            })?;
            cpus.for_each(|cpu| set.insert(cpu));
        }
        Ok(set)
    }
}

/// `5`, `0-3`, or `8-14:2`.
fn parse_part(part: &str) -> Option<impl Iterator<Item = usize>> {
    // Digits only: Rust would take a plus sign, too.
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<usize>().ok()).flatten()
    };
    let (first, last, stride) = match part.split_once('-') {
        None => (number(part)?, number(part)?, 1),
        Some((first, rest)) => {
            let (last, stride) = rest.split_once(':').unwrap_or((rest, "1"));
            (number(first)?, number(last)?, number(stride)?)
        }
    };
    (first <= last && last < CPUS && stride > 0).then(|| (first..=last).step_by(stride))
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        let mut set = Self::default();
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

impl fmt::Display for CpuSet {
    /// As taskset(1) writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while cpus.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

/// A set of CPUs in shared memory. All zero: empty.
#[repr(C)]
#[derive(Debug)]
pub struct SharedCpuSet {
    words: [AtomicU64; WORDS],
}

impl SharedCpuSet {
    pub fn set(&self, cpus: &CpuSet) {
        for (word, value) in self.words.iter().zip(cpus.words) {
            // Release: partner of the Acquire in `get`: whoever reads part of it, too early or too
            // late, finds in the word that guards it that it is not (or no more) complete.
            word.store(value, Ordering::Release);
        }
    }

    pub fn get(&self) -> CpuSet {
        // Acquire: see `set`.
        CpuSet { words: std::array::from_fn(|index| self.words[index].load(Ordering::Acquire)) }
    }
}

/// `sched_getaffinity(thread, …)`: the CPUs on which a thread may run; 0 means the calling one.
///
/// <https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html>
///
/// # Errors
/// If there is no such thread, or it may run on CPUs that a [`CpuSet`] cannot name.
pub fn get(thread: i32) -> io::Result<CpuSet> {
    let mut words = [0; WORDS];
    match get_into(thread, &mut words) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        result => return result.map(|()| CpuSet { words }),
    }
    // This kernel is made for more CPUs than fit: it asks for more room, however many there are.
    let mut room = vec![0; WORDS];
    loop {
        room.resize(room.len() * 2, 0);
        match get_into(thread, &mut room) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && room.len() < 1 << 14 => {}
            result => break result?,
        }
    }
    if room[WORDS..].iter().any(|word| *word != 0) {
        return Err(io::Error::other(format!("it may run on CPUs beyond {}", CPUS - 1)));
    }
    words.copy_from_slice(&room[..WORDS]);
    Ok(CpuSet { words })
}

fn get_into(thread: i32, words: &mut [u64]) -> io::Result<()> {
    // SAFETY: the kernel writes at most as many bytes as the slice has, which lives through the
    // call. (The raw call, since libc's wrapper takes a set of a fixed size.)
    let written = unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, thread, size_of_val(words), words.as_mut_ptr())
    };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `sched_setaffinity(thread, …)`; 0 means the calling thread. What it may not use is left out by
/// the kernel.
///
/// # Errors
/// If there is no such thread, it belongs to somebody else, or it may use no CPU of the set.
pub fn set(thread: i32, cpus: &CpuSet) -> io::Result<()> {
    // SAFETY: the kernel reads the given number of bytes from the array, which lives through the
    // call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_setaffinity,
            thread,
            size_of_val(&cpus.words),
            cpus.words.as_ptr(),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Those of `wanted` that the calling thread may use. Only the kernel knows: the thread's own mask
/// may be narrower, and cpusets are out of sight in containers. So it is tried, for a moment.
///
/// # Errors
/// If the calling thread's own mask cannot be read, or not be restored.
pub fn permitted(wanted: &CpuSet) -> io::Result<CpuSet> {
    let before = get(0)?;
    if wanted.without(&before).is_empty() {
        return Ok(*wanted);
    }
    let found = match set(0, wanted) {
        Ok(()) => get(0),
        Err(_) => Ok(CpuSet::default()),
    };
    set(0, &before)?;
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_taskset_does() {
        for (list, written) in [
            ("", ""),
            ("0", "0"),
            ("3,1,2", "1-3"),
            ("0-3,8,10-14:2", "0-3,8,10,12,14"),
            (" 5 , 7 ", "5,7"),
            ("1023", "1023"),
            ("0-1023", "0-1023"),
        ] {
            let set = CpuSet::parse(list).unwrap();
            assert_eq!(set.to_string(), written);
            assert_eq!(CpuSet::parse(written).unwrap(), set);
            assert_eq!(set.count(), set.iter().count());
        }
        for wrong in
            ["a", "3-1", "1024", "-1", "1-", "0-3:0", "0-3:", "1;2", "1,,2", ",", "+1", "4:2"]
        {
            let message = CpuSet::parse(wrong).unwrap_err().to_string();
            assert!(message.contains("taskset"), "{wrong}: {message}");
        }
    }

    #[test]
    fn a_threads_cpus_can_be_set_and_read_back() {
        let before = get(0).unwrap();
        let first: CpuSet = before.iter().take(1).collect();
        set(0, &first).unwrap();
        assert_eq!(get(0).unwrap(), first);
        assert_eq!(permitted(&before).unwrap(), before);
        assert_eq!(get(0).unwrap(), first, "trying leaves no trace");
        set(0, &before).unwrap();
        assert_eq!(get(0).unwrap(), before);
        assert_eq!(before.without(&first).union(&first), before);
        assert!(before.without(&before).is_empty());
        assert!(set(0, &CpuSet::default()).is_err());
    }
}
