"""Triton's own launcher, which loads its code through the driver."""

from __future__ import annotations

import told
import torch
import triton
import triton.language as tl


@triton.jit
def double(x, n, BLOCK: tl.constexpr):  # noqa: N803 - a constant
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)


def launch() -> None:
    double[(4,)](x, 4096, BLOCK=1024)


x = torch.ones(4096, device="cuda")
launch()
torch.cuda.synchronize()
told.ready()
for _ in range(7):
    launch()
torch.cuda.synchronize()
assert x[0].item() == 256.0
told.submitted(7, exactly=False)
