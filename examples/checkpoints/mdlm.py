"""MDLM writes texts that use one word more often: a black-box reward."""

import torch
from token_stand_ins import mdlm

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    network, tokenizer = mdlm()
    mask = len(tokenizer)  # 50257: appended to the vocabulary of GPT-2
    model = cd.models.from_mdlm(network, mask_id=mask, length=6, vocab_size=mask + 1, decode=tokenizer)
    (cat,) = tokenizer.convert_tokens_to_ids(["cat"])
    target = model.tilt(lambda ids: 2.0 * (ids == cat).sum(1).double(), on="mode")
    out = cd.SMC(target, cd.ladder.linear(5, 0.0, 0.999), n_particles=n_draws, micro_batch=8).sample()
    print(model.decode(out.x[:3]), out.mean(lambda ids: (ids == cat).sum(1).to(torch.float64)))


if __name__ == "__main__":
    main()
