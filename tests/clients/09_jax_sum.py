"""JAX: its own runtime above the driver."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import told

assert jax.devices()[0].platform in ("gpu", "cuda"), jax.devices()


def total() -> float:
    return float(jnp.ones((256, 256)).sum())


assert total() == 65536.0
told.ready()
assert total() == 65536.0
told.submitted(1, exactly=False)
