"""The paper's own setting with networks that others published: SEDD-medium and MDLM, guided by a prompt.

    prompt  =  "The sentiment of the text is positive." and then masks;   guidance by what the prompt says of them

Nothing is downloaded here. `python -m studies.sentences published sedd-medium` is for a machine that has the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import crepe_diffusion as cd
from crepe_diffusion.models.tokens import LanguageModel
from studies.sentences.model import LABELS

__all__ = ["PUBLISHED", "Published", "by_prompt"]


def _sedd() -> Any:
    return import_module("load_model").load_model("louaaron/sedd-medium", "cpu")[0].eval()  # of its repository


def _mdlm() -> Any:
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained("kuleshov-group/mdlm-owt", trust_remote_code=True).eval()


@dataclass(frozen=True)
class Published:
    """How a network is loaded and adapted, and what has to be done before."""

    adapter: Callable[..., LanguageModel]
    load: Callable[[], Any]
    first: str

    def loaded(self) -> tuple[Any, Any]:
        """The network and the tokenizer of GPT-2; both are downloaded where they are not yet."""
        try:
            from transformers import AutoTokenizer

            return self.load(), AutoTokenizer.from_pretrained("gpt2")
        except (ImportError, OSError) as error:
            raise cd.InputError(f"the network is not here: {self.first}, where the internet can be reached") from error


PUBLISHED = {
    "sedd-medium": Published(
        cd.models.from_sedd,
        _sedd,
        "run `hf download louaaron/sedd-medium` and `hf download gpt2` with a clone of its code on PYTHONPATH",
    ),
    "mdlm": Published(cd.models.from_mdlm, _mdlm, "run `hf download kuleshov-group/mdlm-owt` and `hf download gpt2`"),
}


def by_prompt(
    preset: Published, network: Any, tokenizer: Any, label: str, strength: float, n_free: int
) -> tuple[LanguageModel, cd.Target]:
    """The model whose texts begin with the prompt, and its guided law, whose partner does not see the prompt."""
    if label not in LABELS:
        raise cd.InputError(f"label must be one of {', '.join(LABELS)}, got {label!r}")
    mask = len(tokenizer)  # 50257: appended to the vocabulary of GPT-2
    said = tokenizer(f"The sentiment of the text is {label}.", add_special_tokens=False)["input_ids"]
    model = preset.adapter(
        network, mask_id=mask, prompt=[*said, *[mask] * n_free], vocab_size=mask + 1, decode=tokenizer
    )
    return model, cd.guided(model, model.hiding(), strength)
