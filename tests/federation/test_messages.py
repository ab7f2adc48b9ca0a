"""Messages survive bytes, and bytes that are no message are refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fedloom.core.tree import leaves
from fedloom.deployment.messages import (
    DTYPES,
    BadMessage,
    Message,
    check_like,
    decode,
    decode_parts,
    encode,
    encode_parts,
)

TENSORS = st.builds(
    lambda shape, dtype: (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
TREES = st.recursive(
    TENSORS,
    lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


@given(FIELDS, st.dictionaries(st.text(max_size=5), TREES, max_size=3))
def test_a_message_comes_back_as_it_was(fields, trees):
    for back in (
        decode(encode(Message("order", fields, trees))),
        decode_parts(*encode_parts(Message("a", fields, trees))),
    ):
        assert repr(dict(back.fields)) == repr(fields)  # NaN is not equal to itself
        assert same(dict(back.trees), trees)


def test_empty_containers_and_names_with_dots_stay():
    tree = {"pretraining": (), "phi": {}, "body": {"conv.0.weight": torch.ones(2), "1": torch.zeros(())}}
    assert same(dict(decode(encode(Message("order", {}, {"shared": tree}))).trees), {"shared": tree})


def test_numbers_keep_all_their_digits():
    numbers = [0.1 + 0.2, 1e-310, float("inf"), 2**60]
    assert decode(encode(Message("reply", {"scores": numbers})))["scores"] == numbers


def test_a_tensor_that_occurs_twice_is_sent_once():
    w = torch.randn(1000)
    once, twice = (
        len(encode(Message("order", {}, trees))) for trees in ({"a": {"w": w}}, {"a": {"w": w}, "b": {"w": w}})
    )
    assert twice - once < 100


def test_the_same_tensors_are_the_same_bytes_whoever_gets_them():
    w = torch.randn(10)
    (one, first), (other, second) = (encode_parts(Message("order", {"client": i}, {"w": w})) for i in (0, 1))
    assert one != other
    assert first == second


def test_parts_of_a_larger_tensor_are_sent_without_the_rest():
    big = torch.randn(1000, 10)
    message = decode(encode(Message("order", {}, {"row": big[3], "flat": big[:1].view(-1), "again": big[:1]})))
    assert torch.equal(message.tree("row"), big[3])
    assert len(encode(Message("order", {}, {"row": big[3]}))) < 1000


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"a" * 100, (10**12).to_bytes(8, "little") + b"{}", b"\xff" * 20])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(BadMessage):
        decode(data)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(BadMessage):
        decode(data)


@given(st.data())
def test_a_message_with_changed_bytes_is_read_or_refused(data):
    sent = bytearray(encode(Message("order", {"t": 3}, {"up": {"w": torch.ones(3), "b": (torch.zeros(2),)}})))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(sent))
    except BadMessage:
        return
    assert all(isinstance(v, torch.Tensor) for v in leaves(dict(found.trees)))


def header(trees):
    return json.dumps({"kind": "order", "fields": {}, "trees": trees})


def nested(depth):
    return header({"up": 0}).replace("0", "[" * depth + "0" + "]" * depth)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no message"),
        ("[]", "no message"),
        ('{"kind": 1, "fields": {}, "trees": {}}', "no message"),
        (header({"up": 1}), "tensor 1 is missing"),
        (header({"up": -1}), "tensor -1 is missing"),
        (header({"up": True}), "neither a tensor"),
        (header({"up": "w"}), "neither a tensor"),
        (nested(50), "nested too deeply"),
        (nested(5000), "nested too deeply|no message"),
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(text, said):
    with pytest.raises(BadMessage, match=said):
        decode_parts(text, save({"0": torch.zeros(1)}))


def test_other_types_are_refused():
    with pytest.raises(BadMessage, match=r"type torch\.float8_e5m2"):
        decode_parts(header({"up": 0}), save({"0": torch.zeros(1, dtype=torch.float8_e5m2)}))
    with pytest.raises(TypeError, match="this is a float"):
        encode(Message("order", {}, {"up": 1.5}))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"w": torch.zeros(2, 3)}, None),
        ({"w": torch.zeros(3, 2)}, r"'w' has shape \[3, 2\] instead of \[2, 3\]"),
        ({"w": torch.zeros(2, 3).double()}, r"'w' has type torch.float64 instead of torch.float32"),
        ({"w": torch.zeros(2, 3), "x": torch.zeros(1)}, "'x' was not asked for"),
        ({}, "'w' is missing"),
        ({"w": {}}, "'w' is of another kind than it should be"),
        ({"w": (torch.zeros(2, 3),)}, "'w' is of another kind than it should be"),
        ({"w": torch.zeros(2, 3), "x": ()}, "'x' was not asked for"),
        ({"w": torch.zeros(2, 3), "w/": torch.zeros(1)}, "'w/' was not asked for"),
        (torch.zeros(2, 3), "'' is of another kind than it should be"),
    ],
)
def test_what_a_tree_must_look_like(found, said):
    like = {"w": torch.zeros(2, 3)}
    if said is None:
        check_like(found, like)
    else:
        with pytest.raises(BadMessage, match=said):
            check_like(found, like)
