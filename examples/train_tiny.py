"""Train a small decoder on the sources of Python's standard library, with its attention chosen by name.

    pip install flax optax                  (and matplotlib for --plot)
    python examples/train_tiny.py --impl flash --plot loss.png
    python examples/train_tiny.py --config configs/gemma2_2b.yaml --steps 100

The text is read as bytes, so there is no tokenizer. The config is that of a real model; its attention is used in miniature
(`config.reduced`), each layer with its own window, cap and sinks. Every operation gives the same curve, up to the order in
which sums are taken: in float32 no loss of 300 steps differs by more than 1e-5. The operation is no hyperparameter.
"""

import argparse
import contextlib
import functools
import importlib.util
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import attention_ops as ao

INSTALL = "pip install flax optax"
INSTALL_PLOT = "pip install matplotlib"
try:
    import optax
    from flax import nnx
except ModuleNotFoundError as error:
    print(f"not installed: {error.name}. {INSTALL}", file=sys.stderr)
    sys.exit(2)

CONFIG = Path(__file__).parents[1] / "configs" / "smollm2_135m.yaml"


@dataclass(frozen=True)
class Size:
    """The model and its batches. The default trains 300 steps in about a minute on two CPU cores."""

    layers: int = 3
    width: int = 128
    kv_heads: int = 2
    head_dim: int = 32
    length: int = 128
    batch: int = 8
    learning_rate: float = 3e-3


@functools.cache
def corpus() -> np.ndarray:
    """The bytes of the standard library's top-level modules, in order of their names: about 5 MB."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)


def batches(size: Size, seed: int = 0) -> Iterator[Int[np.ndarray, "B T+1"]]:
    """Yield random places in the corpus, the same ones for the same seed."""
    text, rng = corpus(), np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - size.length, size.batch)
        yield text[starts[:, None] + np.arange(size.length + 1)].astype(np.int32)


def attention_of(config: ao.AttentionConfig, size: Size, dtype: str) -> list[Any]:
    """The attention of the first layers, in miniature. `dtype` stands in for the config's own."""
    small = config.reduced(num_kv_heads=size.kv_heads, head_dim=size.head_dim, max_length=size.length)
    small = small.model_copy(update={"runtime_dtype": dtype})
    if size.layers > small.num_layers:
        raise ValueError(f"config {config.name} has {small.num_layers} layers, and {size.layers} are asked for")
    for layer in range(size.layers):
        if not small.layer(layer).causal or small.layer(layer).kv_length is not None:
            raise ValueError(f"config {config.name}: layer {layer} is no causal self-attention, which a decoder needs")
    return [small.build(layer) for layer in range(size.layers)]


# ---------------------------------------------------------------- the model


class Attention(nnx.Module):
    """Projections around `attend`, which knows what is causal, windowed or capped. Rotary positions; sinks are learned."""

    def __init__(self, attend: Any, width: int, dtype: str, rngs: nnx.Rngs):
        at = attend.facts
        self.attend = attend
        self.value_dim = at.value_head_dim or at.head_dim
        self.query = nnx.LinearGeneral(width, (at.num_heads, at.head_dim), use_bias=False, dtype=dtype, rngs=rngs)
        self.key = nnx.LinearGeneral(width, (at.num_kv_heads, at.head_dim), use_bias=False, dtype=dtype, rngs=rngs)
        self.value = nnx.LinearGeneral(width, (at.num_kv_heads, self.value_dim), use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral((at.num_heads, self.value_dim), width, axis=(-2, -1), use_bias=False, dtype=dtype, rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros(at.num_heads)) if at.sinks else None

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        sinks = {} if self.sinks is None else {"softmax_aux": self.sinks[...]}
        return self.out(self.attend(rotate(self.query(x)), rotate(self.key(x)), self.value(x), **sinks).attention_outputs)


class Block(nnx.Module):
    def __init__(self, attend: Any, width: int, dtype: str, rngs: nnx.Rngs):
        self.before_attention = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(attend, width, dtype, rngs)
        self.before_mlp = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(jax.nn.gelu(self.up(self.before_mlp(x))))


class Decoder(nnx.Module):
    """A pre-norm decoder over bytes. Parameters are float32; `dtype` is that of activations."""

    def __init__(self, attends: list[Any], width: int, dtype: str, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(256, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(attend, width, dtype, rngs) for attend in attends])
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.logits = nnx.Linear(width, 256, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T 256"]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x)).astype(jnp.float32)


def rotate(x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Rotary positions, base 10000, pairing component i with i + D/2."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# ---------------------------------------------------------------- training


def train(
    attends: list[Any], steps: int, size: Size = Size(), dtype: str = "float32", report: Callable[[int, float], Any] | None = None
) -> list[float]:
    """Return the loss of every step, in nats per byte; log(256) = 5.55 knows nothing. `report` is told each as it comes."""
    model = Decoder(attends, size.width, dtype, nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(
        0.1 * size.learning_rate, size.learning_rate, max(1, steps // 20), max(2, steps)
    )
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: Int[Array, "B T+1"]) -> Float[Array, ""]:
        def loss_of(model: nnx.Module) -> Float[Array, ""]:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
            return losses.mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    losses: list[float] = []
    for number, tokens in zip(range(1, steps + 1), batches(size), strict=False):
        losses.append(float(step(model, optimizer, tokens)))
        if report is not None:
            report(number, losses[-1])
    return losses


# ---------------------------------------------------------------- the command line


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show a bar on a terminal, and otherwise ten lines; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:

        def line(step: int, loss: float) -> None:
            if step % max(1, steps // 10) == 0:
                print(f"step {step}/{steps}  loss {loss:.3f}", file=sys.stderr)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def plot(losses: list[float], title: str, path: Path) -> None:
    """Save the curve: each step, and the mean of the last twenty."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(losses) + 1)
    means = [np.mean(losses[max(0, step - 20) : step]) for step in steps]
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="each step")
    axes.plot(steps, means, color="#08519c", linewidth=2, label="mean of the last 20")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def steps(text: str) -> int:
        if (count := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"found {count}; allowed is 1 or more")
        return count

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", type=Path, default=CONFIG, help="attention and operation, used in miniature (default: %(default)s)")
    add("--impl", metavar="NAME", help="operation to use instead of the config's: vanilla, flash, blocksparse, auto ...")
    add("--steps", type=steps, default=300, help="default: %(default)s")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE.png", help="save the loss curve as a picture")
    add("--explain", action="store_true", help="print the plans: which routes ran, and why")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    config, size = ao.load_config(options.config), Size()
    if options.plot and not options.plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {options.plot}: there is no folder {options.plot.parent}")  # now, not after the training
    attends = attention_of(config, size, options.dtype)
    chosen = ao.use(options.impl) if options.impl else contextlib.nullcontext()
    began = time.perf_counter()
    with chosen, ao.record_plans() as plans, progress(options.steps) as report:
        losses = train(attends, options.steps, size, options.dtype, report)
    seconds = time.perf_counter() - began

    routes = ", ".join(dict.fromkeys(plan.route for plan in plans))
    last = float(np.mean(losses[-20:]))
    print(f"{config.name} in miniature by {routes}: {options.steps} steps of {size.batch * size.length} bytes in {seconds:.0f} s")
    print(f"loss {losses[0]:.3f} at first, {last:.3f} over the last {len(losses[-20:])} steps (nats per byte)")
    if options.plot:
        plot(losses, f"{config.name} in miniature, {routes}, {options.dtype}", options.plot)
        print(f"curve saved in {options.plot}")
    if options.explain:
        print(*dict.fromkeys(f"\n{plan}" for plan in plans), sep="\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        print(f"not installed: matplotlib. {INSTALL_PLOT}", file=sys.stderr)
        return 2
    try:
        run(options)
    except (ao.AttentionOpsError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
