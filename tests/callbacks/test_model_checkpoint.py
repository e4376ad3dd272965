import math
import random
import shutil
from pathlib import Path

import pytest

from callbacks import ModelCheckpoint
from tests.helpers.stand_in import TrainerStandIn


def trainer_with(folder, **arguments):
    callback = ModelCheckpoint(**arguments)
    return TrainerStandIn(callbacks=[callback], checkpoint_dir=folder), callback


def run(folder, values, **arguments):
    trainer, callback = trainer_with(folder, **arguments)
    trainer.start()
    trainer.updates(values)
    return trainer, callback


def steps(names):
    return [int(Path(name).name.removeprefix("step-")) for name in names]


def expected_steps(values, *, monitor, mode, every, save_top_k, save_last):
    """Which steps stay, from the whole history at once instead of save by save."""
    due = [step for step in range(1, len(values) + 1) if step % every == 0]
    if monitor is None:
        ranked = sorted(due, reverse=True)
    else:
        fresh = [s for s in due if values[s - 1] is not None and math.isfinite(values[s - 1])]
        sign = 1 if mode == "min" else -1
        ranked = sorted(fresh, key=lambda step: (sign * values[step - 1], step))
    if save_top_k == -1:
        return due
    return sorted({*ranked[: int(save_top_k)], *(due[-int(save_last) :] if save_last else [])})


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("monitor", [None, "loss"])
@pytest.mark.parametrize(
    ("save_top_k", "save_last"),
    [
        (-1, True),
        (0, 3),
        (1, True),
        (1, False),
        (2, 2),
        (3, False),
        (2.0, 2.0),
    ],
)
def test_the_best_and_the_last_are_kept(tmp_path, mode, monitor, save_top_k, save_last):
    choices = [None, math.nan, math.inf, 1.0, 2.0, 3.0, 4.0, 5.0]
    for seed in range(10):
        values = random.Random(seed).choices(choices, k=30)
        arguments = {
            "monitor": monitor,
            "mode": mode,
            "every": 2,
            "save_top_k": save_top_k,
            "save_last": save_last,
        }
        trainer, _ = run(tmp_path / str(seed), values, **arguments)
        assert steps(trainer.on_disk()) == expected_steps(values, **arguments)


def test_a_failed_save_changes_no_ranking(tmp_path):
    values = [5.0, 4.0, 3.0, 2.0, 6.0, 1.0]
    trainer, callback = trainer_with(
        tmp_path, monitor="loss", every=1, save_top_k=2, save_last=2, on_save_error="warn"
    )
    trainer.fail_saves = {"step-00000004", "step-00000006"}
    trainer.start()
    assert trainer.space_asked == []  # it would end the run
    trainer.updates(values)
    trainer.end()
    assert steps(trainer.on_disk()) == [2, 3, 5]
    assert steps(callback.best_k_models) == [3, 2]
    assert steps([callback.last_model_path]) == [5]
    assert {required for _, _, required in trainer.kinds.values()} == {False}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("values", "fails", "stay"),
    [
        ([3.0], [], [1]),  # not worth a save
        ([1.0], [], [3]),
        ([1.0], [3], [1, 2]),
        ([1.0, 5.0], [3], [1, 2]),
        ([1.0, 0.5], [3], [4]),
    ],
)
def test_a_preemption_save_is_removed_at_the_end_unless_a_save_failed(
    tmp_path, values, fails, stay, background
):
    arguments = {
        "monitor": "loss",
        "every": 1,
        "save_last": False,
        "on_save_error": "warn",
        "background": background,
    }
    messages, callback = trainer_with(tmp_path, **arguments)
    messages.start()
    messages.updates([2.0, 4.0])
    callback.on_preemption(messages, messages.module)
    assert steps(messages.on_disk()) == [1, 2]
    resumed, _ = trainer_with(tmp_path, **arguments)
    resumed.states = messages.states
    resumed.fail_saves = {f"step-{step:08d}" for step in fails}
    resumed.resume("step-00000002")
    resumed.start()
    resumed.updates(values)
    resumed.end()
    assert steps(resumed.on_disk()) == stay


@pytest.mark.parametrize("background", [True, False])
def test_saves_are_asked_for_as_configured_and_waited_for(tmp_path, background):
    trainer, _ = trainer_with(tmp_path, every=1, background=background, save_weights_only=True)
    trainer.start()
    assert trainer.space_asked == [tmp_path]
    trainer.updates([None, None])
    assert set(trainer.kinds.values()) == {(True, background, True)}
    assert trainer.waits == (1 if background else 2)  # before the next one, or at once
    trainer.end()
    assert trainer.waits == 2


def test_attributes_name_what_is_on_disk(tmp_path):
    _, callback = run(tmp_path, [3.0, 1.0, 2.0, 4.0, 5.0], monitor="loss", every=1, save_top_k=2)
    paths = [tmp_path / f"step-{step:08d}" for step in (2, 3, 5)]
    assert callback.best_model_path == paths[0]
    assert callback.best_model_score == 1.0
    assert list(callback.best_k_models.items()) == [(paths[0], 1.0), (paths[1], 2.0)]
    assert callback.last_model_path == paths[2]
    assert all(path.is_dir() for path in paths)


def test_without_monitor_the_newest_is_the_best(tmp_path):
    _, callback = run(tmp_path, [None] * 3, every=1, save_top_k=2)
    assert steps(callback.best_k_models) == [3, 2]
    assert callback.best_model_score is None


def test_a_checkpoint_holds_its_own_decisions(tmp_path):
    trainer, callback = run(tmp_path, [2.0, 1.0], monitor="loss", every=1)
    trainer.end()
    resumed, second = trainer_with(tmp_path, monitor="loss", every=1)
    resumed.states = trainer.states
    resumed.resume("step-00000002")
    resumed.start()
    assert second.best_model_path == callback.best_model_path == tmp_path / "step-00000002"
    assert second.state_dict() == callback.state_dict()


@pytest.mark.parametrize("killed_in_removal", [False, True])
@pytest.mark.parametrize("cut", [2, 4, 6, 8, 10, 12])
def test_resumed_decisions_equal_uninterrupted_ones(tmp_path, cut, killed_in_removal):
    values = [9.0, 5.0, 1.0, 6.0, 2.0, 7.0, None, 4.0, 3.0, 4.0, 2.0, 8.0, 9.0, None]
    arguments = {"monitor": "loss", "every": 2, "save_top_k": 2}
    whole, whole_callback = run(tmp_path / "whole", values, **arguments)

    first, _ = run(tmp_path / "cut", values[: cut - 1], **arguments)
    first.fail_at_removal = killed_in_removal
    try:
        first.updates(values[cut - 1 : cut])
    except ProcessLookupError:
        assert killed_in_removal
    second, callback = trainer_with(tmp_path / "cut", **arguments)
    second.states = first.states
    second.resume(first.on_disk()[-1])
    assert second.global_step == cut
    second.start()
    second.updates(values[cut:])
    assert callback.state_dict() == whole_callback.state_dict()
    assert second.on_disk() == whole.on_disk()


def test_removal_comes_after_the_commit(tmp_path):
    trainer, _ = run(tmp_path, [2.0], monitor="loss", every=1)
    trainer.fail_at_removal = True
    with pytest.raises(ProcessLookupError):
        trainer.updates([1.0])
    assert steps(trainer.on_disk()) == [1, 2]


def test_a_save_that_was_due_is_made_after_resuming(tmp_path):
    _, callback = run(tmp_path, [None] * 3, every=4)
    state = callback.state_dict()  # as a save during the validation of step 4 writes it
    resumed, second = trainer_with(tmp_path, every=4)
    second.load_state_dict(state)
    resumed.global_step = 4
    resumed.start()
    second.on_boundary(resumed, resumed.module)
    assert steps(resumed.on_disk()) == [4]


def test_a_moved_project_keeps_its_decisions(tmp_path):
    trainer, _ = run(tmp_path / "old", [2.0, 1.0, 3.0], monitor="loss", every=1)
    shutil.move(tmp_path / "old", tmp_path / "new")
    moved, callback = trainer_with(tmp_path / "new", monitor="loss", every=1)
    moved.states = trainer.states
    moved.resume("step-00000003")
    moved.start()
    assert callback.best_model_path == tmp_path / "new" / "step-00000002"
    moved.updates([0.5])
    assert steps(moved.on_disk()) == [4]


def test_checkpoints_that_were_left_behind_are_forgotten(tmp_path):
    trainer, _ = run(tmp_path / "old", [2.0, 1.0, 3.0], monitor="loss", every=1)
    elsewhere, callback = trainer_with(tmp_path / "new", monitor="loss", every=1)
    elsewhere.states = trainer.states
    elsewhere.resume("step-00000003")
    elsewhere.start()
    assert callback.best_model_path is callback.last_model_path is None
    elsewhere.updates([4.0])
    assert callback.best_model_score == 4.0
    assert steps(trainer.on_disk()) == [2, 3]


def test_folders_of_others_stay(tmp_path):
    foreign = [tmp_path / "step-00000001", tmp_path / "exception-00000002", tmp_path / "notes"]
    for folder in foreign:
        folder.mkdir(parents=True)
    trainer, callback = trainer_with(tmp_path, every=1)
    trainer.global_step = 1
    trainer.start()
    trainer.updates([None] * 5)
    assert all(folder.is_dir() for folder in foreign)
    assert steps([callback.last_model_path]) == [6]
    assert len(trainer.on_disk()) == len(foreign) + 1


@pytest.mark.parametrize(("updates", "saved"), [(0, []), (3, [3]), (4, [4]), (6, [4, 6])])
def test_the_final_update_is_saved_once(tmp_path, updates, saved):
    trainer, _ = run(tmp_path, [None] * updates, every=4, save_top_k=-1)
    trainer.end()
    assert steps(trainer.on_disk()) == saved


def test_the_final_update_is_ranked_if_it_was_just_measured(tmp_path):
    trainer, callback = run(tmp_path, [2.0, 1.0], monitor="loss", every=4, save_last=False)
    trainer.end()
    assert steps([callback.best_model_path]) == [2]


def test_a_resumed_run_without_updates_saves_nothing(tmp_path):
    trainer, _ = run(tmp_path, [None] * 4, every=4)
    resumed, _ = trainer_with(tmp_path, every=4)
    resumed.states = trainer.states
    resumed.resume("step-00000004")
    resumed.start()
    before = list(trainer.states)
    resumed.end()
    assert list(resumed.states) == before


def test_every_by_the_clock(tmp_path):
    trainer, _ = trainer_with(tmp_path, every="1 minute", save_top_k=-1)
    trainer.seconds = 50.0
    trainer.start()
    for seconds in (59.0, 61.0, 90.0, 200.0, 239.0, 240.0):
        trainer.seconds = seconds
        trainer.update()
    assert steps(trainer.on_disk()) == [2, 4, 6]


def test_a_callback_that_joins_later_waits_for_the_next_multiple(tmp_path):
    trainer, _ = trainer_with(tmp_path, every=10)
    trainer.global_step = 15
    trainer.start()
    trainer.updates([None] * 4)
    assert trainer.on_disk() == []
    trainer.updates([None])
    assert steps(trainer.on_disk()) == [20]


def test_saving_an_update_twice_keeps_it(tmp_path):
    trainer, callback = run(tmp_path, [None, None], monitor="loss", every=2)
    shutil.rmtree(callback.last_model_path)  # the second save of a step replaces the first
    callback.load_state_dict({**callback.state_dict(), "handled": {"steps": 1}})
    callback.on_boundary(trainer, trainer.module)
    assert steps(trainer.on_disk()) == [2]


def test_every_epoch(tmp_path):
    trainer, _ = run(tmp_path, [None] * 25, save_top_k=-1)
    assert steps(trainer.on_disk()) == [10, 20]


def test_a_new_run_resets_the_state(tmp_path):
    _, callback = run(tmp_path / "one", [1.0], monitor="loss", every=1)
    trainer = TrainerStandIn(callbacks=[callback], checkpoint_dir=tmp_path / "two")
    trainer.start()
    trainer.updates([5.0, 6.0])
    assert callback.best_model_score == 5.0
    assert steps(trainer.on_disk()) == [1, 2]
    assert (tmp_path / "one" / "step-00000001").is_dir()


def test_fast_dev_run_writes_nothing_but_checks_the_name(tmp_path):
    trainer, _ = trainer_with(tmp_path / "none", monitor="loss", every=1)
    trainer.fast_dev_run = True
    trainer.steps_per_epoch = 2
    trainer.start()
    trainer.updates([None])
    with pytest.raises(ValueError, match="'loss' was never logged"):
        trainer.updates([None])
    trainer.callback_metrics["loss"], trainer.metric_updates["loss"] = 1.0, trainer.global_step
    trainer.end()
    assert not (tmp_path / "none").exists()


def test_dirpath_wins_over_the_trainers_folder(tmp_path):
    trainer, callback = trainer_with(tmp_path / "default", every=1, dirpath=str(tmp_path / "own"))
    trainer.start()
    trainer.updates([None])
    assert callback.last_model_path == tmp_path / "own" / "step-00000001"
    assert not trainer.on_disk()


def test_two_instances_need_two_folders(tmp_path):
    best, often = ModelCheckpoint(monitor="loss"), ModelCheckpoint(every=100)
    trainer = TrainerStandIn(callbacks=[best, often], checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="dirpath"):
        trainer.start()
    other = ModelCheckpoint(every=100, dirpath=tmp_path / "often")
    TrainerStandIn(callbacks=[best, other], checkpoint_dir=tmp_path).start()
    assert best.state_key != other.state_key


def test_saves_after_the_other_callbacks():
    assert ModelCheckpoint.runs_last
    assert not ModelCheckpoint.__mro__[1].runs_last


def test_a_wrong_name_shows_before_a_save_is_due(tmp_path):
    trainer, _ = trainer_with(tmp_path, monitor="loss", every=100)
    trainer.steps_per_epoch = 2
    trainer.start()
    with pytest.raises(ValueError, match="'loss' was never logged"):
        trainer.updates([None] * 3)
