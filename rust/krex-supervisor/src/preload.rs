//! The interposer in the environment of a command.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const LIBRARY: &str = "libkrex_preload.so";

/// Has the dynamic linker load the interposer into the command, and into what the command starts.
/// Without the library, or with `KREX_PRELOAD=0`, everything stays as it is. Returns whether it
/// will be loaded.
pub fn set(program: &Path) -> bool {
    if std::env::var_os("KREX_PRELOAD").is_some_and(|it| it == "0") {
        return false;
    }
    let Some(library) = find(program) else {
        log::debug!("no {LIBRARY} near {}", program.display());
        return false;
    };
    let before = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    match with(&before, &library) {
        // SAFETY: the launcher has no other thread that could read the environment meanwhile.
        Some(after) => unsafe { std::env::set_var("LD_PRELOAD", after) },
        None => {
            log::warn!(
                "{} cannot be preloaded: its path holds a blank or a colon. Install krex elsewhere",
                library.display()
            );
            return false;
        }
    }
    true
}

/// As the wheel lays it out, or beside the program, where cargo puts both.
fn find(program: &Path) -> Option<PathBuf> {
    let prefix = program.parent()?.parent()?;
    let places = [prefix.join("lib/krex").join(LIBRARY), program.with_file_name(LIBRARY)];
    places.into_iter().find(|it| it.is_file())
}

/// `LD_PRELOAD` with `library` in front, and once. `None` if it cannot be named there.
fn with(before: &OsStr, library: &Path) -> Option<OsString> {
    let separates = |byte: &u8| matches!(byte, b' ' | b':');
    let library = library.as_os_str().as_bytes();
    if library.iter().any(separates) {
        return None;
    }
    let is_other = |word: &&[u8]| {
        // Also that of another installation: two would count everything twice.
        !word.is_empty() && word.rsplit(|it| *it == b'/').next() != Some(LIBRARY.as_bytes())
    };
    let others = before.as_bytes().split(|it| separates(it)).filter(is_other);
    let words: Vec<&[u8]> = std::iter::once(library).chain(others).collect();
    Some(OsString::from_vec(words.join(&b':')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_libraries_stay_and_nothing_is_named_twice() {
        let ours = Path::new("/v/lib/krex/libkrex_preload.so");
        for (before, after) in [
            ("", "/v/lib/krex/libkrex_preload.so"),
            ("/l/libjemalloc.so", "/v/lib/krex/libkrex_preload.so:/l/libjemalloc.so"),
            ("a.so b.so:c.so", "/v/lib/krex/libkrex_preload.so:a.so:b.so:c.so"),
            ("/v/lib/krex/libkrex_preload.so:a.so", "/v/lib/krex/libkrex_preload.so:a.so"),
            ("a.so:/w/libkrex_preload.so", "/v/lib/krex/libkrex_preload.so:a.so"),
        ] {
            assert_eq!(with(OsStr::new(before), ours), Some(after.into()));
        }
        assert_eq!(with(OsStr::new(""), Path::new("/a b/libkrex_preload.so")), None);
    }
}
