"""Which device a user means: by nvidia-smi's index, by a UUID, or by the beginning of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from harness import ActorError, Machine

FIRST = "GPU-00112233-4455-6677-8899-aabbccddee00"
SECOND = "GPU-00112233-4455-6677-8899-aabbccddee01"
PART = "MIG-11112222-3333-4444-5555-666677778888"
OTHER_PART = "MIG-11112222-3333-4444-5555-66667777ffff"


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    nvml = FakeNvml(tmp_path)
    nvml.say(f"gpu {FIRST} NVIDIA_H200", f"gpu {SECOND} NVIDIA_H200")
    return nvml


def shared(machine: Machine, nvml: FakeNvml, *devices: str) -> list[str]:
    """The devices that a command under `krex run` shares."""
    words = [word for it in devices for word in ("--device", it)]
    actor = machine.actor(*words, env=nvml.environment)
    names: list[str] = machine.tenants()[actor.pid]["devices"]
    actor.quit()
    return names


@pytest.mark.parametrize(
    ("device", "uuid"),
    [("0", FIRST), ("1", SECOND), (SECOND, SECOND), (PART, PART)],
)
def test_a_command_shares_the_gpu_that_is_meant(
    machine: Machine, nvml: FakeNvml, device: str, uuid: str
) -> None:
    assert shared(machine, nvml, device) == [uuid]


def test_an_index_is_that_of_nvidia_smi(machine: Machine, nvml: FakeNvml) -> None:
    """CUDA_VISIBLE_DEVICES renumbers the devices of a process; the index means the same."""
    actor = machine.actor("--device", "1", env={**nvml.environment, "CUDA_VISIBLE_DEVICES": "1,0"})
    assert machine.tenants()[actor.pid]["devices"] == [SECOND]


def test_the_beginning_of_one_uuid_will_do(machine: Machine, nvml: FakeNvml) -> None:
    nvml.say(f"gpu {FIRST} A", f"gpu {SECOND.replace('GPU-0', 'GPU-f')} B", f"part {PART}")
    assert shared(machine, nvml, "GPU-0", "MIG-1") == [FIRST, PART]
    done = machine.krex("run", "--device", "GPU-a", "true", env=nvml.environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no UUID begins like that" in done.stderr
    nvml.say(f"gpu {FIRST} A", f"part {PART}", f"part {OTHER_PART}", f"gpu {SECOND} B")
    for device in ("GPU-0", "MIG-1111"):
        done = machine.krex("run", "--device", device, "true", env=nvml.environment)
        assert done.returncode == 2
        assert "2 UUIDs begin like that" in done.stderr


def test_a_divided_gpu_has_to_be_named_by_its_part(machine: Machine, nvml: FakeNvml) -> None:
    nvml.say(f"gpu {FIRST} A", f"part {PART}")
    done = machine.krex("run", "--device", "0", "true", env=nvml.environment)
    assert done.returncode == 2
    assert "MIG-…" in done.stderr


@pytest.mark.parametrize(
    ("says", "device", "status", "message"),
    [
        ([f"gpu {FIRST} A"], "1", 2, "there is one GPU, with index 0"),
        ([f"gpu {FIRST} A", f"gpu {SECOND} A"], "7", 2, "indices 0 to 1"),
        ([], "0", 2, "has no GPU"),
        ([f"gpu {FIRST} A", "lost 0"], "0", 125, "fell off the bus"),
        (["init 9"], "0", 125, "modprobe nvidia"),
        (["init 18"], "0", 125, "restart the machine"),
        (["init 999"], "GPU-0", 125, "nvidia-smi"),
        ([], "cuda:1", 2, "nvidia-smi's index (1"),
        ([], "gpu", 2, "unknown device"),
    ],
)
def test_what_cannot_be_resolved_is_said_before_the_command_runs(
    machine: Machine, nvml: FakeNvml, says: list[str], device: str, status: int, message: str
) -> None:
    nvml.say(*says)
    done = machine.krex("run", "--device", device, "--", "echo", "ran", env=nvml.environment)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_driver_the_message_says_what_to_install(machine: Machine) -> None:
    done = machine.krex("run", "--device", "0", "true")
    if done.returncode == 0:
        pytest.skip("this machine has a driver")
    assert done.returncode == 125
    assert "libnvidia-ml.so.1" in done.stderr
    assert "full UUID" in done.stderr


def test_a_full_uuid_needs_no_driver(machine: Machine, nvml: FakeNvml) -> None:
    nvml.say("init 9")
    assert shared(machine, nvml, FIRST) == [FIRST]
    assert nvml.calls() == []


def test_what_was_resolved_is_said_to_who_asks(machine: Machine, nvml: FakeNvml) -> None:
    command = ("run", "--device", "1", "--", "true")
    assert machine.krex(*command, env=nvml.environment).stderr == ""
    done = machine.krex(*command, env={**nvml.environment, "KREX_LOG": "info"})
    assert f"device 1 is {SECOND} (GPU 1, NVIDIA H200)" in done.stderr


@pytest.mark.parametrize("device", [1, "1", SECOND])
def test_a_region_is_about_the_gpu_that_is_meant(
    machine: Machine, nvml: FakeNvml, device: object
) -> None:
    actor = machine.actor(env=nvml.environment)
    assert actor.do("whole", device=device)["device"] == SECOND
    actor.do("submit", device=device)
    # It is looked up once.
    before = len([it for it in nvml.calls() if it.function == "nvmlInit_v2"])
    actor.do("whole", device=device)
    assert len([it for it in nvml.calls() if it.function == "nvmlInit_v2"]) == before <= 1


@pytest.mark.parametrize(
    ("device", "kind", "message"),
    [
        (7, "UnknownDevice", "indices 0 to 1"),
        ("cuda:0", "UnknownDevice", "nvidia-smi's index (0"),
        ("GPU-", "UnknownDevice", "UUID"),
        (True, "TypeError", "True"),
        (-1, "TypeError", "-1"),
        (0.5, "TypeError", "0.5"),
    ],
)
def test_a_region_on_what_is_no_device(
    machine: Machine, nvml: FakeNvml, device: object, kind: str, message: str
) -> None:
    actor = machine.actor(env=nvml.environment)
    with pytest.raises(ActorError) as raised:
        actor.do("whole", device=device)
    assert raised.value.kind == kind
    assert message in raised.value.message


def test_a_region_without_the_library(machine: Machine, nvml: FakeNvml) -> None:
    nvml.say("init 9")
    actor = machine.actor(env=nvml.environment)
    with pytest.raises(ActorError) as raised:
        actor.do("whole", device=0)
    assert raised.value.kind == "KrexError"
    assert "modprobe" in raised.value.message
