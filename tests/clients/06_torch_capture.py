"""A capture of two seconds in each mode, which must survive whoever drains this process."""

from __future__ import annotations

import time

import told
import torch

torch.ones(1, device="cuda")
torch.cuda.synchronize()
told.ready()
for mode in ("global", "thread_local", "relaxed"):
    x = torch.ones(1 << 20, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        y = x * 2
        time.sleep(2)
        y = y + 1
    graph.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 3.0, mode
told.submitted(6, exactly=False)
