"""ESM-2 redesigns a loop, tilted towards few hydrophobic residues: a reward on tokens."""

import torch
from token_stand_ins import esm

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    network, tokenizer = esm()
    protein = tokenizer("MKT[MASK][MASK][MASK][MASK]LDE", return_tensors="pt")["input_ids"]
    model = cd.models.from_masked_lm(
        network, mask_id=tokenizer.mask_token_id, prompt=protein, forbidden=tokenizer.all_special_ids, decode=tokenizer
    )
    hydrophobic = torch.tensor(tokenizer.convert_tokens_to_ids(list("AILMFWV")))
    target = model.tilt(lambda ids: -torch.isin(ids, hydrophobic).sum(1).double(), on="mode")
    out = cd.SMC(target, cd.ladder.linear(3), n_particles=n_draws, micro_batch=64).sample()
    print(model.decode(out.x[:3]), out.mean(lambda ids: torch.isin(ids, hydrophobic).sum(1)))
    print(f"the network gives {float(model.mass(model.noise(), 1.0).mean()):.2f} to residues")


if __name__ == "__main__":
    main()
