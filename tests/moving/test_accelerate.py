"""Programs in the shape of accelerate's examples run after a change of their import lines alone."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from logging import LoggerAdapter
from pathlib import Path
from typing import Any

import pytest
import torch

import trackers
from tests.moving.running import PROGRAMS, load
from trainer import accelerate
from trainer.accelerate.table import PLACES, find, value_of, why_not

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None,
    reason="accelerate is missing: pip install -e '.[peers]'",
)


def moved(text: str) -> str:
    """What a user does: change the import lines."""
    text = re.sub(r"^(\s*from )accelerate\b", r"\1trainer.accelerate", text, flags=re.MULTILINE)
    return re.sub(
        r"^(\s*)import accelerate$", r"\1import trainer.accelerate as accelerate", text, flags=re.M
    )


def run(name: str, library: str, folder: str) -> dict[str, Any]:
    """Run a program as a script of accelerate or, with its import lines changed, of Cadence."""
    text = (PROGRAMS / f"{name}.py").read_text()
    Path(folder).mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        if library == "accelerate":
            warnings.simplefilter("ignore")  # its own are not what is tested
        else:
            text = moved(text)
        script = load(name, text)
        try:
            found: dict[str, Any] = script["main"](folder)
        finally:
            if library == "accelerate":
                state = sys.modules["accelerate.state"]
                for kept in (state.AcceleratorState, state.PartialState, state.GradientState):
                    kept._reset_state()
    return found


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """The names that the statements define or import from accelerate."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try)):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for part in (node.body, *handlers, node.orelse):
                yield from names_in(part)


@needs_accelerate
def test_each_public_name_of_accelerate_is_here_or_says_why_not():
    spec = find_spec("accelerate")
    root = Path(spec.origin).parent
    missing, here = [], 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if why_not(module):
            continue
        names = [name for name in names_in(ast.parse(path.read_text()).body) if name[0] != "_"]
        for name in dict.fromkeys(names):
            try:
                here += value_of(module, name) is not None
            except ImportError as error:
                if f"{name} is not in Cadence: " not in str(error):
                    raise
            except (AttributeError, KeyError):
                missing.append(f"{module}.{name}")
    assert missing == []
    assert here > 700


@needs_accelerate
def test_the_version_is_that_of_which_the_names_are():
    assert metadata.version("accelerate") == accelerate.__version__


def test_names_are_cadences_own():
    import trainer.accelerate.utils.operations
    import trainer.accelerate.utils.tqdm
    from trainer.accelerate.data_loader import DataLoaderShard
    from trainer.accelerate.state import AcceleratorState
    from trainer.accelerate.tracking import get_available_trackers
    from trainer.accelerate.utils import set_seed, tqdm
    from trainer.accelerate.utils.tqdm import tqdm as of_its_module

    assert tqdm is of_its_module is trainer.utils.tqdm
    assert accelerate.Accelerator is trainer.Accelerator
    assert AcceleratorState is trainer.AcceleratorState
    assert set_seed is trainer.set_seed
    assert DataLoaderShard.__module__ == "trainer.data.dataloader"
    assert get_available_trackers is trackers.available_trackers
    assert trainer.accelerate.utils.operations.gather is trainer.utils.gather


def test_what_is_not_here_says_what_to_use():
    with pytest.raises(ImportError, match=r"utils.get_shape is not in Cadence: gather, reduce and"):
        from trainer.accelerate.utils import get_shape  # noqa: F401 - the import is what is tested
    with pytest.raises(
        ImportError, match=r"accelerate.test_utils is not in Cadence: these are the"
    ):
        import_module("trainer.accelerate.test_utils.testing")
    with pytest.raises(
        ImportError, match=r"accelerate.commands.menu is not in Cadence: .*trainer lau"
    ):
        accelerate.commands.menu
    with pytest.raises(ImportError, match=r"megatron_lm.GPTTrainStep is not in .*megatron-core"):
        from trainer.accelerate.utils.megatron_lm import GPTTrainStep  # noqa: F401 - as above
    with pytest.raises(ImportError, match=r"megatron_lm.prepare_data_loader is .*megatron-core"):
        from trainer.accelerate.utils.megatron_lm import prepare_data_loader  # noqa: F401 - as above
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'trainer.accelerate.nothing'"):
        import_module("trainer.accelerate.nothing")
    assert not hasattr(accelerate, "nothing")


def test_the_types_of_names_are_those_of_the_names():
    stub = ast.parse(Path(accelerate.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    for node in imports[1:]:
        for alias in node.names:
            value = getattr(import_module(str(node.module)), alias.name)
            assert getattr(accelerate, alias.name) is value
    assert len(imports) > 15


@needs_accelerate
@pytest.mark.parametrize("name", ["big_models", "complete_cv", "complete_nlp", "local_sgd"])
def test_a_script_gives_the_same_numbers_as_under_accelerate(name, tmp_path):
    assert run(name, "cadence", f"{tmp_path}/a") == run(name, "accelerate", f"{tmp_path}/b")


@needs_accelerate
@pytest.mark.parametrize("name", ["complete_cv", "complete_nlp", "local_sgd"])
def test_a_script_gives_the_same_numbers_on_two_processes(ranks2, name, tmp_path):
    ours = ranks2(run, name, "cadence", f"{tmp_path}/a")
    theirs = ranks2(run, name, "accelerate", f"{tmp_path}/b")
    assert ours == theirs


def test_a_moved_script_gives_the_numbers_of_a_plain_loop_and_resumes_exactly(tmp_path):
    found = run("complete_nlp", "cadence", str(tmp_path))
    script = load("complete_nlp", moved((PROGRAMS / "complete_nlp.py").read_text()))
    torch.manual_seed(42)
    model = script["Classifier"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    batches = [script["collate"](script["dataset"](52, 0)[at : at + 4]) for at in range(0, 52, 4)]
    evaluated = script["collate"](script["dataset"](21, 1))
    losses, metrics = [], []
    for _ in range(3):
        model.train()
        for index, batch in enumerate(batches):
            loss, _ = model(**batch)
            losses.append(loss.item())
            (loss / 2).backward()
            if index % 2 == 1 or batch is batches[-1]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        guesses = model.eval()(**evaluated)[1].argmax(-1)
        metrics.append(((guesses == evaluated["labels"]).sum().item(), 21))
    assert found["losses"][:39] == losses
    assert found["losses"][39:] == losses[28:]  # resumed after the second batch of the last epoch
    assert found["metrics"] == [*metrics, metrics[-1]]


OTHER_PARAMETERS = {
    "AcceleratedOptimizer": {"scaler": "prepare makes it, and its precision has the scaler"},
    "DistributedDataParallelKwargs.to_dict": {"ignore_keys": "for its own register_comm_hook"},
    "MultiProcessAdapter": dict.fromkeys(
        inspect.signature(LoggerAdapter).parameters.keys() - {"logger"}, "get_logger makes it"
    ),
    "ignorant_find_batch_size": {"data": "by position: it is find_batch_size, as `tree`"},
    "on_main_process": {"function": "by position, as a decorator"},
    "register_tracker_class": {"tracker_class": "by position, as a decorator"},
}
"""Parameters of accelerate that are not here under their name: why nobody passes them by it."""


def parameters(of: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(of).parameters)
    except ValueError:  # of an enumeration, or a built-in
        return {}


def pairs() -> Iterator[tuple[str, Any, Any]]:
    """Each public function, class and method of accelerate that is here, with ours."""
    for module in PLACES:
        # The command line has tests of its own; the others need rich, or say that they are old.
        if module.startswith("commands") or module in ("memory_utils", "utils.rich"):
            continue
        for name, theirs in vars(import_module(f"accelerate.{module}".strip("."))).items():
            if name[0] == "_" or not getattr(theirs, "__module__", "").startswith("accelerate"):
                continue
            if not callable(theirs) or not find(module, name) or why_not(module, name):
                continue
            ours = value_of(module, name)
            yield name, theirs, ours
            for method, function in vars(theirs).items() if inspect.isclass(theirs) else ():
                if method[0] != "_" and inspect.isfunction(function) and hasattr(ours, method):
                    yield f"{name}.{method}", function, getattr(ours, method)


@needs_accelerate
def test_each_parameter_of_accelerate_is_taken_under_its_name():
    missing: dict[str, list[str]] = {}
    seen = 0
    for name, theirs, ours in pairs():
        seen += 1
        here = parameters(ours)
        if any(each.kind == each.VAR_KEYWORD for each in here.values()):
            continue  # it hands them on to what refuses those that it does not know
        absent = [
            each.name
            for each in parameters(theirs).values()
            if each.name not in here and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if absent:
            missing[name] = sorted(absent)
    assert missing == {name: sorted(reasons) for name, reasons in OTHER_PARAMETERS.items()}
    assert seen > 500
