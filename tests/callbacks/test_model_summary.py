import pytest
import torch
from torch import nn

from callbacks import ModelSummary
from callbacks.model_summary import summarize
from tests.helpers.stand_in import TrainerStandIn


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


def test_wrong_depth_is_refused():
    with pytest.raises(ValueError, match="-2"):
        ModelSummary(max_depth=-2)
    with pytest.raises(ValueError, match="-2"):
        summarize(Model(), -2)
