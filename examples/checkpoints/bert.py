"""BERT fills the gaps of a sentence, and the rest of it counts one and a half times: debiased guidance by a prompt."""

from token_stand_ins import bert

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    network, tokenizer = bert()
    sentence = tokenizer("the cat [MASK] [MASK] the [MASK]", return_tensors="pt")["input_ids"]
    model = cd.models.from_masked_lm(
        network,
        mask_id=tokenizer.mask_token_id,
        prompt=sentence,
        forbidden=tokenizer.all_special_ids,
        decode=tokenizer,
    )
    target = cd.guided(model, model.hiding(), scale=1.5)
    out = cd.ReplicaExchange(target, cd.ladder.linear(3), n_chains=4, micro_batch=64).sample(n_draws, burn_in=10)
    print(model.decode(out.x[:3]), out.verdict())


if __name__ == "__main__":
    main()
