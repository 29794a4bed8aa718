"""Finding entry points."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from contract.support import Gpu, case, equal, name, ok


class Resolver:
    """cuGetProcAddress, with all its arguments."""

    LEGACY, PER_THREAD = 1, 2

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.version = ok(driver.cuDriverGetVersion())

    def find(
        self, symbol: bytes, version: int, flags: int = 0, with_status: bool = True
    ) -> tuple[str, int | None, int | None]:
        """What it returns; the address; the status."""
        address, found = ctypes.c_void_p(0xBAD), ctypes.c_int(99)
        resolve = self.library.cuGetProcAddress_v2
        resolve.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ]
        place = ctypes.addressof(found) if with_status else None
        result = resolve(symbol, ctypes.addressof(address), version, flags, place)
        return name((driver.CUresult(result),)), address.value, found.value

    def exported(self, symbol: str) -> int | None:
        return ctypes.cast(getattr(self.library, symbol), ctypes.c_void_p).value


@case
def entry_points_are_found_by_name(gpu: Gpu) -> None:
    resolver = Resolver()
    outcome, address, found = resolver.find(b"cuInit", 12000)
    equal((outcome, found), ("SUCCESS", 0))
    assert address
    outcome, again, _ = resolver.find(b"cuInit", 12000, with_status=False)
    equal((outcome, again), ("SUCCESS", address))


@case
def entry_points_that_are_none_have_no_address(gpu: Gpu) -> None:
    equal(Resolver().find(b"cuNoSuchThing", 12000), ("SUCCESS", None, 1))


@case
def without_a_status_only_the_address_can_tell(gpu: Gpu) -> None:
    found = Resolver().find(b"cuNoSuchThing", 12000, with_status=False)
    equal(found[:2], ("SUCCESS", None))


@case
def entry_points_newer_than_the_version_have_no_address(gpu: Gpu) -> None:
    equal(Resolver().find(b"cuMemAllocAsync", 10000), ("SUCCESS", None, 2))


@case
def names_are_asked_for_without_their_endings(gpu: Gpu) -> None:
    resolver = Resolver()
    equal(resolver.find(b"cuMemAlloc_v2", 12000), ("SUCCESS", None, 1))
    equal(resolver.find(b"cuLaunchKernel_ptsz", 12000), ("SUCCESS", None, 1))


@case
def a_version_newer_than_the_driver_is_refused(gpu: Gpu) -> None:
    resolver = Resolver()
    equal(resolver.find(b"cuInit", resolver.version + 1000)[0], "INVALID_VALUE")


@case
def the_version_chooses_the_form(gpu: Gpu) -> None:
    resolver = Resolver()
    if resolver.version >= 13000:
        old, new = (resolver.find(b"cuCtxGetDevice", it)[1] for it in (12000, 13000))
        assert old
        assert new
        assert old != new
    old, new = (resolver.find(b"cuStreamBeginCapture", it)[1] for it in (10000, 12000))
    assert old
    assert new
    assert old != new
    old, new = (resolver.find(b"cuGetProcAddress", it)[1] for it in (11030, 12000))
    assert old
    assert new
    assert old != new


@case
def flags_choose_the_default_stream(gpu: Gpu) -> None:
    resolver = Resolver()
    default, legacy, per_thread = (
        resolver.find(b"cuLaunchKernel", 12000, flags)[1] for flags in (0, 1, 2)
    )
    assert default
    assert default == legacy
    assert per_thread
    assert per_thread != legacy
    allocate = {resolver.find(b"cuMemAlloc", 12000, flags)[1] for flags in (0, 1, 2)}
    equal(len(allocate), 1)


@case
def entry_points_work_whichever_way_they_are_found(gpu: Gpu) -> None:
    resolver = Resolver()
    gpu.initialise()
    count = ctypes.c_int(-1)
    address = resolver.find(b"cuDeviceGetCount", 12000)[1]
    assert address
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(address)
    equal(function(ctypes.byref(count)), 0)
    exported = resolver.library.cuDeviceGetCount
    other = ctypes.c_int(-1)
    equal(exported(ctypes.byref(other)), 0)
    equal(count.value, other.value)
