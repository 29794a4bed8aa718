"""The CUDA driver through NVIDIA's bindings: one context, one program, as little as possible."""

from __future__ import annotations

import ctypes
from typing import Any

# The simulated driver reads the marked comments, the real one all but them.
PROGRAM = b"""
// krex-simgpu: kernel nothing() for 2 us
// krex-simgpu: kernel stream(ptr, u64) for 250 us
// krex-simgpu: kernel spin(u64) for arg0 ns
.version 7.8
.target sm_80
.address_size 64

.visible .entry nothing()
{
    ret;
}

.visible .entry stream(.param .u64 stream_place, .param .u64 stream_count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    .reg .f32 %f<5>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [stream_place];
    ld.param.u64 %rd2, [stream_count];
    cvta.to.global.u64 %rd3, %rd1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %rd4, %r1, %r2;
    cvt.u64.u32 %rd5, %r3;
    add.u64 %rd4, %rd4, %rd5;
    mul.wide.u32 %rd6, %r4, %r2;
STREAM:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra STREAMED;
    shl.b64 %rd7, %rd4, 4;
    add.u64 %rd7, %rd3, %rd7;
    ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd7];
    add.f32 %f1, %f1, 0f3F800000;
    add.f32 %f2, %f2, 0f3F800000;
    add.f32 %f3, %f3, 0f3F800000;
    add.f32 %f4, %f4, 0f3F800000;
    st.global.v4.f32 [%rd7], {%f1, %f2, %f3, %f4};
    add.u64 %rd4, %rd4, %rd6;
    bra STREAM;
STREAMED:
    ret;
}

.visible .entry spin(.param .u64 spin_time)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [spin_time];
    mov.u64 %rd2, %globaltimer;
SPIN:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra SPIN;
    ret;
}
"""

NON_BLOCKING = 1
NO_TIMING = 2
# Bytes that the kernel `stream` reads and writes: more than any cache holds.
BYTES = 256 << 20
_BLOCKS, _THREADS = 132 * 8, 256


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a call that has to succeed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the driver said {status!r}")
    return values[0] if len(values) == 1 else values


class Gpu:
    """The first device that this process sees, with a context, the program and a stream."""

    def __init__(self, *, bytes: int = BYTES) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device))
        check(driver.cuCtxSetCurrent(self.context))
        self.module = check(driver.cuModuleLoadData(PROGRAM))
        self.functions = {
            name: check(driver.cuModuleGetFunction(self.module, name.encode()))
            for name in ("nothing", "stream", "spin")
        }
        self.bytes = bytes
        self.memory = check(driver.cuMemAlloc(bytes))
        self.stream = check(driver.cuStreamCreate(NON_BLOCKING))
        # The first launch of each loads its code.
        self.nothing()
        self.fill()
        self.spin(1000)
        self.synchronize()

    def nothing(self) -> None:
        """Launch a kernel that does nothing."""
        self._launch("nothing", 1, 1, 0)

    def fill(self) -> None:
        """Launch a kernel on all multiprocessors that is bound by memory: about 0.15 ms."""
        arguments = (
            (int(self.memory), self.bytes // 16),
            (ctypes.c_uint64, ctypes.c_uint64),
        )
        self._launch("stream", _BLOCKS, _THREADS, arguments)

    def spin(self, nanoseconds: int) -> None:
        """Launch a kernel of one thread that lasts this long."""
        self._launch("spin", 1, 1, ((nanoseconds,), (ctypes.c_uint64,)))

    def _launch(self, name: str, blocks: int, threads: int, arguments: Any) -> None:
        function = self.functions[name]
        check(
            self.driver.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, self.stream, arguments, 0
            )
        )

    def synchronize(self) -> None:
        """Wait for what was launched."""
        check(self.driver.cuStreamSynchronize(self.stream))

    def event(self, flags: int = 0) -> Any:
        """Return a new event."""
        return check(self.driver.cuEventCreate(flags))

    def record(self, event: Any) -> None:
        """Record an event behind what was launched."""
        check(self.driver.cuEventRecord(event, self.stream))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two events that are done."""
        return float(check(self.driver.cuEventElapsedTime(start, end)))


def device_name() -> str:
    """Return krex's name of the first device that this process sees; makes no context."""
    library = ctypes.CDLL("libcuda.so.1")
    uuid, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    for result in (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(device), 0),
        library.cuDeviceGetUuid_v2(ctypes.byref(uuid), device),
    ):
        if result:
            raise RuntimeError(f"the driver said {result}")
    text = bytes(uuid).hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return f"GPU-{'-'.join(parts)}"


def make_context() -> None:
    """Make a context and wait for it, by the library alone: nothing has to be imported."""
    library = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for result in (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(device), 0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        library.cuCtxSetCurrent(context),
        library.cuCtxSynchronize(),
    ):
        if result:
            raise RuntimeError(f"the driver said {result}")


def main() -> None:
    """Print the name of the first device, and the version of CUDA that its driver has."""
    name = device_name()
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    print(name, version.value)
