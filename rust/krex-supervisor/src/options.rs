//! The command line of `krex run`.

use std::ffi::OsString;
use std::time::Duration;

use lexopt::prelude::*;

use crate::Exit;

pub const HELP: &str = "\
Usage: krex run [OPTIONS] [--] COMMAND [ARGUMENT]...

Runs COMMAND in place of this process, as a tenant that shares its device with all other
commands under krex, except while one of them is in a region.

Options:
  --device D    device that the command uses: cpu (default), cpu:NAME for a group of
                commands of its own, or a GPU's UUID, as `nvidia-smi -L` prints it. May be given several times; the first is the default
                of krex.region.critical()
  --name N      name in `krex status` and in reports (default: the command)
  --timeout S   end the command after S seconds, not counting the time in which it was frozen
                or waited for a region: SIGTERM, and SIGKILL five seconds later
  --help        this text

The exit status is the command's own; 125 if krex itself fails, 126 if COMMAND cannot be
executed, 127 if it is not found, 2 for a wrong command line.
";

/// What `krex run` was asked for.
#[derive(Debug, PartialEq)]
pub struct Options {
    pub devices: Vec<String>,
    pub name: Option<String>,
    pub time_limit: Option<Duration>,
    pub command: Vec<OsString>,
}

/// Parses the words after `run`; `None` if help was asked for.
pub fn parse(words: Vec<OsString>) -> Result<Option<Options>, Exit> {
    let mut options =
        Options { devices: Vec::new(), name: None, time_limit: None, command: Vec::new() };
    let mut parser = lexopt::Parser::from_args(words);
    while let Some(argument) = parser.next().map_err(Exit::usage)? {
        match argument {
            Long("device") => options.devices.push(text(&mut parser, "--device")?),
            Long("name") => options.name = Some(text(&mut parser, "--name")?),
            Long("timeout") => options.time_limit = Some(seconds(&mut parser)?),
            Long("help") | Short('h') => return Ok(None),
            // The command begins: everything from here on is its own.
            Value(word) => {
                options.command.push(word);
                options.command.extend(parser.raw_args().map_err(Exit::usage)?);
            }
            other => return Err(Exit::usage(other.unexpected())),
        }
    }
    if options.command.is_empty() {
        return Err(Exit::usage("no command: krex run [OPTIONS] -- COMMAND"));
    }
    for device in &options.devices {
        krex_core::device::check_name(device).map_err(Exit::usage)?;
    }
    if options.name.as_deref() == Some("") {
        return Err(Exit::usage("--name is empty"));
    }
    Ok(Some(options))
}

fn text(parser: &mut lexopt::Parser, option: &str) -> Result<String, Exit> {
    let value = parser.value().map_err(Exit::usage)?;
    value.into_string().map_err(|value| Exit::usage(format!("{option} {value:?}: not UTF-8")))
}

fn seconds(parser: &mut lexopt::Parser) -> Result<Duration, Exit> {
    let value = text(parser, "--timeout")?;
    let seconds: f64 = value.parse().unwrap_or(f64::NAN);
    if seconds > 0.0
        && let Ok(limit) = Duration::try_from_secs_f64(seconds)
    {
        return Ok(limit);
    }
    Err(Exit::usage(format!("--timeout {value}: not a positive number of seconds below 1.8e19")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        line.iter().map(OsString::from).collect()
    }

    fn error(line: &[&str]) -> String {
        match parse(words(line)) {
            Err(exit) => {
                assert_eq!(exit.status, crate::USAGE);
                exit.message
            }
            Ok(options) => panic!("{options:?}"),
        }
    }

    #[test]
    fn everything_after_the_command_is_the_commands() {
        let expected = words(&["python", "-c", "pass", "--device", "x", "--", "y"]);
        for separator in [vec![], vec!["--"]] {
            let mut line = vec!["--device", "cpu:1", "--name", "a b", "--timeout", "1.5"];
            line.extend(separator);
            line.extend(["python", "-c", "pass", "--device", "x", "--", "y"]);
            let options = parse(words(&line)).ok().flatten().unwrap();
            assert_eq!(options.command, expected);
            assert_eq!(options.devices, ["cpu:1"]);
            assert_eq!(options.name.as_deref(), Some("a b"));
            assert_eq!(options.time_limit, Some(Duration::from_millis(1500)));
        }
    }

    #[test]
    fn wrong_command_lines_say_what_is_wrong() {
        assert!(error(&[]).contains("no command"));
        assert!(error(&["--device"]).contains("--device"));
        assert!(error(&["--device", "gpu", "true"]).contains("gpu"));
        assert!(error(&["--no-such", "true"]).contains("--no-such"));
        assert!(error(&["--name", "", "true"]).contains("--name"));
        for bad in ["0", "-1", "nan", "inf", "x", "", "1e300"] {
            assert!(error(&["--timeout", bad, "true"]).contains("--timeout"), "{bad}");
        }
    }
}
