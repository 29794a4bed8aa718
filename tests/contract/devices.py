"""Initialisation, devices and errors."""

from __future__ import annotations

import os

from cuda.bindings import driver

from contract.support import Child, Gpu, case, equal, expect, name, ok


@case
def nothing_works_before_initialisation(gpu: Gpu) -> None:
    expect(driver.cuDeviceGetCount(), "NOT_INITIALIZED")
    expect(driver.cuDeviceGet(0), "NOT_INITIALIZED")
    expect(driver.cuCtxGetCurrent(), "NOT_INITIALIZED")
    assert ok(driver.cuDriverGetVersion()) >= 11000
    expect(driver.cuInit(1), "INVALID_VALUE")
    ok(driver.cuInit(0))
    ok(driver.cuInit(0))


@case
def devices_have_names_and_identifiers(gpu: Gpu) -> None:
    device = gpu.initialise()
    count = ok(driver.cuDeviceGetCount())
    assert count >= 1
    expect(driver.cuDeviceGet(count), "INVALID_DEVICE")
    expect(driver.cuDeviceGet(-1), "INVALID_DEVICE")
    assert ok(driver.cuDeviceGetName(64, device)).strip(b"\0 ")
    assert any(ok(driver.cuDeviceGetUuid(device)).bytes)
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert ok(driver.cuDeviceGetAttribute(major, device)) >= 8
    assert ok(driver.cuDeviceTotalMem(device)) > 0


def uuid_of_first() -> str:
    digits = bytes(ok(driver.cuDeviceGetUuid(0)).bytes).hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


@case
def the_environment_chooses_devices(gpu: Gpu) -> None:
    def uuid(child: Child) -> None:
        gpu.initialise()
        child.say(uuid_of_first().encode())

    first = Child(uuid)
    text = b"".join(iter(first.hear, b"")).decode()
    first.end()
    outcomes = {}
    for value in ("0", text, text[:-1], "", "99", "-1", "0,99", "99,0", "nonsense", "0,0"):

        def count(child: Child, value: str = value) -> None:
            os.environ["CUDA_VISIBLE_DEVICES"] = value
            result = driver.cuInit(0)
            child.say(name(result).encode() + b" ")
            if name(result) == "SUCCESS":
                child.say(b"%d" % ok(driver.cuDeviceGetCount()))

        child = Child(count)
        outcomes[value.replace(text[:-1], "UUID")] = b"".join(iter(child.hear, b"")).decode()
        child.end()
    last = text[-1]
    equal(
        outcomes,
        {
            "0": "SUCCESS 1",
            "UUID" + last: "SUCCESS 1",
            "UUID": "SUCCESS 1",
            "": "NO_DEVICE ",
            "99": "NO_DEVICE ",
            "-1": "NO_DEVICE ",
            "0,99": "SUCCESS 1",
            "99,0": "NO_DEVICE ",
            "nonsense": "NO_DEVICE ",
            "0,0": "INVALID_DEVICE ",
        },
    )


@case
def errors_have_names(gpu: Gpu) -> None:
    equal(ok(driver.cuGetErrorName(driver.CUresult(700))), b"CUDA_ERROR_ILLEGAL_ADDRESS")
    assert ok(driver.cuGetErrorString(driver.CUresult(700)))
