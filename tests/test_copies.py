"""Metadata, plans, configs, requests and masks as values: copied and pickled they are equal, and as frozen as before."""

from __future__ import annotations

import copy
import pathlib
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import masks
from attention_ops.metadata import OperationMetadata
from attention_ops.request import make_request

Q, K = (jax.ShapeDtypeStruct((2, 16, heads, 8), "bfloat16") for heads in (4, 2))
METADATA = OperationMetadata(
    runtime_dtype="bfloat16",
    block_sizes=(16, 16),
    operation_configs={"flash": ("a", 2)},
    partition_axis={"batch_axis": ["dp"]},
)
STATIC = masks.Causal(2) & masks.Dense(np.tril(np.ones((16, 16), bool))) | ~masks.Chunked(4, 0)
RUN_TIME = (
    masks.Segments(jnp.array([[0] * 9 + [-1] * 7])) & masks.Lengths(kv=jnp.array([3, 16])) & masks.PrefixLM(jnp.array(4), 0)
)
CONFIG = ao.load_config(pathlib.Path(__file__).parents[1] / "configs" / "gemma2_2b.yaml")
PLAN = ao.plan("flash", Q, K, K, causal=True, kv_lengths=jax.ShapeDtypeStruct((2,), "int32"), mask=STATIC, metadata=METADATA)
VALUES: dict[str, Any] = {
    "metadata": METADATA,
    "plan": PLAN,
    "plan of a chain": ao.plan(["cudnn_flash", "flash"], Q, K, K, device="a100"),
    "spec": PLAN.spec,
    "config": CONFIG,
    "layer": CONFIG.build("local"),
    "static mask": STATIC,
    "abstract mask": RUN_TIME.abstract(),
    "device": ao.DeviceProfile.named("h100"),
}
WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_copy_is_equal_with_the_same_hash_and_text(value, way):
    hash(value)
    found = way(value)
    assert type(found) is type(value)
    assert found == value
    assert hash(found) == hash(value)
    assert str(found) == str(value) or value is PLAN.spec  # which holds a set, in any order


@every_way
def test_the_array_of_a_copied_mask_cannot_be_written_to(way):
    dense = next(leaf for leaf in way(STATIC).leaves() if isinstance(leaf, masks.Dense))
    with pytest.raises(ValueError, match="read-only"):
        dense.array.array[0] = True


@every_way
def test_a_copied_mask_of_run_time_data_hides_the_same(way):
    np.testing.assert_array_equal(way(RUN_TIME).dense(16, 16), RUN_TIME.dense(16, 16))


@every_way
def test_a_copied_request_gives_the_same(way):
    arrays = [jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, heads, 8)), jnp.float32) for heads in (2, 1, 1)]
    request = way(make_request(*arrays, {"causal": True, "kv_lengths": jnp.array([5])}, OperationMetadata()))
    operation = ao.OperationRegistry.create("vanilla")
    wanted = operation(*arrays, causal=True, kv_lengths=jnp.array([5])).attention_outputs
    np.testing.assert_allclose(operation.forward_native(request).attention_outputs, wanted, atol=1e-6)


@every_way
def test_a_copied_operation_is_ready_to_call(way):
    operation = way(ao.OperationRegistry.create("flash", METADATA))
    assert operation.metadata == METADATA
    assert operation.plan(Q, K, K).route == "flash/native"


@every_way
def test_the_plan_of_an_operation_that_cannot_be_imported_finds_it_by_its_name(registry, way):
    class Local(ao.OperationImpl):
        name = "local"

        def forward_native(self, request: ao.AttentionRequest) -> Any:
            return request.query

    registry.register(Local)
    other = registry.register(name="other")(Local)
    for name, implementation in (("local", Local), ("other", other)):
        plan = way(ao.plan(name, Q, Q, Q, differentiable=False))
        assert plan.implementation is implementation
    pickled = pickle.dumps(ao.plan("local", Q, Q, Q, differentiable=False))
    registry.unregister("local")
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'local'"):
        pickle.loads(pickled)


@every_way
def test_an_error_keeps_its_text_and_decisions(way):
    with pytest.raises(ao.NoRouteError) as caught:
        ao.plan(["cudnn_flash"], Q, K, K, device="cpu")
    found = way(caught.value)
    assert str(found) == str(caught.value)
    assert found.decisions == caught.value.decisions
    assert found.decisions
