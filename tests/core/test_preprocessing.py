"""How encoded samples become the input of a model: by hand, as in training, through JSON, and exported."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import RAGGED, make_federation
from sentences import user_error
from torch import nn

from fedloom.core.federation import Federation, Ragged
from fedloom.core.preprocessing import Column, Numbers, Preprocessing, Vocabulary

NAN = float("nan")
EXAMPLES = {
    "table": Preprocessing(
        "table", (4,), "float64", ("ill", "well"),
        columns=(Column("age"), Column("sex", ("f", "m")), Column("pressure")),
        numbers=Numbers((0.1 + 0.2, 0.0, 0.0, 1e-300), (1 / 3, 1.0, 1.0, 2.5), fill=(0.3, 0.0, 0.0, -0.0)),
        missing="mean", label="y", client="site", split="part",
    ),
    "image": Preprocessing(
        "image", (3, 4, 4), "uint8", ("a", "b"), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=True,
        content="photo",
    ),
    "grey": Preprocessing("image", (1, 4, 4), "uint8", ("0", "1"), mean=(0.5,), std=(0.5,)),
    "text": Preprocessing(
        "text", (5,), "int64", ("ä", "b"), vocabulary=Vocabulary(("<pad>", "<unk>", "ü"), "basic_english", 5, 1, 0, 1),
        token_ids=3, content="review",
    ),
    "array": Preprocessing("array", (7, 3), "float32", ("0", "1"), numbers=Numbers((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))),
    "channels": Preprocessing("array", (2, 3, 3), "float64", ("0",), numbers=Numbers((1.0, 2.0), (1.0, 2.0), axis=1)),
}  # fmt: skip


def samples(preprocessing, n=4):
    draw = np.random.default_rng(0)
    if preprocessing.dtype == "uint8":
        return torch.from_numpy(draw.integers(0, 256, (n, *preprocessing.shape), dtype=np.uint8))
    if preprocessing.dtype == "int64":
        return torch.from_numpy(draw.integers(0, preprocessing.token_ids, (n, *preprocessing.shape)))
    x = torch.from_numpy(draw.normal(size=(n, *preprocessing.shape)).astype(preprocessing.dtype))
    if preprocessing.numbers.fill is not None:
        x[0, 0] = x[1, -1] = NAN
    return x


@pytest.mark.parametrize("kind", EXAMPLES)
def test_json_gives_back_the_same(kind):
    first = EXAMPLES[kind]
    again = Preprocessing.from_json(json.loads(json.dumps(first.to_json())))
    assert again == first
    assert repr(again) == repr(first)  # also the sign of zero, and the types


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v.pop("columns"), lambda v: v.pop("kind"), lambda v: v.update(colour=1),
        lambda v: v.update(columns=[3]), lambda v: v.update(numbers={"average": []}), lambda v: v.update(columns=None),
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused_in_one_sentence(damage):
    values = EXAMPLES["table"].to_json()
    damage(values)
    with user_error("description", "damaged"):
        Preprocessing.from_json(values)


def test_numbers_are_filled_and_scaled_by_hand():
    numbers = Numbers(mean=(10.0, 0.0), std=(4.0, 1.0), fill=(12.0, 7.0))
    made = Preprocessing("table", (2,), "float64", ("a", "b"), numbers=numbers)
    x = torch.tensor([[NAN, 3.0], [2.0, NAN]], dtype=torch.float64)
    assert made.scale(x, torch.float32).tolist() == [[0.5, 3.0], [-2.0, 7.0]]
    assert made.scale(x, torch.float32).dtype == torch.float32
    channels = EXAMPLES["channels"].scale(torch.full((1, 2, 3, 3), 4.0), torch.float64)  # (4 - 1) / 1, (4 - 2) / 2
    assert channels.unique(dim=-1).squeeze().tolist() == [[3.0] * 3, [1.0] * 3]


def test_numbers_are_scaled_before_they_are_rounded():
    """In float32, 2^24 + 1 - 2^24 is 0."""
    made = Preprocessing("table", (1,), "float64", ("a",), numbers=Numbers((2.0**24,), (1.0,)))
    assert made.scale(torch.tensor([[2.0**24 + 1]], dtype=torch.float64), torch.float32).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["image", "grey"])
def test_pixels_are_scaled_as_in_training(kind, dtype):
    made = EXAMPLES[kind]
    x = samples(made)
    data = Federation(x, torch.zeros(4), 1, {}, mean=made.mean, std=made.std, dtype=dtype)
    assert torch.equal(made.scale(x, dtype), data.prepare(x))
    stacked = x[torch.tensor([[0, 1], [2, 3]])]  # a batch of each of two clients
    assert torch.equal(data.prepare(stacked).flatten(0, 1), made.scale(x, dtype))


def test_token_ids_stay_as_they_are():
    x = samples(EXAMPLES["text"])
    assert EXAMPLES["text"].scale(x, torch.float32) is x


class Scale(nn.Module):
    def __init__(self, preprocessing):
        super().__init__()
        self.preprocessing = preprocessing

    def forward(self, x):
        return self.preprocessing.scale(x, torch.float32) + 0


@pytest.mark.parametrize("kind", EXAMPLES)
def test_scaling_can_be_exported_for_batches_of_any_size(kind):
    module = Scale(EXAMPLES[kind])
    program = torch.export.export(
        module, (samples(module.preprocessing),), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    other = samples(module.preprocessing, n=7)
    assert torch.equal(program.module()(other), module(other))


# -- of a federation


def test_a_federation_made_by_hand_has_a_preprocessing_by_default():
    def default(x, **options):
        rows = Ragged.of([np.arange(len(x))])
        return Federation(x, torch.arange(len(x)) % 2, 2, {"train": rows}, **options).preprocessing_or_default()

    numbers = default(torch.zeros(4, 5))
    assert (numbers.kind, numbers.shape, numbers.dtype, numbers.classes) == ("array", (5,), "float32", ("0", "1"))
    assert numbers.numbers is None
    pixels = default(
        torch.zeros(4, 3, 8, 8, dtype=torch.uint8), mean=(0.4,) * 3, std=(0.2,) * 3, class_names=("a", "b")
    )
    assert (pixels.kind, pixels.mean, pixels.std, pixels.classes) == ("image", (0.4,) * 3, (0.2,) * 3, ("a", "b"))
    assert default(torch.zeros(4, 5, 8, 8, dtype=torch.uint8)).kind == "array"  # no picture has five channels
    tokens = default(torch.arange(12).view(4, 3))
    assert (tokens.kind, tokens.dtype, tokens.token_ids) == ("array", "int64", 12)
    assert default(torch.arange(12).view(4, 3), vocab=50).token_ids == 50
    half = default(torch.zeros(4, 5, dtype=torch.float16))
    assert half.dtype == "float64"  # which has room for all its values


def test_a_federation_keeps_its_preprocessing_and_its_fingerprint():
    plain = make_federation(RAGGED)
    data = replace(plain, preprocessing=EXAMPLES["array"], held_out=1)
    for other in (data, data.to(torch.device("cpu"), torch.float64), data.participants()):
        assert other.preprocessing == EXAMPLES["array"]
    assert data.fingerprint() == plain.fingerprint()
    assert data.participants().digest() != plain.digest() == replace(data, held_out=0).digest()
