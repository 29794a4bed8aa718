"""Programs that use a GPU beside each other: siblings that load it, and a holder that times.

Shared by `benches/gpu.sh`, which measures, and by `tests/gpu`, which judges. Siblings use the
driver alone, so that they are there in a second; the holder may use torch.
"""
