"""The programs of docs/guides/sweeps.md, with the libraries that they are for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.requires import requires_hydra, requires_ray

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "sweeps.md"
TITLED = re.compile(r'^```python title="(.*?)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(program: str, *words: str, **variables: str) -> str:
    """Run a program beside the files of the page; return what it has printed."""
    for name, text in TITLED.findall(PAGE.read_text()):
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
    page = dict(TITLED.findall(PAGE.read_text()))["hydra_runs.py"]
    (start,) = re.findall(r"^# (hydra\.main.*)$", page, re.MULTILINE)
    run(f"{page}\nimport hydra\n{start}", "--multirun", "lr=0.1,0.01", "hydra.sweep.dir=swept")
    for number, rate in ((0, 0.1), (1, 0.01)):
        found = json.loads(Path("swept", str(number), "run.json").read_text())
        assert found["hyper_parameters"] == {"lr": rate}
    program = 'import json; print("FOUND", json.dumps([losses("swept/0"), plain(0.1)]))'
    found, expected = json.loads(run(LOSSES + program).partition("FOUND ")[2])
    assert found == expected
