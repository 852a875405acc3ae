"""Fetch and read the models of others: AntiBERTy 0.1.3 and Sapiens 1.0.3, whose weights lie in their Python wheels.

Nothing of the packages is installed or run. A wheel is a zip file; the tensors in it are read with `weights_only=True`
and put into the classes of transformers that have the same layers.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crepe_diffusion.errors import InputError

__all__ = ["FOLDER", "AntiBERTy", "Sapiens", "fetch", "load_antiberty", "load_sapiens"]

FOLDER = Path("data/antibodies")
VERSIONS = {"antiberty": "0.1.3", "sapiens": "1.0.3"}
SPECIES = ("camel", "human", "mouse", "rabbit", "rat", "rhesus")
N_RESIDUES = 20


def fetch(folder: Path = FOLDER) -> None:
    """Download both wheels (104 MB) without their dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *wanted]
    if subprocess.run(command, check=False).returncode:
        raise InputError(f"pip could not download {' and '.join(wanted)}: put their wheels in {folder} yourself")


def _read(name: str, member: str, folder: Path) -> io.BytesIO:
    path = folder / f"{name}-{VERSIONS[name]}-py3-none-any.whl"
    if not path.exists():
        raise InputError(f"no wheel {path}: run `python -m studies.antibodies fetch --data {folder}` first")
    with zipfile.ZipFile(path) as wheel:
        return io.BytesIO(wheel.read(member))


class Residues(nn.Module):
    """A network with ids of its own, as a function of residues 0 .. 19 (A C D ... Y) and the mask, 20.

    `forward(x)` gives logits (rows, length, 21). Both networks list the residues alphabetically from `first` on, and
    frame a sequence by a token before and one after it.
    """

    def __init__(self, network: nn.Module, first: int, mask: int, frame: tuple[int, int], longest: int):
        super().__init__()
        self.network, self.first, self.frame, self.longest = network, first, frame, longest
        ids = torch.arange(first, first + N_RESIDUES)
        self.register_buffer("ids", torch.cat([ids, torch.tensor([mask])]))

    def framed(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            raise InputError(
                f"{type(self).__name__} takes {self.longest} residues at most, got {x.shape[1]}: give the variable"
                " domain alone"
            )
        wrong = x[(x < 0) | (x > N_RESIDUES)]
        if len(wrong):
            raise InputError(
                f"residues are tokens 0 to {N_RESIDUES - 1}, and {N_RESIDUES} where one is to be drawn, got"
                f" {int(wrong[0])}: `encode` makes tokens of letters"
            )
        before, after = (torch.full_like(x[:, :1], v) for v in self.frame)
        return torch.cat([before, self.ids[x], after], 1)  # type: ignore[index]

    def residues(self, logits: Tensor) -> Tensor:
        """Logits of residues, without the frame; the mask is never drawn."""
        chosen = logits[:, 1:-1, self.first : self.first + N_RESIDUES]
        return torch.cat([chosen, torch.full_like(chosen[..., :1], -torch.inf)], -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.residues(self.network(self.framed(x)).logits)


class Sapiens(Residues):
    """Human antibody repertoires, one network per chain (Prihoda et al. 2022)."""


class AntiBERTy(Residues):
    """Antibodies of six species (Ruffolo, Gray and Sulam 2021), with a head that tells the species."""

    def __init__(self, network: nn.Module, species: nn.Linear, **options: Any):
        super().__init__(network, **options)
        self.species = species

    def forward(self, x: Tensor) -> Tensor:
        return self.residues(self.network(self.framed(x)).prediction_logits)

    def log_species(self, x: Tensor) -> Tensor:
        """Log-probabilities of the species, (rows, 6), of complete sequences."""
        pooled = self.network.bert(self.framed(x)).pooler_output  # type: ignore[operator]
        return self.species(pooled).log_softmax(-1)

    def log_human(self, x: Tensor) -> Tensor:
        """`log P(human)`, (rows,), in pieces of 64 rows."""
        with torch.no_grad():
            return torch.cat([self.log_species(part)[:, SPECIES.index("human")] for part in x.split(64)])


def load_sapiens(chain: str = "H", folder: Path = FOLDER) -> Sapiens:
    """Sapiens for heavy (`"H"`) or light (`"L"`) chains."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    if chain not in ("H", "L"):
        raise InputError(f'chain must be "H" or "L", got {chain!r}')
    file = _read("sapiens", f"sapiens/models/v1/checkpoint_v{chain.lower()}.pt", folder)
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(file, map_location="cpu", weights_only=True)["model"]
    config = RobertaConfig(
        vocab_size=25, hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256,
        max_position_embeddings=146, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        layer_norm_eps=1e-5,
    )  # fmt: skip
    network = RobertaForMaskedLM(config)
    tensors = {_sapiens_name(name): value.float() for name, value in found.items()}
    tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, 128)  # this network has none
    tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"]
    _load(network, tensors)
    return Sapiens(network, first=4, mask=24, frame=(0, 2), longest=142).eval().requires_grad_(False)


def _sapiens_name(name: str) -> str:
    """A name of fairseq in the words of transformers."""
    for old, new in (
        ("decoder.sentence_encoder.layers.", "roberta.encoder.layer."),
        ("decoder.sentence_encoder.embed_tokens", "roberta.embeddings.word_embeddings"),
        ("decoder.sentence_encoder.embed_positions", "roberta.embeddings.position_embeddings"),
        ("decoder.sentence_encoder.emb_layer_norm", "roberta.embeddings.LayerNorm"),
        ("decoder.lm_head.weight", "lm_head.decoder.weight"),
        ("decoder.lm_head", "lm_head"),
        (".self_attn.k_proj", ".attention.self.key"),
        (".self_attn.v_proj", ".attention.self.value"),
        (".self_attn.q_proj", ".attention.self.query"),
        (".self_attn.out_proj", ".attention.output.dense"),
        (".self_attn_layer_norm", ".attention.output.LayerNorm"),
        (".fc1", ".intermediate.dense"),
        (".fc2", ".output.dense"),
        (".final_layer_norm", ".output.LayerNorm"),
    ):
        name = name.replace(old, new)
    return name


def load_antiberty(folder: Path = FOLDER) -> AntiBERTy:
    """AntiBERTy with its head for species."""
    from transformers import BertConfig, BertForPreTraining

    member = "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin"
    found = torch.load(_read("antiberty", member, folder), map_location="cpu", weights_only=True)
    config = BertConfig(
        vocab_size=25, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    network = BertForPreTraining(config)
    heads = ("cls.species", "cls.chain", "cls.graft")
    tensors = {k: v for k, v in found.items() if not k.startswith(heads) and k != "bert.embeddings.position_ids"}
    # A head of BERT that these models do not have, and that is not used.
    tensors |= {f"cls.seq_relationship.{k}": v for k, v in network.cls.seq_relationship.state_dict().items()}
    _load(network, tensors)
    species = nn.Linear(512, len(SPECIES))
    species.load_state_dict({k: found[f"cls.species.{k}"] for k in ("weight", "bias")})
    model = AntiBERTy(network, species, first=5, mask=4, frame=(2, 3), longest=510)
    return model.eval().requires_grad_(False)


def _load(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """All tensors and no others, but for numbers that a class derives from its settings."""
    missing, unknown = network.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.endswith(("position_ids", "token_type_ids"))]
    if missing or unknown:
        raise InputError(f"the wheel does not hold this network: missing {missing}, not known {list(unknown)}")
