"""Cases on eight devices: `python -m tests.mesh_cases dp=2,tp=2,sp=2 [--all]` prints one line each; exits with 1 if one failed.

Each compares values and gradients with those of the same call without a mesh. tests/test_mesh.py starts it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import attention_ops as ao

OPERATIONS = ("vanilla", "sdpa", "flash", "blocksparse", "ring", "ulysses", "auto")
SHAPES = {  # B, T, S, H, K
    "mha": (8, 16, 16, 8, 8),
    "gqa": (8, 16, 16, 16, 4),
    "mqa": (8, 16, 16, 8, 1),
    "odd_heads": (8, 16, 16, 6, 3),
    "batch_1": (1, 16, 16, 8, 8),
    "decode": (8, 1, 16, 8, 4),
}
OPTIONS = ("causal", "window", "segments", "bias", "sinks", "soft_cap", "dense")
SHORT = {
    "dp=8": {"blocksparse": ("batch_1", "gqa"), "vanilla": ("mha",)},
    "tp=8": {"blocksparse": ("mqa", "gqa"), "flash": ("odd_heads",), "sdpa": ("mha",)},
    "sp=8": {
        "ring": tuple(SHAPES),
        "ulysses": ("mha", "gqa", "mqa"),
        "blocksparse": ("decode",),
        "vanilla": ("gqa",),
        "auto": ("mha",),
    },
    "dp=2,tp=2,sp=2": {
        "blocksparse": ("mha", "mqa", "odd_heads", "batch_1", "decode"),
        "ring": ("gqa", "odd_heads"),
        "ulysses": ("gqa",),
    },
    "fsdp=2,sp=4": {"ring": ("mqa", "batch_1"), "flash": ("gqa",), "sdpa": ("mha",), "auto": ("decode",)},
}
"""Meshes, and the shapes of the short run per operation; each case takes two of the options, in turn, and some a dense mask."""
D = 8


def options_of(names, shape, rng):
    B, T, S, H, _ = shape
    options = {}
    for name in names:
        match name:
            case "causal":
                options |= {"causal": True}
            case "window":
                options |= {"sliding_window": (5, 2)}
            case "segments":
                ids = jnp.asarray(np.repeat(np.arange(4), 4)[None].repeat(B, 0) + rng.integers(0, 2, (B, 1)))
                options |= {"q_segment_ids": ids[:, S - T :], "kv_segment_ids": ids.at[0, 3].set(-1)}
            case "bias":
                options |= {"bias": jnp.asarray(rng.standard_normal((1, H, T, S)), jnp.float32)}
            case "bias_of_rows":
                options |= {"bias": jnp.asarray(rng.standard_normal((1, 1, T, S)), jnp.float32)}
            case "sinks":
                options |= {"softmax_aux": jnp.asarray(rng.standard_normal(H), jnp.float32)}
            case "sinks_of_some":
                options |= {"softmax_aux": jnp.asarray(np.where(np.arange(H) % 2, 0.5, -np.inf), jnp.float32)}
            case "soft_cap":
                options |= {"logits_soft_cap": 3.0}
            case "dense":
                options |= {"mask": jnp.asarray(rng.random((B, 1, T, S)) < 0.7)}
            case "static":
                options |= {"mask": ao.masks.Dense(rng.random((B, 1, T, S)) < 0.7)}
            case "lengths":
                options |= {"kv_lengths": jnp.asarray(np.arange(B) * S // B)}
    return options


def call(name, shape, names, rng, gradient=True):
    """Return the inputs of a call, and the function of them and of metadata that returns its results."""
    B, T, S, H, K = shape
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, T, H, D), (B, S, K, D), (B, S, K, D))]
    options = options_of(names, shape, rng)
    inputs = dict(zip(("query", "key", "value"), arrays, strict=True)) | {
        key: options.pop(key) for key in ("bias", "softmax_aux") if key in options
    }

    def loss(inputs, metadata=None):
        out = ao.attention(**inputs, impl=name, metadata=metadata, return_logsumexp=True, **options)
        finite = jnp.where(out.logsumexp == -jnp.inf, 0.0, out.logsumexp)
        return jnp.sum(jnp.sin(out.attention_outputs)) + jnp.sum(finite**2), out

    return inputs, jax.value_and_grad(loss, has_aux=True) if gradient else loss


def difference(one, many):
    """Return which results differ and by how much, or ''."""
    finite = functools.partial(np.nan_to_num, nan=999, neginf=-99)
    found = [
        f"{jax.tree_util.keystr(path)} by {np.max(np.abs(finite(a) - finite(b))):.2g}"
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True)
        if not np.allclose(np.asarray(a), np.asarray(b), atol=3e-5, rtol=3e-5)
    ]
    return ", ".join(found)


def differs(name, shape, names, metadata, rng):
    """Return how the sharded call differs from the one without a mesh, or ''."""
    inputs, run = call(name, shape, names, rng)
    return difference(jax.jit(run)(inputs), jax.jit(lambda inputs: run(inputs, metadata))(inputs))


def mesh_of(text):
    """Return the mesh that is written as "dp=2,sp=4"."""
    sizes = dict(part.split("=") for part in text.split(","))
    return jax.make_mesh(
        tuple(int(n) for n in sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
    )


def cases(mesh, every):
    for index, (name, shape) in enumerate(itertools.product(OPERATIONS, SHAPES)):
        if every:
            yield from ((name, shape, (option,)) for option in OPTIONS)
        elif shape in SHORT[mesh].get(name, ()):
            first, second = OPTIONS[index % 6], OPTIONS[(index + 1 + index // 6 % 4) % 6]
            if name == "ring" and shape in ("mqa", "odd_heads"):  # causal without a window, so in zigzag order
                yield name, shape, ("bias_of_rows" if first == "bias" else first, "causal", "dense")
            else:
                yield name, shape, (first, second)


def main():
    mesh = mesh_of(sys.argv[1])
    failed = 0
    for name, shape, names in cases(sys.argv[1], "--all" in sys.argv):
        rng = np.random.default_rng(zlib.crc32(f"{name}{shape}{names}".encode()))
        try:
            difference = differs(name, SHAPES[shape], names, ao.OperationMetadata(mesh=mesh, fallback="silent"), rng)
        except Exception as error:
            difference = f"{type(error).__name__}: {error}"
        failed += bool(difference)
        print(f"{sys.argv[1]} {name} {shape} {'+'.join(names)}: {difference or 'equal'}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
