//! Compares the table with NVIDIA's own header, in the package `nvidia-cuda-runtime` of the test
//! environment, or where `KREX_CUDA_INCLUDE` says.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use krex_driver::table::{Table, base_name};
use krex_driver::{CUDA, abi};

/// Exported by the driver, but not declared in the header.
const UNDECLARED: [&str; 1] = ["cuGetProcAddress_v2_ptsz"];

/// Has the header declare all versions of all functions.
const ALL_VERSIONS: &str = "-D__CUDA_API_VERSION_INTERNAL";

fn include() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = |library: PathBuf| {
        let entries = library.read_dir().into_iter().flatten().flatten();
        entries.map(|it| it.path()).collect::<Vec<_>>()
    };
    let installed = packages(root.join(".venv-test/lib"))
        .into_iter()
        .flat_map(|python| packages(python.join("site-packages/nvidia")))
        .map(|package| package.join("include"));
    let set = std::env::var_os("KREX_CUDA_INCLUDE").map(PathBuf::from);
    set.into_iter().chain(installed).find(|it| it.join("cuda.h").exists()).expect(
        "no cuda.h. Run `make .venv-test/.installed`, or set KREX_CUDA_INCLUDE to the directory \
         that holds it",
    )
}

/// Runs the C compiler on `source`.
fn compile(arguments: &[&str], source: &str) -> String {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut child = Command::new(compiler)
        .args(arguments)
        .arg("-I")
        .arg(include())
        .args(["-x", "c", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a C compiler");
    let mut input = child.stdin.take().unwrap();
    let source = source.to_owned();
    let writer = std::thread::spawn(move || input.write_all(source.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the compiler says:\n{message}");
    String::from_utf8(output.stdout).unwrap()
}

/// The names of all functions that the header declares.
fn declared() -> Vec<String> {
    let text = compile(&["-E", "-P", ALL_VERSIONS], "#include <cuda.h>\n");
    let mut names: Vec<String> = text
        .split(';')
        .filter_map(|statement| {
            let (head, _) = statement.split_once('(')?;
            let name = head.rsplit(|it: char| !it.is_ascii_alphanumeric() && it != '_').next()?;
            let rest = name.strip_prefix("cu")?;
            let is_function =
                !head.contains("typedef") && rest.starts_with(|it: char| it.is_ascii_uppercase());
            is_function.then(|| name.to_owned())
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn every_function_of_the_header_is_classified() {
    let table = Table::parse(CUDA).unwrap();
    let declared = declared();
    assert!(declared.len() > 600, "only {} functions were found in the header", declared.len());
    let unknown: Vec<_> = declared.iter().filter(|it| !table.contains(it)).collect();
    assert!(unknown.is_empty(), "cuda.h has functions that cuda.table does not class: {unknown:?}");
    let harmless = table.harmless.keys();
    let names = table.functions.iter().map(|it| &it.name).chain(harmless);
    let gone: Vec<_> = names
        .filter(|it| declared.binary_search(it).is_err() && !UNDECLARED.contains(&it.as_str()))
        .collect();
    assert!(gone.is_empty(), "cuda.table has functions that cuda.h does not: {gone:?}");
}

#[test]
fn prototypes_and_versions_are_the_headers() {
    let table = Table::parse(CUDA).unwrap();
    let mut source =
        String::from("#include <stddef.h>\n#include <cuda.h>\n#include <cudaTypedefs.h>\n");
    for function in table.functions.iter().filter(|it| !UNDECLARED.contains(&it.name.as_str())) {
        let name = &function.name;
        let parameters = function.c_parameters();
        source += &format!(
            "_Static_assert(__builtin_types_compatible_p(__typeof__({name}), CUresult ({parameters})), \"the prototype of {name}\");\n"
        );
        let mode = if function.is_per_thread() { &name[name.len() - 5..] } else { "" };
        let own = (function.since, base_name(name).to_owned());
        for (since, asked) in std::iter::once(&own).chain(&function.also) {
            // Renamed, the header has no type for it under the other name.
            if *asked == own.1 {
                source += &format!(
                    "_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), PFN_{asked}_v{since}{mode}), \"the version of {name}\");\n"
                );
            }
        }
    }
    for (c_type, _, size) in abi::TYPES {
        source +=
            &format!("_Static_assert(sizeof({c_type}) == {size}, \"the size of {c_type}\");\n");
    }
    for (structure, member, offset) in abi::STREAMS {
        source += &format!(
            "_Static_assert(offsetof({structure}, {member}) == {offset}, \"{structure}.{member}\");\n"
        );
    }
    let entry = abi::LIST_ENTRY;
    source += &format!("_Static_assert(sizeof(CUDA_LAUNCH_PARAMS) == {entry}, \"a launch\");\n");
    compile(&["-fsyntax-only", "-Wno-deprecated-declarations", ALL_VERSIONS], &source);
}

#[test]
fn every_parameter_has_a_known_type() {
    let table = Table::parse(CUDA).unwrap();
    for function in &table.functions {
        for parameter in &function.parameters {
            let known = abi::rust_type(&parameter.c_type);
            assert!(known.is_some(), "{}: {}", function.name, parameter.c_type);
        }
    }
}

/// `cuGetProcAddress` is asked for a version: no two functions of one name may share theirs.
#[test]
fn versions_tell_functions_of_one_name_apart() {
    let table = Table::parse(CUDA).unwrap();
    let mut seen = BTreeMap::new();
    for function in &table.functions {
        let own = (function.since, function.base_name().to_owned());
        for (since, name) in std::iter::once(&own).chain(&function.also) {
            let key = (name.clone(), *since, function.is_per_thread());
            if let Some(other) = seen.insert(key, &function.name) {
                panic!("{} and {other} are both {name} of {since}", function.name);
            }
        }
    }
}
