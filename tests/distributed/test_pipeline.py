"""Pipelines of two processes equal the whole model on one: outputs, losses, norms and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from tests.helpers.ranks import RankError
from tests.helpers.requires import requires_pipelining
from trainer import Accelerator, PartialState, PipelineParallel, prepare_pippy
from trainer.big_models.pipeline import choose_split_points
from trainer.torch_compat import check_pipelining

X = torch.randint(0, 11, (10, 6), generator=torch.Generator().manual_seed(1))
Y = (X * 3 + 1) % 11
Y[X == 4] = -100  # unequally many in each row


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.net(self.norm(x)).tanh() * scale.mT


class Net(nn.Module):
    """Later stages use what the first one has computed, and the argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        scale = (self.scale * (1 + x.mean(-1, keepdim=True))).mT  # not contiguous
        for block in self.blocks:
            x = block(x, scale)
        return {"logits": self.head(x) * (tokens != 4).unsqueeze(-1), "embedded": scale}


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def count(target: Tensor) -> float:
    return float((target != -100).sum())


def batches() -> list[tuple[Tensor, Tensor]]:
    """A short one too, of which a micro-batch would be empty."""
    return [(X, Y), (X.flip(0), Y.flip(0)), (X[:3], Y[:3])]


def reference() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train with plain torch, on whole batches."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for x, y in batches():
        loss = loss_of(model(x), y)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(loss_of(model.eval()(X), Y).item())
    return losses, norms, model.state_dict()


def begin() -> None:
    tqdm.monitor_interval = 0  # torch.export uses it, and its thread would never end
    PartialState(cpu=True)


def train(
    folder: Path, schedule: str, split_points: list[str]
) -> tuple[list[float], list[float], set[str]]:
    begin()
    model = Net()
    pipeline = PipelineParallel(
        model,
        loss_of,
        example_args=(X[:3],),
        split_points=split_points,
        num_microbatches=4,
        schedule=schedule,
        count_items=count,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for x, y in batches():
        if pipeline.stage_index:  # rank 0's count
            x, y = torch.zeros_like(x), torch.zeros_like(y)
        losses.append(pipeline.step(x, target=y).item())
        norms.append(pipeline.clip_grad_norm_(0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    losses.append(pipeline.evaluate(X, target=Y).item())
    output = pipeline(X)
    if output is not None:  # on the last process
        assert loss_of(output, Y).item() == pytest.approx(losses[-1], abs=2e-6)
    pipeline.save_model(folder)
    return losses, norms, {name for name, _ in pipeline.named_parameters()}


def read_model(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


@pytest.mark.parametrize(
    ("schedule", "points"), [("1F1B", ["blocks.2"]), ("GPipe", ["blocks.1", "blocks.3"])]
)
@requires_pipelining
def test_training_equals_one_process(ranks, schedule, points, tmp_path):
    expected, norms, weights = reference()
    found = ranks(len(points) + 1)(lambda: train(tmp_path, schedule, points))
    for losses, of_all, _ in found:
        assert losses == pytest.approx(expected, abs=2e-6)
        assert of_all == pytest.approx(norms, abs=2e-6)
    saved = read_model(tmp_path)
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=2e-6)
    first, *_, last = (names for _, _, names in found)
    assert "embedding.weight" in first
    assert "head.weight" in last
    assert not first & last


def test_one_process_runs_the_same_micro_batches(tmp_path):
    expected, norms, weights = reference()
    losses, of_all, _ = train(tmp_path, "1F1B", [])
    assert losses == pytest.approx(expected, abs=2e-6)
    assert of_all == pytest.approx(norms, abs=2e-6)
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("gather_output", [False, True])
@requires_pipelining
def test_inference_equals_the_whole_model(ranks2, gather_output):
    def run() -> Any:
        begin()
        model = prepare_pippy(
            Net(), example_args=(X[:2],), num_chunks=3, gather_output=gather_output
        )
        with torch.no_grad():  # as often as needed, with any number of rows
            outputs = [model(X), model(X[:4])] if dist.get_rank() == 0 else [model(), model()]
        return model.hf_split_points, [each and each["logits"] for each in outputs]

    with torch.no_grad():
        expected = Net()(X)["logits"]
    (points, first), (others, last) = ranks2(run)
    assert points == others == ["blocks.2"]
    for found in (first, last) if gather_output else (last,):
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(found[1], expected[:4], rtol=0, atol=1e-6)
    if not gather_output:
        assert first == [None, None]


@requires_pipelining
def test_the_mode_of_a_submodule_counts_also_after_the_model_was_traced(ranks2):
    def outputs() -> list[Tensor]:
        begin()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(1.0))
        prepare_pippy(model, ["1"], example_args=(torch.ones(2, 6),), gather_output=True)
        dropped = model(torch.ones(2, 6))
        model[2].eval()
        return [dropped, model(torch.ones(2, 6))]

    for dropped, kept in ranks2(outputs):
        assert not dropped.any()
        assert kept.all()


def test_a_single_process_keeps_its_model():
    PartialState(cpu=True)
    model = prepare_pippy(Net(), example_args=(X[:2],))
    assert model.hf_split_points == []
    assert torch.equal(model(X)["logits"], Net()(X)["logits"])


def test_stages_of_about_equal_size_begin_where_modules_do():
    assert choose_split_points(Net(), 2, ["Block"]) == ["blocks.2"]
    assert choose_split_points(Net(), 3, ["Block"]) == ["blocks.1", "blocks.3"]
    with pytest.raises(ValueError, match="finds 7 modules in Net to distribute over 9 processes"):
        choose_split_points(Net(), 9, ["Block"])


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight


@requires_pipelining
def test_unsupported_models_are_refused_by_name(ranks2):
    def refused() -> list[str]:
        begin()
        found = []

        def refuse(make: Any, error: type[Exception] = ValueError) -> None:
            with pytest.raises(error) as raised:
                make()
            found.append(str(raised.value))

        def pipeline(model: nn.Module, points: Any, **options: Any) -> PipelineParallel:
            return PipelineParallel(model, loss_of, (X[:2],), split_points=points, **options)

        refuse(lambda: pipeline(Tied(), ["blocks.2"]))
        refuse(lambda: pipeline(Net(), ["block.2"]))
        refuse(lambda: pipeline(Net(), ["blocks.1", "blocks.2"]))
        refuse(lambda: pipeline(Net(), ["unused"]))
        frozen = Net()
        frozen.head.requires_grad_(False)
        refuse(lambda: pipeline(frozen, ["head"]))
        refuse(lambda: pipeline(Net(), ["blocks.2"], num_microbatches=1))
        refuse(lambda: pipeline(Net(), ["blocks.2"], schedule="1F2B"))
        working = pipeline(Net(), ["blocks.2"])
        refuse(lambda: working.step(X, target=Y[:3]))
        with torch.autocast("cpu", torch.bfloat16):
            refuse(lambda: working.step(X, target=Y))
        shown = prepare_pippy(Net(), ["blocks.2"], example_args=(X[:2],))
        refuse(lambda: Accelerator(cpu=True).prepare(shown))
        return found

    said = [
        "embedding.weight is used in the stages [0, 1]",
        "split_points is 'block.2'. Did you mean 'blocks.2'? It must be one of",
        "split_points has 2 names, which make 3 stages, for 2 processes",
        "split_points ['unused'] cut Net into 1 stages, for 2 processes",
        "No parameter of stage 1 is trained",
        "num_microbatches is 1, for 2 processes",
        "schedule is '1F2B'. Did you mean '1F1B'? It must be one of '1F1B', 'GPipe'",
        "has a tensor of shape (3, 6)",
        "A pipeline does not run under autocast",
        "Net is a pipeline (prepare_pippy)",
    ]
    for found in ranks2(refused):
        for text, part in zip(found, said, strict=True):
            assert part in text


@requires_pipelining
def test_an_error_in_the_loss_is_raised_on_all_ranks(ranks2):
    expected = reference()[0][0]

    def run() -> tuple[list[str], float, float]:
        begin()
        fails, calls, found = "", 0, []

        def loss_of_step(output: dict[str, Tensor], target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if fails == "loss" and calls % 4 == 2:  # the second micro-batch
                raise KeyError("loss")
            return output["logits"] if fails == "shape" else loss_of(output, target)

        def count_of_step(target: Tensor) -> float:
            if fails == "count":
                raise KeyError("count")
            return count(target)

        pipeline = PipelineParallel(
            Net(),
            loss_of_step,
            (X[:3],),
            split_points=["blocks.2"],
            num_microbatches=4,
            count_items=count_of_step,
        )
        for kind in ("loss", "shape", "count"):
            fails = kind
            for call in (pipeline.step, pipeline.evaluate):
                with pytest.raises((KeyError, ValueError, RuntimeError)) as raised:
                    call(X, target=Y)
                found.append(str(raised.value))
        fails = ""
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.step(X, target=Y)
        parameters = list(pipeline.parameters())
        for parameter in parameters:
            elements = sum(each.numel() for each in parameters)
            parameter.data = parameter.data.half()
            parameter.grad = torch.full_like(parameter, 300 / elements**0.5)
        return found, loss.item(), pipeline.clip_grad_norm_(1.0).item()

    (first, *of_first), (last, *of_last) = ranks2(run)
    for loss, norm in (of_first, of_last):
        assert loss == pytest.approx(expected, abs=2e-6)
        assert norm == pytest.approx(300 * 2**0.5, rel=1e-2)  # its square is above float16
    causes = ["'loss'"] * 2 + ["loss_function returned a tensor of shape"] * 2 + ["'count'"] * 2
    for others, own, cause in zip(first, last, causes, strict=True):
        assert own.startswith(cause)
        assert others.startswith("Rank 1 failed while the others waited for it: ")
        assert own in others


class Places(Net):
    """The last stage alone uses the first argument, and none the third."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(11, 11)

    def forward(self, places: Tensor, tokens: Tensor, unused: Tensor) -> dict[str, Tensor]:
        output = super().forward(tokens)
        return {**output, "logits": output["logits"] + self.places(places)}


@requires_pipelining
def test_an_error_in_one_stage_is_raised_on_all_ranks_and_the_next_batch_runs(ranks2):
    outside = X.clone()
    outside[-1] = 11  # in the last micro-batch
    good, bad_of_each = (X.flip(0), X), [(X, outside), (outside, X)]

    def run() -> tuple[list[str], float, Any]:
        begin()
        example, found = ((X[:3], X[:3]), {"unused": X[:3]}), []
        pipeline = PipelineParallel(
            Places(), loss_of, *example, split_points=["blocks.2"], count_items=count
        )
        model = prepare_pippy(Places(), ["blocks.2"], None, *example)
        for bad in bad_of_each:
            for call in (pipeline.step, pipeline.evaluate, model):
                target = {} if call is model else {"target": Y}
                with pytest.raises((IndexError, RuntimeError)) as raised, torch.no_grad():
                    call(*bad, unused=X, **target)
                found.append(str(raised.value))
        loss = pipeline.step(*good, unused=X, target=Y).item()
        with torch.no_grad():
            output = model(*good, unused=X)
        return found, loss, output and output["logits"]

    (first, *of_first), (last, *of_last) = ranks2(run)
    own = "index out of range in self"
    for rank, own_texts, others in ((0, first[:3], last[:3]), (1, last[3:], first[3:])):
        waited = f"Rank {rank} failed while the others waited for it: IndexError: {own}"
        assert all(text.startswith(own) for text in own_texts)
        assert all(text.startswith(waited) for text in others)
    expected = Places()(*good, X)
    assert of_first[0] == of_last[0] == pytest.approx(loss_of(expected, Y).item(), abs=2e-6)
    torch.testing.assert_close(of_last[1], expected["logits"].detach(), rtol=0, atol=1e-6)


@requires_pipelining
def test_an_error_on_rank_0_is_raised_on_all_ranks(ranks2):
    def run() -> None:
        begin()
        model = prepare_pippy(Net(), ["blocks.2"], example_args=(X[:2],))
        model() if dist.get_rank() else model("text")

    with pytest.raises(RankError) as raised:
        ranks2(run)
    assert str(raised.value).count("TypeError: find_batch_size needs a tensor") == 2


def test_an_older_torch_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    with pytest.raises(NotImplementedError, match=r"needs torch 2\.12; this is torch 2\.11"):
        check_pipelining()
