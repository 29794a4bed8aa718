"""What a run was asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from krex.bench.commands import Command
from krex.bench.policies import SOLO, Policy

#: The CPUs that only holders of regions run on.
RESERVED_VARIABLE = "KREX_RESERVED_CPUS"

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Turn:
    """Some commands under one policy, after which another policy has its turn."""

    policy: Policy
    #: From 1.
    round: int


@dataclass(frozen=True)
class Settings:
    """What is run, and under which conditions; they are the same for all policies."""

    commands: tuple[Command, ...]
    policies: tuple[Policy, ...]
    device: str = "cpu"
    width: int = 4
    #: Commands per turn.
    count: int = 12
    rounds: int = 5
    #: Seconds that a command may take.
    timeout: float = 60.0
    #: Threads per command, for OpenMP and BLAS libraries.
    threads: int = 1
    #: CPUs that all commands share.
    cpus: tuple[int, ...] = (0,)
    #: Settings of krex that were found in the environment, by name.
    krex: Mapping[str, str] = field(default_factory=dict)

    def turns(self) -> list[Turn]:
        """Return the turns in order.

        In rounds, so that a drift of the machine hits all policies. The reference is taken at the
        beginning of each round and once more at the end; the others begin with another one each
        time, so that none always follows the same.
        """
        turns = []
        others = self.policies[1:]
        for number in range(1, self.rounds + 1):
            turns.append(Turn(SOLO, number))
            first = (number - 1) % max(1, len(others))
            turns += [Turn(policy, number) for policy in (*others[first:], *others[:first])]
        return [*turns, Turn(SOLO, self.rounds + 1)]

    def runs(self) -> int:
        """Return how many commands are run in all."""
        return self.count * len(self.turns())

    def thread_environment(self) -> dict[str, str]:
        """Return the variables that pin libraries to `threads` threads."""
        return dict.fromkeys(_THREAD_VARIABLES, str(self.threads))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "device": self.device,
            "policies": [it.name for it in self.policies],
            "width": self.width,
            "count": self.count,
            "rounds": self.rounds,
            "timeout": self.timeout,
            "threads": self.threads,
            "cpus": list(self.cpus),
            "krex": dict(self.krex),
            "commands": [it.to_dict() for it in self.commands],
        }


def default_count(commands: Sequence[Command], width: int) -> int:
    """Return a number of commands per turn: all kinds alike, and the width used for most of it."""
    least = max(12, 3 * width)
    return len(commands) * -(-least // len(commands))
