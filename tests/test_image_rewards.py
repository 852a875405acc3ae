"""Rewards of images: decoded, in batches of their own, called only where they matter, as their owners compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import stand_ins
import torch
from torch import nn

import crepe_diffusion as cd
from checks import assert_near, refuted
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.rewards import Aesthetic, Classifier, ClipScore, EachImage, ImageReward
from crepe_diffusion.rewards.images import CLIP_STD, Preprocess

IMAGE = cd.models.GaussianMixture([1.0], torch.full((1, 1, 4, 4), 0.3), [0.7])
LADDER = cd.ladder.karras(33, 0.05, 20.0)
X, T = cd.Stream(3).normal((33, 1, 4, 4)), LADDER.times


def evaluated(**options):
    target = IMAGE.tilt(options.pop("function", lambda z: z.flatten(1).sum(1)), **options)
    evaluate = Evaluator(target, LADDER, Gaussian(variance=1.0), cd.Proposal())
    return evaluate(X, T), evaluate


def bad(make):
    with pytest.raises(cd.InputError) as caught:
        make()
    return str(caught.value)


# -- terms -----------------------------------------------------------------------------------------------------------


def test_a_reward_of_decoded_images_in_batches_is_the_reward():
    sizes = []

    def decode(z):
        sizes.append(len(z))
        return z.repeat(1, 3, 2, 2) * 0.5 + 1

    def score(images):
        assert images.shape[1:] == (3, 8, 8)
        return images.mean((1, 2, 3))

    for guidance in ("none", "gradient", "jacobian-free"):
        whole, _ = evaluated(function=lambda z: score(decode(z)), guidance=guidance, negligible=0.0)
        sizes.clear()
        parts, evaluate = evaluated(function=score, decode=decode, batch_size=4, guidance=guidance, negligible=0.0)
        assert sizes == [4] * 8 + [1]
        assert evaluate.counts.rewards == 33
        torch.testing.assert_close(parts.reward, whole.reward)
        torch.testing.assert_close(parts.drift, whole.drift)
        other, _ = evaluated(function=score, decode=lambda z: decode(z) + 1, guidance=guidance, negligible=0.0)
        refuted(torch.testing.assert_close, other.reward, whole.reward)


def test_arrays_and_lists_are_rewards():
    expected = evaluated()[0].reward
    forms = {
        "array": lambda z: z.flatten(1).sum(1).numpy(),
        "list": lambda z: z.flatten(1).sum(1).tolist(),
        "list of tensors": lambda z: list(z.flatten(1).sum(1)),
        "list of arrays": lambda z: [np.float32(v) for v in z.flatten(1).sum(1)],
        "integers": lambda z: np.arange(len(z)),
    }
    for name, function in forms.items():
        found, _ = evaluated(function=function)
        (refuted if name == "integers" else lambda f, *a, **o: f(*a, **o))(
            torch.testing.assert_close, found.reward, expected, rtol=1e-6, atol=1e-6
        )
    assert "cannot be differentiated" in bad(lambda: evaluated(function=forms["array"], guidance="gradient"))
    assert "cannot be differentiated" in bad(lambda: evaluated(function=forms["list"], guidance="jacobian-free"))
    assert "got 'float'" in bad(lambda: evaluated(function=lambda z: 1.0))


def test_a_reward_is_not_called_where_it_is_negligible():
    """With the default annealing on 33 levels, 13 of them have gamma below 0.01."""
    rows = []

    def function(z):
        rows.append(len(z))
        return z.flatten(1).sum(1)

    found, evaluate = evaluated(function=function)
    reward = evaluate.target.rewards[0]
    gamma = cd.anneal.power(5)(LADDER.progress(T))
    assert rows == [20]
    assert int((gamma < 0.01).sum()) == 13
    assert evaluate.counts.rewards == 20
    assert torch.equal(reward.called_at(LADDER), gamma >= 0.01)
    assert str(evaluate.rewards) == "reward 'reward' is called at 20 of 33 levels"
    whole, _ = evaluated(negligible=0.0)
    assert torch.equal(found.reward, whole.reward.where(gamma >= 0.01, 0.0))
    refuted(torch.testing.assert_close, found.reward, whole.reward)
    # Guided rewards are called everywhere, unless asked otherwise; without a call there is no push.
    for guidance in ("gradient", "jacobian-free"):
        assert evaluated(guidance=guidance)[1].counts.rewards == 33
        cut, evaluate = evaluated(guidance=guidance, negligible=0.01)
        assert evaluate.counts.rewards == 20
        plain, whole = evaluated()[0], evaluated(guidance=guidance)[0]
        torch.testing.assert_close(
            cut.drift, torch.where((gamma >= 0.01)[:, None, None, None], whole.drift, plain.drift)
        )
        only_top = evaluate(X[-3:], T[-3:])
        torch.testing.assert_close(only_top.drift, plain.drift[-3:])
    # The share is that of level 0, whatever its size.
    tiny = cd.Reward(lambda z: z[:, 0], anneal=lambda u: 0.001 * u**5)
    assert int(tiny.called_at(LADDER).sum()) == 20


def test_a_target_with_the_cut_is_still_the_right_one():
    """Gaussian data and a linear reward: the mean moves by the variance times the slope, by SMC with and without it."""
    p = cd.models.GaussianMixture([1.0], [[0.3]], [0.7], process=Gaussian(variance=0.7))
    steps = cd.ladder.karras(33, 0.01, 10.0)
    for negligible in (None, 0.0):
        smc = cd.SMC(
            p.tilt(lambda z: 1.5 * z[:, 0], negligible=negligible), steps, n_particles=50, n_batches=16, seed=1
        )
        mean = smc.sample().mean(lambda x: x[:, 0])
        assert abs(mean.value - (0.3 + 1.5 * 0.49)) < 5 * mean.error < 0.2


# -- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    coarse = torch.rand(5, 3, 6, 6)
    return nn.functional.interpolate(coarse, (40, 52), mode="bilinear")


@pytest.fixture(scope="module")
def clip():
    pytest.importorskip("transformers")
    return stand_ins.clip()


@pytest.mark.slow  # for the time it takes to import what it compares with
def test_pixels_are_prepared_as_by_the_image_processor(images):
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = transformers.CLIPImageProcessorPil(**size)
    as_bytes = (255 * images).round().to(torch.uint8)
    pictures = [Image.fromarray(image.movedim(0, -1).numpy()) for image in as_bytes]
    theirs = processor(pictures, return_tensors="pt")["pixel_values"]

    def check(prepare):  # eight bits before and after resizing: at most one level of 255, over the least deviation
        assert_near(
            "pixels of an image processor", prepare(as_bytes / 255), theirs, atol=1.5 / 255 / min(CLIP_STD), rtol=0
        )

    check(Preprocess(32))
    check(Preprocess.of(processor.to_dict()))
    refuted(check, Preprocess(32, mode="bilinear"))
    refuted(check, Preprocess(32, crop=False))
    assert Preprocess.of({"size": 48, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}).size == 48
    gray = Preprocess(32)(images[:, :1])
    torch.testing.assert_close(gray, Preprocess(32)(images[:, :1].expand(-1, 3, -1, -1)))


@pytest.mark.slow  # for the time it takes to import what it compares with
def test_the_clip_score_is_that_of_torchmetrics(clip, images):
    functional = pytest.importorskip("torchmetrics.functional.multimodal")
    transformers = pytest.importorskip("transformers")
    model, tokenizer = clip
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = transformers.CLIPProcessor(transformers.CLIPImageProcessorPil(**size), tokenizer)
    as_bytes = (255 * images).round().to(torch.uint8)
    score = ClipScore("a red cat", model, tokenizer)

    class Former(nn.Module):  # torchmetrics 1.9 expects embeddings where transformers 5 returns objects that hold them
        def __init__(self):
            super().__init__()
            self.model, self.config = model, model.config
            self.get_image_features = lambda *args, **options: model.get_image_features(*args, **options).pooler_output
            self.get_text_features = lambda *args, **options: model.get_text_features(*args, **options).pooler_output

    def check(score):
        for image, ours in zip(as_bytes, score(as_bytes / 255), strict=True):
            theirs = functional.clip_score(image, "a red cat", model_name_or_path=lambda: (Former(), processor))
            assert_near("CLIP score", ours.clamp(min=0), theirs, atol=0.2, rtol=0)

    check(score)
    refuted(check, ClipScore("dog", model, tokenizer))
    own = ClipScore("a red cat", model, tokenizer, scale=None)
    torch.testing.assert_close(own(images), score(images) / 100 * model.logit_scale.exp())


@pytest.mark.slow  # for the time it takes to import what it compares with
def test_a_metric_of_torchmetrics_is_called_image_by_image(images):
    image = pytest.importorskip("torchmetrics.functional.image")
    total = EachImage(image.total_variation)
    assert torch.equal(total(images), torch.stack([image.total_variation(z[None]) for z in images]))
    metric = pytest.importorskip("torchmetrics.image").TotalVariation()
    torch.testing.assert_close(EachImage(metric)(images), total(images))
    assert EachImage(lambda z: float(z.dtype == torch.uint8), uint8=True)(images).tolist() == [1.0] * 5


def test_an_aesthetic_head_is_read_from_its_file(clip, images, tmp_path):
    model, _ = clip
    torch.manual_seed(1)
    layers = nn.Sequential(
        nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 4), nn.Dropout(0.2), nn.Linear(4, 3), nn.Linear(3, 1)
    ).eval()
    holder = nn.Module()
    holder.layers = layers
    torch.save(holder.state_dict(), tmp_path / "head.pth")
    pixels = Preprocess(32)(images)
    embedding = model.visual_projection(model.vision_model(pixels).pooler_output)

    def check(embedding):
        found = Aesthetic(tmp_path / "head.pth", model)(images)
        assert_near("aesthetic head", found, layers(embedding)[:, 0])

    check(embedding / embedding.norm(dim=-1, keepdim=True))
    refuted(check, embedding)
    assert "takes 12 numbers, and the embedding has 16" in bad(lambda: Aesthetic(holder.state_dict(), wide_clip(model)))
    assert "hold no head" in bad(lambda: Aesthetic({"weight": torch.ones(1)}, model))
    assert "does not exist" in bad(lambda: Aesthetic(tmp_path / "none.pth", model))


def wide_clip(model):
    import copy

    other = copy.deepcopy(model)
    other.config.projection_dim = 16
    return other


@pytest.mark.slow  # for the time it takes to import what it compares with
def test_a_classifier_gives_the_log_probability_of_its_label(images, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **labels, image_size=32, patch_size=8)
    )
    model.eval().save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    loaded = Classifier("dog", str(tmp_path))  # as a name on the hub is loaded
    found = loaded(images)
    logits = model(loaded.preprocess(images)).logits
    assert_near("log p(label)", found, logits.log_softmax(-1)[:, 1], rtol=1e-3, atol=1e-3)
    refuted(torch.testing.assert_close, found, logits.log_softmax(-1)[:, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(Classifier(1, model)(images), found, rtol=1e-3, atol=1e-3)
    total = sum(Classifier(i, model)(images).exp() for i in range(3))
    torch.testing.assert_close(total, torch.ones(5))
    assert "knows the labels 0 to 2 by number or name, got 'bird'" in bad(lambda: Classifier("bird", model))
    assert "call .eval()" in bad(lambda: Classifier(1, model.train()))
    assert "takes a network or the name of a checkpoint, got 3" in bad(lambda: Classifier(1, 3))


def original_names(vision):
    """The names of BLIP's own vision network, from those of transformers: the other way than the loader goes."""
    back = {
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding": "pos_embed",
        "embeddings.patch_embedding": "patch_embed.proj",
        "post_layernorm": "norm",
        "encoder.layers": "blocks",
        "layer_norm": "norm",
        "self_attn.projection": "attn.proj",
        "self_attn": "attn",
    }
    out = {}
    for name, value in vision.items():
        for new, old in back.items():
            name = name.replace(new, old)
        out[f"blip.visual_encoder.{name}"] = value
    return out


@pytest.mark.slow  # for the time it takes to import what it compares with
def test_image_reward_is_blip_with_its_head(images, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vision = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1}
    text = {**vision, "hidden_size": 128, "num_attention_heads": 2, "encoder_hidden_size": 64, "vocab_size": 7}
    config = transformers.BlipConfig(
        vision_config={**vision, "image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6},
        text_config={**text, "max_position_embeddings": 40},
    )
    blip = transformers.BlipForImageTextRetrieval(config).eval()
    head = nn.Sequential(nn.Linear(128, 8), nn.Dropout(0.2), nn.Linear(8, 1)).eval()
    state = original_names(blip.vision_model.state_dict())
    state |= {f"blip.text_encoder.{name}": value for name, value in blip.text_encoder.state_dict().items()}
    state |= {f"mlp.layers.{name}": value for name, value in head.state_dict().items()}
    state["blip.itm_head.weight"] = torch.ones(2)  # what is not needed is left alone
    torch.save(state, tmp_path / "ImageReward.pt")
    tokenizer = stand_ins._tokenizer()
    reward = ImageReward("a red cat", tmp_path / "ImageReward.pt", tokenizer)
    tokens = tokenizer("a red cat", padding="max_length", truncation=True, max_length=35, return_tensors="pt")

    def check(prompt):
        out = blip(
            tokens["input_ids"].expand(5, -1),
            Preprocess(32)(images),
            attention_mask=tokens["attention_mask"].expand(5, -1),
        )
        raw = head(out.question_embeds[:, 0])[:, 0]
        found = ImageReward(prompt, state, tokenizer)(images)
        expected = (raw - 0.16717362830052426) / 1.0333394966054072
        assert_near("ImageReward", found, expected, rtol=1e-4, atol=1e-4)

    check("a red cat")
    refuted(check, "dog")
    x = images.clone().requires_grad_()
    assert torch.autograd.grad(reward.to("cpu")(x).sum(), x)[0].abs().sum() > 0
    del state["blip.visual_encoder.norm.weight"]
    assert "1 are missing, first 'post_layernorm.weight'" in bad(lambda: ImageReward("a cat", state, tokenizer))
    assert "not those of ImageReward" in bad(lambda: ImageReward("a cat", {"x": torch.ones(1)}, tokenizer))


def test_a_score_depends_on_its_own_image_alone_and_has_a_gradient(clip, images):
    model, tokenizer = clip
    order = torch.tensor([3, 0, 4, 1, 2])
    head = {"layers.0.weight": torch.linspace(-1, 1, 12)[None], "layers.0.bias": torch.zeros(1)}
    for reward in (ClipScore("a red cat", model, tokenizer), Aesthetic(head, model)):

        def check(function):
            together = function(images)
            torch.testing.assert_close(function(images[order]), together[order], rtol=1e-4, atol=1e-4)
            alone = torch.cat([function(image[None]) for image in images])
            torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)

        check(reward)
        refuted(check, lambda z, reward=reward: reward(z) - reward(z).mean())
        x = images.clone().requires_grad_()
        gradient = torch.autograd.grad(reward(x).sum(), x)[0]
        step = 1e-2 * gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
        rise = (reward(images + step) - reward(images - step)) / 2e-2
        torch.testing.assert_close(rise, gradient.flatten(1).norm(dim=1), rtol=0.05, atol=0)


def test_latents_are_refused_with_the_advice_to_decode(clip):
    model, tokenizer = clip
    score = ClipScore("a red cat", model, tokenizer)
    assert "latents are decoded by decode=p.decode" in bad(lambda: score(torch.zeros(2, 4, 8, 8)))
    assert "compares with a text, got 3" in bad(lambda: ClipScore(3, model, tokenizer))
    assert "comes with its tokenizer" in bad(lambda: ClipScore("a cat", model))
    assert "takes a function of one image, got 3" in bad(lambda: EachImage(3))


@pytest.mark.slow  # for the time it takes to import what it compares with
def test_a_latent_model_is_tilted_by_a_score_of_its_pictures(clip):
    """Small real networks from latents to CLIP: decoded rows are scored, and the gradient reaches the latents."""
    model, tokenizer = clip
    p = cd.models.from_diffusers(stand_ins.dit(), 3)
    score = ClipScore("a red cat", model, tokenizer)
    ladder, process = p.ladder(3, substeps=2), Gaussian(variance=1.0)
    for guidance in ("none", "jacobian-free"):
        target = p.tilt(score, decode=p.decode, batch_size=2, guidance=guidance, scale=0.1)
        chain = cd.ReplicaExchange(target, ladder, process=process, seed=1)
        chain.step()
        rows = chain.evaluate(chain.state.x[:3], ladder.times[:3])
        weight = target.rewards[0].weight(ladder.times[:3], ladder)
        with torch.no_grad():
            direct = weight * score(p.decode(rows.predictions[0])).double()
        torch.testing.assert_close(rows.reward, direct, rtol=1e-4, atol=1e-4)
        assert math.isfinite(float(chain.sample(1).x.sum()))
