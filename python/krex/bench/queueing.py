"""What `exclusive` runs before a command: waits for the lock, then becomes the command.

As flock(1) does, but the lock is the bench's: it hands over a descriptor, in whose name the lock is
taken, and keeps a copy. So nothing that the command starts can keep the lock, and the bench sees
who has it. Run by path and in isolated mode, since nothing of krex is needed and little is to
happen beside the command that has the lock.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys


def main() -> None:
    """Be the command after the number of the descriptor."""
    lock, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(lock, False)
    # Python ignores these two at its start, and what is ignored stays so in the command. And in
    # the locale C it adds a variable to the environment, of which the kernel has the first state.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    with open("/proc/self/environ", "rb") as file:
        words = [it.partition(b"=") for it in file.read().split(b"\0") if b"=" in it]
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        os.execvpe(argv[0], argv, {name: value for name, _, value in words})
    except OSError as error:
        print(f"krex: {error.strerror}: {argv[0]}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
