"""Peers that need another package: ejkernel's kernels on XLA, and PyTorch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops.bench.jax_systems import prepare_jax
from attention_ops.bench.problems import Problem
from attention_ops.bench.systems import Prepared, Unavailable
from attention_ops.device import cores

EJKERNEL_BLOCK = 128
"""Query and key block of ejkernel's kernels: what its own configuration takes when nothing is tuned."""


@functools.lru_cache(maxsize=16)
def _ejkernel(algorithm: str) -> Any:
    """Return a kernel registered for XLA. Called directly it neither tunes nor prints."""
    if importlib.util.find_spec("ejkernel") is None:
        raise Unavailable("ejkernel is not installed")
    import ejkernel.kernels  # noqa: F401  registers the kernels
    from ejkernel.kernels._registry import Backend, Platform, kernel_registry

    return kernel_registry.get(algorithm=algorithm, platform=Platform.XLA, backend=Backend.ANY)


def _ej_data(problem: Problem, native_ids: bool) -> dict[str, np.ndarray | None]:
    """Segment ids where a kernel knows them, and a boolean [B, 1, T, S] for what it has no other word for."""
    pattern = problem.case.pattern
    ids = problem.segment_ids if native_ids else None
    by_array = pattern.blocks or pattern.lengths or (pattern.documents and not native_ids)
    allowed = problem.allowed() if by_array else None
    if allowed is not None:
        allowed = np.broadcast_to(allowed, (problem.case.B, *allowed.shape[1:]))
    return {"attention_mask": allowed, "q_segment_ids": ids, "kv_segment_ids": ids}


def _ej_options(problem: Problem) -> dict[str, Any]:
    from ejkernel.ops import BwdParams, FwdParams

    pattern, case = problem.case.pattern, problem.case
    blocks = {"q_blocksize": min(EJKERNEL_BLOCK, case.T), "kv_blocksize": min(EJKERNEL_BLOCK, case.S)}
    return {
        "causal": pattern.causal,
        "sliding_window": (pattern.window - 1, 0) if pattern.window else None,
        "fwd_params": FwdParams(**blocks),
        "bwd_params": BwdParams(**blocks),
    }


def ej_flash(problem: Problem) -> Prepared:
    """ejkernel's chunked attention."""
    kernel = _ejkernel("flash_attention")
    options = _ej_options(problem)
    return prepare_jax(
        problem, lambda q, k, v, extra: kernel(q, k, v, **extra, **options), _ej_data(problem, True), note=_blocks(options)
    )


def ej_attention(problem: Problem) -> Prepared:
    """ejkernel's dense attention, in the dtype of the inputs with a float32 softmax; its weights are not asked for."""
    kernel = _ejkernel("attention")
    options = _ej_options(problem) | {"dtype": jnp.dtype(problem.case.dtype), "softmax_dtype": jnp.float32}
    return prepare_jax(problem, lambda q, k, v, extra: kernel(q, k, v, **extra, **options)[0], _ej_data(problem, False))


def ej_blocksparse(problem: Problem) -> Prepared:
    """ejkernel's block-sparse attention, in its own layout [B, H, T, D]; on XLA it is dense."""
    kernel = _ejkernel("blocksparse_attention")
    options = _ej_options(problem)
    return prepare_jax(
        problem, lambda q, k, v, extra: kernel(q, k, v, **extra, **options), _ej_data(problem, True), heads_first=True
    )


def _blocks(options: dict[str, Any]) -> str:
    return f"blocks {options['fwd_params'].q_blocksize} x {options['fwd_params'].kv_blocksize}"


@functools.cache
def _torch() -> Any:
    if jax.default_backend() != "cpu":
        raise Unavailable(f"PyTorch is measured on the CPU only, and JAX runs on {jax.default_backend()}")
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed: pip install 'attention-ops[peers]'")
    import torch  # pyright: ignore[reportMissingImports]  # in the extra `peers`

    torch.set_num_threads(cores())
    return torch


def _torch_tensor(torch: Any, array: np.ndarray, dtype: str, leaf: bool) -> Any:
    """[B, T, H, D] to a contiguous [B, H, T, D], the layout PyTorch is fastest in."""
    tensor = torch.from_numpy(array).transpose(1, 2).contiguous().to(getattr(torch, dtype))
    return tensor.requires_grad_() if leaf else tensor


def torch_sdpa(problem: Problem) -> Prepared:
    """`scaled_dot_product_attention`, grouped heads by `enable_gqa`, everything but causal as a boolean mask made beforehand."""
    torch, case = _torch(), problem.case
    has_gradient = case.kind == "gradient"
    query, key, value = (_torch_tensor(torch, x, case.dtype, has_gradient) for x in (problem.query, problem.key, problem.value))
    cotangent = _torch_tensor(torch, problem.cotangent, case.dtype, False) if has_gradient else None
    options: dict[str, Any] = {"enable_gqa": case.H != case.K}
    if case.pattern.is_plain:
        options["is_causal"] = True
    else:
        allowed = problem.allowed()
        options["attn_mask"] = None if allowed is None else torch.from_numpy(np.array(allowed))

    def call() -> tuple[Any, ...]:
        with contextlib.nullcontext() if has_gradient else torch.no_grad():
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        return (output, *torch.autograd.grad(output, (query, key, value), cotangent)) if has_gradient else (output,)

    return Prepared(call, _torch_outputs)


def torch_folded(problem: Problem) -> Prepared:
    """The same for one query per sequence, the query heads of a key/value head as its queries: keys are read once."""
    case = problem.case
    if case.T != 1 or case.kind != "forward" or case.pattern.causal:
        raise Unavailable(f"groups are folded for one query that sees all keys up to a length, not for T {case.T}")
    torch = _torch()
    groups = problem.query.reshape(case.B, case.K, case.H // case.K, case.D)
    query = torch.from_numpy(groups.copy()).to(getattr(torch, case.dtype))
    key, value = (_torch_tensor(torch, x, case.dtype, False) for x in (problem.key, problem.value))
    allowed = problem.allowed()
    mask = None if allowed is None else torch.from_numpy(np.array(allowed))

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return Prepared(call, lambda output: (output.float().numpy().reshape(case.B, 1, case.H, case.D),))


def _torch_outputs(results: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    return tuple(x.detach().float().transpose(1, 2).numpy() for x in results)
