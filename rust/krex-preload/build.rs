//! Generates the wrappers from the table of driver functions.

use std::fmt::Write;
use std::path::Path;

use krex_driver::table::{Class, Function, Table};
use krex_driver::{CUDA, abi};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let mut table = Table::parse(CUDA).unwrap_or_else(|problem| panic!("cuda.table: {problem}"));
    // Names are looked up by bisection.
    table.functions.sort_by(|one, other| one.name.cmp(&other.name));
    let mut code = String::new();
    for (index, function) in table.functions.iter().enumerate() {
        wrapper(&mut code, index, function);
    }
    index_of_wrappers(&mut code, &table);
    let directory = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let path = Path::new(&directory).join("wrappers.rs");
    std::fs::write(path, code).expect("OUT_DIR can be written");
}

/// The name of a parameter in the generated code: no keyword has a trailing underscore.
fn name(parameter: &str) -> String {
    format!("{parameter}_")
}

fn wrapper(code: &mut String, index: usize, function: &Function) {
    let typed = |it: &abi_parameter::Typed| format!("{}: {}", it.name, it.rust_type);
    let parameters = abi_parameter::of(function);
    let declared = parameters.iter().map(typed).collect::<Vec<_>>().join(", ");
    let types = parameters.iter().map(|it| it.rust_type).collect::<Vec<_>>().join(", ");
    let passed = parameters.iter().map(|it| it.name.clone()).collect::<Vec<_>>().join(", ");
    let call = call(function);
    write!(
        code,
        "/// The wrapper of `{exported}`.\n\
         ///\n\
         /// # Safety\n\
         /// As the driver's function.\n\
         #[unsafe(no_mangle)]\n\
         pub unsafe extern \"C-unwind\" fn {exported}({declared}) -> Status {{\n\
         \x20   let Some(real) = lookup::real({index}) else {{ return status::NOT_FOUND }};\n\
         \x20   // SAFETY: the driver's function of this name has this type: the table's prototype is\n\
         \x20   // the header's, and so are the sizes of its types.\n\
         \x20   let real: unsafe extern \"C-unwind\" fn({types}) -> Status = unsafe {{ transmute(real) }};\n\
         \x20   // SAFETY: the caller's arguments, passed on as they are.\n\
         \x20   let work = || unsafe {{ real({passed}) }};\n\
         \x20   {call}\n\
         }}\n\n",
        exported = function.name,
    )
    .expect("a string takes it");
}

/// What the wrapper does around the driver's function, `work`.
fn call(function: &Function) -> String {
    let of_type = |c_type: &str| {
        let found = function.parameters.iter().rfind(|it| it.c_type == c_type);
        found.map(|it| name(&it.name))
    };
    let first = || name(&function.parameters[0].name);
    let needed = |c_type: &str| {
        of_type(c_type).unwrap_or_else(|| panic!("{} has no {c_type}", function.name))
    };
    let per_thread = function.is_per_thread();
    let stream = match of_type("CUstream") {
        Some(parameter) => format!("Stream::given({parameter}, {per_thread})"),
        None => format!("Stream::default({per_thread})"),
    };
    let joins = function.base_name() == "cuStreamWaitEvent";
    match function.class {
        Class::Submission if joins => format!("calls::wait_event({stream}, work)"),
        Class::Submission => format!("calls::submission({stream}, work)"),
        Class::SubmissionConfig => {
            let offset = abi::CONFIG_STREAM;
            format!("calls::submission(Stream::inside({}, {offset}, {per_thread}), work)", first())
        }
        Class::SubmissionList => {
            let (entry, offset) = (abi::LIST_ENTRY, abi::LIST_STREAM);
            let count = name(&function.parameters[1].name);
            format!("calls::submissions({}, {count}, {entry}, {offset}, work)", first())
        }
        Class::Resource => "calls::resource(work)".to_owned(),
        Class::ResourceUpload => {
            let params = needed("CUDA_GRAPH_INSTANTIATE_PARAMS*");
            let offset = abi::UPLOAD_STREAM;
            format!("calls::upload({params}, {offset}, {per_thread}, work)")
        }
        Class::ResourceStreamEnd => format!("calls::stream_end({stream}, work)"),
        Class::BirthOfDevice => {
            let primary = function.base_name() == "cuDevicePrimaryCtxRetain";
            format!("calls::context_birth({}, {}, {primary}, work)", needed("CUdevice"), first())
        }
        Class::Birth => "calls::birth(work)".to_owned(),
        Class::DeathOfContext => format!("calls::context_death({}, work)", needed("CUcontext")),
        Class::DeathOfDevice => format!("calls::primary_death({}, work)", needed("CUdevice")),
        Class::Death => "calls::birth(work)".to_owned(),
        Class::CaptureBegin => format!("calls::capture_begin({stream}, work)"),
        Class::CaptureEnd => format!("calls::capture_end({stream}, work)"),
        Class::Context => "calls::context_change(work)".to_owned(),
        Class::Wait => "calls::wait(work)".to_owned(),
        Class::Resolver => {
            let names: Vec<String> =
                function.parameters[..4].iter().map(|it| name(&it.name)).collect();
            format!("resolver::resolve({}, {per_thread}, work)", names.join(", "))
        }
    }
}

mod abi_parameter {
    use super::{Function, abi, name};

    pub struct Typed {
        pub name: String,
        pub rust_type: &'static str,
    }

    pub fn of(function: &Function) -> Vec<Typed> {
        let typed = |it: &krex_driver::table::Parameter| Typed {
            name: name(&it.name),
            rust_type: abi::rust_type(&it.c_type)
                .unwrap_or_else(|| panic!("{}: unknown type {}", function.name, it.c_type)),
        };
        function.parameters.iter().map(typed).collect()
    }
}

fn index_of_wrappers(code: &mut String, table: &Table) {
    let count = table.functions.len();
    let mut add = |text: String| code.push_str(&text);
    add(format!("pub const COUNT: usize = {count};\n\n"));
    add("pub static WRAPPERS: [Wrapper; COUNT] = [\n".to_owned());
    for function in &table.functions {
        let submits = matches!(
            function.class,
            Class::Submission | Class::SubmissionConfig | Class::SubmissionList
        );
        add(format!(
            "    Wrapper {{ name: c\"{name}\", base: \"{base}\", since: {since}, per_thread: {per_thread}, submits: {submits}, address: {name} as *const c_void }},\n",
            name = function.name,
            base = function.base_name(),
            since = function.since,
            per_thread = function.is_per_thread(),
        ));
    }
    add("];\n\n".to_owned());
    add(
        "/// Other names under which cuGetProcAddress hands functions out: (name, since, index).\n"
            .to_owned(),
    );
    let mut renamed = Vec::new();
    for (index, function) in table.functions.iter().enumerate() {
        for (since, name) in &function.also {
            renamed.push(format!("    (\"{name}\", {since}, {index}),\n"));
        }
    }
    add(format!(
        "pub static RENAMED: [(&str, u32, usize); {}] = [\n{}];\n\n",
        renamed.len(),
        renamed.concat()
    ));
    // Sorted, since it comes from a sorted map.
    let harmless: Vec<String> =
        table.harmless.keys().map(|it| format!("    \"{it}\",\n")).collect();
    add(format!("pub static HARMLESS: [&str; {}] = [\n{}];\n", harmless.len(), harmless.concat()));
}
