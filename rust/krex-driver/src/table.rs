//! Reads a table of driver functions; its format is described at the head of `cuda.table`.

use std::collections::BTreeMap;

/// What krex does about a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Puts work on a stream.
    Submission,
    /// Puts work on a stream that its `CUlaunchConfig` names.
    SubmissionConfig,
    /// Puts work on the streams in a list of launches.
    SubmissionList,
    /// Occupies the device at once, and leaves nothing on a stream.
    Resource,
    /// The same, and may copy to the device on a stream that its parameters name.
    ResourceUpload,
    /// The same, and ends a stream.
    ResourceStreamEnd,
    /// Makes a context on the device that its last `CUdevice` parameter names.
    BirthOfDevice,
    /// Loads code into the current context.
    Birth,
    /// Ends the context that is its parameter.
    DeathOfContext,
    /// Ends the primary context of the device that is its parameter.
    DeathOfDevice,
    /// Unloads code from the current context.
    Death,
    CaptureBegin,
    CaptureEnd,
    /// Changes the calling thread's context.
    Context,
    /// Waits for the device.
    Wait,
    /// Hands out functions.
    Resolver,
}

impl Class {
    const NAMES: [(&str, Self); 16] = [
        ("submission", Self::Submission),
        ("submission config", Self::SubmissionConfig),
        ("submission list", Self::SubmissionList),
        ("resource", Self::Resource),
        ("resource upload", Self::ResourceUpload),
        ("resource stream_end", Self::ResourceStreamEnd),
        ("birth of_device", Self::BirthOfDevice),
        ("birth", Self::Birth),
        ("death of_context", Self::DeathOfContext),
        ("death of_device", Self::DeathOfDevice),
        ("death", Self::Death),
        ("capture begin", Self::CaptureBegin),
        ("capture end", Self::CaptureEnd),
        ("context", Self::Context),
        ("wait", Self::Wait),
        ("resolver", Self::Resolver),
    ];

    fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(it, _)| *it == name).map(|(_, class)| *class)
    }
}

/// A parameter: its type in C, and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub c_type: String,
    pub name: String,
}

/// A function that is wrapped.
#[derive(Clone, Debug)]
pub struct Function {
    /// As the driver exports it, with the suffixes of version and stream mode.
    pub name: String,
    /// Since when `cuGetProcAddress` knows it.
    pub since: u32,
    pub class: Class,
    pub parameters: Vec<Parameter>,
    /// Names, beside its own, under which `cuGetProcAddress` hands it out, and since when.
    pub also: Vec<(u32, String)>,
}

/// A table, read.
#[derive(Debug, Default)]
pub struct Table {
    pub functions: Vec<Function>,
    /// Functions that are not wrapped, with the reason.
    pub harmless: BTreeMap<String, String>,
}

/// How a program asked for its default stream to be understood.
const PER_THREAD: [&str; 2] = ["_ptsz", "_ptds"];

impl Function {
    /// Whether the default stream means the calling thread's own.
    pub fn is_per_thread(&self) -> bool {
        PER_THREAD.iter().any(|suffix| self.name.ends_with(suffix))
    }

    /// The name by which `cuGetProcAddress` is asked for it.
    pub fn base_name(&self) -> &str {
        base_name(&self.name)
    }

    /// The parameters as in C.
    pub fn c_parameters(&self) -> String {
        let text = |it: &Parameter| format!("{} {}", it.c_type, it.name);
        match self.parameters.as_slice() {
            [] => "void".to_owned(),
            some => some.iter().map(text).collect::<Vec<_>>().join(", "),
        }
    }
}

/// A function's name without the suffixes of version and stream mode.
pub fn base_name(name: &str) -> &str {
    let name = PER_THREAD.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|it| it.is_ascii_digit()) => base,
        _ => name,
    }
}

impl Table {
    /// Reads a table.
    ///
    /// # Errors
    /// What is wrong, with the number of the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        enum Section {
            None,
            Wrapped(Class),
            Harmless(String),
        }
        let mut table = Self::default();
        let mut section = Section::None;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            let fail = |problem: &str| Err(format!("line {}: {problem}: {line}", index + 1));
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(title) = line.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
                section = match title.strip_prefix("harmless:") {
                    Some(reason) => Section::Harmless(reason.trim().to_owned()),
                    None => match Class::named(title) {
                        Some(class) => Section::Wrapped(class),
                        None => return fail("unknown class"),
                    },
                };
                continue;
            }
            match &section {
                Section::None => return fail("a line before the first section"),
                Section::Harmless(reason) => {
                    for name in line.split_whitespace() {
                        if table.contains(name) {
                            return fail("named twice");
                        }
                        table.harmless.insert(name.to_owned(), reason.clone());
                    }
                }
                Section::Wrapped(class) => {
                    if let Err(problem) = table.add(*class, line) {
                        return fail(problem);
                    }
                }
            }
        }
        Ok(table)
    }

    fn add(&mut self, class: Class, line: &str) -> Result<(), &'static str> {
        let (since, rest) = line.split_once(' ').ok_or("no version")?;
        let since = since.parse().map_err(|_| "no version")?;
        if let Some((name, of)) = rest.split_once(" := ") {
            let function = self.functions.iter_mut().find(|it| it.name == of);
            function.ok_or("no such function above")?.also.push((since, name.to_owned()));
            return Ok(());
        }
        let (name, parameters) = match rest.split_once(" = ") {
            Some((name, of)) => {
                let twin = self.functions.iter().find(|it| it.name == of);
                (name, twin.ok_or("no such function above")?.parameters.clone())
            }
            None => {
                let (name, rest) = rest.split_once('(').ok_or("no parameters")?;
                (name, parse_parameters(rest.strip_suffix(')').ok_or("no closing parenthesis")?)?)
            }
        };
        if self.contains(name) {
            return Err("named twice");
        }
        let name = name.to_owned();
        self.functions.push(Function { name, since, class, parameters, also: Vec::new() });
        Ok(())
    }

    /// Whether the table names this exported function.
    pub fn contains(&self, name: &str) -> bool {
        self.harmless.contains_key(name) || self.functions.iter().any(|it| it.name == name)
    }
}

fn parse_parameters(text: &str) -> Result<Vec<Parameter>, &'static str> {
    if text == "void" {
        return Ok(Vec::new());
    }
    text.split(',')
        .map(|parameter| {
            let (c_type, name) = parameter.trim().rsplit_once(' ').ok_or("a nameless parameter")?;
            Ok(Parameter { c_type: c_type.to_owned(), name: name.to_owned() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_their_suffixes() {
        for (name, base) in [
            ("cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD"),
            ("cuLaunchKernel_ptsz", "cuLaunchKernel"),
            ("cuCtxCreate_v4", "cuCtxCreate"),
            ("cuInit", "cuInit"),
        ] {
            assert_eq!(base_name(name), base);
        }
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, problem) in [
            ("cuInit", "before the first section"),
            ("[nonsense]", "unknown class"),
            ("[wait]\ncuCtxSynchronize(void)", "no version"),
            ("[wait]\n2000 cuCtxSynchronize", "no parameters"),
            ("[wait]\n2000 a = b", "no such function"),
            ("[wait]\n1 a(void)\n2 a(void)", "named twice"),
        ] {
            let message = Table::parse(text).unwrap_err();
            assert!(message.contains(problem) && message.contains("line "), "{message}");
        }
    }
}
