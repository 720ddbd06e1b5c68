"""The local engine with images: what it generates is what the model says of the whole row, in any company."""

import numpy as np
import pytest
import torch
from rollout_cases import generate_all, local_engine
from transformers import PreTrainedModel
from vision_cases import MADE, load, requests_of

from raggedright.agents.vision import Vision
from raggedright.rollout.engine import EngineError, Generation, Request, Sampling
from raggedright.tensors.images import image_positions


def full_log_probs(model: PreTrainedModel, vision: Vision, request: Request, answer: Generation) -> list[float]:
    """By one pass over the whole row with its images and the model's own positions, placeholders left out."""
    ids = torch.tensor([[*request.ids, *answer.ids]])
    kinds = (ids == vision.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **(request.media or {})).logits[0]
    logits[:, [*vision.placeholder_ids]] = -torch.inf
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    index = torch.arange(len(request.ids) - 1, ids.shape[1] - 1)
    return log_probs[index, ids[0, len(request.ids) :]].tolist()


@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-4)])
def test_log_probs_are_those_of_a_full_pass_with_the_images(family: str, dtype: str, tolerance: float) -> None:
    model, _, vision = load(family, dtype)
    requests = requests_of(vision, 18)
    engine = local_engine(model, max_batch_rows=5)
    alone = [generate_all(engine, [request])[0] for request in requests[:6]]
    answers = generate_all(engine, requests)
    for request, answer in zip([*requests, *requests[:6]], [*answers, *alone], strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, vision, request, answer), rel=0, abs=tolerance)


def test_rows_with_and_without_images_in_one_batch_are_answered_as_alone() -> None:
    model, _, vision = load("qwen3_vl")
    requests = requests_of(vision, 12, seed=1)
    engine = local_engine(model)
    together = generate_all(engine, requests)
    for request, answer in zip(requests, together, strict=True):
        alone = generate_all(engine, [request])[0]
        assert alone.ids == answer.ids
        assert alone.log_probs == pytest.approx(answer.log_probs, rel=0, abs=1e-12)


def test_the_image_is_seen() -> None:
    model, _, vision = load("qwen3_vl")
    request = requests_of(vision, 2)[1]
    assert request.media
    dark = {**request.media, "pixel_values": torch.zeros_like(request.media["pixel_values"])}
    other = Request(ids=request.ids, sampling=request.sampling, noise=request.noise, media=dark)
    seen, unseen = generate_all(local_engine(model), [request, other])
    assert abs(seen.log_probs[0] - unseen.log_probs[0]) > 1e-6


def test_placeholders_are_never_sampled() -> None:
    model, _, vision = load("qwen3_vl")
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    kept = head.weight.detach().clone()
    try:
        with torch.no_grad():
            head.weight[[*vision.placeholder_ids]] *= 100.0  # likely, now and then
        sampling = Sampling(max_tokens=20)
        requests = [Request(ids=[1, 2, 3], sampling=sampling, noise=bytes([i])) for i in range(20)]
        sampled = {token for answer in generate_all(local_engine(model), requests) for token in answer.ids}
    finally:
        with torch.no_grad():
            head.weight.copy_(kept)
    assert not sampled & {*vision.placeholder_ids}


@pytest.mark.parametrize("family", MADE)
def test_positions_are_the_models_own(family: str) -> None:
    model, _, vision = load(family)
    for request in requests_of(vision, 30, seed=2):
        if request.media:
            ids = torch.tensor([list(request.ids)])
            kinds, grids = (ids == vision.image_token_id).int(), request.media["image_grid_thw"]
            theirs, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
            token, merge = vision.image_token_id, vision.merge_size
            ours = image_positions(ids[0].numpy(), grids.numpy(), image_token_id=token, merge_size=merge)
            assert np.array_equal(ours, theirs[:, 0].numpy())


def test_images_that_cannot_be_placed_are_refused() -> None:
    model, _, vision = load("qwen3_vl")
    engine, request = local_engine(model), requests_of(vision, 3)[2]
    few = Sampling(max_tokens=1)
    for ids, media, words in (
        ([1, 2, 3], request.media, "0 image tokens and its 2 images"),
        (request.ids, None, "stands for one"),
        (request.ids, {"pixel_values": torch.zeros(1)}, "image_grid_thw is not among them"),
    ):
        with pytest.raises(EngineError, match=words):
            generate_all(engine, [Request(ids=ids, sampling=few, noise=b"", media=media)])
