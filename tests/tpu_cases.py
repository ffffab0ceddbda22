"""Cases of the TPU routes with several tiles, run in the interpreter by tests/kernels and on the device by tests/tpu.

Every case holds NaN, Inf and huge numbers in the keys that nothing may attend and in the queries that may attend nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import attention_ops as ao
from attention_ops import masks
from attention_ops.selftest import numeric, reference
from attention_ops.selftest.cases import _poisoned
from attention_ops.selftest.execution import compiler_options

B, H, K = 2, 4, 2
BLOCKS = ao.BlockSizes(128, 128)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One call with its law. `law` differs from `options` where these hold a Mask."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    options: dict[str, Any]
    law: dict[str, Any]
    d_output: np.ndarray
    d_logsumexp: np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
    """Options of a call, made from a random generator; `law` replaces some of them for the reference."""

    name: str
    T: int
    S: int
    options: Any
    law: Any = dict
    D: int = 24
    Dv: int = 24
    K: int = K
    dtype: str = "float32"

    def draw(self) -> Drawn:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        options = self.options(rng)
        law = {**options, **self.law(options)}
        dtype = np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)
        shapes = ((B, self.T, H, self.D), (B, self.S, self.K, self.D), (B, self.S, self.K, self.Dv))
        arrays = tuple(rng.normal(size=shape, scale=scale).astype(dtype) for shape, scale in zip(shapes, (3, 1, 1), strict=True))
        arrays = _poisoned(*arrays, reference.visible(B, H, self.T, self.S, law))
        d_output = rng.normal(size=(B, self.T, H, self.Dv)).astype(dtype)
        return Drawn(arrays, options, law, d_output, rng.normal(size=(B, self.T, H)).astype(np.float32))  # type: ignore[arg-type]


def errors(case: Case, impl: str, logsumexp: bool = True, blocks: ao.BlockSizes = BLOCKS) -> dict[str, float]:
    """Run a case, forward and backward, and return each quantity's error as a share of what is allowed."""
    drawn = case.draw()
    static = {name: value for name, value in drawn.options.items() if isinstance(value, bool | int | float | tuple)}
    traced = {name: jax.tree_util.tree_map(jnp.asarray, x) for name, x in drawn.options.items() if name not in static}
    differentiated = {name: traced.pop(name) for name in ("softmax_aux", "bias") if name in traced}
    metadata = ao.OperationMetadata(block_sizes=blocks)

    @functools.partial(jax.jit, compiler_options=compiler_options(fast=True) or None)
    def run(inputs: Any, traced: Any, cotangents: Any) -> Any:
        def forward(inputs: Any) -> Any:
            out = ao.attention(**inputs, **traced, **static, impl=impl, metadata=metadata, return_logsumexp=logsumexp)
            return out.attention_outputs, out.logsumexp

        results, pull_back = jax.vjp(forward, inputs)
        return results, pull_back(cotangents)[0]

    inputs = {**dict(zip(("query", "key", "value"), map(jnp.asarray, drawn.arrays), strict=True)), **differentiated}
    cotangents = (jnp.asarray(drawn.d_output), jnp.asarray(drawn.d_logsumexp) if logsumexp else None)
    (output, found_logsumexp), gradients = run(inputs, traced, cotangents)
    got = {"output": output, **({"logsumexp": found_logsumexp} if logsumexp else {}), **gradients}
    exact, plain = (which(*drawn.arrays, drawn.law) for which in (reference.attention, reference.plain))
    rounding = float(np.finfo(np.float32).eps) * exact.largest_logit
    law, plain = (_quantities(result, drawn, logsumexp) for result in (exact, plain))
    shares = {}
    for name, value in got.items():
        error, bound = numeric.compare(value, law[name], plain[name], 4.0 if name in ("output", "logsumexp") else 6.0, rounding)
        shares[name] = error / bound if bound else (0.0 if error == 0 else float("inf"))
    return shares


def _quantities(result: reference.Attention, drawn: Drawn, logsumexp: bool) -> dict[str, np.ndarray]:
    gradients = result.gradients(drawn.d_output, drawn.d_logsumexp if logsumexp else None)
    found = {"output": result.output, "logsumexp": result.logsumexp}
    found |= {"query": gradients.query, "key": gradients.key, "value": gradients.value}
    return found | {
        name: value for name, value in (("softmax_aux", gradients.sinks), ("bias", gradients.bias)) if value is not None
    }


# ---------------------------------------------------------------- the cases


def _ids(rng: np.random.Generator, *lengths: int) -> tuple[np.ndarray, ...]:
    return tuple(np.sort(rng.integers(-1, 3, (B, n)), axis=1).astype(np.int32) for n in lengths)


def _segments(T: int, S: int, **others: Any) -> Any:
    def options(rng: np.random.Generator) -> dict[str, Any]:
        q, kv = _ids(rng, T, S)
        return {"q_segment_ids": q, "kv_segment_ids": kv, **others}

    return options


def _scattered(b: int, h: int, t: int, s: int, static: bool = False, **others: Any) -> Any:
    def options(rng: np.random.Generator) -> dict[str, Any]:
        array = rng.random((b, h, t, s)) < 0.7
        array[..., s // 3 : s // 3 + 140] &= np.arange(t)[:, None] < t // 2  # leaves a tile empty, for one half of the queries
        array[..., min(5, t - 1), :] &= t == 1
        array[..., 7] = False
        return {"mask": masks.Dense(array) if static else array, **others}

    return options


def _fixed(**options: Any) -> Any:
    return lambda rng: options


def _as_array(options: dict[str, Any]) -> dict[str, Any]:
    return {"mask": options["mask"].array.array}


def _position(T: int, S: int) -> np.ndarray:
    return np.arange(S)[None, :] - np.arange(T)[:, None]


_SHARED = _position(300, 300)
_KEY, _QUERY = np.arange(300)[None, :], np.arange(300)[:, None]
_OFFSETS = np.array([60, 170], np.int32)

CASES = {
    case.name: case
    for case in (
        Case("plain", 256, 256, _fixed()),
        Case("ragged", 200, 300, _fixed()),
        Case("causal", 300, 300, _fixed(causal=True)),
        Case("causal bfloat16", 300, 300, _fixed(causal=True), dtype="bfloat16", D=128, Dv=128),
        Case("causal cap wide", 300, 300, _fixed(causal=True, logits_soft_cap=2.5), D=144, Dv=40),
        Case("causal offset", 200, 300, _fixed(causal=True, query_offset=40)),
        Case("causal empty rows", 300, 200, _fixed(causal=True, query_offset=-100)),
        Case("window", 300, 300, _fixed(sliding_window=(40, 10))),
        Case("window sinks", 300, 300, lambda rng: {"sliding_window": (20, 0), "softmax_aux": _sinks(rng)}),
        Case("chunked", 300, 300, _fixed(mask=masks.Chunked(70) & masks.Causal()), lambda _: {"mask": _chunks()}),
        Case("prefix", 300, 300, _fixed(mask=masks.PrefixLM(150)), lambda _: {"mask": (_SHARED <= 0) | (_KEY < 150)}),
        Case("not", 300, 300, _fixed(mask=~masks.Window(30, 30)), lambda _: {"mask": np.abs(_SHARED) > 30}),
        Case(
            "or",
            300,
            300,
            _fixed(mask=masks.Window(30, 0) | masks.Dense(np.arange(300)[None, :] < 7)),
            lambda _: {"mask": ((_SHARED <= 0) & (_SHARED >= -30)) | (_KEY + 0 * _QUERY < 7)},
        ),
        Case("static array", 200, 300, _scattered(1, 1, 200, 300, static=True), _as_array),
        Case("static array of samples and heads", 200, 300, _scattered(B, H, 200, 300, static=True), _as_array),
        Case("segments", 300, 260, _segments(300, 260)),
        Case("causal segments bfloat16", 300, 300, _segments(300, 300, causal=True), dtype="bfloat16", D=64, Dv=64),
        Case("lengths", 300, 260, _fixed(q_lengths=np.array([300, 90]), kv_lengths=np.array([0, 200]))),
        Case("traced offsets", 100, 300, _fixed(causal=True, query_offset=_OFFSETS)),
        Case("traced offsets window", 100, 300, _fixed(causal=True, sliding_window=(50, 0), query_offset=_OFFSETS)),
        Case("array of keys", 300, 260, _scattered(B, 1, 1, 260)),
        Case("array of samples", 200, 300, _scattered(B, 1, 200, 300, causal=True, query_offset=90)),
        Case("array of heads", 200, 300, _scattered(1, H, 200, 300)),
        Case(
            "everything",
            200,
            300,
            lambda rng: {
                **_scattered(B, H, 200, 300, causal=True, query_offset=_OFFSETS)(rng),
                **_segments(200, 300, logits_soft_cap=3.0)(rng),
                "kv_lengths": np.array([290, 120]),
                "softmax_aux": _sinks(rng),
            },
        ),
        Case("decode", 1, 300, _fixed(causal=True, kv_lengths=np.array([100, 300])), K=1),
        Case("sinks of minus infinity", 130, 130, lambda rng: {**_scattered(B, 1, 130, 130)(rng), "softmax_aux": _no_sinks(rng)}),
    )
}


def _biased(b: int, h: int, T: int, S: int, dtype: Any = np.float32, **others: Any) -> Any:
    def options(rng: np.random.Generator) -> dict[str, Any]:
        bias = rng.normal(0, 2, (b, h, T, S))
        blocked = rng.random(bias.shape) < 0.2
        blocked[..., 5, :] = blocked[..., 7] = True
        return {"bias": np.where(blocked, -np.inf, bias).astype(dtype), **others}

    return options


FLASH_CASES = {
    case.name: case
    for case in (
        Case("plain", 256, 256, _fixed(), K=H),
        Case("ragged value dim", 200, 300, _fixed(), K=H, Dv=40),
        Case("causal", 300, 300, _fixed(causal=True), K=H),
        Case("causal wide bfloat16", 300, 300, _fixed(causal=True), K=H, D=128, Dv=128, dtype="bfloat16"),
        Case("causal hidden keys", 130, 300, _fixed(causal=True, query_offset=0), K=H),
        Case("causal more queries", 300, 130, _fixed(causal=True, query_offset=0), K=H),
        Case(
            "causal segments sinks",
            300,
            300,
            lambda rng: {**_segments(300, 300)(rng), "causal": True, "softmax_aux": _sinks(rng)},
            K=H,
        ),
        Case("lengths", 300, 260, _fixed(q_lengths=np.array([300, 90]), kv_lengths=np.array([0, 200])), K=H),
        Case("bias", 200, 300, _biased(B, H, 200, 300)),
        Case("bias bfloat16", 200, 300, _biased(1, H, 200, 300, ml_dtypes.bfloat16), D=128, Dv=128, dtype="bfloat16"),
        Case("bias scale", 200, 300, _biased(B, 1, 200, 300, softmax_scale=-1.7)),
        Case("bias scale zero", 200, 300, _biased(B, 1, 200, 300, softmax_scale=0.0)),
        Case("sinks of minus infinity", 130, 130, lambda rng: {**_segments(130, 130)(rng), "softmax_aux": _no_sinks(rng)}, K=H),
        Case(
            "bias sinks of minus infinity",
            130,
            130,
            lambda rng: {**_biased(1, H, 130, 130)(rng), "softmax_aux": _no_sinks(rng)},
        ),
        Case(
            "bias everything",
            200,
            300,
            lambda rng: {
                **_scattered(B, 1, 200, 300, causal=True, query_offset=_OFFSETS)(rng),
                **_segments(200, 300, sliding_window=(90, 0))(rng),
                **_biased(1, H, 200, 300)(rng),
                "kv_lengths": np.array([290, 120]),
                "softmax_aux": _sinks(rng),
            },
        ),
    )
}

WINDOW_CASES = {
    case.name: case
    for case in (
        Case("window", 300, 300, _fixed(sliding_window=(40, 10)), K=H),
        Case("window causal", 300, 300, _fixed(causal=True, sliding_window=(40, 60)), K=H),
        Case("window open bfloat16", 300, 300, _fixed(sliding_window=(None, 10)), K=H, D=128, Dv=128, dtype="bfloat16"),
    )
}


def _sinks(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(1.0, 1.0, (H, 2)).astype(np.float32)


def _no_sinks(rng: np.random.Generator) -> np.ndarray:
    """Return sinks that are all -inf for one head and one of them for another."""
    sinks = _sinks(rng)
    sinks[0], sinks[1, 0] = -np.inf, -np.inf
    return sinks


@functools.cache
def _chunks() -> np.ndarray:
    return (_SHARED <= 0) & (_KEY // 70 == _QUERY // 70)
