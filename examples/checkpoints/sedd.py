"""SEDD continues a text at lower temperature."""

from token_stand_ins import sedd

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    network, tokenizer = sedd()
    mask = len(tokenizer)  # 50257: appended to the vocabulary of GPT-2
    text = [*tokenizer("the cat", add_special_tokens=False)["input_ids"], *[mask] * 6]
    model = cd.models.from_sedd(network, mask_id=mask, prompt=text, vocab_size=mask + 1, decode=tokenizer)
    ladder = cd.ladder.linear(4, 0.0, 0.999)
    out = cd.ReplicaExchange(model**1.2, ladder, n_chains=2, micro_batch=8).sample(n_draws, burn_in=10)
    print(model.decode(out.x[:3]), out.verdict())
    print(f"scores sum to {float(model.mass(model.noise(), 0.999)[0, -1]):.3f}; 1 would be exact")


if __name__ == "__main__":
    main()
