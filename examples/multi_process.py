"""Train a small decoder over several processes: batch over dp, heads over tp, sequence over sp, on real text.

    python examples/multi_process.py                      # 2 processes of 4 CPU devices each, on this machine
    python examples/multi_process.py --single             # the same training on one device
    srun python examples/multi_process.py --cluster       # one process per host, found by jax.distributed.initialize()

The text is the source of Python's standard library. Every process prints nothing but the first, which prints the losses as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import sysconfig
import time

PROCESSES, DEVICES = 2, 4
AXES = {"dp": 2, "tp": 2, "sp": 2}
BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY = 4, 128, 64, 4, 2, 2, 256


def text(steps):
    """Return bytes of the standard library as [steps, BATCH, LENGTH + 1]."""
    import numpy as np

    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    needed = steps * BATCH * (LENGTH + 1)
    found = b""
    for file in files:
        found += file.read_bytes()
        if len(found) >= needed:
            break
    return np.frombuffer(found[:needed], np.uint8).reshape(steps, BATCH, LENGTH + 1).astype(np.int32)


def parameters(key):
    import jax

    def normal(shape):
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape) * shape[0] ** -0.5

    head = WIDTH // HEADS
    layers = [
        {
            "query": normal((WIDTH, HEADS, head)),
            "key": normal((WIDTH, KV_HEADS, head)),
            "value": normal((WIDTH, KV_HEADS, head)),
            "out": normal((HEADS * head, WIDTH)),
            "up": normal((WIDTH, 4 * WIDTH)),
            "down": normal((4 * WIDTH, WIDTH)),
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": normal((VOCABULARY, WIDTH)), "positions": normal((LENGTH, WIDTH)) * 0.1, "layers": layers}


def loss_of(parameters, tokens, metadata):
    import jax
    import jax.numpy as jnp

    import attention_ops as ao

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = parameters["embedding"][inputs] + parameters["positions"]
    for layer in parameters["layers"]:
        normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        query, key, value = (jnp.einsum("btw,whd->bthd", normed, layer[name]) for name in ("query", "key", "value"))
        attended = ao.attention(query, key, value, impl="auto", causal=True, metadata=metadata).attention_outputs
        x = x + attended.reshape(*attended.shape[:2], -1) @ layer["out"]
        normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(normed @ layer["up"]) @ layer["down"]
    logits = x @ parameters["embedding"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def train(steps, mesh):
    """Return the losses of `steps` steps of plain gradient descent; over a mesh if there is one."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import attention_ops as ao

    metadata = ao.OperationMetadata(mesh=mesh)
    weights, batches = parameters(jax.random.key(0)), text(steps)
    if mesh is not None:
        weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
        batches = jax.make_array_from_callback(
            batches.shape, NamedSharding(mesh, PartitionSpec(None, "dp")), lambda index, whole=batches: whole[index]
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights, batches, index):
        loss, gradient = jax.value_and_grad(loss_of)(weights, batches[index], metadata)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    losses = []
    for index in range(steps):
        weights, loss = step(weights, batches, index)
        losses.append(float(loss))
    return losses


def worker(arguments):
    """Be one of the processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = {}
    if not arguments.cluster:
        address, count, number = arguments.join.split(",")
        where = {"coordinator_address": address, "num_processes": int(count), "process_id": int(number)}
    jax.distributed.initialize(**where, initialization_timeout=60, heartbeat_timeout_seconds=20)
    if arguments.die is not None and jax.process_index() == 1:
        os._exit(arguments.die)
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    losses = train(arguments.steps, mesh)
    if jax.process_index() == 0:
        print(json.dumps({"processes": jax.process_count(), "devices": jax.device_count(), "losses": losses}), flush=True)
    jax.distributed.shutdown()


def launch(arguments):
    """Start the processes, and end all of them as soon as one has failed. Return 0 if none has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    command = [sys.executable, __file__, "--steps", str(arguments.steps)]
    if arguments.die is not None:
        command += ["--die", str(arguments.die)]
    running = [
        subprocess.Popen([*command, "--join", f"{address},{PROCESSES},{number}"], env=environment) for number in range(PROCESSES)
    ]
    try:
        while any(process.poll() is None for process in running):
            failed = [process for process in running if process.poll()]
            if failed:
                print(f"a process ended with {failed[0].returncode}; the others are ended too", file=sys.stderr)
                return 1
            time.sleep(0.1)
        return int(any(process.returncode for process in running))
    finally:
        for process in running:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--single", action="store_true", help="train on one device, without a mesh")
    parser.add_argument("--cluster", action="store_true", help="one of the processes that a cluster's launcher has started")
    parser.add_argument("--join", metavar="ADDRESS,PROCESSES,NUMBER", help="be one of several processes")
    parser.add_argument("--die", type=int, metavar="CODE", help="the second process dies with this code: see what happens")
    arguments = parser.parse_args()
    if arguments.single:
        print(json.dumps({"processes": 1, "devices": 1, "losses": train(arguments.steps, None)}))
    elif arguments.cluster or arguments.join:
        worker(arguments)
    else:
        sys.exit(launch(arguments))


if __name__ == "__main__":
    main()
