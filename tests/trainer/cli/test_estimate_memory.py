"""`trainer estimate-memory`: its numbers are the bytes of real modules."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.cli import main
from trainer.cli.estimate_memory import parser
from trainer.cli.estimate_memory.footprint import Footprint

SCRIPT = '''
import torch
from torch import nn
from torch.nn import functional as F
from trainer import TrainModule


class Tied(nn.Module):
    """Attention, tied weights, buffers, dropout and a part that is not trained."""

    def __init__(self, width=16, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, scale=None):
        x = self.frozen(self.body(self.embedding(ids)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(F.gelu(x) * (1 if scale is None else scale))


class Image(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(5) if channels == 0 else nn.Linear(36, 5),
        )

    def forward(self, x):
        return self.net(x).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.GRU(4, 6, 2, batch_first=True)

    def forward(self, x):
        return self.net(x)[0]


class Late(TrainModule):
    def configure_model(self):
        self.net = nn.Linear(3, 4)


def make(width=3):
    return nn.Linear(width, 1)


def sgd_of_a_list(params, momentum=0.0):
    assert isinstance(params, list)
    return torch.optim.SGD(params, lr=0.1, momentum=momentum)


def no_optimizer(params):
    return [params]


class Reads(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList(nn.Linear(1 << 20, 1 << 20) for _ in range(4))
'''
FORWARD = {
    "Tied": (["--input", "7:int64"], lambda batch: torch.randint(50, (batch, 7))),
    "Image": (["--input", "3x8x8"], lambda batch: torch.randn(batch, 3, 8, 8)),
    "Recurrent": (["--input", "5x4"], lambda batch: torch.randn(batch, 5, 4)),
}


@pytest.fixture(autouse=True)
def weighed(monkeypatch) -> Any:
    """The user's module, in the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("weighed.py").write_text(SCRIPT)
    yield
    sys.modules.pop("weighed", None)


def estimate(capsys, *words: object) -> list[dict[str, Any]]:
    assert main(["estimate-memory", *map(str, words), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def refused(capsys, *words: object, code: int = 1) -> str:
    assert main(["estimate-memory", *map(str, words)]) == code
    text: str = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def nbytes(tensors) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@contextmanager
def saved_tensors() -> Iterator[dict[int, torch.UntypedStorage]]:
    """The stretches of memory that are saved for a backward pass inside, by their addresses."""
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def held_by_the_graph(output: torch.Tensor) -> set[int]:
    """The addresses of what the graph of an output holds, found by walking it."""
    addresses, seen, left = set(), set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    addresses.add(tensor.untyped_storage().data_ptr())
    return addresses


CASES = [(name, how) for name in FORWARD for how in ("no", "bf16", "pure-bf16")]


@pytest.mark.parametrize(("name", "precision"), [*CASES, ("Tied", "fp8")])
def test_the_numbers_are_the_bytes_of_a_real_module(capsys, name, precision):
    words, make_input = FORWARD[name]
    rows = estimate(capsys, f"weighed:{name}", *words, "--batch", 1, 6, "--precision", precision)
    for row, batch in zip(rows, (1, 6), strict=True):
        module = getattr(import_module("weighed"), name)()
        x = make_input(batch)
        if precision == "pure-bf16":
            module = module.to(torch.bfloat16)
            x = x.to(torch.bfloat16) if x.is_floating_point() else x
        module.train()
        if precision == "fp8":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            inner = [f"body.layers.{at}.linear{of}" for at in (0, 1) for of in (1, 2)]
            convert_to_float8_training(
                module,
                config=Float8LinearConfig(emulate=True),
                module_filter_fn=lambda _, name: name in [*inner, "frozen"],  # noqa: B023 - called at once
            )
        casting = torch.autocast("cpu", torch.bfloat16, enabled=precision in ("bf16", "fp8"))
        with saved_tensors() as saved, casting:
            output = module(x)
        if precision != "fp8":  # whose functions are written in Python: the graph hides theirs
            assert saved.keys() <= held_by_the_graph(output)  # so it is what stays in memory
        for own in (*module.parameters(), *module.buffers()):
            saved.pop(own.untyped_storage().data_ptr(), None)
        assert row["batch"] == batch
        # torch says that batch normalisation keeps its two statistics in the type of its input;
        # where autocast has made that bf16, it keeps them in fp32.
        norms = [
            each for each in module.modules() if isinstance(each, nn.modules.batchnorm._NormBase)
        ]
        casts = precision in ("bf16", "fp8")
        hidden = sum(2 * 2 * n.num_features for n in norms) if casts else 0
        assert row["activations"] + hidden == sum(each.nbytes() for each in saved.values())
        output.float().sum().backward()
        optimizer = torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
        optimizer.step()
        state = [v for values in optimizer.state.values() for v in values.values()]
        assert row["parameters"] == nbytes(module.parameters())
        assert row["buffers"] == nbytes(module.buffers())
        assert row["gradients"] == nbytes(p.grad for p in module.parameters() if p.requires_grad)
        assert row["optimizer"] == nbytes(state)
        assert row["total"] == sum(
            row[part] for part in ("parameters", "gradients", "optimizer", "buffers", "activations")
        )


def test_the_weights_alone_in_each_dtype(capsys):
    bits = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4}
    rows = estimate(capsys, "weighed:Tied", "--dtypes", *bits)
    module = import_module("weighed").Tied()
    tensors = [*module.parameters(), *module.buffers()]
    floats = sum(each.numel() for each in tensors if each.is_floating_point())
    others = sum(each.nbytes for each in tensors if not each.is_floating_point())
    assert {row["dtype"]: row["total"] for row in rows} == {
        dtype: floats * size // 8 + others for dtype, size in bits.items()
    }
    largest = module.embedding.weight.numel()
    assert [row["largest layer"] for row in rows] == [largest * size // 8 for size in bits.values()]
    assert main(["estimate-memory", "weighed:Tied", "--dtypes", "int4"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["int4", "400", "B"]
    for option in ("--fsdp=2", "--wrap=Tied", "--optimizer=sgd", "--activation-checkpointing"):
        said = refused(capsys, "weighed:Tied", "--dtypes", "int4", option, code=2)
        assert f"--dtypes estimates only weights; leave out {option.partition('=')[0]}." in said
    said = refused(capsys, "weighed:Tied", "--precision", "fp8", "--fsdp", 2, code=2)
    assert "not measured with --fsdp" in said


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (["--optimizer", "SGD"], torch.optim.SGD),
        (
            ["--optimizer", "sgd", "--optimizer-init", "momentum=0.9"],
            lambda p: torch.optim.SGD(p, momentum=0.9),
        ),
        (["--optimizer=torch.optim:Adagrad"], torch.optim.Adagrad),
        (
            ["--optimizer=adam", "--optimizer-init", "amsgrad=true", "lr=1e-3"],
            lambda p: torch.optim.Adam(p, amsgrad=True),
        ),
        (["--optimizer=weighed:sgd_of_a_list"], torch.optim.SGD),
        (
            ["--optimizer=weighed:sgd_of_a_list", "--optimizer-init", "momentum=0.9"],
            lambda p: torch.optim.SGD(p, momentum=0.9),
        ),
    ],
)
def test_other_optimizers_have_their_own_state(capsys, words, make: Callable[..., Any]):
    (row, _) = estimate(capsys, "weighed:make", "--init", "width=100", *words)
    module = import_module("weighed").make(100)
    optimizer = make(module.parameters())
    module(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    state = [v for values in optimizer.state.values() for v in values.values()]
    assert row["optimizer"] == nbytes(each for each in state if isinstance(each, torch.Tensor))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "torch.optim.AdamW"),
        (
            ["--optimizer-init", "momentum=0.9", "--optimizer=sgd", "--optimizer-init", "lr=1"],
            "torch.optim.SGD(momentum=0.9, lr=1)",
        ),
        (["--optimizer=weighed:sgd_of_a_list"], "weighed:sgd_of_a_list"),
    ],
)
def test_the_output_names_the_optimizer_that_was_counted(capsys, words, name):
    words = ["estimate-memory", "weighed:make", "--precision", "no", *words]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"optimizer: {name}"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == name


def test_the_help_says_what_an_optimizer_may_be():
    shown = " ".join(parser("trainer estimate-memory").format_help().split())
    assert "MODULE:NAME, a class or function that creates an optimizer from a list" in shown


OF_TORCH = [
    name.lower()
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name != "Optimizer"
]


@pytest.mark.parametrize("name", OF_TORCH)
def test_every_optimizer_of_torch_is_measured_or_refused_with_the_choices(capsys, name):
    words = ["torch.nn:Linear", "--init", "in_features=30", "out_features=20", "bias=false"]
    if name in ("lbfgs", "sparseadam"):  # which make no step on dense gradients alone
        told = refused(capsys, *words, "--optimizer", name, code=2)
        choices = told.partition("must be one of ")[2].partition(".")[0].split(", ")
        assert choices == sorted(map(repr, {*OF_TORCH} - {"lbfgs", "sparseadam"}))
        return
    (row,) = estimate(capsys, *words, "--optimizer", name, "--precision", "no")
    module = nn.Linear(30, 20, bias=False)
    make = {each.lower(): value for each, value in vars(torch.optim).items()}[name]
    optimizer = make(module.parameters())
    module(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    state = [v for values in optimizer.state.values() for v in values.values()]
    assert row["optimizer"] == nbytes(each for each in state if isinstance(each, torch.Tensor))


def test_what_a_network_with_gates_keeps_is_not_left_out(capsys):
    words = ["torch.nn:LSTM", "--init", "input_size=4", "hidden_size=6", "batch_first=true"]
    (row,) = estimate(capsys, *words, "--input", "5x4", "--batch", 3, "--precision", "no")
    module = nn.LSTM(4, 6, batch_first=True)
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        with saved_tensors() as saved:
            module(torch.randn(3, 5, 4))
    finally:
        torch.backends.mkldnn.set_flags(before)
    for own in module.parameters():
        saved.pop(own.untyped_storage().data_ptr(), None)
    assert row["activations"] == sum(each.nbytes() for each in saved.values())


def test_shards_follow_the_stages_of_zero(capsys):
    rows = estimate(capsys, "weighed:Tied", "--precision", "no", "--shards", 1, 2, 8)
    alone = rows[0]
    assert [(row["processes"], row["zero"]) for row in rows] == [
        (1, 0),
        *((2, stage) for stage in (1, 2, 3)),
        *((8, stage) for stage in (1, 2, 3)),
    ]
    for row in rows[1:]:
        for stage, part in ((1, "optimizer"), (2, "gradients"), (3, "parameters")):
            by = row["processes"] if row["zero"] >= stage else 1
            assert alone[part] / by <= row[part] < alone[part] / by + 1
        assert row["buffers"] == alone["buffers"]
        assert row["activations"] is None


def test_a_layout_of_fsdp_is_measured_beside_that_of_one_process(capsys):
    words = ["weighed:Tied", "--precision", "no", "--input", "7:int64"]
    (alone,) = estimate(capsys, *words)
    words += ["--wrap", "TransformerEncoderLayer", "--fsdp", 1, 2]
    one, two = estimate(capsys, *words)
    assert one == alone
    assert (two["processes"], two["sharding"]) == (2, "FSDP 2")
    assert two["activations"] == alone["activations"]
    module = import_module("weighed").Tied()
    halves = {p: -(-len(p) // 2) * p[0].nbytes for p in module.parameters()}
    assert two["parameters"] == sum(halves.values())
    assert two["gradients"] == sum(size for p, size in halves.items() if p.requires_grad)
    assert two["gathered"] == alone["parameters"]  # the two layers, and all around them


def test_the_formulas_are_those_of_the_paper():
    # Its example, with 16 bytes of model state a parameter: 7.5e9 parameters on 64 processes.
    whole = Footprint(parameters=15, gradients=15, optimizer=90, buffers=0)  # in 1e9 bytes
    scaled = Footprint(**{k: v * 10**9 for k, v in vars(whole).items() if v is not None})
    totals = [scaled.total, *(scaled.sharded(stage, 64).total for stage in (1, 2, 3))]
    assert [round(total / 1e9, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


def test_a_model_of_any_size_fits(capsys):
    (row,) = estimate(capsys, "weighed:Huge", "--precision", "no")
    assert row["parameters"] == 4 * 4 * ((1 << 40) + (1 << 20))
    assert row["optimizer"] == 2 * row["parameters"] + 4 * 8
    main(["estimate-memory", "weighed:Huge", "--precision", "no"])
    shown = capsys.readouterr().out
    assert "4,398,050,705,408 parameters" in shown
    assert "16 TiB" in shown
    assert "Activations are unknown without --input" in shown


def test_inputs_may_have_names_and_types(capsys):
    words = ["weighed:Tied", "--precision", "no", "--batch", 3]
    (row,) = estimate(capsys, *words, "--input", "scale=1x1:float32", "ids=7:int64")
    module = import_module("weighed").Tied()
    with saved_tensors() as saved:
        module(torch.zeros(3, 7, dtype=torch.int64), torch.ones(3, 1, 1))
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    assert row["activations"] == sum(s.nbytes() for at, s in saved.items() if at not in own)


def test_configure_model_is_called(capsys):
    (row,) = estimate(capsys, "weighed:Late", "--precision", "no")
    assert row["parameters"] == 4 * 16


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["nowhere:Net"], 1, "There is no module 'nowhere'"),
        (["weighed:Tiedd"], 1, "Did you mean 'Tied'?"),
        (["weighed:Tied", "--init", "widht=3"], 2, "weighed:Tied(width=16, vocabulary=50) cannot"),
        (["weighed.Tied"], 2, "Did you mean 'weighed:Tied'?"),
        (["weighed:F"], 1, "it must be a class or a function"),
        (["weighed:Tied", "--optimizer", "adanw"], 2, "Did you mean 'adamw'?"),
        (
            ["weighed"],
            2,
            "'weighed' is not MODULE:CLASS. Did you mean 'weighed:CLASS'?",
        ),
        (["weighed.py:Tied"], 1, "Did you mean 'weighed:Tied'?"),
        (["./weighed.py:Tied"], 1, "Did you mean 'weighed:Tied'?"),
        (["../net.py:Net"], 1, "There is no module '../net.py',"),
        ([":Net"], 1, "There is no module '',"),
        (["weighed:Image", "--optimizer", "muon"], 1, "optimizer cannot be measured: ValueError"),
        (["weighed:Image", "--optimizer-init", "rl=1"], 1, "unexpected keyword argument 'rl'\nIt"),
        (["weighed:Image", "--optimizer", "torch.optim:LBFGS"], 1, "or choose another with"),
        (
            ["weighed:Image", "--optimizer", "adanw"],
            2,
            "a custom optimizer as MODULE:NAME, a class or",
        ),
        (["weighed:Image", "--optimizer", "weighed:F"], 2, "takes MODULE:NAME, a class or func"),
        (["weighed:Image", "--optimizer", "weighed:no_optimizer"], 1, "is a list, not a torch.opt"),
        (["weighed:Tied", "--input", "7:int46"], 2, "'int64'"),
        (["weighed:Tied", "--wrap", "Linear"], 2, "need --fsdp or --tp"),
        (
            ["weighed:Tied", "--fsdp", "2", "--wrap", "Block"],
            1,
            "transformer_cls_names_to_wrap is 'Block'; it must be one of",
        ),
        (["weighed:Image", "--tp", "2"], 1, "does not say which layers to split"),
        (["weighed:Reads", "--input", "3"], 1, "must not read values"),
        (["weighed:Image", "--input", "3"], 1, "--input must be what forward takes"),
    ],
)
def test_what_cannot_be_measured_is_an_error(capsys, words, code, text):
    assert text in refused(capsys, *words, code=code)


@pytest.mark.parametrize(
    "words",
    [["--init", "width"], ["--input", "3*4"], ["--batch", "0"], ["--precision", "int8"]],
)
def test_a_wrong_word_is_an_error_of_usage(capsys, words):
    assert main(["estimate-memory", "weighed:Tied", *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_the_values_of_repeated_options_add_up(capsys):
    once = ["--batch", 1, 2, "--shards", 1, 8, "--precision", "no", "bf16", "--input", "7:int64"]
    twice = ["--batch", 1, "--shards", 1, "--precision", "no", "--input", "7:int64"]
    twice += ["--batch", 2, "--shards", 8, "--precision", "bf16"]
    found = estimate(capsys, "weighed:Tied", *twice)
    assert found == estimate(capsys, "weighed:Tied", *once)
    assert len(found) == 2 * 2 * (1 + 3)


def test_arguments_and_inputs_add_up(capsys):
    together = ["--init", "width=8", "vocabulary=9", "--input", "scale=1x1", "ids=7:int64"]
    apart = ["--init", "width=8", "--input", "scale=1x1", "--init", "vocabulary=9"]
    apart += ["--input", "ids=7:int64"]
    assert estimate(capsys, "weighed:Tied", *apart) == estimate(capsys, "weighed:Tied", *together)
    (row, _) = estimate(capsys, "weighed:Tied")
    assert row["parameters"] != estimate(capsys, "weighed:Tied", *apart)[0]["parameters"]


@pytest.mark.parametrize(
    ("words", "library"),
    [
        (["bert"], "transformers"),
        (["timm/vit"], "timm"),
        (["vit", "--library_name", "timm"], "timm"),
        (["timm/vit", "--library_name=timm"], "timm"),
    ],
)
def test_a_library_that_is_missing_is_named(capsys, monkeypatch, words, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert f"pip install {library}" in refused(capsys, *words)


def test_code_that_comes_with_a_model_is_run_only_if_it_is_trusted(capsys, monkeypatch, tmp_path):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    Path("own").mkdir()
    Path("own/code.py").write_text(
        "import torch, transformers\n"
        "class Config(transformers.PretrainedConfig):\n"
        "    model_type = 'own'\n"
        "class Model(transformers.PreTrainedModel):\n"
        "    config_class = Config\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.layer = torch.nn.Linear(3, 5)\n"
        "        self.post_init()\n"
    )
    classes = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    Path("own/config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (row,) = estimate(capsys, "./own", "--precision", "no", "--trust_remote_code")
    assert row["parameters"] == 4 * (3 * 5 + 5)
    assert "trust_remote_code" in refused(capsys, "./own", "--precision", "no")


def test_a_configuration_of_transformers(capsys):
    from transformers import AutoModel, BertConfig

    config = BertConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=90)
    config.save_pretrained("bert")
    (row,) = estimate(capsys, "./bert", "--precision", "no")
    assert row["parameters"] == nbytes(AutoModel.from_config(config).parameters())


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch):
    # In a process of its own, since the library goes on trying in a thread.
    script = (
        "import sys\n"
        "from trainer.cli import estimate_memory, main\n"
        "estimate_memory._PATIENCE = 0.5\n"
        "sys.exit(main(['estimate-memory', 'somebody/model']))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 1
    assert "the hub did not answer within 0.5 seconds" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_nothing_of_the_process_is_changed(capsys):
    before = torch.get_rng_state(), torch.get_default_dtype()
    estimate(capsys, "weighed:Tied", "--input", "7:int64", "--precision", "pure-bf16")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_default_dtype() == before[1]
    assert type(torch.zeros(1)) is torch.Tensor
