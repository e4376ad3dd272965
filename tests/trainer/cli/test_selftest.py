"""The command `trainer test`: what it starts, and that each check can fail."""

from __future__ import annotations

import pytest

from tests.helpers.terminal import without_gloo
from trainer import Accelerator
from trainer.cli import launch, main, selftest

CHECKS = ["collectives", "data order", "accumulation", "checkpoint", "metrics", "precision"]


def table(text: str) -> dict[str, str]:
    """The verdict and its text by the name of the check."""
    return {name: text.split(name, 1)[1].split("\n", 1)[0].strip() for name in CHECKS}


def test_two_processes_pass(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("os.execvp", pytest.fail)  # one process would take the place of this one
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert main(["test", "--cpu", "--num_processes", "2"]) == 0
    shown = capfd.readouterr()
    first, *lines, last = without_gloo(shown.out).splitlines()
    assert first == "2 process(es) on cpu, gloo"
    assert last == "All is well."
    assert [line[:14].rstrip() for line in lines] == CHECKS
    assert all(line[14:].startswith(" ok  ") for line in lines)
    assert shown.err == ""
    assert list(tmp_path.iterdir()) == [temporary]
    assert list(temporary.glob("cadence-*")) == []


def test_options_are_passed_to_launch(monkeypatch):
    asked = []
    monkeypatch.setattr(launch, "run", lambda arguments: asked.append(arguments) or 7)
    line = ["--cpu", "--num_processes", "3", "--config-file", "four.yaml"]
    assert main(["test", *line]) == 7
    assert main(["test"]) == 7
    given = [(each.cpu, each.num_processes, str(each.config_file)) for each in asked]
    assert given == [(True, 3, "four.yaml"), (False, None, "None")]
    assert [(each.module, each.words) for each in asked] == [(True, [selftest.__name__])] * 2


def test_a_file_that_is_not_there(capsys):
    assert main(["test", "--config_file", "four.yaml"]) == 1
    assert "there is no configuration file four.yaml" in capsys.readouterr().err


def test_a_file_in_the_way_of_our_packages_is_named(capsys, tmp_path):
    (tmp_path / "trainer.py").write_text("")
    assert main(["test", "--cpu", "--num_processes", "2"]) == 1
    assert f"{tmp_path / 'trainer.py'} is imported instead of" in capsys.readouterr().err


# -- each check can fail: its subject is broken on the ranks ---------------------------------------


def wrong_on_rank_1(patch):
    reduce = Accelerator.reduce

    def shifted(self, tensor, reduction="sum", scale=1.0):
        return reduce(self, tensor, reduction, scale) + self.process_index

    patch(Accelerator, "reduce", shifted)


def a_sample_twice(patch):
    loader = selftest.DataLoader

    def twice(dataset, batch_size, shuffle=False):
        order = [0, 0, *range(2, len(dataset))] if shuffle else None
        return loader(dataset, batch_size=batch_size, sampler=order)

    patch(selftest, "DataLoader", twice)


def one_rank_weighs_double(patch):
    import torch.distributed as dist

    step = selftest._Regression.training_step

    def doubled(self, batch, batch_idx):
        return step(self, batch, batch_idx) * (1 + dist.get_rank())

    patch(selftest._Regression, "training_step", doubled)


def nothing_is_loaded(patch):
    patch(Accelerator, "load_state", lambda self, folder: None)


def nothing_is_learned(patch):
    def still(self):
        return selftest.torch.optim.SGD(self.parameters(), lr=0.0)

    patch(selftest._Regression, "configure_optimizers", still)


def padding_counts(patch):
    from trainer import Trainer

    validate = Trainer.validate

    def padded(self, module, loader):
        samples = [*range(len(loader.dataset)), *[0] * 11]
        subset = selftest.torch.utils.data.Subset(loader.dataset, samples)
        return validate(self, module, selftest.DataLoader(subset, batch_size=loader.batch_size))

    patch(Trainer, "validate", padded)


@pytest.mark.parametrize(
    ("broken", "check", "said"),
    [
        (wrong_on_rank_1, "collectives", "FAILED  rank 1: the sum is [2.0, 4.0, 6.0]"),
        (
            a_sample_twice,
            "data order",
            "of 53 samples, these were not seen exactly once (sample: count): {0: 2, 1: 0}",
        ),
        (one_rank_weighs_double, "accumulation", "net.0.weight is "),
        (nothing_is_loaded, "checkpoint", "update 1 after loading is "),
        (padding_counts, "metrics", "the validation loss is "),
        (nothing_is_learned, "precision", "in 'no' the loss was "),
    ],
)
def test_a_check_that_fails_says_what_differs(ranks2, broken, check, said):
    def body():
        import contextlib
        import io
        from unittest import mock

        with contextlib.ExitStack() as stack:
            broken(lambda *what: stack.enter_context(mock.patch.object(*what)))
            shown = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            return selftest.main(), shown.getvalue()

    (code, shown), (other_code, other_shown) = ranks2(body)
    assert (code, other_code, other_shown) == (1, 0, "")  # one of them is enough to say so
    verdicts = table(shown)
    assert verdicts.pop(check).startswith("FAILED  rank ")
    assert said in shown
    assert "1 of 6 checks failed." in shown.splitlines()[-1]
    assert [verdict.split()[0] for verdict in verdicts.values()] == ["ok"] * 5


DIVIDED = {
    "FSDP": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LayerOfTheUsersModel",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    },
    "tp_size 2": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    },
    "DeepSpeed, stage 3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "LayerOfTheUsersModel",
    },
}


@pytest.mark.parametrize("name", DIVIDED)
def test_models_are_divided_as_the_configuration_asks(ranks2, name):
    def body():
        import contextlib
        import io

        from trainer.environment import patch_environment

        shown = io.StringIO()
        with patch_environment(**DIVIDED[name]), contextlib.redirect_stdout(shown):
            return selftest.main(), shown.getvalue()

    (code, shown), (other, _) = ranks2(body)
    assert (code, other) == (0, 0), shown
    assert f"2 process(es) on cpu, gloo, {name}\n" in shown
    assert [verdict.split()[0] for verdict in table(shown).values()] == ["ok"] * 6
    steps = int(DIVIDED[name].get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 2))
    replicas = 1 if name == "tp_size 2" else 2
    assert f"{steps} micro-batches of 4 as one of {4 * steps * replicas}" in shown
    assert ("'bf16': the loss was" in shown) == (name == "FSDP")


def test_the_common_folder_may_be_gone_at_the_end(ranks2):
    """The first processes of two machines that share it remove it at once."""

    def body():
        import contextlib
        import io
        import shutil
        from unittest import mock

        def gone(accelerator, folder):
            accelerator.wait_for_everyone()
            shutil.rmtree(folder, ignore_errors=True)
            return ""

        checks = mock.patch.dict(selftest.CHECKS, {"metrics": gone}, clear=True)
        with checks, contextlib.redirect_stdout(io.StringIO()):
            return selftest.main()

    assert ranks2(body) == [0, 0]


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("model.py", "`trainer launch model.py` runs a script."),
        ("lines.yaml", "`trainer test-model lines.yaml` tests the model of a configuration."),
    ],
)
def test_a_file_is_answered_with_the_command_that_was_meant(file, fix, capsys):
    assert main(["test", "--cpu", file]) == 2
    assert capsys.readouterr().err == (
        "trainer test: this checks that processes work together on this machine, and takes no "
        f"file: {fix}\n"
    )
