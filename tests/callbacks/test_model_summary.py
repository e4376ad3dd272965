import contextlib
import io
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelSummary
from callbacks.flops import flops_of
from callbacks.model_summary import summarize
from tests.helpers.stand_in import TrainerStandIn
from trainer import Trainer, TrainModule


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5, bias=False))
        self.head = nn.Linear(5, 2, dtype=torch.float64)
        self.head.weight.requires_grad_(False)
        self.frozen = nn.Linear(1000, 1, bias=False).requires_grad_(False)


def test_table():
    assert summarize(Model()) == "\n".join(
        [
            "Name    Type        Parameters  Trainable",
            "-----------------------------------------",
            "scale   Parameter            3  yes",
            "body    Sequential         320  yes",
            "head    Linear              12  partly",
            "frozen  Linear           1,000  no",
            "-----------------------------------------",
            "325 trainable parameters",
            "1,010 frozen parameters",
            "1,335 parameters, 0.005 MB",
        ]
    )


def names(text):
    return [line.split()[0] for line in text.splitlines()[2:-4]]


def test_depth():
    nested = nn.Sequential(Model())
    assert names(summarize(nested)) == ["0"]
    assert names(summarize(nested, 2)) == ["0", "0.body", "0.head", "0.frozen"]
    assert names(summarize(nested, -1)) == names(summarize(nested, 3))
    assert {"0.body.0", "0.body.1", "0.body.2"} < set(names(summarize(nested, 3)))
    assert summarize(nested, 0) == "\n".join(summarize(nested).splitlines()[-3:])


def test_size_counts_the_bytes_of_each_type():
    model = nn.ModuleList(
        [nn.Linear(1000, 1000, bias=False, dtype=t) for t in (torch.float64, torch.bfloat16)]
    )
    assert summarize(model, 0).endswith("2,000,000 parameters, 10.000 MB")


def test_tied_parameters_count_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    text = summarize(model)
    assert names(text) == ["embedding", "head"]
    assert "21 parameters" in text
    assert "42" not in text


def test_uninitialised_parameters_are_named_as_such():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    text = summarize(model)
    assert "10 + 2 uninitialised parameters" in text
    assert "0 + 2 uninitialised" in text.splitlines()[2]
    model(torch.zeros(1, 3))
    assert "26 parameters" in summarize(model)


def test_model_without_parameters():
    assert summarize(nn.Sequential(nn.ReLU())).splitlines()[-1] == "0 parameters, 0.000 MB"
    assert "-" in summarize(nn.Sequential(nn.ReLU())).splitlines()[2]


def test_callback_prints_through_the_accelerator():
    trainer, model = TrainerStandIn(), Model()
    ModelSummary(max_depth=2).on_fit_start(trainer, model)
    assert trainer.accelerator.printed == [summarize(model, 2)]


class Everything(nn.Module):
    """One of each that has a formula, and of each kind that has none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(8, 5)
        self.bilinear = nn.Bilinear(8, 8, 2)

    def forward(self, x):
        y = self.norm(self.conv(x)).relu().flatten(2).permute(2, 0, 1)
        y, _ = self.attention(y, y, y, need_weights=False)
        self.bilinear(y, y)
        torch.fft.fft(y)
        torch.linalg.inv(torch.eye(2))
        nn.functional.linear(y, self.head.weight)
        return self.head(self.head(y)[..., :1].expand(-1, -1, 8)).softmax(-1).lgamma()


def test_flops_are_those_of_the_closed_formulas():
    model, x = Everything(), torch.randn(2, 3, 8, 8)
    with flops_of(model) as flops:
        model(x)
    places, batch, width = 4 * 4, 2, 8
    projections = 2 * places * batch * width * 4 * width  # of query, key, value and the result
    products = 2 * (2 * batch * 2 * places * places * (width // 2))  # of 2 heads
    head = 2 * places * batch * width * 5
    expected = {
        "conv": 2 * batch * places * 8 * (3 * 3 * 3),
        "norm": 0,
        "attention": projections + products,
        "head": 2 * head,  # it is called twice
        "bilinear": 0,
    }
    # the third product with the head's weight is outside its calls
    assert flops.total == flops.by_module.pop("") == sum(expected.values()) + head
    assert {name: n for name, n in flops.by_module.items() if "." not in name} == expected
    assert flops.uncounted == ["aten._fft_r2c", "aten._trilinear", "aten.linalg_inv_ex"]
    lines = summarize(model, flops=flops).splitlines()
    assert lines[0].split() == ["Name", "Type", "Parameters", "Trainable", "FLOPs"]
    column = {line.split()[0]: line.split()[-1] for line in lines[2:8]}
    assert column == {name: f"{n:,}" for name, n in expected.items()} | {"unused": "-"}
    assert lines[-2:] == [
        f"{flops.total:,} FLOPs in the forward pass of one batch",
        "not counted: aten._fft_r2c, aten._trilinear, aten.linalg_inv_ex",
    ]


def test_attention_on_the_cpu_counts_forward_and_backward():
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with flops_of(nn.Identity()) as flops:
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * (2 * 3 * 16 * 16 * 8)
    assert flops.total == (2 + 5) * product  # the weights are computed a second time
    assert flops.uncounted == []


def test_composite_operations_are_counted():
    layer = nn.Linear(3, 2)
    with torch.inference_mode(), flops_of(layer) as flops:
        layer(torch.ones(4, 3))
    assert (flops.total, flops.uncounted) == (2 * 4 * 3 * 2, [])


def test_counting_leaves_no_hooks_and_no_mode_also_after_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"), flops_of(model):
        model(torch.ones(3))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


class Digits(TrainModule):
    def __init__(self, *, fails=False, manual=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
        self.fails = fails
        self.automatic_optimization = not manual
        self.forwards = 0

    def training_step(self, batch, batch_idx):
        self.forwards += 1
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        if self.fails:
            raise KeyError("stop")
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return None
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


FORWARD = 2 * 5 * (6 * 4 + 4 * 3)  # of a batch of 5


def fit(module, *callbacks, **options):
    defaults = {"max_epochs": 2, "progress_bar": False, "checkpointing": False, "seed": 0}
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 6, generator=generator))
    trainer = Trainer(cpu=True, callbacks=list(callbacks), **(defaults | options))
    trainer.fit(module, DataLoader(data, 5))
    return dict(trainer.callback_metrics), module.state_dict()


@pytest.mark.parametrize("manual", [False, True])
def test_the_callback_counts_the_first_forward_pass_and_prints_once(manual, capsys):
    summary, module = ModelSummary(flops=True), Digits(manual=manual)
    fit(module, summary)
    assert summary.flops.total == summary.flops.by_module["net"] == FORWARD
    assert capsys.readouterr().out == summarize(module, flops=summary.flops) + "\n"
    assert module.forwards == 8  # none runs a second time


def test_counting_changes_no_number():
    results = []
    for callbacks in ([], [ModelSummary(flops=True)]):
        torch.manual_seed(0)
        results.append(fit(Digits(), *callbacks, project_dir=f"run{len(results)}"))
    (metrics, weights), (own_metrics, own_weights) = results
    assert metrics == own_metrics
    assert all(torch.equal(weights[name], own_weights[name]) for name in weights)


def test_a_first_batch_that_fails_leaves_the_table_without_flops(capsys):
    summary, module = ModelSummary(flops=True), Digits(fails=True)
    with pytest.raises(KeyError):
        fit(module, summary)
    assert capsys.readouterr().out == summarize(module) + "\n"
    assert summary.flops is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_table_does_not_break_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    monkeypatch.setattr(sys, "stdout", terminal.stderr)
    summary, module = ModelSummary(flops=True), Digits()
    fit(module, summary, progress_bar=True, max_epochs=1)
    table = summarize(module, flops=summary.flops).splitlines()
    assert terminal.screen()[1 : len(table) + 1] == table  # after the first line of the run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 3)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def test_compiled_parts_are_counted_and_compiled_afterwards():
    from torch._dynamo.testing import CompileCounter

    compiled = CompileCounter()
    summary, module = ModelSummary(2, flops=True), Digits()
    module.net = Block()
    module.net.compile(backend=compiled)
    fit(module, summary)
    assert summary.flops.total == FORWARD
    assert summary.flops.by_module["net.layers.0"] == 2 * 5 * 6 * 4
    assert compiled.frame_count == 1
    torch.compiler.reset()


def counted_on_ranks():
    summary = ModelSummary(flops=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        fit(Digits(), summary)
    return summary.flops.total, "FLOPs" in output.getvalue()


def test_each_process_counts_and_one_prints(ranks2):
    assert ranks2(counted_on_ranks) == [(FORWARD, True), (FORWARD, False)]
