"""Calls in a `jax.shard_map` of one's own over two by two devices: `python -m tests.mesh_own` prints one line each; exits with 1
if one failed. tests/test_mesh.py starts it.

JAX checks over which axes every array varies, as it does unless told not to. Values and gradients are held to the law; gradients
are taken on each device, and of the whole too where each has all of a bias.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import attention_ops as ao
from attention_ops.selftest import reference
from tests.mesh_cases import mesh_of
from tests.mesh_transforms import report
from tests.test_transforms import agree, save_names

B, T, H, D = 2, 8, 4, 4
QKV = ("query", "key", "value")
BATCH, HEADS, ROWS = P("dp"), P("dp", None, "tp"), P("dp", "tp")
MASK = np.ones((B, 1, T, T), bool)
MASK[:, :, 1], MASK[:, :, :, 2], MASK[1, :, :, 5] = False, False, False
SMALL = ao.OperationMetadata(block_sizes=ao.BlockSizes(2, 4))


@dataclasses.dataclass(frozen=True)
class Own:
    """One call: where its arrays lie, those not named being whole on each device. The keys `unseen` hold NaN."""

    at: Mapping[str, P]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lengths: tuple[int, int] = (T, T)
    K: int = 2
    bias: tuple[int, ...] | None = None
    unseen: Any = 2
    dtype: Any = np.float32

    def inputs(self) -> dict[str, np.ndarray]:
        rng, (rows, keys) = np.random.default_rng(0), self.lengths
        shapes = {
            "query": (B, rows, H, D),
            **dict.fromkeys(QKV[1:], (B, keys, self.K, D)),
            "bias": self.bias,
            "softmax_aux": (H,),
        }
        made = {name: rng.standard_normal(shape).astype(self.dtype) for name, shape in shapes.items() if shape}
        made["key"][:, self.unseen] = made["value"][:, self.unseen] = np.nan
        return made

    def run(self, op: str, inputs: Any, arrays: Any) -> Any:
        offset = {"query_offset": jax.lax.axis_index("tp") * (T // 2)} if self.at["query"] == ROWS else {}
        return ao.attention(**inputs, **arrays, **offset, **self.static, impl=op, metadata=SMALL).attention_outputs

    def law(self, inputs: dict[str, np.ndarray]) -> reference.Attention:
        static = {**self.static, "mask": MASK[0, 0]} if "mask" in self.static else self.static
        return reference.attention(*(inputs[name] for name in QKV), {**static, **self.arrays, **inputs})


OWN = {
    "rows of the batch, all of bias and sinks": Own(
        {**dict.fromkeys(QKV, BATCH), "mask": BATCH}, {"mask": MASK}, {"logits_soft_cap": 5.0}, bias=(1, H, T, T)
    ),
    "heads, parts of bias and sinks, all of the mask": Own(
        {**dict.fromkeys(QKV, HEADS), "bias": P("dp", "tp"), "softmax_aux": P("tp")},
        {"mask": MASK[:1]},
        {"causal": True},
        bias=(B, H, T, T),
    ),
    "parts of the queries at offsets, all keys": Own(
        {"query": ROWS, "key": BATCH, "value": BATCH, "kv_lengths": BATCH},
        {"kv_lengths": np.int32([6, 6])},
        {"causal": True, "sliding_window": (3, 0)},
        unseen=slice(6, None),
    ),
    "decoding with lengths": Own(
        {"query": HEADS, "key": BATCH, "value": BATCH, "kv_lengths": BATCH, "softmax_aux": P("tp")},
        {"kv_lengths": np.int32([17, 30])},
        lengths=(1, 40),
        K=1,
        unseen=slice(30, None),
    ),
    "a static mask, bfloat16": Own(
        {**dict.fromkeys(QKV, HEADS), "softmax_aux": P("tp")},
        static={"mask": ao.masks.Dense(MASK[0, 0])},
        dtype=jnp.bfloat16,
    ),
}
RUN = {"flash": tuple(OWN), "blocksparse": tuple(OWN)[:1]}
MAPPED = {"causal": (T, T), "decoding": (1, 40)}


def over_devices(run: Callable[..., Any], *specs: Any, out: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(run, mesh=mesh_of("dp=2,tp=2"), in_specs=specs, out_specs=out))


def held_to_the_law(op: str, own: Own) -> None:
    inputs, out = own.inputs(), own.at["query"]
    of_inputs, of_arrays = ({name: own.at.get(name, P()) for name in given} for given in (inputs, own.arrays))
    law = own.law(inputs)
    cotangent = np.random.default_rng(1).standard_normal(law.output.shape).astype(own.dtype)
    found = law.gradients(cotangent)
    gradients = {name: getattr(found, "sinks" if name == "softmax_aux" else name) for name in inputs}
    run = functools.partial(own.run, op)

    def on_each_device(inputs: Any, arrays: Any, cotangent: Any) -> Any:
        def loss(inputs: Any) -> Any:
            output = run(inputs, arrays)
            return jnp.sum(output * cotangent), output

        return jax.grad(jax.checkpoint(loss, policy=save_names), has_aux=True)(inputs)

    each = over_devices(on_each_device, of_inputs, of_arrays, out, out=(of_inputs, out))
    agree(each(inputs, own.arrays, cotangent), (gradients, law.output))
    if own.bias is not None and "bias" not in own.at:
        whole = over_devices(run, of_inputs, of_arrays, out=out)
        agree(jax.grad(lambda inputs: jnp.sum(whole(inputs, own.arrays) * cotangent))(inputs), gradients)


def held_to_the_law_under_vmap(lengths: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((2 * B, n, 2, D)).astype(np.float32) for n in lengths)
    cotangent = rng.standard_normal(query.shape).astype(np.float32)

    def loss(query: Any, key: Any, cotangent: Any) -> Any:
        output = ao.attention(query[None], key[None], key[None], impl="flash", causal=True, metadata=SMALL).attention_outputs
        return jnp.sum(output * cotangent)

    mapped = over_devices(jax.vmap(jax.grad(loss)), BATCH, BATCH, BATCH, out=BATCH)
    want = reference.attention(query, key, key, {"causal": True}).gradients(cotangent)
    agree(mapped(query, key, cotangent), want.query)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for op, names in RUN.items():
        yield from ((f"{op}: {name}", functools.partial(held_to_the_law, op, OWN[name])) for name in names)
    yield from ((f"vmap, {name}", functools.partial(held_to_the_law_under_vmap, sizes)) for name, sizes in MAPPED.items())


if __name__ == "__main__":
    report(checks())
