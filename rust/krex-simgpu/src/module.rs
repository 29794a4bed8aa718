//! Modules, libraries and their functions.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use crate::program::{Duration, Kernel, Parameter, Program};
use crate::status::{INVALID_VALUE, Outcome};
use crate::stream::{Action, Effect};

#[derive(Debug)]
pub struct Module {
    /// 0: a library, which belongs to none.
    pub context: usize,
    pub functions: Vec<(CString, usize)>,
    /// Names, addresses and bytes.
    pub globals: HashMap<CString, (u64, usize)>,
    pub program: Arc<Program>,
    /// The module of a library in each context.
    pub loaded: HashMap<usize, usize>,
}

/// What a `CUfunction` or a `CUkernel` stands for.
#[derive(Clone, Debug)]
pub struct Function {
    pub module: usize,
    pub kernel: Arc<Kernel>,
}

impl Function {
    /// What a launch with these arguments does; each argument is as long as its parameter.
    ///
    /// # Errors
    /// `INVALID_VALUE`: an argument is missing.
    pub fn action(&self, arguments: &[Vec<u8>]) -> Outcome<Action> {
        let kernel = &self.kernel;
        let value = |index: usize| -> Outcome<u64> {
            let mut bytes = [0; 8];
            let argument = arguments.get(index).ok_or(INVALID_VALUE)?;
            bytes[..argument.len()].copy_from_slice(argument);
            Ok(u64::from_le_bytes(bytes))
        };
        let first = |wanted| kernel.parameters.iter().position(|&it| it == wanted);
        let nanoseconds = match kernel.duration {
            _ if kernel.hangs => f64::INFINITY,
            Duration::Fixed(nanoseconds) => nanoseconds,
            Duration::Argument(index, unit) => value(index)? as f64 * unit,
        };
        let effect = match (kernel.fault, kernel.add) {
            (Some(status), _) => Effect::Fault(status),
            (None, Some(add)) => Effect::Add {
                address: value(first(Parameter::Pointer).ok_or(INVALID_VALUE)?)?,
                count: value(first(Parameter::Unsigned32).ok_or(INVALID_VALUE)?)?,
                value: add,
            },
            (None, None) => Effect::Nothing,
        };
        Ok(Action::Work(nanoseconds, effect))
    }
}
