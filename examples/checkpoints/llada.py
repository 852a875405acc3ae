"""LLaDA answers a question, without the bias of its own classifier-free guidance."""

from token_stand_ins import llada

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    network, tokenizer = llada()
    mask = tokenizer.mask_token_id  # 126336 in the real one, whose tokenizer does not tell
    question = [*tokenizer("the dog ran on the")["input_ids"], *[mask] * 4]
    model = cd.models.from_masked_lm(network, mask_id=mask, prompt=question, decode=tokenizer)
    target = cd.guided(model, model.hiding(), scale=1.5)  # its cfg_scale is 1 less
    out = cd.SMC(target, cd.ladder.linear(3), n_particles=n_draws, micro_batch=8).sample()
    print(model.decode(out.x[:3]), out.verdict())


if __name__ == "__main__":
    main()
