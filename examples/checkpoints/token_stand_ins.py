"""Language models in miniature: the real classes, or their interface, with small random weights and a few words.

Each function stands for the lines that load the real checkpoint, which are its docstring. What they say is noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "rug"]
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def _tokenizer(words: list[str], letters: bool = False, special: bool = True) -> Any:
    """A tokenizer of whole words, or of letters; without special tokens it is like that of GPT-2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = [*SPECIAL, *words] if special else words
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, unk_token=known[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated") if letters else pre_tokenizers.Whitespace()
    if not special:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "unk": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{f"{k}_token": v for k, v in names.items()})


def bert(seed: int = 0) -> tuple[Any, Any]:
    """`name = "google-bert/bert-base-uncased"`, `BertForMaskedLM.from_pretrained(name).eval()`,
    `AutoTokenizer.from_pretrained(name)`
    """
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    config = BertConfig(vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=32, pad_token_id=0, **SIZE)
    return BertForMaskedLM(config).eval(), _tokenizer(WORDS)


def esm(seed: int = 0) -> tuple[Any, Any]:
    """`name = "facebook/esm2_t30_150M_UR50D"`, `EsmForMaskedLM.from_pretrained(name).eval()`,
    `AutoTokenizer.from_pretrained(name)`
    """
    from transformers import EsmConfig, EsmForMaskedLM

    torch.manual_seed(seed)
    residues = list("LAGVSERTIDPKQNFYMHWC")
    config = EsmConfig(
        vocab_size=len(SPECIAL) + len(residues),
        mask_token_id=3,
        pad_token_id=0,
        token_dropout=True,
        position_embedding_type="rotary",
        emb_layer_norm_before=False,
        **SIZE,
    )
    return EsmForMaskedLM(config).eval(), _tokenizer(residues, letters=True)


def llada(seed: int = 0) -> tuple[Any, Any]:
    """`name = "GSAI-ML/LLaDA-8B-Base"`, `AutoModel.from_pretrained(name, trust_remote_code=True).eval()`,
    `AutoTokenizer.from_pretrained(name)`
    """
    return bert(seed)  # like it, a function from ids to `.logits`, without a time


class Timed(nn.Module):
    """`f(ids, sigma)`: the interface of SEDD and MDLM, around a small network."""

    def __init__(self, vocab_size: int, width: int = 16):
        super().__init__()
        self.tokens, self.noise = nn.Embedding(vocab_size, width), nn.Linear(1, width)
        self.mix = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor, sigma: Tensor) -> Tensor:
        return self.head(self.mix(self.tokens(ids) + self.noise(sigma[:, None])[:, None]))


class Scores(Timed):
    """As SEDD scales them: `score_v = p(v) / (e^sigma - 1)` if the head's numbers are log-probabilities."""

    def forward(self, ids: Tensor, sigma: Tensor) -> Tensor:
        log_score = super().forward(ids, sigma).log_softmax(-1) - sigma.expm1().log()[:, None, None]
        return log_score.scatter(-1, ids[..., None], 0.0)


def sedd(seed: int = 0) -> tuple[Any, Any]:
    """`model, graph, noise = load_model("louaaron/sedd-medium", device)` of its repository,
    `AutoTokenizer.from_pretrained("gpt2")`
    """
    torch.manual_seed(seed)
    return Scores(len(WORDS) + 1).eval(), _tokenizer(WORDS, special=False)


def mdlm(seed: int = 0) -> tuple[Any, Any]:
    """`name = "kuleshov-group/mdlm-owt"`, `AutoModelForMaskedLM.from_pretrained(name, trust_remote_code=True).eval()`,
    `AutoTokenizer.from_pretrained("gpt2")`
    """
    torch.manual_seed(seed)
    return Timed(len(WORDS) + 1).eval(), _tokenizer(WORDS, special=False)
