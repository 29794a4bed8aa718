"""torch: cuBLAS, a graph that is captured and replayed."""

from __future__ import annotations

import told
import torch

x = torch.randn(1024, 1024, device="cuda")
y = x @ x
torch.cuda.synchronize()
told.ready()
y = x @ x
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    z = x * 2
for _ in range(5):
    graph.replay()
torch.cuda.synchronize()
assert torch.equal(z, x * 2)
told.submitted(6, exactly=False)
