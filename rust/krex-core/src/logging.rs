//! Which messages are wanted: `KREX_LOG`. Each program starts its log by itself.

use log::LevelFilter;

/// The level that `KREX_LOG` asks for, and what is wrong with it, if anything is.
pub fn level() -> (LevelFilter, Option<String>) {
    let Some(value) = std::env::var_os("KREX_LOG").filter(|it| !it.is_empty()) else {
        return (LevelFilter::Warn, None);
    };
    match value.to_str().and_then(|it| it.parse().ok()) {
        Some(level) => (level, None),
        None => {
            let words = "off, error, warn, info, debug or trace";
            (LevelFilter::Warn, Some(format!("KREX_LOG is {value:?}; use {words}")))
        }
    }
}

/// How a message looks.
pub fn line(record: &log::Record<'_>) -> String {
    let (pid, time) = (std::process::id(), crate::clock::seconds(crate::clock::now()));
    format!("krex[{pid}] {time:.6} {}: {}", record.level(), record.args())
}
