"""Programs in the shape of those that Lightning's users write, moved in by their import lines.

Each runs as it is under Lightning, where that is installed, and under `trainer.lightning`. Its
weights are the same to the last bit, and its metrics have the same names and values.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.moving.plain import Trained
from tests.moving.running import PROGRAMS, real, run_lightning
from tests.numerics.running import copy_of

NAMES = sorted(path.stem for path in (PROGRAMS / "lightning").glob("*.py"))
WINDOW = "with accumulation it is the mean of the update's batches, not the last batch's"
WHOLE = "evaluations record the values of a whole pass"
DIFFERS = {
    "image_classifier": {"valid_loss_step": WHOLE},
    "research_template": {"train/loss_step": WINDOW, "train/root": WINDOW},
    "segmentation": {"train_loss": WINDOW},
}
"""Values that are other than Lightning's, and why."""
TESTED = ("project_template",)
"""Programs whose test loads the best weights into the module that was trained."""


def is_rate(name: str) -> bool:
    """Whether a `LearningRateMonitor` has logged it: before an update there, and after it here."""
    return name.startswith(("lr-", "one_cycle"))


def ours(name: str, tmp_path: Any) -> tuple[Any, Any, dict[str, list[float]]]:
    module, found, values = run_lightning(name, "trainer.lightning", tmp_path / "ours")
    different = DIFFERS.get(name, {})
    compared = {key: values[key] for key in values if not (key in different or is_rate(key))}
    return copy_of(module), found, compared


def assert_close(found: Any, expected: Any) -> None:
    """Compare numbers in containers: sums in float32 and in float64 differ in the last digits."""
    assert type(found) is type(expected) or isinstance(found, (float, tuple))
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected)
        for name in expected:
            assert_close(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float) and not math.isnan(expected):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_moved_program_trains_as_a_plain_loop(name, tmp_path):
    weights, _, values = ours(name, tmp_path)
    with pytest.raises(Trained) as over:
        run_lightning(name, "tests.moving.plain", tmp_path / "plain")
    module, expected = over.value.args
    if name not in TESTED:
        torch.testing.assert_close(weights, copy_of(module), rtol=0, atol=0)
    compared = {key: expected[key] for key in expected if key not in DIFFERS.get(name, {})}
    assert compared
    for key, kept in compared.items():  # later evaluations come behind those of the fit
        assert key in values, sorted(values)
        assert_close(values[key][: len(kept)], kept)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("name", NAMES)
def test_a_moved_program_does_what_it_does_under_lightning(name, tmp_path, monkeypatch):
    real("lightning")
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning sets them
        monkeypatch.setenv(variable, "1")
    weights, found, values = ours(name, tmp_path)
    module, expected, logged = run_lightning(name, "lightning", tmp_path / "theirs")
    torch.testing.assert_close(weights, copy_of(module), rtol=0, atol=0)
    assert_close(found, expected)
    compared = DIFFERS.get(name, {})
    assert_close(
        values, {key: logged[key] for key in logged if not (key in compared or is_rate(key))}
    )
