"""The models of the experiments: parameters, layers, heads, shapes, initial values, and what they refuse."""

import math
import re
from pathlib import Path

import pytest
import torch
from helpers import method, model_task, run_and_evaluate
from sentences import user_error
from torch import nn

import fedloom
from fedloom.core.federation import Federation, Ragged
from fedloom.engine.plan import Plan
from fedloom.models.zoo import MODELS
from fedloom.nn.network import _layers

# -- as the experiments describe them


def conv(inputs, outputs, side):
    """Weights of a convolution without bias and of the normalisation that follows or precedes it."""
    return inputs * outputs * side * side + 2 * outputs


def resnet50():
    count, inputs = conv(3, 64, 3), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        count += conv(inputs, 4 * width, 1)  # shortcut
        for _ in range(blocks):
            count += conv(inputs, width, 1) + conv(width, width, 3) + conv(width, 4 * width, 1)
            inputs = 4 * width
    return count


def wide_resnet():
    count, inputs = 3 * 16 * 9, 16
    for width in (160, 320, 640):
        count += inputs * width  # shortcut, without a normalisation of its own
        for _ in range(4):
            # a normalisation of the inputs and one in between
            count += 2 * inputs + inputs * width * 9 + 2 * width + width * width * 9
            inputs = width
    return count + 2 * inputs


# model, shape, classes, vocabulary | parameters, layers, width of the features
TABLE = [
    ("logreg", (30,), 30, None, 930, 1, 30),  # 30*30 + 30
    ("mlp", (1, 8, 8), 10, None, 4810, 2, 64),  # 64*64+64 = 4160, head 64*10+10 = 650
    ("mlp3", (5000,), 2, None, 5_551_802, 4, 100),
    # conv 1*9*16+16 = 160, conv 16*9*32+32 = 4640, linear 32*2*2*64+64 = 8256, head 650
    ("cnn8", (1, 8, 8), 10, None, 13_706, 4, 64),
    # conv 1*25*32+32 = 832, conv 32*25*64+64 = 51264, linear 64*4*4*512+512 = 524800, head 512*10+10 = 5130
    ("cnn4", (1, 28, 28), 10, None, 582_026, 4, 512),
    ("cnn4", (3, 32, 32), 100, None, 924_708, 4, 512),
    ("cnn4", (3, 64, 64), 200, None, 5_694_600, 4, 512),
    ("cnn_kt", (3, 32, 32), 10, None, 1_706_458, 5, 80),
    ("cnn_kt", (3, 32, 32), 100, None, 1_713_748, 5, 80),
    ("harcnn", (9, 1, 128), 6, None, 2_253_958, 5, 1664),
    ("harcnn", (9, 128), 6, None, 2_253_958, 5, 1664),
    ("resnet18_bn", (3, 64, 64), 200, None, 11_279_112, 21, 512),
    ("resnet18_gn", (3, 32, 32), 100, None, 11_227_812, 21, 512),
    ("resnet18_gn", (3, 64, 64), 200, None, 11_279_112, 21, 512),
    ("resnet18_gn_c", (3, 32, 32), 10, None, 11_173_962, 21, 512),
    ("wrn28_10_gn", (3, 32, 32), 100, None, wide_resnet() + 640 * 100 + 100, 29, 640),  # 36,536,884
    ("resnet50_gn_t", (3, 64, 64), 200, None, resnet50() + 2048 * 200 + 200, 54, 2048),  # 23,910,152
    ("fasttext", (200,), 4, 98_635, 3_157_508, 3, 32),
    ("lstm_shakes", (80,), 80, 80, 133_520, 4, 100),
    ("lstm_so", (20,), 10_004, 10_004, 4_952_596, 3, 256),
]


def on_meta(name, shape, classes, vocab=None, **options):
    """The model without values, and a batch for it."""
    with torch.device("meta"):
        x = torch.zeros(2, *shape, dtype=torch.float32 if vocab is None else torch.int64)
        return MODELS[name](**options).build(shape, classes, vocab), x


@pytest.mark.parametrize(("name", "shape", "classes", "vocab", "count", "layers", "features"), TABLE)
def test_a_model_is_as_its_paper_describes_it(name, shape, classes, vocab, count, layers, features):
    model, x = on_meta(name, shape, classes, vocab)
    names = {id(p): key for key, p in model.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == count
    assert len(_layers(model, names)) == layers
    seen = []
    model.head.register_forward_hook(lambda module, given, out: seen.append((given[0].shape, out.shape)))
    positions = shape if name == "lstm_so" else ()
    assert model(x).shape == (2, *positions, classes)
    assert seen == [((2, *positions, features), (2, *positions, classes))]


def test_every_model_is_in_the_table_and_says_what_it_takes():
    built_in = [name for name in MODELS.names() if MODELS[name].__module__.startswith("fedloom.")]
    assert set(built_in) == {name for name, *_ in TABLE}
    assert all(MODELS[name].takes for name in built_in)


def test_layers_are_those_of_the_modules_in_their_order():
    model, _ = on_meta("lstm_shakes", (80,), 80, 80)
    layers = _layers(model, {id(p): key for key, p in model.named_parameters()})
    first = [layer[0] for layer in layers]
    assert first == ["embedding.weight", "lstm.weight_ih_l0", "lstm.weight_ih_l1", "head.weight"]


@pytest.mark.parametrize(
    ("name", "side", "shapes"),
    [  # channels and side after each stage: torchvision's stem divides the side by 4, later stages by 2 each
        ("resnet18_gn", 64, [(64, 16), (128, 8), (256, 4), (512, 2)]),
        ("resnet18_bn", 32, [(64, 8), (128, 4), (256, 2), (512, 1)]),
        ("resnet18_gn_c", 32, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet50_gn_t", 64, [(256, 32), (512, 16), (1024, 8), (2048, 4)]),
        ("wrn28_10_gn", 32, [(160, 32), (320, 16), (640, 8)]),
    ],
)
def test_stages_of_residual_networks_have_their_sizes(name, side, shapes):
    model, x = on_meta(name, (3, side, side), 10)
    seen = []
    for i in range(len(shapes)):
        model.get_submodule(f"stage{i + 1}").register_forward_hook(lambda m, given, out: seen.append(tuple(out.shape)))
    model(x)
    assert seen == [(2, channels, side, side) for channels, side in shapes]


def test_a_basic_block_adds_its_input_before_the_last_relu():
    """With all convolutions zero, the first block, which has no shortcut of its own, passes on what the stem gives."""
    torch.manual_seed(0)
    model = MODELS["resnet18_gn_c"](width=4).build((3, 8, 8), 2)
    block, x = model.stage1[0], torch.randn(2, 4, 8, 8)
    for m in block.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.zeros_(m.weight)
    torch.testing.assert_close(block(x), x.relu())
    wide = MODELS["wrn28_10_gn"](depth=10, widen=1).build((3, 8, 8), 2).stage1[0]
    for m in wide.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.zeros_(m.weight)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(wide(x), x)  # pre-activation: nothing after the sum


@pytest.mark.parametrize(
    ("name", "norms"), [("resnet18_gn", 20), ("resnet18_gn_c", 20), ("resnet50_gn_t", 53), ("wrn28_10_gn", 25)]
)
def test_group_normalisation_has_two_groups(name, norms):
    model, _ = on_meta(name, (3, 32, 32), 10)
    found = [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert found == [2] * norms  # one for each convolution; pre-activation: two a block and one at the end


@pytest.mark.parametrize(
    ("name", "deviation"),
    [  # stage4's first convolution, 64 to 128 channels: torchvision's sqrt(2 / fan_out), torch's sqrt(1 / (3 fan_in))
        ("resnet18_bn", math.sqrt(2 / (128 * 9))),
        ("resnet18_gn", math.sqrt(2 / (128 * 9))),
        ("resnet18_gn_c", math.sqrt(1 / (3 * 64 * 9))),
    ],
)
def test_residual_networks_start_as_torchvision_or_torch_does(name, deviation):
    torch.manual_seed(0)
    model = MODELS[name](width=16).build((3, 8, 8), 2)
    weight = model.stage4[0].main[0].weight.detach()
    assert weight.shape == (128, 64, 3, 3)
    # 73728 values: the standard error of their deviation is below 0.3 %
    assert float(weight.std()) == pytest.approx(deviation, rel=0.01)


def test_logistic_regression_starts_at_zero():
    assert not any(p.any() for p in MODELS["logreg"]().build((30,), 30).parameters())


# -- the page about them

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_the_page_has_every_model_with_its_paper_its_parameters_and_the_width_of_its_features():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    assert [name for name, *_ in rows] == [f"`{name}`" for name in dict.fromkeys(name for name, *_ in TABLE)]
    for name, paper, _, counts, _, features, _ in rows:
        known = [row for row in TABLE if f"`{row[0]}`" == name]
        assert paper == MODELS[name.strip("`")].source
        numbers = [int(found.replace(",", "")) for found in re.findall(r"[\d,]*\d", re.sub(r"\(.*?\)", "", counts))]
        assert numbers == list(dict.fromkeys(row[4] for row in known)), name
        assert features == ("inputs" if name == "`logreg`" else str(known[0][6]))


def test_the_example_of_the_page_is_a_model(monkeypatch):
    monkeypatch.setattr(MODELS, "_known", {name: MODELS[name] for name in MODELS.names()})  # forgotten afterwards
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "models.md", "exec"), {"__name__": "models_page"})
    model = MODELS["wide"](width=3).build((2, 4), 10)
    assert model(torch.zeros(5, 2, 4)).shape == (5, 10)
    assert model.head.in_features == 3


# -- text


def test_fasttext_takes_the_mean_over_all_positions_with_padding_as_zero():
    torch.manual_seed(0)
    model = MODELS["fasttext"](width=2).build((4,), 3, 5)
    vectors = model.embedding.weight
    assert not vectors[0].any()
    expected = model.head(model.linear((vectors[3] + vectors[1]) / 4))
    torch.testing.assert_close(model(torch.tensor([[3, 1, 0, 0]]))[0], expected)


@pytest.mark.parametrize("plan", [Plan("per-client"), Plan("stacked", "eager", chunk=4)], ids=lambda plan: plan.mode)
def test_the_vector_of_padding_stays_zero_in_training(plan):
    task = model_task("fasttext", (7,), vocab=4, weight_decay=0.1, momentum=0.9, lr=0.5)
    run, _ = run_and_evaluate(method("fedavg"), task, plan, rounds=2)
    vectors = run.server["w"]["embedding.weight"]
    assert (task.data.x == 0).any()
    assert not vectors[0].any()
    assert (vectors[1:] != task.init(run.key)["embedding.weight"][1:]).all()


def test_the_lstm_predicts_after_the_last_token_that_is_not_padding():
    torch.manual_seed(0)
    model = MODELS["lstm_shakes"](width=5, padding=0).build((6,), 3, 9)
    full, short = torch.tensor([[4, 2, 7, 1, 0, 0]]), torch.tensor([[4, 2, 7, 1]])
    torch.testing.assert_close(model(full), model(short))
    plain = MODELS["lstm_shakes"](width=5).build((6,), 3, 9)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(short), model(short))
    assert not torch.allclose(plain(full), model(full))


def test_the_language_model_sees_only_what_came_before():
    torch.manual_seed(0)
    model = MODELS["lstm_so"](embedding=4, width=5).build((6,), 9, 9)
    a, b = torch.tensor([[4, 2, 7, 1, 3, 3]]), torch.tensor([[4, 2, 7, 8, 3, 3]])
    torch.testing.assert_close(model(a)[:, :3], model(b)[:, :3])
    assert (model(a)[:, 3:] != model(b)[:, 3:]).any(-1).all()


# -- what does not fit


@pytest.mark.parametrize(
    ("name", "shape", "vocab"),
    [
        ("cnn4", (30,), None),
        ("cnn4", (1, 8, 8), None),
        ("cnn_kt", (1, 15, 28), None),
        ("cnn8", (1, 3, 3), None),
        ("cnn8", (28, 28), None),
        ("resnet18_gn", (28, 28), None),
        ("wrn28_10_gn", (30,), None),
        ("harcnn", (9, 1, 27), None),
        ("harcnn", (3, 32, 32), None),
        ("harcnn", (128,), None),
        ("fasttext", (1, 28, 28), None),
        ("lstm_so", (20,), None),
        ("lstm_shakes", (20, 4), 9),
        ("mlp", (20,), 9),
        ("logreg", (20,), 9),
        ("cnn4", (20,), 9),
        ("harcnn", (128,), 9),
    ],
)
def test_a_model_refuses_samples_it_is_not_for(name, shape, vocab):
    words = ["token ids; use fasttext"] if vocab and not name.startswith("lstm") else [str(shape)]
    with user_error(f"Model '{name}' takes {MODELS[name].takes}", *words):
        MODELS[name]().build(shape, 10, vocab)


def test_widths_and_depths_that_no_network_has_are_refused():
    with user_error("width", "even", "7"):
        MODELS["resnet18_gn"](width=7).build((3, 8, 8), 2)
    with user_error("depth", "16 or 28", "20"):
        MODELS["wrn28_10_gn"](depth=20).build((3, 8, 8), 2)


def tokens(y, vocab=None, least=0):
    x = torch.arange(60).view(20, 3) % 7 + least
    rows = [torch.arange(i * 10, i * 10 + 10).numpy() for i in range(2)]
    splits = {"train": [r[:6] for r in rows], "val": [r[6:6] for r in rows], "test": [r[6:] for r in rows]}
    return Federation(x, y, 7, {name: Ragged.of(lists) for name, lists in splits.items()}, vocab=vocab)


PER_SAMPLE, PER_POSITION = torch.arange(20) % 7, torch.arange(60).view(20, 3) % 7  # labels


def run(data, model, **settings):
    return fedloom.run("fedavg", data, model=model, rounds=1, device="cpu", plan="per-client", **settings)


def test_token_ids_beyond_the_vocabulary_and_negative_ones_are_refused():
    with user_error("token id 6", "below 5"):
        run(tokens(PER_SAMPLE, vocab=5), "fasttext")
    with user_error("token id -1", "not negative"):
        run(tokens(PER_SAMPLE, least=-1), "fasttext")


def test_the_vocabulary_is_as_large_as_it_says_or_as_the_largest_token_needs():
    assert run(tokens(PER_SAMPLE), "fasttext").server["w"]["embedding.weight"].shape == (7, 32)
    assert run(tokens(PER_SAMPLE, vocab=30), "fasttext").server["w"]["embedding.weight"].shape == (30, 32)


def test_a_label_for_every_position_needs_a_model_that_predicts_one():
    with user_error("predicts one label", "each of 3 positions", "lstm_so"):
        run(tokens(PER_POSITION), "lstm_shakes")
    with user_error("each of 3 positions", "the data has one label", "lstm_shakes"):
        run(tokens(PER_SAMPLE), "lstm_so")
    with user_error("'mlp'", "token ids"):
        run(tokens(PER_SAMPLE), "mlp")
    assert run(tokens(PER_POSITION), "lstm_so", width=4, embedding=3).last()["round"] == 1


def test_settings_of_a_model_are_given_by_name():
    found = run(tokens(PER_SAMPLE), "lstm_shakes", layers=3, width=4, model__dropout=0.1)
    assert found.server["w"]["lstm.weight_hh_l2"].shape == (16, 4)
    assert found.config["model"] == {
        "name": "lstm_shakes", "embedding": 8, "width": 4, "layers": 3, "dropout": 0.1, "padding": None,
    }  # fmt: skip


def test_fingerprints_tell_vocabularies_apart():
    assert tokens(PER_SAMPLE).fingerprint() != tokens(PER_SAMPLE, vocab=30).fingerprint()
