"""`Accelerator.profile`, and the Trainer's `profile=ProfileKwargs(...)`, which is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.line import Line, loader
from tests.numerics.running import quiet_trainer
from trainer import Accelerator, ProfileKwargs


def steps_in(trace):
    """The steps of the loop that a trace has seen."""
    names = [event.get("name", "") for event in json.loads(Path(trace).read_text())["traceEvents"]]
    return sorted({int(name.split()[-1]) for name in names if name.startswith("user step")})


def work(profiler, steps):
    for number in range(steps):
        with torch.profiler.record_function(f"user step {number}"):
            torch.ones(4) @ torch.ones(4)
        profiler.step()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_everything_is_recorded_unless_there_is_a_schedule():
    seen = []
    every = ProfileKwargs(activities=["cpu"], output_trace_dir="all", record_shapes=True)
    some = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1},
        on_trace_ready=lambda profiler: seen.append(len(profiler.key_averages())),
        output_trace_dir="some",
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[every])
    assert accelerator.profile_handler is every
    with accelerator.profile() as profiler:
        work(profiler, 3)
    assert "aten::dot" in {event.key for event in profiler.key_averages()}
    assert steps_in("all/profile_0.json") == [0, 1, 2]
    with accelerator.profile(some) as profiler:
        work(profiler, 12)
    assert steps_in("some/profile_0.json") == [7, 8]  # the last of two recordings
    assert len(seen) == 2
    with accelerator.profile(ProfileKwargs(schedule_option={"wait": 5, "warmup": 1, "active": 1})):
        pass  # nothing is due
    assert sorted(path.name for path in Path().iterdir()) == ["all", "some"]


def test_each_process_writes_its_own_trace(ranks2):
    def body():
        accelerator = Accelerator(cpu=True)
        with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
            work(profiler, 1 + accelerator.process_index)
        return sorted(path.name for path in Path("traces").iterdir())

    assert ranks2(body) == [["profile_0.json", "profile_1.json"]] * 2
    assert [steps_in(f"traces/profile_{rank}.json") for rank in (0, 1)] == [[0], [0, 1]]


class Traced(Line):
    def training_step(self, batch, batch_idx):
        with torch.profiler.record_function(f"user step {batch_idx}"):
            return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        with torch.profiler.record_function(f"user step {batch_idx}"):
            super().validation_step(batch, batch_idx)


def test_a_trainer_steps_with_its_updates_or_the_batches_of_an_evaluation():
    handler = ProfileKwargs(schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1})
    trainer = quiet_trainer(max_epochs=1, profile=handler)
    trainer.fit(Traced(), loader(12))
    assert steps_in("run/profile-fit/profile_0.json") == [2, 3]
    trainer.validate(Traced(), loader(12))
    assert steps_in("run/profile-validate/profile_0.json") == [2, 3]
    seen = []
    handler = ProfileKwargs(on_trace_ready=lambda profiler: seen.append(profiler.step_num))
    quiet_trainer(max_epochs=1, profile=handler, project_dir="other").fit(Traced(), loader(12))
    assert seen == [6]
    assert not Path("other/profile-fit").exists()
    with pytest.raises(ValueError, match=r"profile is 'torch'.*ProfileKwargs"):
        quiet_trainer(profile="torch")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"activities": ["gpu"]}, ValueError, "activities is 'gpu'. .* It must be one of 'cpu'"),
        ({"activities": "cpu"}, TypeError, "it must be a list"),
        ({"schedule_option": {"wait": 1}}, ValueError, "schedule_option.*warmup"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 0}}, ValueError, "schedule_option"),
        ({"record_shapes": "no"}, TypeError, "record_shapes is 'no'"),
    ],
)
def test_wrong_options_are_refused(options, error, said):
    with pytest.raises(error, match=f"(?s){said}"):
        ProfileKwargs(**options)


def test_an_activity_that_this_machine_lacks_is_refused():
    kinds = {kind.name.lower() for kind in torch.profiler.supported_activities()}
    lacking = next(name for name in ("mtia", "hpu", "xpu") if name not in kinds)
    with pytest.raises(ValueError, match=f"activities has '{lacking}', which this torch cannot"):
        ProfileKwargs(activities=[lacking]).build()
