//! Programs that this device can run.
//!
//! A program is text; what matters are its lines with `krex-simgpu:`, so that PTX text with such
//! lines in comments is a program for both a real driver and this one:
//!
//! ```text
//! // krex-simgpu: kernel spin(u64) for arg0 ns
//! // krex-simgpu: kernel add_one(ptr, u32) for 20 us add 1
//! // krex-simgpu: kernel forever() hang
//! // krex-simgpu: kernel crash() for 10 us fault 700
//! // krex-simgpu: global counter 8
//! ```
//!
//! `add` adds to as many 32-bit integers, at the first `ptr`, as the first `u32` says. A kernel
//! whose time is not given takes 10 us.

use std::ffi::CString;
use std::sync::Arc;

use crate::status::{INVALID_IMAGE, Outcome};

const MARK: &str = "krex-simgpu:";
const DEFAULT_NANOSECONDS: f64 = 10_000.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    Pointer,
    Unsigned64,
    Unsigned32,
}

impl Parameter {
    pub fn size(self) -> usize {
        match self {
            Self::Pointer | Self::Unsigned64 => 8,
            Self::Unsigned32 => 4,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Duration {
    /// In nanoseconds.
    Fixed(f64),
    /// A parameter, times so many nanoseconds.
    Argument(usize, f64),
}

#[derive(Debug, PartialEq)]
pub struct Kernel {
    pub name: CString,
    pub parameters: Vec<Parameter>,
    pub duration: Duration,
    pub add: Option<i32>,
    pub hangs: bool,
    pub fault: Option<u32>,
}

impl Kernel {
    /// Where each parameter lies in a packed buffer, each aligned to its size.
    pub fn offsets(&self) -> Vec<usize> {
        let mut offset = 0_usize;
        let place = |it: &Parameter| {
            let start = offset.next_multiple_of(it.size());
            offset = start + it.size();
            start
        };
        self.parameters.iter().map(place).collect()
    }
}

#[derive(Debug, Default)]
pub struct Program {
    pub kernels: Vec<Arc<Kernel>>,
    /// Names and bytes.
    pub globals: Vec<(CString, usize)>,
}

impl Program {
    /// # Errors
    /// `INVALID_IMAGE`: nothing in it is for this device, or a line of it has a mistake.
    pub fn parse(text: &str) -> Outcome<Self> {
        let mut program = Self::default();
        for line in text.lines() {
            let Some((_, directive)) = line.split_once(MARK) else { continue };
            program.read(directive.trim()).ok_or(INVALID_IMAGE)?;
        }
        if program.kernels.is_empty() { Err(INVALID_IMAGE) } else { Ok(program) }
    }

    fn read(&mut self, directive: &str) -> Option<()> {
        let (what, rest) = directive.split_once(' ')?;
        match what {
            "kernel" => self.kernels.push(Arc::new(kernel(rest)?)),
            "global" => {
                let (name, bytes) = rest.trim().split_once(' ')?;
                self.globals.push((CString::new(name).ok()?, bytes.trim().parse().ok()?));
            }
            _ => return None,
        }
        Some(())
    }
}

fn kernel(text: &str) -> Option<Kernel> {
    let (name, rest) = text.split_once('(')?;
    let (parameters, rest) = rest.split_once(')')?;
    let parameters = parameters.split(',').map(str::trim).filter(|it| !it.is_empty());
    let parameters = parameters
        .map(|it| match it {
            "ptr" => Some(Parameter::Pointer),
            "u64" => Some(Parameter::Unsigned64),
            "u32" => Some(Parameter::Unsigned32),
            _ => None,
        })
        .collect::<Option<Vec<_>>>()?;
    let mut kernel = Kernel {
        name: CString::new(name.trim()).ok()?,
        parameters,
        duration: Duration::Fixed(DEFAULT_NANOSECONDS),
        add: None,
        hangs: false,
        fault: None,
    };
    let mut words = rest.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "for" => {
                let amount = words.next()?;
                let unit = match words.next()? {
                    "ns" => 1.0,
                    "us" => 1e3,
                    "ms" => 1e6,
                    _ => return None,
                };
                kernel.duration = match amount.strip_prefix("arg") {
                    Some(index) => {
                        let index = index.parse().ok()?;
                        kernel.parameters.get(index)?;
                        Duration::Argument(index, unit)
                    }
                    None => Duration::Fixed(amount.parse::<f64>().ok()? * unit),
                };
            }
            "add" => kernel.add = Some(words.next()?.parse().ok()?),
            "hang" => kernel.hangs = true,
            "fault" => kernel.fault = Some(words.next()?.parse().ok()?),
            _ => return None,
        }
    }
    Some(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_stands_in_comments() {
        let text = "// krex-simgpu: kernel slow(ptr, u32, u64) for arg2 us add 2\n.version 8.0\n\
                    // krex-simgpu: kernel forever() hang\n// krex-simgpu: global counter 8\n";
        let program = Program::parse(text).unwrap();
        let slow = &program.kernels[0];
        assert_eq!(slow.duration, Duration::Argument(2, 1e3));
        assert_eq!(slow.add, Some(2));
        assert_eq!(slow.offsets(), [0, 8, 16]);
        assert!(program.kernels[1].hangs);
        assert_eq!(program.globals[0].1, 8);
    }

    #[test]
    fn refuses_what_it_cannot_run() {
        for text in ["", ".version 8.0\n", "krex-simgpu: kernel a(float)", "krex-simgpu: wat x"] {
            assert_eq!(Program::parse(text).unwrap_err(), INVALID_IMAGE, "{text}");
        }
    }
}
