"""The kernels of the suite, as one text for both drivers."""

from __future__ import annotations

# The simulated driver reads the marked comments, the real one all but them.
PROGRAM = b"""
// krex-simgpu: kernel spin(u64) for arg0 ns
// krex-simgpu: kernel add_one(ptr, u32) for 5 us add 1
// krex-simgpu: kernel slow_add(ptr, u32, u64) for arg2 ns add 1
// krex-simgpu: kernel crash() for 5 us fault 700
.version 7.8
.target sm_80
.address_size 64

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

.visible .entry add_one(.param .u64 add_place, .param .u32 add_count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [add_place];
    ld.param.u32 %r1, [add_count];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r2, 0;
ADD:
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra ADDED;
    ld.global.u32 %r3, [%rd2];
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd2], %r3;
    add.u64 %rd2, %rd2, 4;
    add.u32 %r2, %r2, 1;
    bra ADD;
ADDED:
    ret;
}

.visible .entry slow_add(.param .u64 slow_place, .param .u32 slow_count, .param .u64 slow_time)
{
    .reg .pred %p<3>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [slow_place];
    ld.param.u32 %r1, [slow_count];
    ld.param.u64 %rd3, [slow_time];
    mov.u64 %rd4, %globaltimer;
SLOW:
    mov.u64 %rd5, %globaltimer;
    sub.u64 %rd6, %rd5, %rd4;
    setp.lt.u64 %p1, %rd6, %rd3;
    @%p1 bra SLOW;
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r2, 0;
SLOWADD:
    setp.ge.u32 %p2, %r2, %r1;
    @%p2 bra SLOWADDED;
    ld.global.u32 %r3, [%rd2];
    add.u32 %r3, %r3, 1;
    st.global.u32 [%rd2], %r3;
    add.u64 %rd2, %rd2, 4;
    add.u32 %r2, %r2, 1;
    bra SLOWADD;
SLOWADDED:
    ret;
}

.visible .entry crash()
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""
