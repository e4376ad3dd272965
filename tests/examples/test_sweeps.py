"""The programs of the pages about sweeps and clusters, with the libraries that they are for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.requires import requires_hydra, requires_ray
from tests.helpers.services import wandb_runs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "guides" / name for name in ("sweeps.md", "clusters.md")]
TITLED = re.compile(r'^```python title="(.*?)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def programs() -> dict[str, str]:
    return dict(found for page in PAGES for found in TITLED.findall(page.read_text()))


def run(program: str, *words: str, **variables: str) -> str:
    """Run a program beside the files of the pages; return what it has printed."""
    for name, text in programs().items():
        Path(name).write_text(text)
    Path("program.py").write_text(program)
    paths = [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "program.py", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


LOSSES = """
import json, re, sys
def losses(folder):
    lines = map(json.loads, open(folder + "/metrics.jsonl"))
    return [line["val/loss"] for line in lines if "val/loss" in line]
def plain(lr):
    from line import Line, loader
    from trainer import Trainer
    folder = f"plain/{lr}"
    options = dict(project_dir=folder, progress_bar=False, checkpointing=False, cpu=True)
    Trainer(max_epochs=4, **options).fit(Line(lr), loader(), loader())
    return losses(folder)
"""
ON_RAY = """
import os
import ray
from ray import tune
import on_ray

FAILED = os.path.abspath("failed")

def fails_once(config):  # after its second report
    class Failing(on_ray.Report):
        def on_boundary(self, trainer, module):
            super().on_boundary(trainer, module)
            if trainer.global_step == 16 and not os.path.exists(FAILED):
                open(FAILED, "w").close()
                raise RuntimeError("once")
    on_ray.Report = Failing
    on_ray.trial(config)

if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1")
    options = tune.RunConfig(
        storage_path=os.path.abspath("ray"), failure_config=tune.FailureConfig(max_failures=1)
    )
    search = tune.Tuner(
        fails_once, param_space={"lr": tune.grid_search([0.1])}, run_config=options
    ).fit()
    (found,) = search
    frame = found.metrics_dataframe
    print("FOUND", json.dumps([list(frame["loss"]), plain(0.1)]))
    assert os.path.exists(FAILED)
"""


@requires_ray
def test_a_trial_of_ray_that_failed_goes_on_from_its_checkpoint():
    found = re.search("FOUND (.*)", run(LOSSES + ON_RAY, RAY_USAGE_STATS_ENABLED="0"))
    reported, expected = json.loads(found[1])
    assert len(expected) == 4
    assert reported == expected


@requires_hydra
def test_each_run_of_a_multirun_of_hydra_has_its_folder():
    Path("conf").mkdir()
    Path("conf", "line.yaml").write_text("lr: 0.1\nepochs: 4\n")
    page = programs()["hydra_runs.py"]
    (start,) = re.findall(r"^# (hydra\.main.*)$", page, re.MULTILINE)
    program = f"{page}\nimport hydra\n{start}\n{LOSSES}"
    program += 'print("FOUND", json.dumps([losses("swept/0"), plain(0.1)]))'
    printed = run(program, "--multirun", "lr=0.1,0.01", "hydra.sweep.dir=swept")
    for number, rate in ((0, 0.1), (1, 0.01)):
        found = json.loads(Path("swept", str(number), "run.json").read_text())
        assert found["hyper_parameters"] == {"lr": rate}
    found, expected = json.loads(printed.partition("FOUND ")[2])
    assert found == expected


WITH_AN_AGENT = """
import os
from pathlib import Path

Path("choice.yaml").write_text("wandb_version: 1\\nlr: {value: 0.1}\\n")

if __name__ == "__main__":
    import wandb_sweep
    os.environ["WANDB_SWEEP_ID"] = "sweep"  # as its agent does for each trial
    os.environ["WANDB_RUN_ID"] = "trial-1"
    os.environ["WANDB_SWEEP_PARAM_PATH"] = "choice.yaml"
    wandb_sweep.trial()
    print("FOUND", json.dumps([losses("runs/wandb/trial-1"), plain(0.1)]))
"""


def test_a_trial_of_an_agent_of_wandb_logs_to_the_run_that_the_agent_chose():
    """Its server is not reached from here, so the agent's part is done as it does it."""
    pytest.importorskip("wandb")
    printed = run(LOSSES + WITH_AN_AGENT, WANDB_MODE="offline")
    recorded, expected = json.loads(re.search("FOUND (.*)", printed)[1])
    assert len(expected) == 4
    assert recorded == expected
    (logged,) = wandb_runs(Path.cwd())
    assert (logged.run.run_id, logged.run.sweep_id) == ("trial-1", "sweep")
    assert logged.config["lr"] == 0.1
    assert logged.series("val/loss") == list(zip((8, 16, 24, 32), expected, strict=True))


WITH_RAY_TRAIN = """
import json, os
from pathlib import Path

FOLDER = os.path.abspath("shared")

def worker():
    import ray.train, torch, train
    os.chdir(FOLDER)  # where the page's relative project_dir lies
    torch.manual_seed(0)
    train.main()
    context = ray.train.get_context()
    found = [context.get_world_rank(), torch.distributed.get_world_size()]
    Path(f"rank-{found[0]}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    os.makedirs(FOLDER)
    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1")
    TorchTrainer(
        worker,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("storage")),
    ).fit()
"""


@requires_ray
def test_workers_that_ray_has_placed_train_as_launched_ones():
    run(WITH_RAY_TRAIN, RAY_USAGE_STATS_ENABLED="0")
    ranks = [json.loads(Path("shared", f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks == [[0, 2], [1, 2]]
    command = [sys.executable, "-m", "trainer", "launch", "--cpu", "--num_processes", "2"]
    Path("seeded.py").write_text("import torch, train\ntorch.manual_seed(0)\ntrain.main()\n")
    launched = subprocess.run(
        [*command, "seeded.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert launched.returncode == 0, launched.stderr
    runs = [Path("shared", "runs", "line"), Path("runs", "line")]
    assert [json.loads((each / "run.json").read_text())["world_size"] for each in runs] == [2, 2]
    ours, expected = (
        load_file(each / "checkpoints" / "step-00000008" / "model.safetensors") for each in runs
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
